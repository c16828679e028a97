"""How the tensors of a refit are cut into buckets; decided before the first byte moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_offload_rl.protocols.refit import TensorSlice
from nemo_offload_rl.weight_sync.errors import RefitError, listed

if TYPE_CHECKING:
    from nemo_offload_rl.protocols.backend import WeightSpec

ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class BucketPlan:
    """The slices of one bucket, in sending order, and the bytes from the first to the end of the last."""

    slices: tuple[TensorSlice, ...]
    num_bytes: int


def plan_buckets(specs: Sequence[WeightSpec], buffer_bytes: int) -> list[BucketPlan]:
    """Pack tensors in their order, each slice aligned to 512 bytes.

    Args:
        specs: What will be sent, in order.
        buffer_bytes: A bucket's limit. A tensor above it travels alone, in a bucket of its own size.

    Raises:
        RefitError: A name appears twice.
        ValueError: `buffer_bytes` is not positive.
    """
    if buffer_bytes < 1:
        raise ValueError(f"A refit buffer needs at least one byte, not {buffer_bytes}")
    counts = Counter(spec.name for spec in specs)
    twice = [name for name, count in counts.items() if count > 1]
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
