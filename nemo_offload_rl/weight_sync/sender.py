"""The sending side, without a transport: which tensor goes where, and is it the one that was announced.

Over shared memory rank 0 of the policy sends; the other ranks, which take part in gathering each tensor, use
`DiscardingSender` with the same arguments, so that all ranks gather in step. Over CUDA IPC every rank sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_offload_rl.protocols.refit import TensorSlice, WeightBucket
from nemo_offload_rl.weight_sync.errors import RefitError, listed
from nemo_offload_rl.weight_sync.packing import BucketPlan, plan_buckets

if TYPE_CHECKING:
    from nemo_offload_rl.protocols.backend import WeightSpec

NUM_BUFFERS = 2  # of every sender: one is filled while the engine reads the other


class BucketSender(ABC):
    """Walks through the announced tensors, bucket by bucket, and refuses anything that was not announced."""

    transport: str

    def __init__(self, specs: Sequence[WeightSpec], buffer_bytes: int) -> None:
        self._plan = plan_buckets(specs, buffer_bytes)
        self._weights: Iterator[tuple[str, Tensor]] | None = None
        self._next_index = 0

    @property
    def plan(self) -> Sequence[BucketPlan]:
        """The buckets of every refit of this sender."""
        return self._plan

    def start(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Begin a refit; an unfinished one is dropped.

        Args:
            weights: (name, full tensor) in the order of the specs; advanced by `next_bucket` only. Of what is announced
                in 16 bits, float32 tensors are taken too and rounded.
        """
        self._weights = iter(weights)
        self._next_index = 0

    def next_bucket(self) -> WeightBucket | None:
        """Fill the next bucket; None after the last one.

        Buffers are used in turn: a bucket's bytes stay valid until the call after the next.

        Raises:
            RefitError: A tensor is missing, unexpected, out of order, or of another shape or type than announced.
            RuntimeError: No refit was started.
        """
        if self._weights is None:
            raise RuntimeError("next_bucket was called before start")
        index = self._next_index
        if index == len(self._plan):
            return None
        plan = self._plan[index]
        for position, piece in enumerate(plan.slices):
            self._store(index, piece, self._take(index, position, piece))
        is_last = index == len(self._plan) - 1
        if is_last:
            self._check_exhausted()
        self._next_index = index + 1
        return WeightBucket(index, self.transport, self._handle(index), plan.num_bytes, plan.slices, is_last)

    def release(self) -> None:  # noqa: B027
        """Give up what the buffers hold of the device's memory, until the next `start`; nothing by default."""

    def close(self) -> None:
        """Free the buffers; safe to call twice."""
        self._weights = None

    @abstractmethod
    def _store(self, index: int, piece: TensorSlice, tensor: Tensor) -> None: ...

    @abstractmethod
    def _handle(self, index: int) -> object: ...

    def _take(self, index: int, position: int, piece: TensorSlice) -> Tensor:
        assert self._weights is not None
        found = next(self._weights, None)
        if found is None:
            raise RefitError(f"The policy sent no {listed(self._names_from(index, position))}")
        name, tensor = found
        if name != piece.name:
            if name in self._names_from(index, position):
                raise RefitError(f"{piece.name} is missing or out of order: the policy sent {name} in its place")
            raise RefitError(f"The policy sent the unexpected tensor {name} where {piece.name} was announced")
        is_rounded = piece.dtype in (torch.bfloat16, torch.float16) and tensor.dtype == torch.float32  # by `_store`
        if tuple(tensor.shape) != piece.shape or not (is_rounded or tensor.dtype == piece.dtype):
            raise RefitError(
                f"{name} was announced as {list(piece.shape)} {piece.dtype}, "
                f"but the policy sent {list(tensor.shape)} {tensor.dtype}"
            )
        return tensor

    def _names_from(self, index: int, position: int) -> set[str]:
        names = {piece.name for piece in self._plan[index].slices[position:]}
        return names.union(*({piece.name for piece in plan.slices} for plan in self._plan[index + 1 :]))

    def _check_exhausted(self) -> None:
        assert self._weights is not None
        surplus = next(self._weights, None)
        if surplus is not None:
            raise RefitError(f"The policy sent the unexpected tensor {surplus[0]} after the last announced one")


class DiscardingSender(BucketSender):
    """Takes every tensor and keeps none."""

    transport = "none"

    def _store(self, index: int, piece: TensorSlice, tensor: Tensor) -> None:
        pass

    def _handle(self, index: int) -> object:
        return None
