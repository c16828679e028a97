"""Contents of a Megatron backend's checkpoint: parameters by a rank's place in the model, optimizer by parameter.

Ranks at the same place hold the same parameters, and one of them writes these. Each optimizer state of a parameter is
saved as a flat tensor of the parameter's size. The distributed optimizer gives each data-parallel rank a range of it,
according to Megatron's buffers. Ranks with other ranges, or with whole parameters, read the parts that they need.
A checkpoint of another split of the model is refused. With delayed scaling it also holds the scales of 8-bit layers.
"""

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from nemo_offload_rl.backends.megatron import parallel
from nemo_offload_rl.backends.megatron.model import BuiltModel
from nemo_offload_rl.backends.megatron.optim import make_states, sub_optimizers
from nemo_offload_rl.backends.megatron.streaming import StreamedStates
from nemo_offload_rl.backends.megatron.upstream.caches import fp8_scales, set_fp8_scales
from nemo_offload_rl.backends.saving import contents, dcp
from nemo_offload_rl.backends.saving.contents import FlatRange
from nemo_offload_rl.errors import CheckpointError
from nemo_offload_rl.residency import unique_storages

logger = logging.getLogger(__name__)

TRACKED = "tracked-"
VALUES, SCALES = "place/", "scales/"
STEP = "step"


