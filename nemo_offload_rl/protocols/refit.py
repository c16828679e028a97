"""Refit: how weights get from the trainer into the engine.

1. The driver requests two buckets of the policy workers (`next_bucket`); rank 0 fills one of two buffers after the
   other, or every rank those on its own GPU.
2. The driver hands the first bucket's description to the engine (`load_bucket`), which copies out of the buffer.
3. While the engine copies, the worker fills the other buffer. A bucket for the first is requested once its load has
   returned.
4. After the last bucket the engine checks the manifest and resets its prefix cache (`finish_refit`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSlice:
    """One tensor inside a bucket's buffer; `offset_bytes` is a multiple of 512."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int


@dataclass(frozen=True)
class RefitGroupAddress:
    """Where the senders and receivers of a refit between different devices meet."""

    host: str
    port: int
    world_size: int


@dataclass(frozen=True)
class WeightBucket:
    """A filled buffer. `handle` is what the transport needs to map it in another process."""

    index: int
    transport: str  # "shared_memory", "cuda_ipc" or "nccl"
    handle: object
    num_bytes: int
    slices: tuple[TensorSlice, ...]
    is_last: bool
