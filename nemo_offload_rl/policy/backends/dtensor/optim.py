"""Optimizer and schedule from their dotted names, and the global gradient norm."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.backends.dtensor.parallel import TP
from nemo_offload_rl.policy.settings import DTensorSettings, OptimizerSettings, SchedulerSettings
from nemo_offload_rl.residency import OptimizerParts, adam_state_bytes, divide_optimizer, local_tensor


def _class_by_name(key: str, dotted: str, base: type) -> Any:
    module_name, _, class_name = dotted.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={dotted} cannot be imported ({error}); give a dotted path.") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{key}={dotted} is no {base.__name__}; give the dotted path of one.")
    return found


def build_optimizer(settings: OptimizerSettings, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer that `policy.optimizer` names.

    Raises:
        ConfigError: The name is no optimizer, or it does not take these arguments.
    """
    cls = _class_by_name("policy.optimizer.name", settings.name, Optimizer)
    try:
        return cls(list(parameters), **settings.kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy.optimizer.kwargs does not fit {settings.name}: {error}.") from error


def divide(parameters: Sequence[tuple[str, nn.Parameter]], settings: DTensorSettings) -> OptimizerParts:
    """Which optimizer states stream around the step, and in which parts."""
    chunk_mib = settings.offload_optimizer_states_chunk_mib
    return divide_optimizer(
        parameters,
        lambda parameter: adam_state_bytes(local_tensor(parameter).nbytes),
        1.0 if settings.offload_optimizer_states else 0.0,
        None if chunk_mib is None else int(chunk_mib * 2**20),
    )


def build_scheduler(phases: Sequence[SchedulerSettings], optimizer: Optimizer) -> LRScheduler | None:
    """The phases one after the other, each until its `until_step`; None keeps the learning rate.

    Raises:
        ConfigError: A name is no scheduler, its arguments do not fit, or the steps do not grow.
    """
    if not phases:
        return None
    milestones = [phase.until_step for phase in phases[:-1]]
    if any(step is None for step in milestones) or phases[-1].until_step is not None:
        raise ConfigError("policy.scheduler: every phase but the last needs a milestone, and the last has none.")
    steps = [step for step in milestones if step is not None]
    if steps != sorted(set(steps)):
        raise ConfigError(f"policy.scheduler: milestones {steps} do not grow; each must be above the one before.")
    built = []
    for phase in phases:
        cls = _class_by_name("policy.scheduler.name", phase.name, LRScheduler)
        try:
            built.append(cls(optimizer, **phase.kwargs))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"policy.scheduler kwargs do not fit {phase.name}: {error}.") from error
    return SequentialLR(optimizer, built, steps)


def _is_split_over_tp(gradient: Tensor) -> bool:
    if not isinstance(gradient, DTensor):
        return False
    names = gradient.device_mesh.mesh_dim_names or ()
    return TP in names and gradient.placements[names.index(TP)].is_shard()


def global_grad_norm(parameters: Iterable[nn.Parameter], tp_rank: int, device: torch.device) -> Tensor:
    """L2 norm of the gradients of all ranks, each element counted once; a 0-dim float64, equal on all ranks."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    mine = [local_tensor(grad) for grad in gradients if tp_rank == 0 or _is_split_over_tp(grad)]
    norm = torch.nn.utils.get_total_norm(mine) if mine else torch.zeros(())
    square = norm.to(device=device, dtype=torch.float64) ** 2
    dist.all_reduce(square)
    return square.sqrt()


def scale_grads(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient by a 0-dim factor."""
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))  # pyright: ignore[reportPrivateImportUsage]
