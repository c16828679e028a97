"""Every branch of `CudaDevice`, on streams that need no GPU (fake_cuda.py says how)."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import FakeRuntime, make_cuda_device
from toy_parts import NUM_PARTS, PartsTraining, give_room
from toy_training import Training, assert_bitwise_equal

from nemo_offload_rl.residency import DeviceOutOfMemoryError, HostArena, HostBudgetError, Phase, TransitionReport
from nemo_offload_rl.residency.device import cuda, cuda_copies
from nemo_offload_rl.residency.device.cuda import CudaDevice
from nemo_offload_rl.residency.device.device import Copy, Room
from nemo_offload_rl.residency.host import regions as host_regions
from nemo_offload_rl.residency.table import ledger

STEP = (Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE)
VARIANTS = {
    "away": {},
    "parameters stay": {"resident_groups": frozenset({"params"})},
    "layer by layer": {"layered": True},
    "streamed, layer by layer": {"layered": True, "offload_optimizer_states": True},
    "streamed": {"offload_optimizer_states": True},
    "streamed in parts": {"offload_optimizer_states": True, "part_bytes": 200},
    "pageable optimizer": {"use_pinned_optimizer_offload": False},
    "away for logprobs": {"offload_optimizer_states_for_logprob": True},
}


@pytest.mark.parametrize("staged_below", [0, 200, 4 << 20], ids=["alone", "mixed", "staged"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_late_copies_through_streams_staging_and_events_change_no_bit(monkeypatch, variant, staged_below):
    monkeypatch.setattr(cuda_copies, "STAGED_BELOW_BYTES", staged_below)
    monkeypatch.setattr(cuda, "CHUNK_BYTES", 512)
    runtime = FakeRuntime()
    read_dtype = torch.bfloat16 if "layered" in VARIANTS[variant] else torch.float32
    device = make_cuda_device(monkeypatch, runtime)
    moved, plain = Training(device=device, read_dtype=read_dtype, **VARIANTS[variant]), Training()
    moved.manager.enter(Phase.LP_INFERENCE)
    moved.manager.snapshot("params", "reference")
    initial = moved.state_as_read(read_dtype)
    for _ in range(4):
        moved.step()
        plain.step()
        moved.manager.release_finished()
        for phase in STEP:
            moved.manager.enter(phase)
            moved.manager.prefetch(Phase.TRAINING)
        assert torch.equal(moved.outputs(), plain.outputs())
        with moved.manager.swapped_in("reference"):
            assert_bitwise_equal(dict(moved.model.state_dict()), initial)
    with moved.manager.checkpoint_view():
        assert_bitwise_equal(moved.contents(), plain.contents())
    reports = moved.manager.reports.drain()
    assert sum(report.bytes_moved for report in reports) > 0
    assert all(report.transfer_s >= 0 and report.exposed_s >= 0 for report in reports)
    moved.manager.close()
    assert runtime.registered == {}


@pytest.mark.parametrize("room", [0, 3, 20])
def test_parts_that_come_ahead_and_hand_over_their_memory_change_no_bit(monkeypatch, room):
    monkeypatch.setattr(cuda_copies, "STAGED_BELOW_BYTES", 0)
    device = make_cuda_device(monkeypatch, FakeRuntime())
    held = PartsTraining(device)
    give_room(held, monkeypatch, room)
    plain = PartsTraining(streamed=False)
    for _ in range(4):
        held.step()
        plain.step()
    assert held.most_held == max(2, min(room, NUM_PARTS))
    assert_bitwise_equal(held.contents(), plain.contents())
    held.manager.close()


def test_no_stream_of_copies_shares_its_priority_and_so_a_hardware_queue_with_another_or_with_passes(monkeypatch):
    device = make_cuda_device(monkeypatch, FakeRuntime())
    priorities = {stream.priority for stream in (device._out, device._in, torch.cuda.current_stream())}
    assert len(priorities) == 3
    assert max(priorities) == torch.cuda.current_stream().priority


def make_copies(arena, sizes):
    arena.reserve(sum(size + 512 for size in sizes))
    return [
        Copy(torch.full((size,), i, dtype=torch.uint8), arena.alloc(size, "test").buffer)
        for i, size in enumerate(sizes)
    ]


def test_memory_can_be_released_chunk_by_chunk_while_later_copies_wait(monkeypatch):
    monkeypatch.setattr(cuda_copies, "STAGED_BELOW_BYTES", 0)
    monkeypatch.setattr(cuda, "CHUNK_BYTES", 2000)
    device = make_cuda_device(monkeypatch, FakeRuntime())
    arena = HostArena(device.new_region)
    copies = make_copies(arena, [1000, 1000, 3000, 500])
    transfer = device.copy_out(copies)
    assert transfer.num_finished() == 0
    seen = []
    while not transfer.finished:
        transfer.wait_some()
        seen.append(transfer.num_finished())
    assert seen == [2, 3, 4]
    assert transfer.num_bytes == 5500
    transfer.wait_some()
    assert transfer.seconds() == pytest.approx(4e-3)
    for index, copy in enumerate(copies):
        assert torch.equal(copy.host, torch.full_like(copy.host, index))


def test_neighbours_on_both_sides_cross_in_one_copy_and_each_counts_as_one(monkeypatch):
    device = make_cuda_device(monkeypatch, FakeRuntime())
    monkeypatch.setattr(cuda, "end_of_cuda_allocation", lambda address: address + (1 << 30))
    arena = HostArena(device.new_region)
    arena.reserve(8192)
    memory = torch.arange(4096).to(torch.uint8)
    copies = [Copy(memory[i : i + 500], arena.alloc(500, "test").buffer) for i in range(0, 4096, 512)]
    transfer = device.copy_out(copies)
    assert len(device._out.queue) == 1
    transfer.wait_host()
    assert (transfer.num_finished(), transfer.num_bytes) == (8, 4000)
    before = memory.clone()
    memory.zero_()
    device.copy_in(copies).wait_host()
    assert len(device._in.queue) == 1
    for index, copy in enumerate(copies):
        assert torch.equal(copy.device, before[512 * index : 512 * index + 500])


def test_copies_in_follow_copies_out_whose_memory_they_use_again_and_ask_for_no_new_block(monkeypatch):
    device = make_cuda_device(monkeypatch, FakeRuntime())
    arena = HostArena(device.new_region)
    leaving, coming = device.copy_out(make_copies(arena, [100, 100])), torch.empty(0, dtype=torch.uint8)
    blocks = []
    monkeypatch.setattr(device, "_cache_one_block", blocks.append)
    wanted = [Room(coming.untyped_storage(), 4 << 20)]
    device.allocate(wanted)
    assert len(blocks) == 1
    assert not leaving.finished
    device.follow(leaving)
    assert leaving.finished  # the stream of copies in has waited for it; the host did not ask
    device.allocate(wanted)
    assert len(blocks) == 1
    device.observe([])  # at the next transition
    device.allocate(wanted)
    assert len(blocks) == 2


def test_a_copy_from_pageable_memory_follows_copies_out_whose_memory_it_uses_again_too(monkeypatch):
    """As states that are not page-locked do, in the memory of parameters that are."""
    device = make_cuda_device(monkeypatch, FakeRuntime())
    pinned, pageable = HostArena(device.new_region), HostArena()
    (leaving,), (coming,) = make_copies(pinned, [100]), make_copies(pageable, [100])
    leaving.device.fill_(7)
    coming.host.fill_(9)
    transfer = device.copy_out([leaving])
    # On a GPU the stream only waits once it gets there.
    monkeypatch.setattr(device._in, "wait_event", lambda event: device._in.queue.append((event.synchronize, ())))
    device.follow(transfer)
    assert not transfer.finished
    device.copy_in([Copy(leaving.device, coming.host)])
    transfer.wait_host()
    assert leaving.device.eq(9).all()
    assert leaving.host.eq(7).all()


def test_what_was_waited_for_on_the_device_is_exposed_and_what_was_not_is_hidden(monkeypatch):
    device = make_cuda_device(monkeypatch, FakeRuntime())
    arena = HostArena(device.new_region)
    hidden, waited, later = (device.copy_in(make_copies(arena, [100, 100])) for _ in range(3))
    hidden.wait_host()  # two copies: from the host to staging, from there to the tensors
    reports = {transfer: TransitionReport(None, Phase.TRAINING) for transfer in (hidden, waited, later)}
    with device.held_up(reports[waited]):
        waited.wait_device()
    later.wait_host()
    with device.held_up(reports[later]):
        later.wait_device()
    device.account()
    assert [report.exposed_s for report in reports.values()] == [0.0, pytest.approx(2e-3), 0.0]


def test_the_first_copies_can_be_waited_for_while_later_ones_wait_and_what_each_wait_exposes_is_summed(monkeypatch):
    monkeypatch.setattr(cuda_copies, "STAGED_BELOW_BYTES", 0)
    monkeypatch.setattr(cuda, "CHUNK_BYTES", 2000)
    device = make_cuda_device(monkeypatch, FakeRuntime())
    arena = HostArena(device.new_region)
    transfer = device.copy_in(make_copies(arena, [1000, 1000, 3000, 4000, 500]))
    report = TransitionReport(None, Phase.TRAINING)
    seen = []
    for num_copies in (0, 1, 2, 3):
        with device.held_up(report):
            transfer.wait_device(num_copies)
        seen.append(device._in.num_done)
    assert seen == [0, 2, 2, 3]  # as far as the chunk that has the last of them
    device._in.run_to(4)  # behind work
    with device.held_up(report):
        transfer.wait_device()
    device.account()
    assert device._in.num_done == 5
    assert transfer.seconds() == pytest.approx(5e-3)
    assert report.exposed_s == pytest.approx(4e-3)


def test_what_layers_wait_for_is_charged_to_the_phase_that_brought_them_once_the_last_has_run(monkeypatch):
    monkeypatch.setattr(cuda_copies, "STAGED_BELOW_BYTES", 0)
    monkeypatch.setattr(cuda, "CHUNK_BYTES", 1)
    monkeypatch.setattr(ledger, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # what `enter` takes the host
    device = make_cuda_device(monkeypatch, FakeRuntime())
    training = Training(device=device, layered=True)
    training.manager.enter(Phase.GENERATION)
    report = training.manager.enter(Phase.LP_INFERENCE)
    training.manager.reports.drain()
    assert report.transfer_s == 0.0

    def run_link(*_: object) -> None:
        device._in.run_to(device._in.num_done + 1)

    training.model.first.register_forward_hook(run_link)
    training.outputs()
    # A buffer, a tied weight and bias, then of the norm's two one that was not behind work.
    training.manager.reports.drain()
    assert report.transfer_s == pytest.approx(5e-3)
    assert report.exposed_s == pytest.approx(4e-3)


def test_nothing_to_copy_is_a_finished_transfer(monkeypatch):
    device = make_cuda_device(monkeypatch, FakeRuntime())
    transfer = device.copy_out([])
    assert transfer.finished and transfer.num_bytes == 0


def test_a_failure_while_copies_are_listed_waits_for_those_under_way(monkeypatch):
    device = make_cuda_device(monkeypatch, FakeRuntime())
    arena = HostArena(device.new_region)
    first, second = make_copies(arena, [8 << 20, 8 << 20])

    def listing():
        yield first
        yield second
        raise DeviceOutOfMemoryError("no room for the third")

    with pytest.raises(DeviceOutOfMemoryError, match="the third"):
        device.copy_in(listing())
    assert torch.equal(first.device, first.host)
    assert device._in.num_done == len(device._in.queue) > 0


def test_refused_page_locking_falls_back_to_pageable_copies_with_a_warning(monkeypatch, caplog):
    moved, plain = Training(device=make_cuda_device(monkeypatch, FakeRuntime(error=2))), Training()
    for _ in range(2):
        moved.step()
        plain.step()
        for phase in STEP:
            moved.manager.enter(phase)
    assert "several times slower" in caplog.text
    assert "RLIMIT_MEMLOCK" in caplog.text
    with moved.manager.checkpoint_view():
        assert_bitwise_equal(moved.contents(), plain.contents())


def test_a_region_that_is_dropped_without_being_closed_does_not_stay_registered(monkeypatch):
    runtime = FakeRuntime()
    arena = HostArena(make_cuda_device(monkeypatch, runtime).new_region)
    arena.reserve(1 << 20)
    assert len(runtime.registered) == 1
    del arena
    gc.collect()
    assert runtime.registered == {}


def test_pages_are_asked_for_on_the_gpus_numa_node_or_a_warning_says_why_not(monkeypatch, caplog):
    runtime = FakeRuntime()
    make_cuda_device(monkeypatch, runtime)
    region = host_regions.PinnedRegion(4 << 20, numa_node=0)
    (address,) = runtime.registered
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    policies = [line.split()[1] for line in lines if line.startswith(f"{address:x} ")]
    assert policies == ["prefer:0"] or "NUMA node 0 failed" in caplog.text
    region.close()


def test_the_memory_of_copies_that_have_finished_is_released_in_between_without_waiting(monkeypatch):
    training = Training(device=(device := make_cuda_device(monkeypatch, FakeRuntime())))
    training.step()
    training.manager.enter(Phase.REFIT)
    training.manager.release_finished()
    assert training.manager.device_bytes()["optimizer"] > 0
    device._out.synchronize()  # the link is through, though nobody has waited for it
    training.manager.release_finished()
    assert training.manager.device_bytes()["optimizer"] == 0
    assert training.manager.device_bytes()["params"] > 0


def test_running_out_of_device_memory_says_how_much_is_there_and_what_to_lower(monkeypatch):
    device = make_cuda_device(monkeypatch, FakeRuntime())

    class Full:
        def resize_(self, num_bytes: int) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(DeviceOutOfMemoryError, match=r"no room for 2\.000 GiB .* 6\.00 of 8\.00 GiB free.*gpu_memory"):
        device.allocate([Room(Full(), 2 << 30)])


@pytest.mark.parametrize(
    ("cached_gib", "free_gib", "allocator", "at_once"),
    [(0, 6, "", True), (4, 6, "", True), (0, 1, "", False), (0, 6, "max_split_size_mb:512", False)],
    ids=["room", "room beside what passes have cached", "room in pieces only", "blocks that are not divided"],
)
def test_what_arrives_together_is_asked_for_at_once_where_that_is_possible(
    monkeypatch, cached_gib, free_gib, allocator, at_once
):
    device = make_cuda_device(monkeypatch, FakeRuntime())
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: (1 + cached_gib) << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free_gib << 30, 8 << 30))
    asked, streams = [], []

    @contextmanager
    def on_stream(stream):
        streams.append(stream)
        yield
        streams.append(None)

    def ask(what: str, num_bytes: int) -> None:
        assert streams == [device._in], "the block would come from the cache of the passes"
        asked.append((what, num_bytes))

    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(device, "_allocate", lambda room: ask("part", room.num_bytes))
    monkeypatch.setattr(torch, "empty", lambda num_bytes, **kwargs: ask("block", num_bytes))
    sizes = [1 << 30, (1 << 30) + 1, 1 << 10]
    CudaDevice.allocate(device, [Room(torch.UntypedStorage(0), size) for size in sizes])
    # A size is rounded up to whole blocks of 512 bytes; what is small comes from pages of its own.
    assert asked == [("block", (2 << 30) + 512)] * at_once + [("part", size) for size in sizes]


def test_the_host_budget_bounds_what_is_page_locked(monkeypatch):
    device = make_cuda_device(monkeypatch, FakeRuntime())
    with pytest.raises(HostBudgetError, match="over the budget"):
        HostArena(device.new_region, 1 << 20).reserve(2 << 20)


def test_memory_figures_come_from_the_driver_and_count_what_the_allocator_could_release(monkeypatch):
    device = make_cuda_device(monkeypatch, FakeRuntime())
    gib = 1 << 30
    assert device.total_bytes() == 8 * gib
    assert device.free_bytes() == 8 * gib  # six free, two cached by this process
    assert device.drain_peak_bytes() == 2 * gib
    assert (device.drain_cache_flushes(), device.drain_cache_flushes()) == (2, 0)
    assert device.allocated_bytes() == gib
    # Of the two that are cached one and a half are for passes, and of no use for groups.
    assert device.cached_for_work_bytes() == 1.5 * gib
    assert device.room_bytes(0) == device.room_bytes(gib) == 6.5 * gib
    assert device.room_bytes(2 * gib) == 6 * gib
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: 0.5)
    assert device.free_bytes() == 3 * gib  # of four that this process may have, three are reserved, two of them cached
