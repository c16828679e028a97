"""Schedules of torch, alone and in phases, and where a resumed run is in them."""

from __future__ import annotations

import inspect
from copy import deepcopy
from functools import partial

import pytest
import torch
from policy_cases import torch_optimizer
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from nemo_offload_rl.backends.dtensor.torch_optim import Schedule, try_schedule
from nemo_offload_rl.errors import CheckpointError, ConfigError
from nemo_offload_rl.keys.worker import SchedulerSettings

ADAMW = torch_optimizer("AdamW", lr=1.0)


class Counting(Optimizer):
    """Keeps its counts in its groups."""

    def __init__(self, params, lr, decay=0.5):
        super().__init__(params, {"lr": lr, "decay": decay})
        for group in self.param_groups:
            group["count"] = torch.zeros(1)
            group["limits"] = [torch.zeros(2)]

    def step(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["count"] += 1
            group["seen"] = [*group.get("seen", []), group["lr"]]


class Halving(LRScheduler):
    """Changes what torch's schedulers leave alone."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["decay"] /= 2
        return [group["lr"] for group in self.optimizer.param_groups]


SCHEDULES = {
    "ConstantLR": {},
    "LinearLR": {"total_iters": 3},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 2]},
    "ExponentialLR": {"gamma": 0.5},
    "PolynomialLR": {"total_iters": 3},
    "CosineAnnealingLR": {"T_max": 3},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 8},
}
NO_SCHEDULES = {
    "ReduceLROnPlateau": {},
    "ChainedScheduler": {},
    "SequentialLR": {"schedulers": [], "milestones": []},
    "LambdaLR": {"lr_lambda": "0.9"},
    "MultiplicativeLR": {"lr_lambda": 0.9},
    "LRScheduler": {},
}


def phase(name, until=None, **kwargs):
    return SchedulerSettings(name=f"torch.optim.lr_scheduler.{name}", kwargs=kwargs, until_step=until)


ADAMW_OF_1 = partial(AdamW, lr=1.0)


def made(phases, make=ADAMW_OF_1, num_groups=2):
    optimizer = make([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(num_groups)])
    return optimizer, Schedule(phases, optimizer)


def settings_by_step(optimizer, schedule, num_steps):
    found = []
    for _ in range(num_steps):
        found.append(deepcopy({key: value for key, value in optimizer.param_groups[-1].items() if key != "params"}))
        optimizer.step()
        schedule.step()
    return found


def test_every_schedule_of_torch_is_known_here():
    named = {*SCHEDULES, *NO_SCHEDULES}
    assert {name for name in lr_scheduler.__all__ if inspect.isclass(getattr(lr_scheduler, name))} == named


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_schedule_that_is_accepted_makes_all_steps_of_its_phase_alone_and_between_others(name):
    middle = phase(name, 6, **SCHEDULES[name])
    phases = [phase("ConstantLR", 2), middle, phase("ConstantLR")]
    for chosen in ([phase(name, **SCHEDULES[name])], phases):
        try_schedule(ADAMW, chosen, 8, "sft.max_num_steps")
        assert len(settings_by_step(*made(chosen), 7)) == 7


@pytest.mark.parametrize("name", NO_SCHEDULES)
def test_a_schedule_that_cannot_step_by_itself_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        try_schedule(ADAMW, [phase(name, **NO_SCHEDULES[name])], 8, "sft.max_num_steps")
    assert "policy.scheduler.0" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_schedule_that_ends_before_its_phase_is_refused_with_what_to_lower():
    cycle = {"max_lr": 1.0, "total_steps": 4}
    try_schedule(ADAMW, [phase("OneCycleLR", **cycle)], 4, "sft.max_num_steps")
    with pytest.raises(ConfigError, match=r"ends after 4 steps, but its phase has 5; .*lower sft\.max_num_steps"):
        try_schedule(ADAMW, [phase("OneCycleLR", **cycle)], 5, "sft.max_num_steps")
    after = [phase("ConstantLR", 3), phase("OneCycleLR", 8, **cycle), phase("ConstantLR")]
    with pytest.raises(ConfigError, match=r"policy\.scheduler\.1 .*its phase has 5; .*lower the milestone after it"):
        try_schedule(ADAMW, after, 100, "sft.max_num_steps")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_resumed_run_has_the_settings_of_one_that_was_not_stopped(name):
    between = [phase("ConstantLR", 2), phase(name, 7, **SCHEDULES[name]), phase("ConstantLR")]
    for phases in ([phase(name, **SCHEDULES[name])], between):
        for make in (ADAMW_OF_1, partial(SGD, lr=1.0, momentum=0.5)):
            whole = settings_by_step(*made(phases, make), 7)
            for num_steps in range(7):
                resumed = made(phases, make)
                settings_by_step(*resumed, 2)  # of no account
                resumed[1].go_on(num_steps, [])
                assert settings_by_step(*resumed, 7 - num_steps) == whole[num_steps:]


def test_a_resumed_run_has_its_own_settings_and_what_the_optimizer_has_counted():
    before = [phase("LinearLR", 4, start_factor=0.1, total_iters=4), phase("ConstantLR", factor=1.0)]
    optimizer, schedule = made(before, partial(Counting, lr=1.0))
    settings_by_step(optimizer, schedule, 3)
    kept = schedule.kept_by_optimizer()
    cycle = {"max_lr": 3.0, "total_steps": 5, "cycle_momentum": False}
    for phases in ([], before, [phase("OneCycleLR", **cycle)], [phase("StepLR", step_size=2)]):
        make = partial(Counting, lr=2.0, decay=0.25)
        whole = settings_by_step(*made(phases, make), 4)
        resumed = made(phases, make)
        resumed[1].go_on(schedule.num_steps, kept)
        (now,) = settings_by_step(*resumed, 1)
        assert (now["lr"], now["decay"]) == (whole[3]["lr"], 0.25)
        assert now["count"] == 3 and now["seen"] == optimizer.param_groups[0]["seen"]
    assert not made(before)[1].kept_by_optimizer()
    halving = [SchedulerSettings(name=f"{__name__}.Halving", kwargs={}, until_step=None)]
    optimizer, schedule = made(halving, partial(Counting, lr=1.0, decay=64.0))
    settings_by_step(optimizer, schedule, 3)
    resumed, its_schedule = made(halving, partial(Counting, lr=1.0, decay=64.0))
    its_schedule.go_on(3, schedule.kept_by_optimizer())
    runs = [settings_by_step(*of, 2) for of in ((optimizer, schedule), (resumed, its_schedule))]
    assert [[now["decay"] for now in run] for run in runs] == [[2.0, 1.0]] * 2
    with pytest.raises(CheckpointError, match="2 groups of parameters, and this run has 1, so"):
        made(before, partial(Counting, lr=1.0), num_groups=1)[1].go_on(3, kept)
    with pytest.raises(CheckpointError, match=r"ends after step 2 and .* after 3; make it longer"):
        made([phase("OneCycleLR", **cycle | {"total_steps": 2})], partial(Counting, lr=1.0))[1].go_on(3, kept)
