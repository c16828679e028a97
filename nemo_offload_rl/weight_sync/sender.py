"""Fills buckets with the weights of a refit: the base class of each transport's sender.

With buffers in GPU memory every rank of the policy sends to the engine on its own GPU. Otherwise rank 0 sends, and the
other ranks use `DiscardingSender`, because all ranks take part in gathering each tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_offload_rl.protocols.refit import RefitError, TensorSlice, WeightBucket, listed

if TYPE_CHECKING:
    from nemo_offload_rl.protocols.backend import WeightSpec

NUM_BUFFERS = 2  # of every sender: one is filled while the engine reads the other
ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class BucketPlan:
    """The slices of one bucket in sending order, and the bytes up to the end of the last."""

    slices: tuple[TensorSlice, ...]
    num_bytes: int


def plan_buckets(specs: Sequence[WeightSpec], buffer_bytes: int) -> list[BucketPlan]:
    """Pack tensors in their order, each slice aligned to 512 bytes.

    Args:
        specs: The tensors that will be sent, in order.
        buffer_bytes: Limit of a bucket. A larger tensor travels alone, in a bucket of its own size.

    Raises:
        RefitError: A name appears twice.
        ValueError: `buffer_bytes` is not positive.
    """
    if buffer_bytes < 1:
        raise ValueError(f"A refit buffer needs at least one byte, not {buffer_bytes}")
    twice = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if twice:
        raise RefitError(f"These tensors would be sent twice: {listed(twice)}")

    buckets: list[BucketPlan] = []
    slices: list[TensorSlice] = []
    end_bytes = 0
    for spec in specs:
        offset_bytes = -(-end_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if slices and offset_bytes + spec.num_bytes > buffer_bytes:
            buckets.append(BucketPlan(tuple(slices), end_bytes))
            slices, offset_bytes = [], 0
        slices.append(TensorSlice(spec.name, tuple(spec.shape), spec.dtype, offset_bytes))
        end_bytes = offset_bytes + spec.num_bytes
    if slices:
        buckets.append(BucketPlan(tuple(slices), end_bytes))
    return buckets


class BucketSender(ABC):
    """Sends the announced tensors bucket by bucket, and refuses any other.

    Args:
        specs: The tensors that every refit sends, in order.
        buffer_bytes: Limit of a bucket; a sender's two buffers have at most twice this, unless one tensor is larger.
    """

    transport: str

    def __init__(self, specs: Sequence[WeightSpec], buffer_bytes: int) -> None:
        self.plan = plan_buckets(specs, buffer_bytes)  # the buckets that every refit sends
        self._weights: Iterator[tuple[str, Tensor]] | None = None
        self._next_index = 0

    def buffer_sizes_bytes(self) -> list[int]:
        """Return the size of each buffer in use, which is the size of its largest bucket."""
        per_buffer = (self.plan[slot::NUM_BUFFERS] for slot in range(NUM_BUFFERS))
        return [max(1, *(plan.num_bytes for plan in plans)) for plans in per_buffer if plans]

    def start(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Begin a refit; an unfinished one is dropped.

        Args:
            weights: (name, full tensor) in the order of the specs; advanced by `next_bucket` only. A tensor announced
                in 16 bits may be float32 and is rounded.
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
        if index == len(self.plan):
            return None
        plan = self.plan[index]
        for position, piece in enumerate(plan.slices):
            self._store(index, piece, self._take(self._weights, index, position, piece))
        is_last = index == len(self.plan) - 1
        if is_last and (surplus := next(self._weights, None)) is not None:
            raise RefitError(f"The policy sent the unexpected tensor {surplus[0]} after the last announced one")
        self._next_index = index + 1
        return WeightBucket(index, self.transport, self._handle(index), plan.num_bytes, plan.slices, is_last)

    def release(self) -> None:  # noqa: B027
        """Free the device memory of the buffers until the next `start`; does nothing by default."""

    def close(self) -> None:
        """Free the buffers; safe to call twice."""
        self._weights = None

    @abstractmethod
    def _store(self, index: int, piece: TensorSlice, tensor: Tensor) -> None: ...

    @abstractmethod
    def _handle(self, index: int) -> object: ...

    def _take(self, weights: Iterator[tuple[str, Tensor]], index: int, position: int, piece: TensorSlice) -> Tensor:
        """Return the next tensor, which must match `piece`, the slice at `position` of bucket `index`."""
        found = next(weights, None)
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
        names = {piece.name for piece in self.plan[index].slices[position:]}
        return names.union(*({piece.name for piece in plan.slices} for plan in self.plan[index + 1 :]))


class DiscardingSender(BucketSender):
    """Takes every tensor and keeps none."""

    transport = "none"

    def _store(self, index: int, piece: TensorSlice, tensor: Tensor) -> None:
        pass

    def _handle(self, index: int) -> object:
        return None
