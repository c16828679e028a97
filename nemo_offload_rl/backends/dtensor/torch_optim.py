"""Builds the optimizer and the learning rate's schedule that the configuration names, by torch, and tries both.

Steps on tiny parameters, sharded like the model's, show whether an optimizer works here and which states it keeps.
They take milliseconds, so they run before anything is started.
"""

import importlib
import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from nemo_offload_rl.errors import CheckpointError, ConfigError
from nemo_offload_rl.keys.policy import OptimizerConfig
from nemo_offload_rl.keys.worker import SchedulerSettings
from nemo_offload_rl.protocols.optimizer import OptimizerSpec
from nemo_offload_rl.residency import local_tensor

# Errors that torch raises for wrong arguments, and in steps that it cannot do.
REFUSALS = (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, LookupError, ArithmeticError)
# Arguments that choose an implementation, not the result; tried only if the run has the device that they need.
_IMPLEMENTATIONS = ("capturable", "foreach", "fused")
_NO_DECAY = {"weight_decay": 0.0}
NO_OPTIMIZER = "policy.optimizer is null, but the DTensor backend needs it; set policy.optimizer.name and kwargs"

type NamedParameters = Iterable[tuple[str, nn.Parameter]]
_TRIED_STEPS = 4
_specs: dict[str, OptimizerSpec] = {}  # results of `optimizer_spec` in this process
# Keys of an optimizer's groups that torch's schedulers change; other schedulers may change more.
_SCHEDULED = ("lr", "betas", "momentum")


def optimizer_spec(settings: OptimizerConfig, *, on_gpu: bool) -> OptimizerSpec:
    """Find the states that the optimizer of `policy.optimizer` keeps for float32 parameters, by trying it once.

    Args:
        settings: The optimizer.
        on_gpu: The run has GPUs, so `fused`, `foreach` and `capturable` are not tried here.

    Raises:
        ConfigError: The optimizer cannot be made, cannot step, or needs more than a shard to update it.
    """
    key = f"{settings!r} {on_gpu}"  # plans ask hundreds of times
    if key not in _specs:
        _specs[key] = _tried_spec(settings, on_gpu=on_gpu)
    return _specs[key]


def _tried_spec(settings: OptimizerConfig, *, on_gpu: bool) -> OptimizerSpec:
    matrix, vector = torch.linspace(-1.0, 1.0, 24).view(6, 4), torch.linspace(0.5, 1.5, 6)
    kwargs = {name: value for name, value in settings.kwargs.items() if not (on_gpu and name in _IMPLEMENTATIONS)}
    build_optimizer(settings, [nn.Parameter(matrix.clone()), nn.Parameter(vector.clone())])
    whole = replace(settings, kwargs=kwargs)
    together, states = _try_steps(whole, [matrix, vector])
    alone, _ = _try_steps(whole, [matrix[:2]])
    has_other_shapes = any(state.shape not in (matrix.shape, torch.Size([])) for state in states.values())
    spec = OptimizerSpec(
        states={name: state.dtype for name, state in states.items() if state.dim() > 0},
        masters={},
        is_elementwise=not has_other_shapes and torch.allclose(together[0][:2], alone[0], rtol=1e-5, atol=1e-7),
    )
    if not spec.is_elementwise:
        raise _cannot_train(settings.name, "its update of one shard of a parameter needs the others")
    return spec


