"""Set-up of a worker's process: environment, deterministic kernels, a record of memory, clean-up of constructors."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from nemo_offload_rl.keys.worker import PolicySettings

logger = logging.getLogger(__name__)

MAX_EVENTS = 200_000


def use_deterministic_algorithms() -> None:
    """Make torch's operations in this process deterministic where it can.

    Other operations give a warning; a backend may refuse them. Call this before the first matrix product, because
    cuBLAS reads its setting once. Otherwise the backward pass of attention and some reductions sum in the order in
    which the GPU's blocks happen to finish (https://docs.pytorch.org/docs/stable/notes/randomness.html).
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's attention
    torch.use_deterministic_algorithms(True, warn_only=True)
    # No code reads uninitialized memory; filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def record_memory_history(folder: str | None, device: torch.device, rank: int) -> None:
    """Record allocations, and write a snapshot to `folder`/rank_<rank>.pickle when CUDA runs out of memory.

    https://docs.pytorch.org/memory_viz shows the file. Recording costs a few percent of a step. Without a folder or a
    GPU nothing is recorded.
    """
    if folder is None or device.type != "cuda":
        return
    target = Path(folder) / f"rank_{rank}.pickle"
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)

    def on_out_of_memory(device: int, wanted: int, allocated: int, free: int) -> None:
        torch.cuda.memory._dump_snapshot(str(target))
        logger.error("out of memory on cuda:%d: snapshot written to %s", device, target)

    torch._C._cuda_attach_out_of_memory_observer(on_out_of_memory)  # pyright: ignore[reportAttributeAccessIssue]


def policy_env_vars(settings: PolicySettings, cpu_workers_per_node: int | None) -> dict[str, str]:
    """Environment variables of a policy worker, set before any import.

    Args:
        settings: The policy's settings.
        cpu_workers_per_node: Workers that share a host's CPUs; None for workers on GPUs.
    """
    env_vars: dict[str, str] = {}
    if cpu_workers_per_node is not None:
        # Ray gives a worker one thread for its share of a CPU, but the engine is idle while the policy computes.
        # Threads that spin while waiting make a step up to ten times slower as soon as another process needs a core.
        threads = max(1, (os.cpu_count() or 1) // cpu_workers_per_node)
        env_vars |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {**env_vars, **settings.backend.worker_env_vars}


class Closes(Protocol):
    """An object that has to be closed."""

    def close(self) -> None: ...


def closing(made: Closes) -> Callable[..., None]:
    """Return a callback for `ExitStack.push` that closes `made`; its failure becomes a note of the error under way."""

    def close(_type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            made.close()
        except (RuntimeError, OSError) as second:
            if error is None:
                raise
            error.add_note(f"and then: {type(second).__name__}: {second}")

    return close