class MegatronState:
    """Training state for one save or load; implements `contents.TrainingState`.

    Args:
        model: The model.
        optimizer: Megatron's optimizer.
        streamed: The optimizer's states by group.
        scheduler: Megatron's schedule.
        device: Device of the parameters.
        with_frozen: Also save parameters that are not trained; otherwise only the adapters are saved.
        with_scales: Save the scales of 8-bit layers.
    """

    def __init__(
        self,
        model: BuiltModel,
        optimizer: Any,
        streamed: StreamedStates,
        scheduler: Any,
        device: torch.device,
        *,
        with_frozen: bool,
        with_scales: bool,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._streamed = streamed
        self._scheduler = scheduler
        self.device = device
        self._with_frozen = with_frozen
        self._with_scales = with_scales

    def check_layout(self, path: Path) -> None:
        """Refuse a checkpoint of another split of the model. One without scales is accepted, with a warning.

        Raises:
            CheckpointError: The layouts differ, or this backend cannot read the folder.
        """
        saved = dcp.saved_names(path)
        if not any(name.startswith(VALUES) for name in saved):
            raise CheckpointError(
                f"The checkpoint {path} was written by another backend, or by an earlier version; resume with "
                "policy.dtensor_cfg if that wrote it, or begin anew from an export"
            )
        if self._with_scales and not any(name.startswith(SCALES) for name in saved):
            self._with_scales = False
            logger.warning("checkpoint %s has no scales of 8-bit layers; the next steps compute them again", path)
        layouts = {name.split("/")[1] for name in saved if name.startswith(contents.MODEL)}
        if layouts != {parallel.layout_name()}:
            raise CheckpointError(
                f"The checkpoint {path} was written by ranks laid out as {', '.join(sorted(layouts))}, not as "
                f"{parallel.layout_name()}; resume with the sizes that wrote it, or begin anew from an export."
            )

    @property
    def groups(self) -> Sequence[str]:
        """Names of the optimizer's state groups."""
        return self._streamed.group_names

    def model_tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers that are saved."""
        found: dict[str, Tensor] = {}
        for index, chunk in enumerate(self._model.chunks):
            for name, tensor in chunk.module.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor) and not name.endswith("_extra_state") and self._is_saved(tensor):
                    found[f"{contents.MODEL}{_place(tensor)}/{index}/{name}"] = tensor.detach()
        return found

    def model_tensors_with(self, group: str) -> dict[str, Tensor]:
        """Return all model tensors for the first group, none for the others."""
        return self.model_tensors() if group == self.groups[0] else {}

    def optimizer_tensors(self, group: str) -> dict[str, Tensor]:
        """Return this rank's ranges of the masters and states of one group."""
        found: dict[str, Tensor] = {}
        params, names = self._stored_parameters, self._optimizer_names
        for mcore, held, parameter, offset in self._ranges_by_group[group]:
            for key, tensor in _kept_for(held, mcore.optimizer):
                # Without fp32 masters the optimizer's parameters are the model's.
                if unique_storages([(key, tensor)]).keys().isdisjoint(params):
                    is_range = tensor.shape == held.shape
                    found[f"{names[parameter]}/{key}"] = (
                        FlatRange(tensor, offset, parameter.numel()) if is_range else tensor.detach()
                    )
        return found

    # Cached: a large model has many groups.

    @cached_property
    def _stored_parameters(self) -> frozenset[int]:
        """Keys of the storages of the model's parameters."""
        return frozenset(unique_storages(self.model_tensors().items()))

    @cached_property
    def _ranges_by_group(self) -> dict[str, list[tuple[Any, Tensor, Tensor, int]]]:
        """Ranges of each state group: optimizer, updated tensor, the model's parameter, and the start offset in it."""
        found: dict[str, list[tuple[Any, Tensor, Tensor, int]]] = {group: [] for group in self.groups}
        for mcore in _real(self._optimizer):
            for held, parameter, offset in _ranges(mcore):
                found[self._streamed.group_of(held)].append((mcore, held, parameter, offset))
        return found

    @cached_property
    def _optimizer_names(self) -> dict[Tensor, str]:
        """Prefix of the names of each parameter's masters and states."""
        return {
            parameter: f"{contents.OPTIMIZER}{_place(parameter)}/{index}/{name}"
            for index, chunk in enumerate(self._model.chunks)
            for name, parameter in chunk.module.named_parameters()
        }

    def _is_saved(self, tensor: Tensor) -> bool:
        return self._with_frozen or tensor.requires_grad

    def values(self) -> dict[str, Any]:
        """Return the optimizers' step count, loss scale, place in the schedule and 8-bit scales; a collective."""
        scalers = [_grad_scaler(mcore) for mcore in _real(self._optimizer)]
        mine = {
            "num_steps": self._num_steps_in_groups(),
            "grad_scalers": [scaler.state_dict() for scaler in scalers if scaler],
            "schedule_steps": self._scheduler.num_steps,
        }
        dense, expert = parallel.place_in_model(False), parallel.place_in_model(True)
        values: dict[str, Any] = {f"{VALUES}{parallel.layout_name()}/{dense}": mine}
        if self._with_scales:
            values[f"{SCALES}{parallel.layout_name()}/{dense}-{expert}"] = fp8_scales(self._model.chunks)
        return values

    def _num_steps_in_groups(self) -> int | None:
        """Return the step count that some optimizers keep in their parameter groups, equal in all groups.

        Counts are shared: a rank without parameters of a group has none, but a rank with some may read its checkpoint.
        """
        mine = [group[STEP] for group in self._all_groups() if STEP in group]
        everyones: list[list[int]] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        return max((count for counts in everyones for count in counts), default=None)

    def _all_groups(self) -> Iterator[dict[str, Any]]:
        for mcore in _real(self._optimizer):
            for inner in _with_parts(mcore.optimizer):
                yield from inner.param_groups

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Restore step count, loss scale, place in the schedule and scales of 8-bit layers.

        Settings such as learning rates stay those of this run.
        """
        (mine,) = (value for name, value in values.items() if name.startswith(VALUES))
        for found in (value for name, value in values.items() if name.startswith(SCALES)):
            set_fp8_scales(self._model.chunks, found, get_fp8_recipe(self._model.config))
        for mcore in _real(self._optimizer):
            inner = mcore.optimizer
            if mine["num_steps"] is not None:
                # At each step the hybrid optimizer passes all group settings but this one to its parts.
                parts = inner.sub_optimizers if isinstance(inner, HybridDeviceOptimizer) else [inner]
                for group in (group for part in parts for group in part.param_groups):
                    group[STEP] = mine["num_steps"]
            if isinstance(inner, HybridDeviceOptimizer) and not inner.state:
                # The checkpoint is from before the first step and has no masters: make them from the loaded parameters.
                inner.update_fp32_param_by_new_param()
        scaled = [mcore for mcore in _real(self._optimizer) if _grad_scaler(mcore)]
        if scaled and mine["grad_scalers"]:  # float16 only; the saved run may have had another precision
            for mcore, saved in zip(scaled, mine["grad_scalers"], strict=True):
                mcore.grad_scaler.load_state_dict(saved)
        self._scheduler.num_steps = 0
        self._scheduler.step(mine["schedule_steps"])

    def make_optimizer_state(self, group: str, saved: Container[str]) -> None:
        """Let the optimizers allocate the states of one group."""
        wanted: dict[int, tuple[Any, list[Tensor]]] = {}
        for mcore, held, parameter, _ in self._ranges_by_group[group]:
            inner = mcore.optimizer
            # `state[held]` would create an entry.
            if self._optimizer_names[parameter] in saved and not inner.state.get(held):
                wanted.setdefault(id(inner), (inner, []))[1].append(held)
        for inner, updated in wanted.values():
            make_states(inner, updated)

    def rng_state(self) -> dict[str, Tensor]:
        """Return the random states of torch and of Megatron's tracker."""
        tracked = {TRACKED + name: state for name, state in _tracker().get_states().items()}
        return contents.torch_rng_state(self.device) | tracked

    def set_rng_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore the random states."""
        contents.set_torch_rng_state(states, self.device)
        tracked = [name for name in states if name.startswith(TRACKED)]
        _tracker().set_states({name.removeprefix(TRACKED): states[name] for name in tracked})


def _tracker() -> Any:
    return get_cuda_rng_tracker()


def _real(optimizer: Any) -> list[Any]:
    """Return the optimizers that have parameters on this rank."""
    return [mcore for mcore in sub_optimizers(optimizer) if not mcore.is_stub_optimizer]


def _with_parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and its parts, which count steps separately."""
    return [optimizer, *(optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else ())]


def _grad_scaler(mcore: Any) -> Any:
    return getattr(mcore, "grad_scaler", None)  # an optimizer in fp32 has no such attribute


def _place(tensor: Tensor) -> str:
    """Name the split of the model and the place of this rank's part of the tensor in it."""
    is_expert = not getattr(tensor, "allreduce", True)  # Megatron's mark of an expert's parameter
    return f"{parallel.layout_name()}/{parallel.place_in_model(is_expert)}"


def _ranges(mcore: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield each tensor that the inner optimizer updates, its parameter in the model, and its offset there."""
    if isinstance(mcore, DistributedOptimizer):
        groups = zip(mcore.model_fp32_groups, mcore.model_float16_groups, mcore.optimizer.param_groups, strict=True)
        for in_fp32, in_half, group in groups:
            # Megatron passes them to the inner optimizer in this order.
            for parameter, held in zip([*in_fp32, *in_half], group["params"], strict=True):
                yield held, parameter, mcore._get_model_param_range_map(parameter)["param"].start
        return
    of_masters: dict[Tensor, Tensor] = {}
    if isinstance(mcore, Float16OptimizerWithFloat16Params):
        for half, masters in zip(mcore.float16_groups, mcore.fp32_from_float16_groups, strict=True):
            of_masters |= dict(zip(masters, half, strict=True))
    for group in mcore.optimizer.param_groups:
        for held in cast(list[Tensor], group["params"]):
            yield held, of_masters.get(held, held), 0


def _kept_for(held: Tensor, inner: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return the master and the states, including Adam's step, on any device."""
    # `state[held]` would create an entry.
    state = inner.state.get(held, {})
    return [("master", held), *((key, value) for key, value in state.items() if isinstance(value, Tensor))]
