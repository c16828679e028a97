"""Inputs of a pass on their way to a GPU, past the copies of state that are under way."""

from __future__ import annotations

import torch
from torch import Tensor

# From pageable memory the CUDA driver puts so much into the stream's commands; more, or page-locked memory, takes the
# copy engine, which runs copies of all streams in the order in which they were asked for, whatever their priority.
PIECE_BYTES = 64 << 10
MOST_BYTES = 4 << 20  # in pieces: a piece costs 0.03 ms


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device; itself where it is there. From pageable memory, it may be changed at once.

    What has 64 KiB to 4 MiB goes to a GPU in pieces that wait for no other copies. In one, an input of 72 KiB waits for
    everything that is prefetched: docs/measurements/mechanisms.md.
    """
    target = torch.device(device)
    is_small = PIECE_BYTES < tensor.nbytes <= MOST_BYTES
    if target.type != "cuda" or not is_small or tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor.to(target, non_blocking=True)
    source = tensor.contiguous()
    result = torch.empty(source.shape, dtype=source.dtype, device=target)
    copy_in_pieces(source, result)
    return result


def copy_in_pieces(source: Tensor, target: Tensor) -> None:
    """Copy between contiguous tensors of the same size and type, `PIECE_BYTES` at a time."""
    pieces = (tensor.view(-1).view(torch.uint8).split(PIECE_BYTES) for tensor in (target, source))
    for to, part in zip(*pieces, strict=True):
        to.copy_(part, non_blocking=True)
