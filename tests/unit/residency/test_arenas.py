from __future__ import annotations

import threading

import pytest

from nemo_offload_rl.residency import CpuDevice, HostAllowance, HostArena, HostArenas, HostBudgetError
from nemo_offload_rl.residency.host_memory import PageableRegion


class TightDevice(CpuDevice):
    """Gives memory only when the test says so."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def new_arena(self, pinned: bool, allowance: HostAllowance) -> HostArena:
        def region(num_bytes: int) -> PageableRegion:
            assert self.may_go_on.wait(30)
            return PageableRegion(num_bytes)

        return HostArena(allowance, region)


def test_memory_that_was_begun_beside_other_work_is_there_when_it_is_asked_for():
    device = TightDevice()
    arenas = HostArenas(device)
    arenas.begin_reserve({True: 4096, False: 512})
    device.may_go_on.set()
    assert arenas.arena(True).reserved_bytes == 4096
    assert arenas.reserved_bytes == 4096 + 512
    arenas.reserve({True: 2048})
    assert arenas.reserved_bytes == 4096 + 512
    arenas.close()
    assert arenas.reserved_bytes == 0


def test_a_budget_that_was_exceeded_beside_other_work_is_raised_where_it_is_waited_for():
    device = TightDevice()
    device.may_go_on.set()
    arenas = HostArenas(device)
    arenas.limit(1 << 20)
    arenas.begin_reserve({True: 2 << 20})
    with pytest.raises(HostBudgetError, match="over the budget"):
        arenas.arena(True)
    arenas.close()


def test_both_kinds_of_memory_have_one_bound_and_what_is_given_back_can_be_had_again():
    arenas = HostArenas(CpuDevice())
    arenas.limit(8192)
    arenas.reserve({True: 4096, False: 3584})
    with pytest.raises(HostBudgetError, match="over the budget"):
        arenas.arena(True).alloc(4097, "more")
    arenas.close()
    arenas.reserve({False: 8192})
    arenas.close()
