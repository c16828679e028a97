"""What reports are charged where the host is held up: the time in which the device had nothing to run, once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from clocked_device import ClockedDevice
from fake_cuda import FakeRuntime, FakeStream, make_cuda_device
from torch import nn
from toy_training import settings

from nemo_offload_rl.residency import (
    CpuDevice,
    GradsGroup,
    HostArena,
    Phase,
    ResidencyManager,
    StateGroup,
    TransitionReport,
    resolve_plan,
)
from nemo_offload_rl.residency.device import cuda, cuda_copies
from nemo_offload_rl.residency.device.device import Copy
from nemo_offload_rl.residency.table import ledger
from nemo_offload_rl.residency.table.ledger import Ledger

NUM_PARTS, WIDTH = 6, 64
PART_BYTES = 4 * WIDTH


def new_report() -> TransitionReport:
    return TransitionReport(None, Phase.TRAINING)


class Gpu:
    """A fake GPU, copies to the host of a millisecond each, and work that has been given to it and not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda, "time", SimpleNamespace(perf_counter=lambda: FakeStream.clock_ms / 1e3))
        self.device = make_cuda_device(monkeypatch, FakeRuntime())
        monkeypatch.setattr(cuda_copies, "STAGED_BELOW_BYTES", 0)
        self._arena = HostArena(self.device.new_region)
        self._arena.reserve(1 << 20)
        self.stream = torch.cuda.current_stream()

    def copies(self, number: int):
        return self.device.copy_out(
            [Copy(torch.zeros(100, dtype=torch.uint8), self._arena.alloc(100, "test").buffer) for _ in range(number)]
        )

    def give_work(self, duration_ms: int) -> None:
        place = torch.zeros(1)
        self.stream.queue += [(place.copy_, (place,))] * duration_ms


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def exposed_ms(gpu: Gpu, report: TransitionReport) -> int:
    gpu.device.account()
    return round(1e3 * report.exposed_s)


def test_a_wait_of_the_host_is_charged_where_the_device_has_nothing_to_run(gpu):
    report, copies = new_report(), gpu.copies(3)
    with gpu.device.held_up(report):
        copies.wait_host()
    assert exposed_ms(gpu, report) == 3


def test_a_wait_of_the_host_behind_work_of_the_device_is_not_charged_and_nothing_waits_to_know_that(gpu):
    report, copies = new_report(), gpu.copies(3)
    gpu.give_work(5)
    with gpu.device.held_up(report):
        copies.wait_host()
    assert exposed_ms(gpu, report) == gpu.stream.num_done == 0
    gpu.stream.synchronize()
    assert exposed_ms(gpu, report) == 0


def test_a_wait_that_is_longer_than_the_work_is_charged_from_its_end_on(gpu):
    report, copies = new_report(), gpu.copies(3)
    gpu.give_work(5)
    with gpu.device.held_up(report):
        gpu.stream.synchronize()
        copies.wait_host()
    assert exposed_ms(gpu, report) == 3


def test_between_bodies_nothing_is_charged(gpu):
    report = new_report()
    for number in (1, 2):
        with gpu.device.held_up(report):
            gpu.copies(number).wait_host()
        gpu.copies(7).wait_host()
    assert exposed_ms(gpu, report) == 3


@pytest.mark.parametrize("work_ms", [0, 20])
def test_the_devices_own_waits_are_charged_once_beside_those_of_the_host(gpu, work_ms):
    report, first, second = new_report(), gpu.copies(2), gpu.copies(3)
    gpu.give_work(work_ms)
    with gpu.device.held_up(report):
        first.wait_host()
        gpu.stream.synchronize()
        second.wait_device()
    second.wait_device()
    assert exposed_ms(gpu, report) == (3 if work_ms else 5)


def test_a_body_inside_another_takes_its_own_part(gpu):
    outer, inner, same = new_report(), new_report(), new_report()
    with gpu.device.held_up(outer):
        gpu.copies(1).wait_host()
        with gpu.device.held_up(inner):
            gpu.copies(2).wait_device()
        gpu.copies(4).wait_host()
        with pytest.raises(ValueError, match="inside"), gpu.device.held_up(same), gpu.device.held_up(same):
            gpu.copies(8).wait_host()
            raise ValueError("inside")
    gpu.copies(16).wait_host()
    assert [exposed_ms(gpu, report) for report in (outer, inner, same)] == [5, 2, 8]


