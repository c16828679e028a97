"""The Megatron backend on a real GPU: layers of Transformer Engine, every optimizer flavour, packing, experts."""

from __future__ import annotations

import gc
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import Poisoned, assert_equal, full_optimizer, make_batch, make_settings, worker_of
from tiny_models import VOCAB_SIZE, make_tokenizer, qwen3_config, save_model_folder
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.backends.megatron.optimizer_spec import optimizer_spec
from nemo_offload_rl.backends.megatron.upstream import storages
from nemo_offload_rl.keys.policy import BatchingConfig
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.residency.device.cuda_copies import STAGING_BYTES
from nemo_offload_rl.residency.table.ledger import find_leftovers

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
if torch.cuda.is_available():
    # Read when the libraries are loaded.
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}

GPU = ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:0")
MIB = 2**20
WITH_MASTERS: dict[str, Any] = {"use_precision_aware_optimizer": False}
PRECISION_AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True}
BFLOAT16_MOMENTS: dict[str, Any] = {
    **PRECISION_AWARE,
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}
CPU_OPTIMIZER: dict[str, Any] = {
    "use_precision_aware_optimizer": True,
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
}
FLAVOURS: dict[str, dict[str, Any]] = {
    "masters": WITH_MASTERS,
    "masters, not sharded": {**WITH_MASTERS, "use_distributed_optimizer": False},
    "precision-aware": PRECISION_AWARE,
    "bfloat16 moments": BFLOAT16_MOMENTS,
    "precision-aware, overlapped": {**PRECISION_AWARE, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "on the CPU": CPU_OPTIMIZER,
    "on the CPU, overlapped": {**CPU_OPTIMIZER, "overlap_cpu_optimizer_d2h_h2d": True},
    "half on the CPU": {**CPU_OPTIMIZER, "optimizer_offload_fraction": 0.5},
}
STREAMED = {"offload_optimizer_states": True, "offload_optimizer_states_chunk_mib": 64}
# All that stays on the GPU: what small copies of both directions are gathered in.
STAGING = [f"tensor [{STAGING_BYTES}] uint8: {2 * STAGING_BYTES // MIB} MiB"]


@pytest.fixture(autouse=True)
def needs_transformer_engine() -> None:
    pytest.importorskip("transformer_engine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 M parameters: 160 MiB in bfloat16, six times that in masters and states."""
    path = tmp_path_factory.mktemp("model")
    config = qwen3_config(num_layers=8, hidden_size=1024)
    config.initializer_range = 0.02
    save_model_folder(path, 0, config)
    return path


def gpu_settings(folder: Path, **changes: Any) -> Any:
    """bfloat16 and Transformer Engine, the rest as in the CPU tests."""
    defaults = {"precision": "bfloat16", "bf16": True, "pipeline_dtype": "bfloat16"}
    defaults |= {"clear_memory_caches_before_refit": True}
    values = {**defaults, "transformer_impl": "transformer_engine", **changes}
    return make_settings(folder, backend="megatron", **values)


@dataclass
class Run:
    """What a few steps with every phase gave, and the memory that was left when everything had been offloaded."""

    values: list[float]
    weights: Tensor
    allocated_bytes: int
    driver_bytes: int
    leftovers: list[str]

    def sizes_mib(self) -> dict[str, int]:
        return {"allocated": self.allocated_bytes // MIB, "driver": self.driver_bytes // MIB}


def run(settings: Any, num_steps: int = 3) -> Run:
    values: list[float] = []
    gc.collect()
    torch.cuda.empty_cache()
    free_before = torch.cuda.mem_get_info()[0]
    with worker_of(settings, GPU, keep_reference=True) as worker:
        for seed in range(num_steps):
            step(worker, seed, values)
        worker.offload_before_refit()
        weights = torch.cat([tensor.float().flatten().cpu() for _, tensor in worker.named_weights()])
        worker.offload_after_refit()
        torch.cuda.synchronize()
        gc.collect()
        driver_bytes = free_before - torch.cuda.mem_get_info()[0]
        left = find_leftovers({}, (), torch.device("cuda:0"), from_bytes=MIB)
        return Run(values, weights, torch.cuda.memory_allocated(), driver_bytes, [str(leftover) for leftover in left])


def step(worker: PolicyWorker, seed: int, values: list[float]) -> None:
    batch = make_batch(seed=seed)
    worker.prepare_for_lp_inference()
    values.append(float(worker.get_logprobs(batch).double().sum()))
    values.append(float(worker.get_reference_logprobs(batch).double().sum()))
    worker.prepare_for_training()
    result = worker.train(batch, NLLLoss())
    values += [*result.loss, *result.grad_norm]
    worker.offload_before_refit()
    worker.offload_after_refit()


@pytest.fixture(scope="module")
def resident_run(folder: Path) -> Callable[[str], Run]:
    """Make the run of a flavour that moves nothing; once for all tests."""
    return cache(lambda flavour: run(gpu_settings(folder, colocated=False, **FLAVOURS[flavour])))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_residency_changes_no_bit_of_any_flavour_and_leaves_nothing_on_the_gpu(
    folder: Path, resident_run: Callable[[str], Run], flavour: str
) -> None:
    changes = FLAVOURS[flavour]
    resident = resident_run(flavour)
    away = run(gpu_settings(folder, offload_optimizer_states_for_logprob=True, **changes))
    logger.info("%s: %s", flavour, {"away": away.sizes_mib(), "resident": resident.sizes_mib(), "left": away.leftovers})
    assert away.values == resident.values
    assert torch.equal(away.weights, resident.weights)
    assert len(set(away.values[::4])) == 3  # each step changed the policy
    assert away.allocated_bytes - 2 * STAGING_BYTES < 100 * MIB < resident.allocated_bytes
    assert away.leftovers == STAGING


@pytest.mark.parametrize("flavour", ["masters", "masters, not sharded", "precision-aware", "bfloat16 moments", "sgd"])
def test_the_optimizer_keeps_the_bytes_of_its_spec_and_what_is_made_for_a_load_is_the_same(
    folder: Path, tmp_path: Path, flavour: str
) -> None:
    settings = gpu_settings(folder, colocated=False, **FLAVOURS.get(flavour, FLAVOURS["masters, not sharded"]))
    optimizer = settings.megatron_cfg.optimizer
    if flavour == "sgd":
        optimizer = replace(optimizer, optimizer="sgd")
        settings = replace(settings, megatron_cfg=replace(settings.megatron_cfg, optimizer=optimizer))
    with worker_of(settings, GPU) as worker:
        worker.prepare_for_training()
        worker.train(make_batch(), NLLLoss())
        num_parameters = sum(p.numel() for chunk in worker._backend._chunks for p in chunk.parameters())
        expected_bytes = optimizer_spec(optimizer).bytes_per_element(torch.bfloat16) * num_parameters
        # Small states are joined after the first update, each in whole units.
        assert expected_bytes <= worker.residency.device_bytes()["optimizer"] < 1.05 * expected_bytes
        kept = full_optimizer(worker)
        worker.save_checkpoint(tmp_path / "saved")
    with worker_of(settings, GPU) as worker:
        worker.load_checkpoint(tmp_path / "saved")
        assert_equal(full_optimizer(worker), kept)
        assert worker.residency.device_bytes()["optimizer"] == expected_bytes


def test_what_building_the_model_left_on_the_gpu_goes_before_the_first_generation(folder: Path) -> None:
    with worker_of(gpu_settings(folder), GPU) as worker:
        report = worker.offload_after_refit()
        left = find_leftovers({}, (), torch.device("cuda:0"), from_bytes=MIB)
        assert [str(leftover) for leftover in left] == STAGING
        assert report.leftovers == []


@pytest.mark.parametrize("flavour", ["masters", "precision-aware", "bfloat16 moments"])
def test_streamed_states_change_no_bit(folder: Path, resident_run: Callable[[str], Run], flavour: str) -> None:
    resident = resident_run(flavour)
    streamed = run(gpu_settings(folder, **FLAVOURS[flavour], **STREAMED))
    assert streamed.values == resident.values
    assert torch.equal(streamed.weights, resident.weights)
    assert streamed.leftovers == STAGING


@pytest.mark.parametrize("flavour", [*FLAVOURS, "streamed"])
def test_an_update_with_gradients_that_are_not_finite_leaves_no_trace(folder: Path, flavour: str) -> None:
    changes = {**PRECISION_AWARE, **STREAMED} if flavour == "streamed" else FLAVOURS[flavour]

    def trained(*, poisoned: bool) -> list[Any]:
        with worker_of(gpu_settings(folder, **changes), GPU) as worker:
            results = []
            for seed in range(3):
                worker.prepare_for_training()
                if poisoned:
                    assert worker.train(make_batch(seed=9), Poisoned(math.nan)).is_skipped == [True]
                    worker.offload_after_refit()
                    worker.prepare_for_training()
                results.append(worker.train(make_batch(seed=seed), NLLLoss()))
            return results

    assert trained(poisoned=True) == trained(poisoned=False)


RESUMED: dict[str, dict[str, Any]] = {
    **{
        name: FLAVOURS[name]
        for name in ("masters", "precision-aware", "bfloat16 moments", "on the CPU", "half on the CPU")
    },
    "masters, streamed": {**WITH_MASTERS, **STREAMED},
    "precision-aware, streamed": {**PRECISION_AWARE, **STREAMED},
}


@pytest.mark.parametrize("flavour", RESUMED)
def test_a_resumed_run_goes_on_bit_by_bit_and_takes_no_more_memory_for_it(
    folder: Path, tmp_path: Path, flavour: str
) -> None:
    changes = RESUMED[flavour]

    def peak_since_last_asked() -> int:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    with worker_of(gpu_settings(folder, **changes), GPU) as worker:
        worker.prepare_for_training()
        peak_since_last_asked()
        worker.train(make_batch(seed=0), NLLLoss())
        training = peak_since_last_asked()
        worker.offload_after_refit()
        peak_since_last_asked()
        worker.save_checkpoint(tmp_path / "saved")
        worker.export_hf(tmp_path / "hf")
        assert peak_since_last_asked() <= training
        worker.prepare_for_training()
        expected = [worker.train(make_batch(seed=seed), NLLLoss()) for seed in (1, 2)]
    with worker_of(gpu_settings(folder, **changes), GPU) as worker:
        worker.offload_after_refit()
        peak_since_last_asked()
        worker.load_checkpoint(tmp_path / "saved")
        assert peak_since_last_asked() <= training
        worker.prepare_for_training()
        assert [worker.train(make_batch(seed=seed), NLLLoss()) for seed in (1, 2)] == expected


def test_logprobs_are_the_dtensor_backends_up_to_bfloat16_also_when_packed_or_in_chunks(folder: Path) -> None:
    batch = make_batch(num_rows=16, width=24)
    with worker_of(make_settings(folder, precision="bfloat16"), GPU) as worker:
        worker.prepare_for_lp_inference()
        expected = worker.get_logprobs(batch)
    packing = BatchingConfig(enabled=True, train_mb_tokens=96, logprob_mb_tokens=96, sequence_length_round=1)
    for changes in ({}, {"sequence_packing": packing}, {"logprob_chunk_size": 7}, {"activation_checkpointing": True}):
        with worker_of(gpu_settings(folder, **PRECISION_AWARE, **changes), GPU) as worker:
            worker.prepare_for_lp_inference()
            found = worker.get_logprobs(batch)
            worker.prepare_for_training()
            result = worker.train(batch, NLLLoss())
        difference = (found - expected).abs()
        logger.info("%s: mean %.2e max %.2e loss %s", list(changes), difference.mean(), difference.max(), result.loss)
        assert difference.mean() < 0.01
        assert (found == 0).eq(expected == 0).all()


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(("rope", "is_fused"), [(YARN, False), (LLAMA3, False), (LLAMA3, True)])
def test_scaled_rotary_embeddings_are_the_dtensor_backends_padded_and_packed(
    folder: Path, rope: dict[str, Any], is_fused: bool
) -> None:
    batch = make_batch(num_rows=16, width=24)
    overrides = {"hf_config_overrides": {"rope_parameters": rope}}
    with worker_of(make_settings(folder, precision="bfloat16", **overrides), GPU) as worker:
        worker.prepare_for_lp_inference()
        expected = worker.get_logprobs(batch)
    packing = BatchingConfig(enabled=True, train_mb_tokens=96, logprob_mb_tokens=96, sequence_length_round=1)
    for changes in ({}, {"sequence_packing": packing}):
        settings = gpu_settings(folder, **PRECISION_AWARE, **overrides, apply_rope_fusion=is_fused, **changes)
        with worker_of(settings, GPU) as worker:
            worker.prepare_for_lp_inference()
            difference = (worker.get_logprobs(batch) - expected).abs()
        logger.info("%s, %s: mean %.2e max %.2e", rope["rope_type"], list(changes), difference.mean(), difference.max())
        assert difference.mean() < 0.01


def fp8_settings(folder: Path, recipe: str, **changes: Any) -> Any:
    settings = gpu_settings(folder, **PRECISION_AWARE, **changes)
    cfg = settings.megatron_cfg
    fp8 = replace(cfg.fp8_cfg, enabled=True, fp8="hybrid" if recipe == "delayed" else "e4m3", fp8_recipe=recipe)
    return replace(settings, megatron_cfg=replace(cfg, fp8_cfg=fp8))


ODD_ROWS = make_batch(num_rows=8, width=13)


@pytest.fixture(scope="module")
def in_16_bits(folder: Path) -> tuple[Tensor, float]:
    """Logprobs of `ODD_ROWS` and the loss of a step with them."""
    with worker_of(gpu_settings(folder, **PRECISION_AWARE), GPU) as worker:
        worker.prepare_for_lp_inference()
        logprobs = worker.get_logprobs(ODD_ROWS)
        worker.prepare_for_training()
        return logprobs, *worker.train(ODD_ROWS, NLLLoss()).loss


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "delayed"])
def test_eight_bit_layers_train_on_rows_of_any_length_packed_and_padded(
    folder: Path, in_16_bits: tuple[Tensor, float], recipe: str
) -> None:
    """In 16 bits these rows have 26 tokens padded, and packed any number up to 40."""
    expected, expected_loss = in_16_bits
    packing = BatchingConfig(enabled=True, train_mb_tokens=40, logprob_mb_tokens=40, sequence_length_round=1)
    for changes in ({"sequence_packing": packing}, {}):
        with worker_of(fp8_settings(folder, recipe, **changes), GPU) as worker:
            worker.prepare_for_lp_inference()
            difference = (worker.get_logprobs(ODD_ROWS) - expected).abs()
            worker.prepare_for_training()
            (loss,) = worker.train(ODD_ROWS, NLLLoss()).loss
        logger.info(
            "%s, %s: mean %.2e loss %.4f of %.4f", recipe, list(changes), difference.mean(), loss, expected_loss
        )
        assert difference.mean() < 0.1
        assert loss == pytest.approx(expected_loss, rel=0.02)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_resumed_run_in_eight_bits_goes_on_bit_by_bit(folder: Path, tmp_path: Path, recipe: str) -> None:
    packing = BatchingConfig(enabled=True, train_mb_tokens=40, logprob_mb_tokens=40, sequence_length_round=1)
    settings = fp8_settings(folder, recipe, sequence_packing=packing)

    def steps(worker: PolicyWorker, *seeds: int) -> list[float]:
        values: list[float] = []
        for seed in seeds:
            step(worker, seed, values)
        return values

    with worker_of(settings, GPU, keep_reference=True) as worker:
        steps(worker, 0, 1)
        worker.save_checkpoint(tmp_path / "saved")
        expected = steps(worker, 2, 3)
    with worker_of(settings, GPU, keep_reference=True) as worker:
        worker.load_checkpoint(tmp_path / "saved")
        assert steps(worker, 2, 3) == expected


def test_a_model_whose_parameters_waited_on_the_host_is_the_same_and_never_took_more_than_its_buffers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without masters, whose making would be the peak of either way.
    settings = gpu_settings(folder, grad_reduce_in_fp32=True, **PRECISION_AWARE)
    expected = run(settings)
    peaks = {}
    for has_room in (True, False):
        if not has_room:
            monkeypatch.setattr(storages, "buffer_bytes", lambda parameters, *, grads_in_fp32: 1 << 60)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with worker_of(settings, GPU, keep_reference=False) as worker:
            peaks[has_room] = torch.cuda.max_memory_allocated() - before
            params = worker.residency.device_bytes()["params"]
    assert peaks[False] + 0.8 * params < peaks[True]
    found = run(settings)
    assert found.values == expected.values and torch.equal(found.weights, expected.weights)


def test_parameters_that_stay_change_places_with_the_reference_and_no_bit_of_a_run_changes(folder: Path) -> None:
    changes = {**BFLOAT16_MOMENTS, **STREAMED}
    away = run(gpu_settings(folder, **changes))
    stays = run(gpu_settings(folder, residency_overrides={"params": "device"}, **changes))
    assert stays.values == away.values and torch.equal(stays.weights, away.weights)


def moe_folder(path: Path) -> dict[str, Tensor]:
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    model = Qwen3MoeForCausalLM(config).bfloat16()
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def test_experts_load_train_offload_and_export(tmp_path: Path) -> None:
    moe_folder(tmp_path / "moe")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.bfloat16)
    settings = gpu_settings(tmp_path / "moe", **PRECISION_AWARE)
    with worker_of(settings, GPU) as worker:
        worker.offload_after_refit()
        worker.offload_before_refit()
        worker.export_hf(tmp_path / "exported")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
        for name, tensor in stored.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
        worker.prepare_for_lp_inference()
        batch = make_batch()
        with torch.no_grad():
            logits = stored.cuda()(input_ids=batch.input_ids.cuda()).logits.float().cpu()
        expected = logits.log_softmax(-1)[:, :-1].gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
        is_real = torch.arange(1, batch.input_ids.shape[1]) < batch.input_lengths[:, None]
        found = worker.get_logprobs(batch)[:, 1:]
        difference = ((found - expected) * is_real).abs()
        logger.info("experts: mean %.2e max %.2e", difference.mean(), difference.max())
        assert difference.mean() < 0.02
    resident = run(gpu_settings(tmp_path / "moe", colocated=False, **PRECISION_AWARE))
    away = run(settings)
    assert away.values == resident.values
    assert torch.equal(away.weights, resident.weights)
