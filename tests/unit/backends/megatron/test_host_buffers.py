from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_offload_rl.backends.megatron.activation_offload import ROUND_BYTES, HostBufferPool
from nemo_offload_rl.residency.host.regions import PageableRegion
from nemo_offload_rl.residency.table.errors import ResidencyError

MIB = 1 << 20


class Waits:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def make_pool(limit_mib: int) -> tuple[HostBufferPool, Waits]:
    waits = Waits()
    return HostBufferPool(limit_mib * MIB, PageableRegion, waits), waits


def take(pool: HostBufferPool, mib: int) -> torch.Tensor:
    return pool.allocate((mib, MIB // 4), torch.float32)


def test_a_buffer_serves_another_shape_and_type_that_it_holds() -> None:
    pool, _ = make_pool(64)
    first = take(pool, 8)
    address = first.data_ptr()
    pool.free(first)
    second = pool.allocate((6, MIB // 2), torch.bfloat16)
    assert second.data_ptr() == address
    assert second.shape == (6, MIB // 2)
    assert second.dtype == torch.bfloat16
    assert pool.num_regions_made == 1


def test_a_buffer_is_not_spent_on_something_much_smaller() -> None:
    pool, _ = make_pool(64)
    pool.free(take(pool, 16))
    small = take(pool, 4)
    assert pool.num_regions_made == 2
    pool.free(small)
    assert take(pool, 4).data_ptr() == small.data_ptr()


def test_buffers_in_use_never_overlap() -> None:
    pool, _ = make_pool(64)
    tensors = [take(pool, 2).fill_(i) for i in range(8)]
    assert [float(tensor.min()) for tensor in tensors] == [float(tensor.max()) for tensor in tensors]


def test_above_the_limit_the_longest_unused_buffers_go_first_and_only_after_copies_have_ended() -> None:
    pool, waits = make_pool(24)
    pool.free(take(pool, 8))
    pool.reset()
    pool.free(take(pool, 12))
    pool.reset()
    assert (pool.total_bytes, waits.count) == (20 * MIB, 0)
    take(pool, 16)
    assert waits.count == 1
    assert pool.total_bytes == 16 * MIB, "8 and 12 MiB had to go for 16"
    pool.reset()
    take(pool, 8)
    assert pool.total_bytes == 24 * MIB


def test_at_the_limit_a_far_larger_buffer_serves_instead_of_a_new_one() -> None:
    pool, _ = make_pool(16)
    for num_mib in (16, 4, 8, 16):
        pool.free(take(pool, num_mib))
        pool.reset()
    assert pool.num_regions_made == 1


def test_a_pass_that_needs_more_than_the_limit_gets_it_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    pool, _ = make_pool(8)
    with caplog.at_level(logging.WARNING):
        held = [take(pool, 4) for _ in range(4)]
    assert pool.total_bytes == 16 * MIB
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "activation_offload_host_limit_gib" in caplog.text
    del held
    pool.reset()
    assert pool.total_bytes == 8 * MIB


def test_reset_takes_back_what_was_not_freed() -> None:
    pool, _ = make_pool(64)
    addresses = {take(pool, 4).data_ptr() for _ in range(3)}
    pool.reset()
    assert {take(pool, 4).data_ptr() for _ in range(3)} == addresses


def test_freeing_twice_is_an_error() -> None:
    pool, _ = make_pool(64)
    tensor = take(pool, 4)
    pool.free(tensor)
    with pytest.raises(ResidencyError, match="freed twice"):
        pool.free(tensor)


def test_clear_gives_everything_back() -> None:
    pool, _ = make_pool(64)
    take(pool, 4)
    pool.clear()
    assert pool.total_bytes == 0


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=20))
def test_what_is_kept_between_passes_is_within_the_limit_whatever_comes(passes: list[list[int]]) -> None:
    pool, _ = make_pool(32)
    for sizes in passes:
        held = [take(pool, size) for size in sizes]
        assert len({tensor.data_ptr() for tensor in held}) == len(held)
        assert pool.total_bytes >= sum(tensor.nbytes for tensor in held)
        for tensor in held:
            pool.free(tensor)
        pool.reset()
        assert pool.total_bytes <= 32 * MIB
        assert pool.total_bytes % ROUND_BYTES == 0
