"""The DPO loss against its formula in plain Python floats, and against TRL on the same tensors."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny_models import make_qwen3, make_tokenizer
from torch import Tensor

from nemo_offload_rl.algorithms.losses import DpoLoss, counted_sums
from nemo_offload_rl.data.batch import LossNorm, PreferenceBatch
from nemo_offload_rl.keys.supervised import DpoSectionConfig

PLAIN = DpoSectionConfig(
    max_num_epochs=1,
    max_num_steps=1,
    val_period=0,
    val_batches=0,
    val_global_batch_size=1,
    val_micro_batch_size=1,
    val_at_start=False,
    val_at_end=False,
    seed=0,
    reference_policy_kl_penalty=0.1,
    preference_loss_weight=1.0,
    preference_average_log_probs=False,
    label_smoothing=0.0,
    sft_loss_weight=0.0,
    sft_average_log_probs=False,
    precompute_reference_logprobs=False,
)
VARIANTS = [
    {},
    {"reference_policy_kl_penalty": 2.0, "label_smoothing": 0.2},
    {"preference_average_log_probs": True},
    {"sft_loss_weight": 0.3, "preference_loss_weight": 0.5},
    {"sft_loss_weight": 0.3, "sft_average_log_probs": True, "preference_average_log_probs": True},
]


def make_batch(num_pairs: int = 3, width: int = 7) -> tuple[Tensor, PreferenceBatch]:
    """Logprobs [B, S] and a batch; the last pair is dropped by its mask."""
    generator = torch.Generator().manual_seed(0)
    rows = 2 * num_pairs
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)
    position = torch.arange(width)
    mask = ((position >= 2) & (position < lengths[:, None])).float()
    sample_mask = torch.ones(rows)
    sample_mask[-2:] = 0
    batch = PreferenceBatch(
        input_ids=torch.zeros(rows, width, dtype=torch.int64),
        input_lengths=lengths,
        token_mask=mask,
        sample_mask=sample_mask,
        reference_sums=-5 * torch.rand(rows, generator=generator, dtype=torch.float64),
    )
    return -3 * torch.rand(rows, width, generator=generator), batch


def norm_of(batch: PreferenceBatch) -> LossNorm:
    return LossNorm(float(batch.sample_mask.sum()), float((batch.token_mask * batch.sample_mask[:, None]).sum()))


def by_formula(logprobs: Tensor, batch: PreferenceBatch, settings: DpoSectionConfig) -> dict[str, float]:
    """Pair after pair, number after number."""
    totals = dict.fromkeys(("loss", "preference_loss", "sft_loss", "accuracy", "rewards_margin_mean"), 0.0)
    kept = [row for row in range(0, len(batch), 2) if batch.sample_mask[row]]
    for row in kept:
        rewards, sums, counts = [], [], []
        for side in (row, row + 1):
            counted = [float(p) for p, m in zip(logprobs[side], batch.token_mask[side], strict=True) if m]
            ratio = sum(counted) - float(batch.reference_sums[side])
            if settings.preference_average_log_probs:
                ratio /= len(counted)
            rewards.append(settings.reference_policy_kl_penalty * ratio)
            sums.append(sum(counted))
            counts.append(len(counted))
        margin = rewards[0] - rewards[1]
        preferred = 1 / (1 + math.exp(-margin))
        smoothing = settings.label_smoothing
        preference = -(1 - smoothing) * math.log(preferred) - smoothing * math.log(1 - preferred)
        sft = -sums[0] / (counts[0] if settings.sft_average_log_probs else 1)
        loss = settings.preference_loss_weight * preference + settings.sft_loss_weight * sft
        for name, value in zip(totals, (loss, preference, sft, float(margin > 0), margin), strict=True):
            totals[name] += value / len(kept)
    return totals


@pytest.mark.parametrize("changes", VARIANTS)
def test_loss_and_metrics_follow_the_formula(changes):
    settings = replace(PLAIN, **changes)
    logprobs, batch = make_batch()
    loss, metrics = DpoLoss(settings)(logprobs, batch, norm_of(batch))
    expected = by_formula(logprobs, batch, settings)
    assert {name: float(metrics[name]) for name in expected} == pytest.approx(expected, rel=1e-6)
    assert float(loss) == pytest.approx(expected["loss"], rel=1e-6)
    assert float(metrics["rewards_chosen_mean"] - metrics["rewards_rejected_mean"]) == pytest.approx(
        expected["rewards_margin_mean"], rel=1e-6
    )


KEYS = {
    "reference_policy_kl_penalty": [0.1, 2.0],
    "preference_loss_weight": [0.0, 0.5],
    "preference_average_log_probs": [False, True],
    "label_smoothing": [0.0, 0.2],
    "sft_loss_weight": [0.0, 0.3],
    "sft_average_log_probs": [False, True],
}


def gradient_by_hand(logprobs: Tensor, batch: PreferenceBatch, settings: DpoSectionConfig) -> Tensor:
    """Derivative of the loss by each logprob, written down: that of -log sigmoid(m) is sigmoid(m) - 1."""
    slopes = torch.zeros_like(logprobs)
    kept = [row for row in range(0, len(batch), 2) if batch.sample_mask[row]]
    for row in kept:
        counts = batch.token_mask[row : row + 2].sum(dim=1).tolist()
        ratios = (logprobs * batch.token_mask).sum(dim=1)[row : row + 2] - batch.reference_sums[row : row + 2]
        per_token = [1 / count for count in counts] if settings.preference_average_log_probs else [1.0, 1.0]
        beta = settings.reference_policy_kl_penalty
        margin = beta * (float(ratios[0]) * per_token[0] - float(ratios[1]) * per_token[1])
        of_margin = 1 / (1 + math.exp(-margin)) - 1 + settings.label_smoothing
        sft = settings.sft_loss_weight * (1 / counts[0] if settings.sft_average_log_probs else 1.0)
        preference = settings.preference_loss_weight * of_margin * beta
        slopes[row] = (preference * per_token[0] - sft) * batch.token_mask[row] / len(kept)
        slopes[row + 1] = -preference * per_token[1] * batch.token_mask[row + 1] / len(kept)
    return slopes


def test_loss_and_gradient_follow_the_formula_for_all_combinations_of_keys():
    logprobs, batch = make_batch()
    logprobs = logprobs.double().requires_grad_()
    for values in itertools.product(*KEYS.values()):
        settings = replace(PLAIN, **dict(zip(KEYS, values, strict=True)))
        loss, _ = DpoLoss(settings)(logprobs, batch, norm_of(batch))
        assert float(loss) == pytest.approx(by_formula(logprobs.detach(), batch, settings)["loss"], rel=1e-6), settings
        (gradient,) = torch.autograd.grad(loss, logprobs)
        expected = gradient_by_hand(logprobs.detach(), batch, settings)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9, msg=str(settings))


@hypothesis_settings(max_examples=100)
@given(
    values=st.lists(st.floats(-(2.0**100), 0.0, width=32) | st.floats(-50.0, 0.0, width=32), min_size=6, max_size=6),
    mask=st.lists(st.sampled_from([0.0, 1.0]), min_size=6, max_size=6),
    references=st.tuples(st.floats(-1e30, 0.0), st.floats(-1e30, 0.0)),
    settings=st.builds(replace, st.just(PLAIN), **{key: st.sampled_from(values) for key, values in KEYS.items()}),
)
def test_finite_logprobs_give_a_finite_loss_and_gradient_whatever_the_masks(values, mask, references, settings):
    logprobs = torch.tensor(values).view(2, 3).requires_grad_()
    batch = PreferenceBatch(
        input_ids=torch.zeros(2, 3, dtype=torch.int64),
        input_lengths=torch.tensor([3, 3]),
        token_mask=torch.tensor(mask).view(2, 3),
        sample_mask=torch.ones(2),
        reference_sums=torch.tensor(references, dtype=torch.float64),
    )
    loss, _ = DpoLoss(settings)(logprobs, batch, norm_of(batch))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert not gradient[batch.loss_mask == 0].any()


def test_micro_batches_sum_to_the_whole_and_dropped_pairs_have_no_gradient():
    logprobs, batch = make_batch()
    logprobs[-1] = float("-inf")  # a dropped row may hold anything
    logprobs.requires_grad_()
    loss, _ = DpoLoss(PLAIN)(logprobs, batch, norm_of(batch))
    loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert not logprobs.grad[-2:].any()
    pieces = [
        DpoLoss(PLAIN)(logprobs[rows], batch.select(rows), norm_of(batch))[0] for rows in ([0, 1], [2, 3], [4, 5])
    ]
    assert torch.stack(pieces).sum().item() == pytest.approx(loss.item(), rel=1e-12)


def test_without_training_the_margin_is_exactly_zero():
    logprobs, batch = make_batch()
    batch = replace(batch, reference_sums=counted_sums(logprobs, batch))
    loss, metrics = DpoLoss(PLAIN)(logprobs, batch, norm_of(batch))
    assert float(metrics["rewards_margin_mean"]) == 0.0
    assert float(loss) == math.log(2)


# -- TRL


@pytest.fixture(scope="module")
def trl_batch(tmp_path_factory) -> tuple[Any, dict[str, Tensor], Path]:
    """TRL's trainer, and a batch that it made of text: better responses first, then the worse ones."""
    import datasets
    from trl import DPOConfig, DPOTrainer

    rows = {
        "prompt": ["one plus one is ", "say something long: ", "a"],
        "chosen": ["two", "a very long answer", "b"],
        "rejected": ["three", "no", "ccc"],
    }
    folder = tmp_path_factory.mktemp("trl")
    arguments = DPOConfig(
        output_dir=str(folder), use_cpu=True, report_to="none", beta=0.1, per_device_train_batch_size=3, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=make_qwen3(1),
        ref_model=make_qwen3(0),
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=make_tokenizer(),
    )
    trainer.model.eval()
    return trainer, next(iter(trainer.get_train_dataloader())), folder


