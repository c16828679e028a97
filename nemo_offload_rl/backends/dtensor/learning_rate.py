"""The learning rate's schedule by torch's schedulers, for new and resumed runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from nemo_offload_rl.backends.dtensor.torch_optim import (
    REFUSALS,
    build_optimizer,
    class_by_name,
    does_not_fit,
)
from nemo_offload_rl.errors import CheckpointError, ConfigError
from nemo_offload_rl.keys.policy import OptimizerConfig
from nemo_offload_rl.keys.worker import SchedulerSettings

_TRIED_STEPS = 4
# Keys of an optimizer's groups that torch's schedulers change; other schedulers may change more.
_SCHEDULED = ("lr", "betas", "momentum")


class Schedule:
    """Schedules the settings of an optimizer's groups; a resumed run follows the present configuration.

    Args:
        phases: Schedulers in order, each until its `until_step`; without any the learning rate is constant.
        optimizer: The optimizer, as it was built.

    Attributes:
        num_steps: Steps of the schedule so far.

    Raises:
        ConfigError: A name is no scheduler, its arguments do not fit, or the steps do not grow.
    """

    def __init__(self, phases: Sequence[SchedulerSettings], optimizer: Optimizer) -> None:
        self._phases = phases
        self._optimizer = optimizer
        self._scheduled = set(_SCHEDULED)
        self._configured = self._settings()
        self._begin(self._configured)
        self._at_first = self._settings()

    def _begin(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for group, configured in zip(self._optimizer.param_groups, settings, strict=True):
            for key in group.keys() - configured.keys() - {"params"}:
                del group[key]  # added by a scheduler
            group.update(deepcopy(configured))
        self.num_steps = 0
        self._scheduler = _build_scheduler(self._phases, self._optimizer)

    def _settings(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return deepcopy([{key: value for key, value in group.items() if key != "params"} for group in groups])

    def step(self) -> None:
        """Advance the schedule by one step."""
        self.num_steps += 1
        if self._scheduler is None:
            return
        before = [dict(group) for group in self._optimizer.param_groups]
        self._scheduler.step()
        for group, old in zip(self._optimizer.param_groups, before, strict=True):
            self._scheduled |= {key for key, value in group.items() if value is not old.get(key)}

    def kept_by_optimizer(self) -> list[dict[str, Any]]:
        """Return group values that the optimizer's own steps changed, as some optimizers outside torch do."""
        kept = [
            {
                key: value
                for key, value in now.items()
                if key not in self._scheduled and not _equal(value, first.get(key))
            }
            for now, first in zip(self._settings(), self._at_first, strict=True)
        ]
        return kept if any(kept) else []

    def go_on(self, num_steps: int, kept: Sequence[dict[str, Any]]) -> None:
        """Restore the schedule's state at a checkpoint.

        Args:
            num_steps: `num_steps` at the checkpoint.
            kept: Result of `kept_by_optimizer` at the checkpoint.

        Raises:
            CheckpointError: The optimizer has other groups, or the schedule ends before `num_steps`.
        """
        kept = kept or [{} for _ in self._configured]
        if len(kept) != len(self._configured):
            raise CheckpointError(
                f"the checkpoint has {len(kept)} group(s) of parameters with values of the optimizer's own, and this "
                f"run {len(self._configured)}, so policy.optimizer.decay_norm_and_bias or a parallel size was another; "
                "set it as it was, or begin anew from an export"
            )
        self._begin([configured | values for configured, values in zip(self._configured, kept, strict=True)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the optimizer made no step before
            try:
                for _ in range(num_steps):
                    self.step()
            except REFUSALS as error:
                raise CheckpointError(
                    f"policy.scheduler ends after step {self.num_steps - 1} and the checkpoint was taken after "
                    f"{num_steps}; make it longer"
                ) from error


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, ValueError):  # lists of tensors, arrays
        return False


def _build_scheduler(phases: Sequence[SchedulerSettings], optimizer: Optimizer) -> LRScheduler | None:
    if not phases:
        return None
    milestones = [phase.until_step for phase in phases[:-1]]
    if any(step is None for step in milestones) or phases[-1].until_step is not None:
        raise ConfigError("policy.scheduler: every phase but the last needs a milestone, and the last has none.")
    steps = [step for step in milestones if step is not None]
    if steps != sorted(set(steps)):
        raise ConfigError(f"policy.scheduler: milestones {steps} do not grow; each must be above the one before.")
    built = []
    for index, phase in enumerate(phases):
        cls = class_by_name(f"policy.scheduler.{index}.name", phase.name, LRScheduler)
        try:
            built.append(cls(optimizer, **phase.kwargs))
        except REFUSALS as error:
            raise does_not_fit(f"policy.scheduler.{index}", phase.name, error) from error
    return SequentialLR(optimizer, built, steps)


def try_schedule(
    optimizer: OptimizerConfig, phases: Sequence[SchedulerSettings], num_steps: int, steps_key: str
) -> None:
    """Try each phase of a schedule alone, for a few steps.

    Args:
        optimizer: The optimizer to schedule; known to work.
        phases: In order, with ascending ends.
        num_steps: Most steps of the run.
        steps_key: The key that limits `num_steps`, for messages.

    Raises:
        ConfigError: A phase cannot be made, cannot step, or can make fewer steps than it lasts.
    """
    start = 0
    for index, phase in enumerate(phases):
        where, end = f"policy.scheduler.{index}", phase.until_step
        tried = build_optimizer(optimizer, [nn.Parameter(torch.ones(2, 2))])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the optimizer made no step before
            cls = class_by_name(f"{where}.name", phase.name, LRScheduler)
            try:
                scheduler = cls(tried, **phase.kwargs)
                own_end = vars(scheduler).get("total_steps")
                sequence = SequentialLR(tried, [scheduler], [])
                for _ in range(min(_TRIED_STEPS, own_end or _TRIED_STEPS) - 1):
                    sequence.step()
            except REFUSALS as error:
                raise does_not_fit(where, phase.name, error) from error
        lasts = (num_steps if end is None else end) - start
        if own_end is not None and own_end < lasts:
            raise ConfigError(
                f"{where} is {phase.name}, which can make {own_end} steps, but it lasts for {lasts}; set its arguments "
                f"to that many, or lower {steps_key if end is None else 'the milestone after it'}"
            )
        start = end or start
