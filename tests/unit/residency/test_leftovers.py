from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from toy_training import Training

from nemo_offload_rl.residency import CpuDevice, Phase, ResidencyError, ResidencyManager, StateGroup
from nemo_offload_rl.residency.table.groups import unique_storages
from nemo_offload_rl.residency.table.ledger import find_kept_blocks, find_leftovers


def test_a_tensor_that_no_group_lists_and_a_group_that_should_be_away_are_named_with_their_sizes():
    training = Training()
    training.step()
    records = {name: unique_storages(s.group.tensors()) for name, s in training.manager._states.items()}
    forgotten = torch.zeros(3, 1 << 20, dtype=torch.float64)
    found = find_leftovers(records, {"params", "grads"}, torch.device("cpu"), from_bytes=1000)
    sizes = {leftover.owner: leftover.num_bytes for leftover in found}
    assert sizes["tensor [3, 1048576] float64"] == forgotten.nbytes
    assert sizes["group optimizer"] == training.manager.device_bytes()["optimizer"]
    assert not any("params" in owner for owner in sizes)
    assert [leftover.num_bytes for leftover in found] == sorted(sizes.values(), reverse=True)


def test_tensors_that_a_compiler_only_pretends_to_have_are_no_leftovers():
    with FakeTensorMode():
        pretended = torch.zeros(3, 1 << 20)
    assert pretended.device.type == "cpu"
    found = find_leftovers({}, set(), torch.device("cpu"), from_bytes=1000)
    assert not any("faketensor" in leftover.owner for leftover in found)


class CountingDevice(CpuDevice):
    """Says how much is allocated, as the test sets it."""

    bytes_by_others = 0
    bytes_cached = 0
    bytes_kept = 0  # of what is cached: cannot go back

    def allocated_bytes(self) -> int:
        return self.bytes_by_others

    def cached_bytes(self) -> int:
        return self.bytes_cached

    def release_cache(self) -> None:
        self.bytes_cached = min(self.bytes_cached, self.bytes_kept)


def test_leftovers_are_reported_once_when_the_unexplained_memory_grows():
    device = CountingDevice()
    training = Training(device=device)
    training.step()
    assert training.manager.enter(Phase.GENERATION).leftovers == []
    big = torch.zeros(40 << 20, dtype=torch.uint8)
    device.bytes_by_others = big.nbytes
    report = training.manager.enter(Phase.LP_INFERENCE)
    # Not the only one where other tests of this process have left tensors behind.
    assert "tensor [41943040] uint8: 40 MiB" in [str(leftover) for leftover in report.leftovers]
    assert "still on the device: tensor [41943040] uint8: 40 MiB" in report.line()
    assert training.manager.enter(Phase.GENERATION).leftovers == []


def test_cached_memory_counts_where_it_should_have_gone_back_and_nowhere_else():
    device = CountingDevice()
    training = Training(device=device)
    training.step()
    known = torch.zeros(40 << 20, dtype=torch.uint8)  # so that there is something to name
    device.bytes_cached = device.bytes_kept = 10 << 30
    assert training.manager.enter(Phase.LP_INFERENCE).leftovers == []
    report = training.manager.enter(Phase.GENERATION)
    assert f"tensor [{known.numel()}] uint8: 40 MiB" in [str(leftover) for leftover in report.leftovers]
    alone = Training(device=device, colocated=False)
    alone.step()
    assert alone.manager.enter(Phase.GENERATION).leftovers == []


@pytest.mark.parametrize("resident", [frozenset(), frozenset({"params", "optimizer"})])
def test_cached_memory_goes_back_before_a_generation_also_when_nothing_leaves_for_it(resident):
    device = CountingDevice()
    training = Training(device=device, resident_groups=resident)
    training.step()
    training.manager.enter(Phase.REFIT)
    training.manager.settle()
    device.bytes_cached = 2 << 30  # the refit's buffers
    training.manager.enter(Phase.GENERATION)
    assert device.bytes_cached == 0
    alone = Training(device=device, colocated=False)
    alone.step()
    alone.manager.enter(Phase.REFIT)
    device.bytes_cached = 2 << 30
    alone.manager.enter(Phase.GENERATION)
    assert device.bytes_cached == 2 << 30


def segment(*blocks: tuple[int, str]) -> dict[str, object]:
    """As `torch.cuda.memory_snapshot` lists a block of the driver's, sizes in MiB."""
    parts = [{"size": size << 20, "state": state} for size, state in blocks]
    return {"device": 0, "total_size": sum(size << 20 for size, _ in blocks), "blocks": parts}


def test_small_allocations_that_keep_large_cached_blocks_are_told_with_what_they_keep():
    segments = [
        segment((32, "active_allocated"), (968, "inactive")),
        segment((8, "inactive"), (1, "active_allocated"), (4000, "inactive"), (2, "active_pending_free")),
        segment((500, "active_allocated")),
        segment((700, "inactive")),  # goes back
        segment((2, "active_allocated"), (18, "inactive")),  # what torch takes for small tensors
    ]
    assert [str(kept) for kept in find_kept_blocks(segments)] == [
        "cached block that 2 allocations of 3.0 MiB keep: 4008 MiB",
        "cached block that 1 allocation of 32.0 MiB keeps: 968 MiB",
    ]


def test_verifying_finds_a_write_that_nobody_told_of():
    training = Training()
    manager = ResidencyManager(
        plan=training.manager.plan,
        groups=[StateGroup("params", training.model.named_parameters)],
        device=CpuDevice(),
        verify=True,
    )
    for phase in (Phase.GENERATION, Phase.LP_INFERENCE, Phase.GENERATION, Phase.LP_INFERENCE):
        manager.enter(phase)
    with torch.no_grad():
        training.model.norm.bias[3] += 1
    with pytest.raises(ResidencyError, match=r"'params': norm\.bias was written .* without mark_written"):
        manager.enter(Phase.GENERATION)
    manager.mark_written("params")
    manager.enter(Phase.GENERATION)
