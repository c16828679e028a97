"""Families whose layers carry a state along a row: no state crosses from one packed row to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from model_families import FAMILIES, drawn_model, family_config, save_family_folder
from passing_cases import assert_same_steps, in_parts, steps
from policy_cases import NLL, full_grads, make_settings, one_rank_worker, worker_of
from tiny_models import make_tokenizer

from nemo_offload_rl.data.batch import TrainBatch
from nemo_offload_rl.keys.policy import BatchingConfig
from nemo_offload_rl.memory import activations
from nemo_offload_rl.models.families import FAMILIES as RECORDS
from nemo_offload_rl.protocols.backend import ProcessInfo

LENGTHS = (63, 1, 64, 130, 2, 65)  # chunks of gated delta nets have 64 tokens
NUM_TERMS = 2**16  # of gradients of decays: sums over all tokens of sums over chunks
WITH_STATES = [name for name, (model_type, _) in FAMILIES.items() if RECORDS[model_type].state_mixer is not None]
# One family for each class of transformers' modules with states; `make test-models` runs the others.
ONE_A_KIND = ("falcon_h1", "granitemoehybrid-tied", "lfm2-tied", "nemotron_h", "olmo_hybrid")
PACKED: dict[str, Any] = {
    "max_total_sequence_length": 256,
    "sequence_packing": BatchingConfig(
        enabled=True, train_mb_tokens=sum(LENGTHS), logprob_mb_tokens=sum(LENGTHS), sequence_length_round=1
    ),
}


def long_batch() -> TrainBatch:
    """Rows of `LENGTHS`, of which all tokens but the first are counted."""
    lengths_B = torch.tensor(LENGTHS)
    is_real_BS = torch.arange(max(LENGTHS)) < lengths_B.unsqueeze(1)
    ids_BS = torch.randint(0, 256, is_real_BS.shape, generator=torch.Generator().manual_seed(0))
    token_mask = is_real_BS.float()
    token_mask[:, 0] = 0
    return TrainBatch(
        input_ids=ids_BS.where(is_real_BS, 256),
        input_lengths=lengths_B,
        token_mask=token_mask,
        sample_mask=torch.ones(len(LENGTHS)),
    )


def alone(model: Any, batch: TrainBatch) -> torch.Tensor:
    """[B, S] logprobs of each row without the others and without padding."""
    found = torch.zeros(batch.input_ids.shape)
    for row, length in enumerate(LENGTHS):
        ids_1S = batch.input_ids[row : row + 1, :length]
        logprobs = model(ids_1S).logits.float().log_softmax(-1)[0, :-1].gather(-1, ids_1S[0, 1:, None])
        found[row, 1:length] = logprobs.squeeze(-1)
    return found


@pytest.mark.trains
@pytest.mark.parametrize("family", WITH_STATES)
def test_packed_and_padded_rows_have_the_logprobs_and_gradients_of_each_row_alone(tmp_path: Path, family: str) -> None:
    model, batch = save_family_folder(tmp_path, family), long_batch()
    logprobs_BS = alone(model, batch)
    loss = -(logprobs_BS * batch.token_mask).sum() / batch.token_mask.sum()
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for changes in (PACKED, {"max_total_sequence_length": 256, "train_micro_batch_size": 6}):
        with one_rank_worker(tmp_path, activation_checkpointing=True, **changes) as worker:
            worker.prepare_for_lp_inference()
            assert_close(worker.get_logprobs(batch), logprobs_BS.detach())
            worker.prepare_for_training()
            found, _ = worker.forward_backward(batch, NLL())
            assert_close(found, float(loss.detach()))
            assert_close(full_grads(worker), grads, num_terms=NUM_TERMS)


@pytest.mark.trains
@pytest.mark.parametrize(
    "family", [pytest.param(it, marks=() if it in ONE_A_KIND else pytest.mark.models) for it in WITH_STATES]
)
def test_packed_rows_layer_by_layer_are_bit_by_bit_those_of_a_model_that_stays(tmp_path: Path, family: str) -> None:
    save_family_folder(tmp_path, family)
    packing = BatchingConfig(enabled=True, train_mb_tokens=30, logprob_mb_tokens=30, sequence_length_round=1)
    changes: dict[str, Any] = {"precision": "bfloat16", "sequence_packing": packing, "keep_reference": True}
    with one_rank_worker(tmp_path, activation_checkpointing=True, **changes) as worker:
        expected = steps(worker, 2)
    with in_parts(tmp_path, **changes) as worker:
        assert_same_steps(steps(worker, 2), expected)


def test_layers_with_states_and_without_are_counted_apart_however_long_the_traced_row_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family_folder(tmp_path, "qwen3_next")
    settings = make_settings(tmp_path, precision="bfloat16", max_total_sequence_length=1024)
    row, found = activations._row(settings, is_training=True), []
    for num_tokens in (512, 1024):
        monkeypatch.setattr(activations, "_TOKENS", num_tokens)
        model = activations._traced(settings, row, is_training=True, in_place=False)
        assert model is not None
        found.append([layer.kept_bytes for layer in model.layers])
    short, long = found
    assert short[0] == short[2] > 2 * short[1]
    assert [one / other for one, other in zip(long, short, strict=True)] == pytest.approx([2.0] * 3, rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("family", WITH_STATES)
def test_packed_rows_on_a_gpu_have_the_logprobs_of_each_row_alone(tmp_path: Path, family: str) -> None:
    """With kernels, if they are installed, else with torch's operations; the log says which packages are missing."""
    model = drawn_model(family_config(family, initializer_range=0.05), seed=0)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    batch = long_batch()
    expected = alone(model, batch).detach()
    on_gpu = ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0")
    settings = make_settings(tmp_path, precision="bfloat16", train_global_batch_size=len(LENGTHS), **PACKED)
    with worker_of(settings, on_gpu) as worker:
        worker.prepare_for_lp_inference()
        assert (worker.get_logprobs(batch) - expected).abs().mean() < 0.02
        worker.prepare_for_training()
        worker.train(batch, NLL())