def test_what_is_known_only_after_a_report_was_drained_comes_with_the_next_ones_once(gpu):
    kept, report, copies = Ledger(), TransitionReport(Phase.TRAINING, Phase.OPTIM_STEP), gpu.copies(3)
    kept.add(report)
    gpu.give_work(5)
    with gpu.device.held_up(report):
        gpu.stream.queue.append((copies.wait_host, ()))  # the stream waits once it gets there, and passes a ms later
    gpu.device.account()
    assert kept.drain() == [report]
    assert report.exposed_s == 0
    gpu.stream.synchronize()
    gpu.device.account()
    (late,) = kept.drain()
    assert (late.source, late.target, late.bytes_moved) == (Phase.TRAINING, Phase.OPTIM_STEP, 0)
    assert late.exposed_s == report.exposed_s == pytest.approx(4e-3)
    assert kept.drain() == []


def test_pageable_copies_are_charged_their_own_seconds_and_none_of_the_work_before_them(gpu):
    gpu.give_work(5)
    host = HostArena()
    host.reserve(1 << 20)
    transfer = gpu.device.copy_in([Copy(torch.zeros(100, dtype=torch.uint8), host.alloc(100, "test").buffer)])
    assert gpu.stream.num_done == 5
    assert transfer.seconds() == 0


def test_where_copies_do_not_run_beside_work_the_hosts_seconds_are_charged_once(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(ledger, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    report, device = new_report(), CpuDevice()
    for _ in range(2):
        with device.held_up(report):
            clock.now += 1
            with device.held_up(report):
                clock.now += 2
    clock.now += 4
    device.account()
    assert report.exposed_s == 6


class Passes:
    """Layers whose parameters and gradients pass through a device with a clock."""

    def __init__(self, device: ClockedDevice) -> None:
        self.parameters = [nn.Parameter(torch.randn(WIDTH)) for _ in range(NUM_PARTS)]
        groups = []
        for index, parameter in enumerate(self.parameters):
            named = [("weight", parameter)]
            groups += [
                StateGroup(f"params/part.{index}", lambda named=named: named),
                GradsGroup(lambda named=named: named, f"grads/part.{index}"),
                StateGroup(f"optimizer/part.{index}", lambda: []),
            ]
        plan = resolve_plan(settings(offload_optimizer_states=True, streams_parameters=True))
        self.manager = ResidencyManager(plan=plan, groups=groups, device=device)
        self.manager.enter(Phase.TRAINING)
        self.device = device

    def run(self, work: float) -> None:
        """A forward and a backward pass; each part of either takes so long."""
        passing, last = self.manager.passing, NUM_PARTS - 1
        with passing.charged():
            for index in range(NUM_PARTS):
                passing.bring(index)
                passing.has_read(index, min(index + 1, last))
                self.device.run(work)
            for index in reversed(range(NUM_PARTS)):
                passing.bring(index)
                before = index - 1 if index else None
                passing.has_read(index, before, with_gradients=before)
                passing.bring_gradients(index)
                self.device.run(work)
                self.parameters[index].grad = torch.ones(WIDTH)
                passing.has_gradients(index)


@pytest.mark.parametrize("start_cost", [0.0, 0.05])
@pytest.mark.parametrize("work", [0.1, 0.9, 3.0])
def test_passes_are_charged_exactly_what_they_took_beyond_their_work(work, start_cost):
    """However long the host has waited: with long work it waits for gradients behind the work, and nothing is lost."""
    device = ClockedDevice(PART_BYTES, lambda: 1 << 40)
    passes = Passes(device)
    device.start_cost = start_cost
    passes.manager.settle()
    device.host = begin = device.compute = device.idle_from()
    device.host_waited = 0.0
    passes.manager.reports.drain()
    passes.run(work)
    (report,) = passes.manager.reports.drain()
    took = device.compute - begin
    assert report.exposed_s == pytest.approx(took - 2 * NUM_PARTS * work)
    assert device.host_waited > 0
    if work > 1:
        assert report.exposed_s <= 1 + start_cost  # until the first part has come
        assert device.host_waited > work
    passes.manager.settle()
    passes.manager.reports.drain()
    assert 0 <= report.hidden_s <= report.transfer_s
