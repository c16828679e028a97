"""Two GPUs through NCCL: both backends, data- and tensor-parallel, against Hugging Face and without residency.

With the NCCL that torch brings, the test of suspended communicators is skipped. To run it:
`pip install --no-deps --target DIR nvidia-nccl-cu13==2.29.7`, then
`LD_PRELOAD=DIR/nvidia/nccl/lib/libnccl.so.2 pytest -m gpu tests/unit/policy/test_worker_two_gpus.py -k suspended`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_stand_in import are_suspended
from policy_cases import NLL, decoder_layer, hf_logprobs, make_batch, make_settings, run_ranks, shard, worker_of
from safetensors.torch import load_file
from tiny_models import qwen3_config, save_model_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_offload_rl.policy.communicators import nccl_problem
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.utils.gpu_memory import read_gpus

logger = logging.getLogger(__name__)
if torch.cuda.is_available():
    # Read when the libraries are loaded.
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}

MEGATRON: dict[str, Any] = {
    "backend": "megatron",
    "transformer_impl": "transformer_engine",
    "bf16": True,
    "pipeline_dtype": "bfloat16",
}
WITH_MASTERS: dict[str, Any] = {"use_precision_aware_optimizer": False}
CASES: dict[str, dict[str, Any]] = {
    "DTensor, FSDP over 2": {},
    "DTensor, TP over 2": {"tensor_parallel_size": 2},
    "DTensor, TP over 2, sequences split": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "DTensor, CP over 2": {"context_parallel_size": 2},
    "Megatron, DP over 2": {**MEGATRON, **WITH_MASTERS},
    "Megatron, DP over 2, precision-aware": {**MEGATRON, "use_precision_aware_optimizer": True},
    "Megatron, TP over 2": {**MEGATRON, **WITH_MASTERS, "tensor_parallel_size": 2},
    "Megatron, TP over 2, sequences split": {
        **MEGATRON,
        **WITH_MASTERS,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
    },
}


def run(settings: Any, process: ProcessInfo) -> tuple[dict[str, Tensor], Tensor, list[float], int]:
    """Weights as loaded, logprobs of this rank's rows, what three steps gave, and device bytes while all is away."""
    values: list[float] = []
    with worker_of(settings, process, keep_reference=True) as worker:
        worker.offload_before_refit()
        weights = {name: tensor.cpu().clone() for name, tensor in worker.named_weights()}
        worker.offload_after_refit()
        worker.prepare_for_lp_inference()
        logprobs = worker.get_logprobs(shard(make_batch(), worker))
        for seed in range(3):
            batch = shard(make_batch(seed=seed), worker)
            worker.prepare_for_lp_inference()
            values.append(float(worker.get_logprobs(batch).double().sum()))
            values.append(float(worker.get_reference_logprobs(batch).double().sum()))
            worker.prepare_for_training()
            result = worker.train(batch, NLL())
            values += [*result.loss, *result.grad_norm]
            worker.offload_before_refit()
            values += [float(tensor.double().sum()) for _, tensor in worker.named_weights()]
            worker.offload_after_refit()
        held_bytes = sum(worker.residency.device_bytes().values())
        for is_late in (False, True):
            if is_late:
                hold_back_copies(worker)
            worker.prepare_for_lp_inference()
            values.append(float(worker.get_logprobs(batch).double().sum()))
            worker.offload_after_refit()
        assert values[-1] == values[-2]
        return weights, logprobs, values, held_bytes


def hold_back_copies(worker: PolicyWorker) -> None:
    """Have copies to the GPU begin a second later: who does not wait for them reads what was in the memory before."""
    with torch.cuda.stream(worker.residency._device._in):
        torch.cuda._sleep(2_000_000_000)  # cycles


