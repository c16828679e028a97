from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_offload_rl.residency import CpuDevice, HostArena, HostBudgetError, ResidencyError
from nemo_offload_rl.residency.host.arena import ALIGNMENT_BYTES
from nemo_offload_rl.residency.host.regions import HostRegion


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=20), order=st.randoms())
def test_blocks_never_overlap_and_freeing_them_in_any_order_leaves_one_gap(sizes, order):
    arena = HostArena()
    arena.reserve(sum(size + ALIGNMENT_BYTES for size in sizes))
    reserved = arena.reserved_bytes
    blocks = [arena.alloc(size, f"block {i}") for i, size in enumerate(sizes)]
    assert arena.reserved_bytes == reserved
    for i, block in enumerate(blocks):
        assert block.offset_bytes % ALIGNMENT_BYTES == 0
        block.buffer.fill_(i % 251)
    for i, block in enumerate(blocks):
        assert block.buffer.numel() == sizes[i]
        assert bool((block.buffer == i % 251).all())
    order.shuffle(blocks)
    for block in blocks:
        arena.free(block)
    assert arena.used_bytes == 0
    whole = arena.alloc(reserved, "whole")
    assert arena.reserved_bytes == reserved
    arena.free(whole)
    arena.close()


def test_freeing_twice_or_closing_with_blocks_in_use_names_the_owner():
    arena = HostArena()
    block = arena.alloc(10, "optimizer")
    arena.free(block)
    with pytest.raises(ResidencyError, match="'optimizer' was freed twice"):
        arena.free(block)
    arena.alloc(10, "params")
    with pytest.raises(ResidencyError, match="still in use at close: params"):
        arena.close()
    assert arena.reserved_bytes == 0


def test_growing_over_the_budget_is_refused_and_leaves_the_arena_usable():
    arena = HostArena(limit_bytes=2 * ALIGNMENT_BYTES)
    first = arena.alloc(ALIGNMENT_BYTES, "a")
    with pytest.raises(HostBudgetError, match="over the budget"):
        arena.alloc(2 * ALIGNMENT_BYTES, "b")
    arena.alloc(ALIGNMENT_BYTES, "b")
    assert arena.try_alloc(1, "activations") is None
    arena.free(first)
    assert arena.used_bytes == ALIGNMENT_BYTES
    assert arena.try_alloc(1, "activations") is not None


class TightDevice(CpuDevice):
    """Gives memory only when the test says so."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def new_region(self, num_bytes: int) -> HostRegion:
        assert self.may_go_on.wait(1500)
        return super().new_region(num_bytes)


def test_memory_that_was_begun_beside_other_work_is_there_when_it_is_asked_for():
    device = TightDevice()
    arena = HostArena(device.new_region)
    arena.begin_reserve({True: 4096, False: 512})
    device.may_go_on.set()
    assert arena.reserved_bytes == 4096 + 512
    arena.reserve(2048)
    arena.free(arena.alloc(4096, "page-locked"))
    arena.free(arena.alloc(512, "pageable", pinned=False))
    assert arena.reserved_bytes == 4096 + 512
    arena.close()
    assert arena.reserved_bytes == 0


def test_a_budget_that_was_exceeded_beside_other_work_is_raised_where_it_is_waited_for():
    device = TightDevice()
    device.may_go_on.set()
    arena = HostArena(device.new_region, 1 << 20)
    arena.begin_reserve({True: 2 << 20})
    with pytest.raises(HostBudgetError, match="over the budget"):
        arena.alloc(1, "state")
    arena.close()


def test_both_kinds_of_memory_have_one_bound_and_what_is_given_back_can_be_had_again():
    arena = HostArena(limit_bytes=8192)
    arena.reserve(4096)
    arena.reserve(3584, pinned=False)
    with pytest.raises(HostBudgetError, match="over the budget"):
        arena.alloc(4097, "more")
    arena.close()
    arena.reserve(8192, pinned=False)
    arena.close()
