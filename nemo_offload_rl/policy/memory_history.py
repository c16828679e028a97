"""What the device's memory held when it ran out."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

MAX_EVENTS = 200_000


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