def check_cases(process: ProcessInfo, folder: str, backend: str) -> None:
    stored = load_file(Path(folder) / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, changes in CASES.items():
        if not name.startswith(backend):
            continue
        settings = make_settings(folder, precision="bfloat16", **changes)
        weights, logprobs, values, held_bytes = run(settings, process)
        assert {key: tensor.shape for key, tensor in weights.items()} == {k: t.shape for k, t in stored.items()}, name
        assert all(torch.equal(weights[key], stored[key].bfloat16()) for key in stored), name
        dp_size = 1 if "TP" in name or "CP" in name else 2
        rows = len(make_batch()) // dp_size
        first = 0 if dp_size == 1 else process.rank * rows
        expected = hf_logprobs(model, make_batch().select(range(first, first + rows))).detach()
        assert (logprobs - expected).abs().mean() < 0.02, name
        assert held_bytes == 0, name
        resident = run(make_settings(folder, precision="bfloat16", colocated=False, **changes), process)
        assert resident[2] == values, name
        if process.rank == 0:
            logger.info("%s: mean difference %.1e", name, (logprobs - expected).abs().mean())


def run_on_two_gpus(root: Path, check: Any, backend: str) -> None:
    config = qwen3_config(num_layers=4, hidden_size=512)
    config.initializer_range = 0.02
    save_model_folder(root / "model", 0, config)
    run_ranks(2, root, check, str(root / "model"), backend, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("backend", ["DTensor", "Megatron"])
def test_two_gpus_hold_the_model_of_hugging_face_and_residency_changes_no_bit(tmp_path: Path, backend: str) -> None:
    run_on_two_gpus(tmp_path, check_cases, backend)


def process_bytes(device: str) -> int:
    """What the driver says this process has of its GPU, once all ranks are here, beside torch's allocator."""
    dist.all_gather_object([None] * dist.get_world_size(), None)  # through gloo: NCCL may be suspended
    use = read_gpus()[str(torch.cuda.get_device_properties(device).uuid)]
    return use.by_pid[os.getpid()] - torch.cuda.memory_reserved(device)


def check_suspended(process: ProcessInfo, folder: str, backend: str) -> None:
    names = ("DTensor, FSDP over 2", "DTensor, TP over 2", "Megatron, DP over 2", "Megatron, TP over 2")
    for name in names:
        if not name.startswith(backend):
            continue
        settings = make_settings(folder, precision="bfloat16", **CASES[name])
        suspending = replace(settings, suspend_nccl_comms=True)
        _, logprobs, values, _ = run(suspending, process)
        _, expected_logprobs, expected_values, _ = run(settings, process)
        assert torch.equal(logprobs, expected_logprobs), name
        assert values == expected_values, name
        saved = Path(folder).parent / name
        with worker_of(suspending, process, keep_reference=True) as worker:
            batch = shard(make_batch(), worker)
            worker.prepare_for_training()
            worker.train(batch, NLL())
            worker.offload_before_refit()
            weights = {key: tensor.cpu().clone() for key, tensor in worker.named_weights()}
            freed_bytes = worker.offload_after_refit().group("communicators").bytes_freed
            suspended_bytes = process_bytes(process.device)
            with worker._communicators.resumed():
                resumed_bytes = process_bytes(process.device)
            assert freed_bytes > 0, name
            assert resumed_bytes - suspended_bytes > freed_bytes // 2, name
            # A save goes through gloo, and what needs NCCL has it.
            worker.save_checkpoint(saved)
            worker.load_checkpoint(saved)
            worker.export_hf(saved.with_suffix(".exported"))
            assert are_suspended(worker._communicators), name
            worker.offload_before_refit()
            assert all(torch.equal(weights[key], tensor.cpu()) for key, tensor in worker.named_weights()), name
            worker.offload_after_refit()  # the worker ends suspended
        if process.rank == 0:
            resting, awake, freed = (f"{num / 2**20:.0f}" for num in (suspended_bytes, resumed_bytes, freed_bytes))
            logger.info("%s: %s MiB with all away, %s if not suspended; NCCL's count %s", name, resting, awake, freed)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.skipif(nccl_problem() is not None, reason=nccl_problem() or "")
@pytest.mark.parametrize("backend", ["DTensor", "Megatron"])
def test_suspended_communicators_give_memory_back_and_change_no_bit(tmp_path: Path, backend: str) -> None:
    run_on_two_gpus(tmp_path, check_suspended, backend)


class OutOfMemoryOnce:
    """Hook that fails in the first pass that it is in."""

    def __init__(self) -> None:
        self.has_failed = False

    def __call__(self, *_args: Any) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def check_first_pass(process: ProcessInfo, folder: str, backend: str) -> None:
    """The first rank fails in the first pass of all, before its layers communicate; then again after reconnecting."""
    for name in (name for name in CASES if name.startswith(backend)):
        losses: list[float] = []
        for fails in (False, True):
            with worker_of(make_settings(folder, precision="bfloat16", **CASES[name]), process) as worker:
                worker.prepare_for_training()
                for seed in range(2):
                    hook = OutOfMemoryOnce()
                    layer = decoder_layer(worker, 0)
                    handle = layer.register_forward_pre_hook(hook, prepend=True)
                    hook.has_failed = not fails or process.rank != 0
                    result = worker.train(shard(make_batch(seed=seed), worker), NLL())
                    handle.remove()
                    worker.prepare_for_training()
                    assert (result.oom_splits > 0) is fails, name
                    losses += result.loss
        assert losses[len(losses) // 2 :] == pytest.approx(losses[: len(losses) // 2], rel=0.01), name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("backend", ["DTensor", "Megatron"])
def test_a_rank_may_run_out_of_memory_before_the_groups_have_communicated(tmp_path: Path, backend: str) -> None:
    run_on_two_gpus(tmp_path, check_first_pass, backend)
