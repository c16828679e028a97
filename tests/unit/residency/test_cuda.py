"""The residency manager on a real GPU."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn
from toy_parts import PartsTraining

from nemo_offload_rl.residency import (
    Device,
    DeviceOutOfMemoryError,
    GradsGroup,
    HostArena,
    Phase,
    ResidencyManager,
    ResidencyPlan,
    ResidencySettings,
    StateGroup,
    TransitionReport,
    make_device,
    optimizer_tensors,
    resolve_plan,
)
from nemo_offload_rl.residency.device import cuda_copies
from nemo_offload_rl.residency.device.device import Copy, Room
from nemo_offload_rl.residency.host import regions as host_regions
from nemo_offload_rl.residency.needs import RESERVE_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SIZES = [(4096, 4096), (4096,), (128, 7), (4096, 2048), (33,), (1024, 1024), (64 << 20,)]


@pytest.fixture(autouse=True)
def _without_what_earlier_tests_have_cached() -> None:
    # Groups that come into a block which other tests' tensors have divided leave less of it to the driver.
    gc.collect()
    torch.cuda.empty_cache()


def make_plan(**changes: bool | frozenset[str]) -> ResidencyPlan:
    values = {
        "colocated": True,
        "use_pinned_optimizer_offload": True,
        "offload_optimizer_states_for_logprob": False,
    }
    return resolve_plan(ResidencySettings(**{**values, **changes}))


class Training:
    """Parameters of many sizes and a fused Adam on the GPU."""

    def __init__(self, read_dtype: torch.dtype | None = None, **changes: bool | frozenset[str]) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(size, device="cuda")) for size in SIZES]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, fused=True)
        self.manager = ResidencyManager(
            plan=make_plan(**changes),
            groups=[
                StateGroup("params", self.named, read_dtype=read_dtype),
                GradsGroup(self.named),
                StateGroup("optimizer", lambda: optimizer_tensors(self.optimizer, self.named)),
            ],
            device=make_device(torch.device("cuda")),
        )
        self.step_index = 0

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(str(i), p) for i, p in enumerate(self.parameters)]

    def step(self) -> None:
        self.manager.enter(Phase.TRAINING)
        generator = torch.Generator(device="cuda").manual_seed(self.step_index)
        for p in self.parameters:
            p.grad = torch.randn(p.shape, device="cuda", generator=generator)
        self.manager.step_opened()
        with self.manager.during(Phase.OPTIM_STEP):
            self.optimizer.step()
            self.manager.mark_written("params", "optimizer")
            self.optimizer.zero_grad()
        self.manager.step_closed()
        self.step_index += 1

    def contents(self) -> list[torch.Tensor]:
        with self.manager.checkpoint_view():
            moments = [self.optimizer.state[p][k] for p in self.parameters for k in ("exp_avg", "exp_avg_sq")]
            return [t.detach().cpu() for t in [*self.parameters, *moments]]


@pytest.mark.parametrize("changes", [{}, {"use_pinned_optimizer_offload": False}, {"offload_optimizer_states": True}])
def test_training_with_full_phase_cycles_is_bitwise_equal_to_training_without(changes):
    moved, plain = Training(**changes), Training(colocated=False)
    for _ in range(4):
        plain.step()
        moved.step()
        moved.manager.enter(Phase.REFIT)
        moved.manager.release_finished()
        moved.manager.enter(Phase.GENERATION)
        moved.manager.enter(Phase.LP_INFERENCE)
    for a, b in zip(moved.contents(), plain.contents(), strict=True):
        assert torch.equal(a, b)
    moved.manager.close()


@pytest.mark.parametrize("room", [0, 3, 20])
@pytest.mark.parametrize("width", [1000, 8 << 20])
def test_parts_that_come_ahead_and_hand_over_their_memory_change_no_bit(monkeypatch, width, room):
    device = make_device(torch.device("cuda"))
    moved = PartsTraining(device, width=width, torch_device="cuda")
    part_bytes = 2 * 4 * width
    monkeypatch.setattr(
        device, "room_bytes", lambda _: RESERVE_BYTES + (room + 1 - moved.held_parts()) * part_bytes + part_bytes // 2
    )
    monkeypatch.setattr(device, "drain_peak_bytes", lambda: 0)
    monkeypatch.setattr(cuda_copies, "PACE_BYTES", 2 * part_bytes)
    plain = PartsTraining(make_device(torch.device("cuda")), streamed=False, width=width, torch_device="cuda")
    for index in range(6):
        for training in (moved, plain):
            training.backward()
            training.optim_step(before_refit=index >= 3)  # after 4 and 5 no refit comes
            if index == 3:
                for phase in (Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE):
                    training.manager.enter(phase)
    for left, right in zip(moved.contents().values(), plain.contents().values(), strict=True):
        assert torch.equal(left, right)
    for training in (moved, plain):
        training.manager.close()


def test_the_driver_gets_the_memory_back():
    training = Training()
    training.step()
    training.manager.enter(Phase.REFIT)
    training.manager.settle()
    before = torch.cuda.mem_get_info()[0]
    params = sum(p.nbytes for p in training.parameters)
    training.manager.enter(Phase.GENERATION)
    freed = torch.cuda.mem_get_info()[0] - before
    assert freed >= params - (16 << 20)  # segments that other small tensors share stay
    training.manager.close()


def test_each_group_that_comes_back_is_one_call_of_the_driver_and_all_of_it_goes_back():
    training = Training()
    torch.cuda.empty_cache()
    for _ in range(3):
        training.step()
        training.manager.enter(Phase.REFIT)
        training.manager.enter(Phase.GENERATION)
        away = torch.cuda.memory_reserved()
        num_calls = torch.cuda.memory_stats()["num_device_alloc"]
        with training.manager.checkpoint_view():
            groups = training.manager.device_bytes()
            # Each of the two, and for what is small in them a page of its own.
            assert torch.cuda.memory_stats()["num_device_alloc"] - num_calls <= 4
            assert torch.cuda.memory_reserved() - away <= sum(groups.values()) + (8 << 20)
        assert sum(groups.values()) > 1 << 30
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= away
    training.manager.close()


def test_cached_memory_and_that_of_the_optimizer_go_back_when_somebody_looks_after_the_copies():
    training = Training()
    training.step()
    training.manager.enter(Phase.TRAINING)
    activations = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    optimizer_bytes = training.manager.device_bytes()["optimizer"]
    del activations
    before = torch.cuda.mem_get_info()[0]
    training.manager.enter(Phase.REFIT)
    torch.cuda.synchronize()
    training.manager.release_finished()
    assert torch.cuda.mem_get_info()[0] - before >= (2 << 30) + optimizer_bytes - (16 << 20)
    training.manager.close()


def test_host_memory_is_page_locked_of_the_right_size_and_given_back():
    training = Training()
    training.manager.reserve({"params": 1 << 30})
    arena = training.manager._arena
    assert arena.pinned
    assert arena.reserved_bytes == 1 << 30
    block = arena.alloc(1 << 29, "test")
    assert block.buffer.is_pinned()
    arena.free(block)
    training.manager.close()
    assert arena.reserved_bytes == 0


@pytest.mark.parametrize("read_dtype", [torch.float32, torch.bfloat16])
def test_a_swapped_in_snapshot_restores_the_policy_bitwise(read_dtype):
    training = Training(read_dtype)
    training.manager.enter(Phase.TRAINING)
    training.manager.snapshot("params", "reference")
    share = read_dtype.itemsize / torch.float32.itemsize
    assert training.manager.host_bytes()["reference"] == share * training.manager.device_bytes()["params"]
    initial = [p.detach().to(read_dtype).float().cpu() for p in training.parameters]
    for is_staged in (False, True):  # what logprobs take besides is known once they have been passed through
        training.step()
        trained = [p.detach().cpu() for p in training.parameters]
        training.manager.enter(Phase.LP_INFERENCE)
        training.manager.reports.drain()
        with training.manager.swapped_in("reference"):
            for p, value in zip(training.parameters, initial, strict=True):
                assert torch.equal(p.detach().cpu(), value)
        for p, value in zip(training.parameters, trained, strict=True):
            assert torch.equal(p.detach().cpu(), value)
        # Where it was staged, seconds of copies that were still under way may come as a report of their own.
        moved_bytes = sum(report.bytes_moved for report in training.manager.reports.drain())
        assert (moved_bytes == 0) == is_staged
    training.manager.close()


def test_parameters_that_stay_change_places_with_the_references_host_memory():
    training = Training(resident_groups=frozenset({"params"}))
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.snapshot("params", "reference")
    initial = [p.detach().cpu() for p in training.parameters]
    for _ in range(3):
        training.step()
        trained = [p.detach().cpu() for p in training.parameters]
        training.manager.reports.drain()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with training.manager.swapped_in("reference"):
            for p, value in zip(training.parameters, initial, strict=True):
                assert torch.equal(p.detach(), value.cuda())
        for p, value in zip(training.parameters, trained, strict=True):
            assert torch.equal(p.detach(), value.cuda())
        assert torch.cuda.memory_allocated() == before
        torch.cuda.synchronize()
        (swap,) = training.manager.reports.drain()
        held = training.manager.device_bytes()["params"]
        assert {move.bytes_in for move in swap.groups.values()} == {held}
        assert swap.transfer_s > 0
    assert training.manager.host_bytes()["params"] == 0
    training.manager.close()


def test_asynchronous_copies_report_link_seconds_and_what_was_hidden():
    training = Training()
    training.step()
    training.manager.enter(Phase.REFIT)
    training.manager.enter(Phase.GENERATION)
    training.manager.enter(Phase.TRAINING)
    training.manager.enter(Phase.OPTIM_STEP)
    torch.cuda.synchronize()
    reports = training.manager.reports.drain()
    moved = [report for report in reports if report.bytes_moved]
    assert len(moved) >= 2
    for report in moved:
        assert report.transfer_s > 0
        assert report.link_gb_per_s < 100
    training.manager.close()


@torch.no_grad()
def test_layers_wait_for_their_own_late_copies_on_the_device_and_the_host_waits_for_none():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)), nn.Linear(4096, 16)).cuda()
    inputs = torch.randn(64, 4096, device="cuda")
    device = make_device(torch.device("cuda"))
    params = StateGroup("params", lambda: model.named_parameters(), layers=model[:-1])
    manager = ResidencyManager(plan=make_plan(), groups=[params], device=device)
    manager.enter(Phase.LP_INFERENCE)
    expected = model(inputs)
    gc.collect()  # page-locked memory of earlier tests, whose release waits for the device
    for _ in range(2):  # the first time some kernels are still to be loaded, for which the host may wait
        manager.enter(Phase.REFIT)
        manager.enter(Phase.GENERATION)
        with torch.cuda.stream(device._in):
            torch.cuda._sleep(2_000_000_000)  # cycles, about a second
            slept = torch.cuda.Event()
            slept.record()
        report = manager.enter(Phase.LP_INFERENCE)
        outputs = model(inputs)
        had_slept = slept.query()
        assert torch.equal(outputs, expected)
    assert not had_slept
    manager.reports.drain()
    assert report.transfer_s > 0
    assert report.exposed_s > 0
    manager.close()


@torch.no_grad()
def test_thousands_of_storages_cross_in_few_copies_for_which_the_host_does_not_wait():
    # A stream takes about a thousand copies; the next one has the host wait for the first.
    generator = torch.Generator(device="cuda").manual_seed(0)
    sizes = [(5 << 20) // 4 + (i % 7 == 0) * 100 for i in range(1500)]
    tensors = [torch.randn(size, device="cuda", generator=generator) for size in sizes]
    sums = [float(tensor.double().sum()) for tensor in tensors]
    device = make_device(torch.device("cuda"))
    group = StateGroup("params", lambda: ((str(i), tensor) for i, tensor in enumerate(tensors)))
    manager = ResidencyManager(plan=make_plan(), groups=[group], device=device)
    manager.enter(Phase.LP_INFERENCE)
    gc.collect()
    for _ in range(2):  # the first time some kernels are still to be loaded, for which the host may wait
        manager.enter(Phase.GENERATION)
        with torch.cuda.stream(device._in):
            torch.cuda._sleep(2_000_000_000)  # cycles, about a second
            slept = torch.cuda.Event()
            slept.record()
        manager.enter(Phase.LP_INFERENCE)
        had_slept = slept.query()
        assert [float(tensor.double().sum()) for tensor in tensors] == sums
    assert not had_slept
    manager.close()


LONG, SHORT_S = 2_000_000_000, 0.2  # cycles, about a second; what the host is held up for


def charged_s(device: Device, *reports: TransitionReport) -> list[float]:
    torch.cuda.synchronize()
    device.account()
    return [report.exposed_s for report in reports]


def test_the_host_held_up_beside_work_of_the_device_costs_nothing_and_beside_none_all_of_its_time():
    device = make_device(torch.device("cuda"))
    beside_work, beside_none, later = (TransitionReport(None, Phase.TRAINING) for _ in range(3))
    for report in (later, beside_work, beside_none):  # the first time kernels may be loaded
        torch.cuda.synchronize()
        if report is not beside_none:
            torch.cuda._sleep(LONG)
        slept = torch.cuda.Event()
        slept.record()
        with device.held_up(report):
            time.sleep(SHORT_S)
        assert slept.query() == (report is beside_none)
    beside_work_s, beside_none_s = charged_s(device, beside_work, beside_none)
    assert beside_work_s < 0.05 * SHORT_S
    assert 0.5 * SHORT_S < beside_none_s < 3 * SHORT_S


def test_what_the_device_waits_for_and_what_the_host_is_held_up_for_are_counted_once_together():
    device = make_device(torch.device("cuda"))
    arena = HostArena(device.new_region)
    copies = [Copy(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"), arena.alloc(1 << 20, "test").buffer)]
    device.copy_in(copies).wait_host()
    torch.cuda.synchronize()
    with torch.cuda.stream(device._in):
        torch.cuda._sleep(LONG)
    transfer = device.copy_in(copies)
    outer, inner = (TransitionReport(None, Phase.TRAINING) for _ in range(2))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    with device.held_up(outer):
        time.sleep(SHORT_S)
        with device.held_up(inner):
            transfer.wait_device()
    end.record()
    outer_s, inner_s = charged_s(device, outer, inner)
    took_s = begin.elapsed_time(end) / 1e3
    assert 0.9 * took_s < outer_s + inner_s < 1.1 * took_s
    assert inner_s > 0 and outer_s > 0.5 * SHORT_S


def test_hooks_of_a_backward_pass_count_idle_time_of_the_stream_that_it_runs_on():
    device = make_device(torch.device("cuda"))
    report, side, streams = TransitionReport(None, Phase.TRAINING), torch.cuda.Stream(), []

    def hook(grad: torch.Tensor) -> None:
        streams.append(torch.cuda.current_stream())
        torch.cuda._sleep(LONG)
        with device.held_up(report):
            time.sleep(SHORT_S)

    with torch.cuda.stream(side):
        outputs = torch.ones(8, device="cuda", requires_grad=True) * 2
        outputs.register_hook(hook)
        outputs.sum().backward()
    assert charged_s(device, report)[0] < 0.05 * SHORT_S
    assert streams == [side]


def test_running_out_of_device_memory_while_coming_back_is_undone_and_a_later_try_succeeds():
    training, plain = Training(), Training(colocated=False)
    training.step()
    plain.step()
    training.manager.enter(Phase.REFIT)
    training.manager.enter(Phase.GENERATION)
    free, _ = torch.cuda.mem_get_info()
    # Room for the parameters and some of the optimizer.
    hog = torch.empty(free - (600 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(DeviceOutOfMemoryError, match=r"no room for .* GiB free, .* allocated by this process"):
        training.manager.enter(Phase.TRAINING)
    assert training.manager.phase is Phase.GENERATION
    assert sum(training.manager.device_bytes().values()) == 0
    del hog
    torch.cuda.empty_cache()
    training.step()
    plain.step()
    for a, b in zip(training.contents(), plain.contents(), strict=True):
        assert torch.equal(a, b)
    training.manager.close()


def test_where_pinning_is_refused_pageable_memory_serves_with_a_warning(monkeypatch, caplog):
    class RefusingRuntime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(host_regions, "_cudart", RefusingRuntime)
    training, plain = Training(), Training(colocated=False)
    for _ in range(2):
        training.step()
        plain.step()
        training.manager.enter(Phase.REFIT)
        training.manager.enter(Phase.GENERATION)
    assert "pageable memory" in caplog.text
    assert not training.manager._arena.pinned
    for a, b in zip(training.contents(), plain.contents(), strict=True):
        assert torch.equal(a, b)
    training.manager.close()


def test_memory_that_cuda_refuses_to_register_spoils_no_later_kernel():
    region = host_regions.PinnedRegion(64 << 20, None)
    twice = torch.cuda.cudart().cudaHostRegister(region.buffer.data_ptr(), 64 << 20, 1)
    assert int(twice) != 0
    host_regions._forget_last_error()
    assert torch.zeros(8, device="cuda").sum().item() == 0
    region.close()


def test_what_a_backend_forgot_to_list_is_named_after_the_transition():
    gc.collect()  # what other tests left
    training = Training()
    training.step()
    training.manager.enter(Phase.REFIT)
    training.manager.enter(Phase.GENERATION)
    forgotten = torch.zeros(48 << 20, dtype=torch.uint8, device="cuda")
    report = training.manager.enter(Phase.LP_INFERENCE)
    assert f"tensor [{forgotten.numel()}] uint8: 48 MiB" in [str(leftover) for leftover in report.leftovers]
    training.manager.close()


def training_with_a_cached_block() -> Training:
    """In TRAINING, with 2 GiB that an activation has left in the cache."""
    training = Training()
    training.step()
    training.manager.enter(Phase.TRAINING)
    torch.cuda.empty_cache()
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    return training


def test_what_matrix_products_keep_for_themselves_keeps_no_cached_block():
    torch._C._cuda_clearCublasWorkspaces()
    training = training_with_a_cached_block()
    # In both threads: that of the forward pass and that of the backward pass.
    matrix = torch.randn(256, 256, device="cuda", requires_grad=True)
    (matrix @ matrix).sum().backward()
    del matrix
    training.manager.enter(Phase.REFIT)
    report = training.manager.enter(Phase.GENERATION)
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 64 << 20
    assert not any("cached block" in str(leftover) for leftover in report.leftovers)
    training.manager.close()


def test_a_small_tensor_that_keeps_a_large_cached_block_is_told_with_what_it_keeps():
    training = training_with_a_cached_block()
    small = torch.zeros(24 << 20, dtype=torch.uint8, device="cuda")
    training.manager.enter(Phase.REFIT)
    report = training.manager.enter(Phase.GENERATION)
    (told,) = [leftover for leftover in report.leftovers if "cached block" in str(leftover)]
    assert told.num_bytes >= (2 << 30) - small.nbytes - (2 << 20)
    training.manager.close()


def test_buffers_for_copies_keep_no_cached_block_that_was_partly_in_use_when_they_were_made():
    torch.cuda.empty_cache()
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    loaded = torch.zeros(24 << 20, dtype=torch.uint8, device="cuda")
    device = make_device(torch.device("cuda"))
    del loaded
    device.release_cache()
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 64 << 20


def test_what_passes_have_freed_is_no_room_for_groups_and_what_groups_have_freed_is():
    device, size = make_device(torch.device("cuda")), 256 << 20
    torch.cuda.empty_cache()
    for_work, room_bytes = device.cached_for_work_bytes(), device.room_bytes(0)
    torch.empty(size, dtype=torch.uint8, device="cuda")
    assert device.cached_for_work_bytes() - for_work == size
    assert room_bytes - device.room_bytes(0) == size
    assert device.room_bytes(for_work + size) == device.room_bytes(0)  # passes find it
    storage = torch.UntypedStorage(0, device="cuda")
    device.allocate([Room(storage, size)])
    device.release(storage)
    assert device.cached_for_work_bytes() - for_work == size
    assert room_bytes - device.room_bytes(0) == size
    torch.cuda.empty_cache()
    assert device.room_bytes(0) == room_bytes
    device.drain_cache_flushes()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(device.total_bytes(), dtype=torch.uint8, device="cuda")
    assert (device.drain_cache_flushes(), device.drain_cache_flushes()) == (1, 0)
