import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.data.batch import LossNorm, TrainBatch


def make_batch(token_mask, sample_mask) -> TrainBatch:
    mask = torch.tensor(token_mask, dtype=torch.float32)
    return TrainBatch(
        input_ids=torch.zeros(mask.shape, dtype=torch.int64),
        input_lengths=torch.full((mask.shape[0],), mask.shape[1]),
        token_mask=mask,
        sample_mask=torch.tensor(sample_mask, dtype=torch.float32),
    )


def test_loss_is_the_mean_over_counted_tokens_of_kept_samples():
    logprobs = torch.tensor([[0.0, -1.0, -2.0], [0.0, -4.0, -8.0], [0.0, -100.0, -100.0]])
    batch = make_batch([[0, 1, 1], [0, 0, 1], [0, 1, 1]], [1, 1, 0])
    loss, metrics = NLLLoss()(logprobs, batch, LossNorm(num_valid_seqs=2.0, num_valid_tokens=3.0))
    assert loss.item() == pytest.approx((1 + 2 + 8) / 3)
    assert metrics["loss"].item() == loss.item()
    assert not metrics["loss"].requires_grad


def test_infinite_logprobs_at_padding_reach_neither_loss_nor_gradient():
    logprobs = torch.tensor([[0.0, -1.0, float("-inf")]], requires_grad=True)
    loss, _ = NLLLoss()(logprobs, make_batch([[0, 1, 0]], [1]), LossNorm(num_valid_seqs=1.0, num_valid_tokens=1.0))
    loss.backward()
    assert loss.item() == 1.0
    assert logprobs.grad.tolist() == [[0.0, -1.0, 0.0]]


def test_the_gradient_is_minus_one_over_the_counted_tokens_of_the_global_batch_at_counted_tokens():
    logprobs = torch.randn(3, 3, requires_grad=True)
    batch = make_batch([[0, 1, 1], [0, 0, 1], [0, 1, 1]], [1, 1, 0])
    loss, _ = NLLLoss()(logprobs, batch, LossNorm(num_valid_seqs=4.0, num_valid_tokens=8.0))
    loss.backward()
    assert logprobs.grad.tolist() == [[0, -0.125, -0.125], [0, 0, -0.125], [0, 0, 0]]


MASKS = st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=4)


@hypothesis_settings(max_examples=100)
@given(values=st.lists(st.floats(-(2.0**120), 0.0, width=32), min_size=4, max_size=4), mask=MASKS, kept=st.booleans())
def test_finite_logprobs_give_a_finite_loss_and_gradient_whatever_the_masks(values, mask, kept):
    logprobs, batch = torch.tensor([values], requires_grad=True), make_batch([mask], [float(kept)])
    counted = batch.loss_mask.sum().item()
    loss, _ = NLLLoss()(logprobs, batch, LossNorm(num_valid_seqs=float(kept), num_valid_tokens=counted))
    loss.backward()
    assert torch.isfinite(loss)
    assert (logprobs.grad == -batch.loss_mask / max(counted, 1)).all()


def test_a_batch_without_counted_tokens_has_loss_zero():
    loss, _ = NLLLoss()(torch.ones(1, 2), make_batch([[0, 1]], [0]), LossNorm(num_valid_seqs=0.0, num_valid_tokens=0.0))
    assert loss.item() == 0.0


def test_the_loss_survives_pickling():
    assert pickle.loads(pickle.dumps(NLLLoss())) == NLLLoss()
