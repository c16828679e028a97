"""What a checkpoint of the DTensor backend holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nemo_offload_rl.policy.backends import dcp
from nemo_offload_rl.residency import local_tensor


@dataclass(frozen=True)
class DTensorState:
    """Implements `dcp.TrainingState`; tensors are whole ones to the checkpoint, however they are sharded.

    Attributes:
        parameters: By Hugging Face name.
        optimizer: Over these parameters.
        scheduler: Of its learning rate.
    """

    parameters: list[tuple[str, nn.Parameter]]
    optimizer: Optimizer
    scheduler: LRScheduler | None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0][1].device

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer states by their names in the checkpoint."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters}
        found: dict[str, Tensor] = {f"model/{name}": parameter.detach() for name, parameter in self.parameters}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    found[f"{dcp.OPTIMIZER}{names[parameter]}/{key}"] = value
        return found

    def values(self) -> dict[str, Any]:
        """What is no tensor: the optimizer's settings and the schedule."""
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        return {"param_groups": groups, "scheduler": self.scheduler.state_dict() if self.scheduler else None}

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Take over the optimizer's settings and the schedule."""
        for group, saved in zip(self.optimizer.param_groups, values["param_groups"], strict=True):
            group.update(saved)
        if self.scheduler is not None and values["scheduler"] is not None:
            self.scheduler.load_state_dict(values["scheduler"])

    def make_optimizer_state(self) -> None:
        """Have the optimizer allocate its state, by a step that changes nothing."""
        if self.optimizer.state:
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

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
