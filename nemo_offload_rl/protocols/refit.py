"""Messages between policy and engine in a refit; `weight_sync.refit` has the order.

The policy fills a buffer with tensors and describes it by a `WeightBucket`. The driver hands the bucket to the engine,
which copies the tensors out of the buffer.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_offload_rl.errors import UserError

_NAMES_SHOWN = 8


class RefitError(UserError):
    """Error for wrong weights in the engine: tensors are missing, unexpected or of another shape.

    It is a bug if policy and engine have the same model; settings of the engine can make the models differ.
    """


def listed(names: Iterable[str]) -> str:
    """Return the first few names in a stable order, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NAMES_SHOWN])
    num_hidden = len(ordered) - _NAMES_SHOWN
    return f"{shown} and {num_hidden} more" if num_hidden > 0 else shown


@dataclass(frozen=True)
class TensorSlice:
    """Place of one tensor in a bucket's buffer; `offset_bytes` is a multiple of 512."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    def of(self, buffer: Tensor) -> Tensor:
        """Return the tensor as a view of the bucket's buffer, [N] uint8."""
        end_bytes = self.offset_bytes + math.prod(self.shape) * self.dtype.itemsize
        return buffer[self.offset_bytes : end_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class RefitGroupAddress:
    """Address at which senders and receivers meet for a refit between different devices."""

    host: str
    port: int
    world_size: int


@dataclass(frozen=True)
class WeightBucket:
    """A filled buffer. `handle` lets the transport map it in another process."""

    index: int
    transport: str  # "shared_memory", "cuda_ipc" or "nccl"
    handle: object
    num_bytes: int
    slices: tuple[TensorSlice, ...]
    is_last: bool
