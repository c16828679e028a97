from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_offload_rl.protocols.backend import WeightSpec
from nemo_offload_rl.protocols.refit import RefitError
from nemo_offload_rl.weight_sync.sender import plan_buckets


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> WeightSpec:
    return WeightSpec(name, shape, dtype)


def test_slices_start_at_multiples_of_512_bytes_and_buckets_close_when_full() -> None:
    plans = plan_buckets([spec("a", 10), spec("b", 200), spec("c", 1)], buffer_bytes=1312)
    assert [[(s.name, s.offset_bytes) for s in plan.slices] for plan in plans] == [[("a", 0), ("b", 512)], [("c", 0)]]
    assert [plan.num_bytes for plan in plans] == [512 + 800, 4]


def test_a_tensor_above_the_limit_travels_alone() -> None:
    plans = plan_buckets([spec("a", 1), spec("big", 1000), spec("b", 1)], buffer_bytes=1024)
    assert [[s.name for s in plan.slices] for plan in plans] == [["a"], ["big"], ["b"]]


@given(st.lists(st.integers(0, 3000)), st.integers(1, 5000))
def test_every_tensor_is_sent_once_in_order_without_overlap(sizes: list[int], buffer_bytes: int) -> None:
    specs = [spec(str(i), size, dtype=torch.bfloat16) for i, size in enumerate(sizes)]
    plans = plan_buckets(specs, buffer_bytes)
    assert [s.name for plan in plans for s in plan.slices] == [s.name for s in specs]
    for plan in plans:
        end_bytes = 0
        for piece in plan.slices:
            assert piece.offset_bytes % 512 == 0
            assert piece.offset_bytes >= end_bytes
            end_bytes = piece.offset_bytes + 2 * piece.shape[0]
        assert plan.num_bytes == end_bytes
        assert end_bytes <= buffer_bytes or len(plan.slices) == 1


def test_a_name_that_appears_twice_is_refused() -> None:
    with pytest.raises(RefitError, match=r"sent twice: b$"):
        plan_buckets([spec("a", 1), spec("b", 1), spec("b", 2)], 1024)


def test_a_buffer_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        plan_buckets([spec("a", 1)], 0)
