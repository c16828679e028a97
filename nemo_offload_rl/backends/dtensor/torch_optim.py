"""Builds torch optimizers by dotted name, and finds the states that an optimizer keeps for each parameter.

Steps on tiny parameters, sharded like the model's, show whether an optimizer works here and which states it keeps.
They take milliseconds, so they run before anything is started.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.policy import OptimizerConfig
from nemo_offload_rl.protocols.optimizer import OptimizerSpec
from nemo_offload_rl.residency import local_tensor

# Errors that torch raises for wrong arguments, and in steps that it cannot do.
REFUSALS = (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, LookupError, ArithmeticError)
# Arguments that choose an implementation, not the result; tried only if the run has the device that they need.
_IMPLEMENTATIONS = ("capturable", "foreach", "fused")
_NO_DECAY = {"weight_decay": 0.0}
NO_OPTIMIZER = "policy.optimizer is null, but the DTensor backend has no other; set policy.optimizer.name and kwargs"

type NamedParameters = Iterable[tuple[str, nn.Parameter]]


def optimizer_spec(settings: OptimizerConfig, *, on_gpu: bool) -> OptimizerSpec:
    """Find the states that the optimizer of `policy.optimizer` keeps for float32 parameters, by trying it.

    Args:
        settings: The optimizer.
        on_gpu: The run has GPUs, so `fused`, `foreach` and `capturable` are not tried here.

    Raises:
        ConfigError: The optimizer cannot be made, cannot step, or needs more than a shard to update it.
    """
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
        raise _cannot_train(settings.name, f"its step ends in {_first_line(error)}") from error
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
    settings: OptimizerConfig, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]
) -> Optimizer:
    """Build the optimizer that `policy.optimizer` names, over parameters or groups of them.

    Raises:
        ConfigError: The name is no optimizer, or the optimizer refuses these parameters or arguments.
    """
    cls = class_by_name("policy.optimizer.name", settings.name, Optimizer)
    try:
        return cls(list(parameters), **settings.kwargs)
    except REFUSALS as error:
        raise does_not_fit("policy.optimizer", settings.name, error) from error


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
        raise ConfigError(f"{key} is {dotted}, which is no {base.__name__}; give the dotted path of one")
    return found


def does_not_fit(where: str, name: str, error: BaseException) -> ConfigError:
    """Make the error for an optimizer or scheduler that refused its arguments."""
    return ConfigError(f"{where} cannot be {name} with these kwargs: {_first_line(error)}; correct {where}.kwargs")


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text.split(". ")[0].rstrip(".;:")
