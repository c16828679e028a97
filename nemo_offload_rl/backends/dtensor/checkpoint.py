"""The training state that a checkpoint of the DTensor backend saves."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_offload_rl.backends.dtensor.torch_optim import Schedule
from nemo_offload_rl.backends.optimizer_parts import OptimizerParts
from nemo_offload_rl.backends.saving import contents
from nemo_offload_rl.protocols.optimizer import make_states


@dataclass(frozen=True)
class DTensorState:
    """A `contents.TrainingState`; the checkpoint's tensors are whole, so it can be read with another sharding.

    Attributes:
        parameters: All parameters, by Hugging Face name.
        parts: State groups of the optimizer, with the parameters of each.
        optimizer: Optimizer of the trained parameters.
        schedule: Schedule of the optimizer's settings.
        model_parts: Group name -> parameters that are on the device only together with that group.
    """

    parameters: list[tuple[str, nn.Parameter]]
    parts: OptimizerParts
    optimizer: Optimizer
    schedule: Schedule
    model_parts: Mapping[str, Sequence[tuple[str, nn.Parameter]]]

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.parameters[0][1].device

    @property
    def groups(self) -> Sequence[str]:
        """State groups of the optimizer."""
        return list(self.parts.members)

    def model_tensors(self) -> dict[str, Tensor]:
        """Return parameters by their names in the checkpoint."""
        return {f"{contents.MODEL}{name}": parameter.detach() for name, parameter in self.parameters}

    def model_tensors_with(self, group: str) -> dict[str, Tensor]:
        """Return the parameters that are on the device with one group; the first group has all that are in no part."""
        mine = {f"{contents.MODEL}{name}" for name, _ in self.model_parts.get(group, ())}
        others = {f"{contents.MODEL}{name}" for part in self.model_parts.values() for name, _ in part}
        is_first = group == self.groups[0]
        return {
            name: it for name, it in self.model_tensors().items() if name in mine or (is_first and name not in others)
        }

    def optimizer_tensors(self, group: str) -> dict[str, Tensor]:
        """Return the states of one group by their names in the checkpoint."""
        state = self.optimizer.state
        return {
            f"{contents.OPTIMIZER}{name}/{key}": value
            for name, parameter in self.parts.members[group]
            # Not `state[parameter]`: that would make an entry.
            for key, value in (state[parameter].items() if parameter in state else ())
            if isinstance(value, Tensor)
        }

    def values(self) -> dict[str, Any]:
        """Return the state without tensors: the schedule's."""
        return {"num_steps": self.schedule.num_steps, "kept_by_optimizer": self.schedule.kept_by_optimizer()}

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Continue the schedule from these values."""
        self.schedule.go_on(values["num_steps"], values["kept_by_optimizer"])

    def make_optimizer_state(self, group: str, saved: Container[str]) -> None:
        """Make the optimizer allocate the states of one group."""
        state = self.optimizer.state
        # Parameters that were never trained have no states, neither here nor in the checkpoint.
        wanted = [
            parameter
            for name, parameter in self.parts.members[group]
            if contents.OPTIMIZER + name in saved and not state.get(parameter)
        ]
        make_states(self.optimizer, wanted)

    def rng_state(self) -> dict[str, Tensor]:
        """Return this rank's random states."""
        return contents.torch_rng_state(self.device)

    def set_rng_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore a result of `rng_state`."""
        contents.set_torch_rng_state(states, self.device)
