"""Contents of a checkpoint of the DTensor backend."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nemo_offload_rl.backends.dtensor.learning_rate import Schedule
from nemo_offload_rl.backends.optimizer_parts import OptimizerParts
from nemo_offload_rl.backends.saving import dcp
from nemo_offload_rl.protocols.optimizer import make_states
from nemo_offload_rl.residency import local_tensor


@dataclass(frozen=True)
class DTensorState:
    """Implements `dcp.TrainingState`; tensors are whole ones to the checkpoint, however they are sharded.

    Attributes:
        parameters: By Hugging Face name.
        parts: State groups of the optimizer, with the parameters of each.
        optimizer: Over those of these parameters that are trained.
        schedule: Of its settings.
        model_parts: The parameters that are on the device with one of these groups only.
    """

    parameters: list[tuple[str, nn.Parameter]]
    parts: OptimizerParts
    optimizer: Optimizer
    schedule: Schedule
    model_parts: Mapping[str, Sequence[tuple[str, nn.Parameter]]]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0][1].device

    @property
    def groups(self) -> Sequence[str]:
        """State groups of the optimizer."""
        return list(self.parts.members)

    def model_tensors(self) -> dict[str, Tensor]:
        """Parameters by their names in the checkpoint."""
        return {f"{dcp.MODEL}{name}": parameter.detach() for name, parameter in self.parameters}

    def model_tensors_with(self, group: str) -> dict[str, Tensor]:
        """Those that are on the device with one group: the first has all that no other has."""
        mine = {f"{dcp.MODEL}{name}" for name, _ in self.model_parts.get(group, ())}
        others = {f"{dcp.MODEL}{name}" for part in self.model_parts.values() for name, _ in part}
        is_first = group == self.groups[0]
        return {
            name: it for name, it in self.model_tensors().items() if name in mine or (is_first and name not in others)
        }

    def optimizer_tensors(self, group: str) -> dict[str, Tensor]:
        """The states of one group by their names in the checkpoint."""
        state = self.optimizer.state
        return {
            f"{dcp.OPTIMIZER}{name}/{key}": value
            for name, parameter in self.parts.members[group]
            # Not `state[parameter]`: that would make an entry.
            for key, value in (state[parameter].items() if parameter in state else ())
            if isinstance(value, Tensor)
        }

    def values(self) -> dict[str, Any]:
        """Values that are no tensors."""
        return {"num_steps": self.schedule.num_steps, "kept_by_optimizer": self.schedule.kept_by_optimizer()}

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Continue the schedule from these values."""
        self.schedule.go_on(values["num_steps"], values["kept_by_optimizer"])

    def make_optimizer_state(self, group: str, saved: Container[str]) -> None:
        """Have the optimizer allocate the states of one group."""
        state = self.optimizer.state
        # What was never trained has no states, neither here nor in the checkpoint.
        wanted = [
            parameter
            for name, parameter in self.parts.members[group]
            if dcp.OPTIMIZER + name in saved and not state.get(parameter)
        ]
        make_states(self.optimizer, wanted)

    def rng_state(self) -> dict[str, Tensor]:
        """This rank's random states."""
        return dcp.torch_rng_state(self.device)

    def set_rng_state(self, states: Mapping[str, Tensor]) -> None:
        """Take over random states."""
        dcp.set_torch_rng_state(states, self.device)


def full_tensor(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor in `dtype`; a collective for a DTensor. Cast before the gather, which then moves fewer bytes."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.size() == 1:
        # The same bytes, without DTensor's bookkeeping for each of hundreds of tensors.
        parameter = local_tensor(parameter)
    value = parameter.detach().to(dtype)
    return value.full_tensor() if isinstance(value, DTensor) else value