def _try_steps(settings: OptimizerConfig, values: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the parameters after two steps, and the states of the first parameter."""
    # A mesh without process group; DTensor still refuses operations that it does not support on shards.
    mesh = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)

    def sharded(value: Tensor) -> Tensor:
        return DTensor.from_local(value.clone(), mesh, [Shard(0)], run_check=False)

    parameters = [nn.Parameter(sharded(value)) for value in values]
    optimizer: Any = build_optimizer(settings, parameters)
    # With GPUs, torch's check for graph capture would create a CUDA context in the driver process.
    optimizer._accelerator_graph_capture_health_check = _no_graph
    try:
        for scale in (1.0, -0.5):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.grad = sharded(scale * value.square() + 0.1)
            optimizer.step()
    except REFUSALS as error:
        raise _cannot_train(settings.name, f"its step fails ({_first_line(error)})") from error
    kept = {key: value for key, value in optimizer.state[parameters[0]].items() if isinstance(value, Tensor)}
    return [local_tensor(parameter.detach()) for parameter in parameters], kept


def _no_graph() -> None:
    """Replace torch's check for graph capture, since no step here is captured."""


def _cannot_train(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"policy.optimizer.name is {name}, which cannot train parameters that are sharded over workers: {reason}; use "
        "another one, for instance torch.optim.AdamW"
    )


def param_groups(settings: OptimizerConfig, parameters: NamedParameters) -> list[dict[str, Any]]:
    """Make the optimizer's parameter groups: with and without weight decay, and one per mesh.

    As in megatron-core, biases and parameters with one dimension (norms) have no decay. Empty groups are left out. An
    optimizer updates a group in one call, which takes DTensors of one mesh only; experts that are divided over ranks
    have their own mesh.

    Args:
        settings: Its `decay_norm_and_bias` is read.
        parameters: Parameters by name. A DTensor has the whole tensor's dimensions, so all ranks agree.
    """
    groups: dict[tuple[bool, int], dict[str, Any]] = {}
    for name, parameter in parameters:
        is_decayed = settings.decay_norm_and_bias or (parameter.dim() > 1 and not name.endswith("bias"))
        num_dims = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
        group = groups.setdefault((not is_decayed, num_dims), {"params": []} | ({} if is_decayed else _NO_DECAY))
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def build_optimizer(
    settings: OptimizerConfig, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], *, on_gpu: bool = False
) -> Optimizer:
    """Build the optimizer that `policy.optimizer` names, over parameters or groups of them.

    On a GPU it uses torch's fused kernel if there is one and the configuration does not choose: torch's own choice,
    `foreach`, makes a temporary tensor for each parameter (Adam), as much memory as all parameters take.

    Raises:
        ConfigError: The name is no optimizer, or the optimizer refuses these parameters or arguments.
    """
    cls = class_by_name("policy.optimizer.name", settings.name, Optimizer)
    kernel = {"fused": True} if on_gpu and fuses(settings) and "fused" not in settings.kwargs else {}
    try:
        return cls(list(parameters), **settings.kwargs, **kernel)
    except REFUSALS as error:
        raise does_not_fit("policy.optimizer", settings.name, error) from error


def fuses(settings: OptimizerConfig) -> bool:
    """Tell whether torch's fused kernel updates parameters on a GPU.

    Where `policy.optimizer.kwargs` names no implementation, it is used for every optimizer of torch that has one.
    """
    if settings.kwargs.keys() & {*_IMPLEMENTATIONS, "differentiable"}:
        return bool(settings.kwargs.get("fused"))
    package, _, name = settings.name.rpartition(".")
    cls = getattr(torch.optim, name, None) if package == "torch.optim" else None
    return cls is not None and "fused" in inspect.signature(cls).parameters


def class_by_name(key: str, dotted: str, base: type) -> Any:
    """Import the subclass of `base` that `key` names by its dotted path.

    Raises:
        ConfigError: There is no such class.
    """
    module_name, _, class_name = dotted.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={dotted} cannot be imported ({error}); give a dotted path.") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{key} is {dotted}, which does not derive from {base.__name__} of torch; name a class that does"
        )
    return found


def does_not_fit(where: str, name: str, error: BaseException) -> ConfigError:
    """Make the error for an optimizer or scheduler that refused its arguments."""
    return ConfigError(f"{where} cannot be {name} with these kwargs: {_first_line(error)}; correct {where}.kwargs")


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text.split(". ")[0].rstrip(".;:")


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
        """Restore the schedule's state at a checkpoint: its `num_steps`, and its result of `kept_by_optimizer`.

        Raises:
            CheckpointError: The optimizer has other groups, or the schedule ends before `num_steps`.
        """
        kept = kept or [{} for _ in self._configured]
        if len(kept) != len(self._configured):
            raise CheckpointError(
                f"the checkpoint has values of the optimizer for {len(kept)} groups of parameters, and this run "
                f"has {len(self._configured)}, so policy.optimizer.decay_norm_and_bias or a parallel size differs; "
                "set it as when the checkpoint was written, or begin anew from an export"
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
        raise ConfigError("policy.scheduler needs a milestone after every phase except the last; add or remove one")
    steps = [step for step in milestones if step is not None]
    if steps != sorted(set(steps)):
        raise ConfigError(
            f"policy.scheduler has milestones {steps}, but each must be above the one before; change them"
        )
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
                f"{where} is {phase.name}, which ends after {own_end} steps, but its phase has {lasts}; set its "
                f"arguments to {lasts} steps, or lower {steps_key if end is None else 'the milestone after it'}"
            )
        start = end or start
