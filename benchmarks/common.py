"""Shared by the benchmarks: machine and versions of a result, models made in a new process, the link, a loss."""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples" / "demo")]

import hybrid_shapes  # noqa: E402
from qwen3_shapes import is_written, shape_of, write_model  # noqa: E402

GB, GIB = 10**9, 2**30
LIBRARIES = ("torch", "transformers", "vllm", "ray", "megatron-core", "megatron-bridge", "transformer-engine", "trl")
# A few short responses on a CPU, to try a script that runs GRPO; the optimizer is DTensor's.
CPU_OVERRIDES = [
    "cluster.gpus_per_node=0",
    "policy.precision=float32",
    "policy.generation.vllm_cfg.kv_cache_memory_gib=0.125",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "policy.optimizer.kwargs.fused=false",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=2",
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=2",
    "policy.logprob_batch_size=2",
    "policy.generation.max_new_tokens=16",
    "policy.max_total_sequence_length=32",
    "policy.host_memory_budget_gib=null",
]


@dataclass(frozen=True)
class NLL:
    """Mean negative log-likelihood of the counted tokens."""

    token_stat: None = None

    def __call__(self, logprobs_BS: Any, batch: Any, norm: Any) -> tuple[Any, dict[str, Any]]:
        loss = -(logprobs_BS * batch.token_mask).sum() / norm.num_valid_tokens
        return loss, {"loss": loss.detach()}


def measured_with() -> dict[str, Any]:
    """Date, command and machine of a result. Asks CUDA for the GPU's name."""
    import torch

    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": {
            "gpu": gpu.name if gpu else "none",
            "gpu_uuid": str(gpu.uuid) if gpu else "none",
            "cores": len(os.sched_getaffinity(0)),
            "versions": versions,
        },
    }


def write_result(path: Path | None, result: dict[str, Any]) -> None:
    """JSON, where a path is given. Scripts call it after each part: one that does not end leaves the parts before."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file with one on each line; none without the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_in(log_dir: Path) -> list[dict[str, Any]]:
    """The metrics of a run's steps; step 0 is a validation."""
    return [record for record in json_lines(log_dir / "metrics.jsonl") if record["step"] > 0]


def medians(steps: list[dict[str, float]], names: tuple[str, ...]) -> dict[str, float]:
    """Medians over the steps after the first, which compiles."""
    steady = steps[1:] or steps
    return {name: statistics.median(step.get(name, 0.0) for step in steady) for name in names}


def make_model(folder: Path, shape: str, device: str, *, ties_embeddings: bool = False) -> None:
    """Write a random model to `folder`, unless it is there, in a process that leaves nothing on the GPU."""
    if shape in hybrid_shapes.HYBRID_SHAPES:
        done = hybrid_shapes.is_written(folder, shape)
        write, arguments = hybrid_shapes.write_model, (folder, shape, device)
    else:
        done = is_written(folder, shape_of(shape), ties_embeddings)
        write, arguments = write_model, (folder, shape_of(shape), device, ties_embeddings)
    if done:
        return
    writer = multiprocessing.get_context("spawn").Process(target=write, args=arguments)
    writer.start()
    writer.join()
    if writer.exitcode:
        sys.exit("the model could not be made")


def vocab_of(shape: str) -> int:
    """Tokens of a shape's vocabulary."""
    hybrid = hybrid_shapes.HYBRID_SHAPES.get(shape)
    return shape_of(shape).vocab if hybrid is None else hybrid["vocab_size"]


def grow_host_memory(num_bytes: int) -> None:
    """Touch as much host memory as the runs need: a virtual machine may grow on first touch, which is not measured."""
    if not num_bytes:
        return
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = (ctypes.c_char * num_bytes).from_buffer(memory)
        base, piece = ctypes.addressof(view), 256 << 20
        with ThreadPoolExecutor(8) as pool:
            spans = [(base + o, min(piece, num_bytes - o)) for o in range(0, num_bytes, piece)]
            list(pool.map(lambda span: ctypes.memset(span[0], 1, span[1]), spans))
        del view


def probe_link(device: str, num_bytes: int = 4 << 30) -> dict[str, float]:
    """GB/s of plain pinned copies to the host (`d2h`) and to the device (`h2d`), best of three; 0 without a GPU."""
    import torch

    rates = {"d2h": 0.0, "h2d": 0.0}
    if not device.startswith("cuda"):
        return rates
    torch.cuda.set_device(torch.device(device).index or 0)
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    for direction, (target, source) in {"d2h": (host, on_device), "h2d": (on_device, host)}.items():
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates[direction] = max(rates[direction], num_bytes / (time.perf_counter() - start) / GB)
    return rates


def probe_links(count: int, device: str = "cuda") -> dict[str, list[dict[str, float]]]:
    """Rates of the links of the first `count` GPUs: of the first one `alone`, and of all while they copy `together`.

    Each GPU is used by a process of its own, which leaves nothing on it.
    """
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[dict[str, float]]] = {}
    for name, number in {"alone": 1, "together": count}.items():
        if name == "together" and count == 1:
            return {**found, name: found["alone"]}  # the same probe, whose process takes 20 s to start on a slow host
        barrier = context.Barrier(number)
        with ProcessPoolExecutor(number, context, _wait_at, (barrier,)) as pool:
            found[name] = list(pool.map(_probe_at_once, [f"{device}:{place}" for place in range(number)]))
    return found


def _wait_at(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _probe_at_once(device: str) -> dict[str, float]:
    import torch

    torch.zeros(1, device=device)  # which makes the context
    _barrier.wait(120)
    return probe_link(device)


_barrier: Any = None  # of a process that probes
