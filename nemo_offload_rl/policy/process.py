"""A worker's process: deterministic kernels, a record of its memory, and closing what a constructor has made."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

MAX_EVENTS = 200_000


def use_deterministic_algorithms() -> None:
    """From now on, this process computes with operations that repeat bit by bit, where torch has such.

    Others become warnings; a backend may refuse them. Call before the first matrix product: cuBLAS reads its setting
    once. Without it the backward pass of attention and some reductions add up in the order in which the GPU's blocks
    happen to finish
    (https://docs.pytorch.org/docs/stable/notes/randomness.html).
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's attention
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Nothing here reads uninitialized memory; filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def record_memory_history(folder: str | None, device: torch.device, rank: int) -> None:
    """From now on, write a snapshot to `folder`/rank_<rank>.pickle when CUDA runs out of memory in this process.

    The file is for https://docs.pytorch.org/memory_viz. Recording costs a few percent of a step. Without a folder or a
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


class Closes(Protocol):
    """Has to be closed."""

    def close(self) -> None: ...


def closing(made: Closes) -> Callable[..., None]:
    """Give what `ExitStack.push` takes to close `made`; if that fails too, it becomes a note of the error under way."""

    def close(_type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            made.close()
        except (RuntimeError, OSError) as second:
            if error is None:
                raise
            error.add_note(f"and then: {type(second).__name__}: {second}")

    return close