def ours(batch: dict[str, Tensor], settings: DpoSectionConfig) -> dict[str, float]:
    """Our loss on TRL's tensors, with logprobs by a plain forward."""
    num_pairs = len(batch["input_ids"]) // 2
    order = [row for pair in range(num_pairs) for row in (pair, pair + num_pairs)]
    ids, mask = batch["input_ids"][order], batch["completion_mask"][order].float()

    def logprobs(seed: int) -> Tensor:
        model = make_qwen3(seed)
        with torch.no_grad():
            scores = model(input_ids=ids, attention_mask=batch["attention_mask"][order]).logits.log_softmax(-1)
        picked = scores[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(picked, (1, 0))

    ready = PreferenceBatch(
        input_ids=ids,
        input_lengths=batch["attention_mask"][order].sum(1),
        token_mask=mask,
        sample_mask=torch.ones(len(ids)),
        reference_sums=torch.zeros(len(ids), dtype=torch.float64),
    )
    ready = replace(ready, reference_sums=counted_sums(logprobs(0), ready))
    loss, metrics = DpoLoss(settings)(logprobs(1), ready, norm_of(ready))
    return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}


@pytest.mark.parametrize(("loss_type", "average"), [("sigmoid", False), ("sigmoid_norm", True)])
def test_loss_equals_trls_on_the_same_tensors(trl_batch, loss_type, average):
    trainer, batch, _ = trl_batch
    trainer.loss_types, trainer.loss_weights = [loss_type], [1.0]
    with torch.no_grad():
        expected = float(trainer.compute_loss(trainer.model, dict(batch)))
    metrics = ours(batch, replace(PLAIN, preference_average_log_probs=average))
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    if not average:
        theirs = {name: values[-1] for name, values in trainer._metrics["eval"].items()}
        assert metrics["accuracy"] == pytest.approx(theirs["rewards/accuracies"])
        assert metrics["rewards_chosen_mean"] == pytest.approx(theirs["rewards/chosen"], rel=1e-4)
        assert metrics["rewards_rejected_mean"] == pytest.approx(theirs["rewards/rejected"], rel=1e-4)
        assert metrics["rewards_margin_mean"] == pytest.approx(theirs["rewards/margins"], rel=1e-4)
