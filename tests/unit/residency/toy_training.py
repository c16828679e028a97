"""A small model with tied weights and Adam, driven through phases: what the residency tests move."""

from __future__ import annotations

import torch
from torch import nn

from nemo_offload_rl.backends.optimizer_parts import divide_optimizer
from nemo_offload_rl.residency import (
    CpuDevice,
    Device,
    GradsGroup,
    Phase,
    ResidencyManager,
    ResidencySettings,
    StateGroup,
    optimizer_tensors,
    resolve_plan,
)

WIDTH = 16


class ToyModel(nn.Module):
    """Two tied linear layers, a norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))) * self.scale


def settings(**changes: bool | frozenset[str]) -> ResidencySettings:
    values = {"colocated": True, "use_pinned_optimizer_offload": True, "offload_optimizer_states_for_logprob": False}
    return ResidencySettings(**{**values, **changes})


class Training:
    """Model, optimizer and manager, with one training step as a worker runs it."""

    def __init__(
        self,
        device: Device | None = None,
        part_bytes: int | None = None,
        layered: bool = False,
        overlap: bool = True,
        read_dtype: torch.dtype | None = None,
        verify: bool = False,
        left_by_engine_bytes: int = 0,
        **changes: bool | frozenset[str],
    ) -> None:
        torch.manual_seed(0)
        self.model = ToyModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.data = torch.Generator().manual_seed(1)
        named = list(self.model.named_parameters())
        num = len(named) if settings(**changes).offload_optimizer_states else 0
        self.parts = divide_optimizer(named, lambda parameter: 2 * parameter.nbytes, num, part_bytes)
        self.manager = ResidencyManager(
            plan=resolve_plan(settings(**changes)),
            groups=[
                StateGroup(
                    "params",
                    lambda: [*self.model.named_parameters(), *self.model.named_buffers()],
                    layers=(self.model.first, self.model.norm) if layered else (),
                    read_dtype=read_dtype,
                ),
                GradsGroup(lambda: self.model.named_parameters()),
                *self.parts.groups(lambda some: optimizer_tensors(self.optimizer, lambda: some)),
            ],
            device=device or CpuDevice(),
            overlap=overlap,
            verify=verify,
            left_by_engine_bytes=left_by_engine_bytes,
        )

    @torch.no_grad()
    def outputs(self) -> torch.Tensor:
        """[4, WIDTH]: a forward pass over inputs that are always the same."""
        return self.model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))

    def backward(self) -> None:
        x = torch.randn(4, WIDTH, generator=self.data)
        self.model(x).square().mean().backward()
        self.manager.step_opened()

    def optim_step(self) -> None:
        with self.manager.during(Phase.OPTIM_STEP):
            self.manager.mark_written("params", "optimizer")
            self.parts.step(self.optimizer, self.manager.streamed())
            self.optimizer.zero_grad(set_to_none=False)
        self.manager.step_closed()

    def step(self) -> None:
        self.manager.enter(Phase.TRAINING)
        self.backward()
        self.optim_step()

    def state_as_read(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The model's state; parameters with the values that they have in `dtype`."""
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        state = self.model.state_dict()
        return {k: v.to(dtype).to(v.dtype) if k in names else v.clone() for k, v in state.items()}

    def contents(self) -> dict[str, torch.Tensor]:
        """Copies of everything that training has learned; on the device only."""
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            state |= {f"{name}/{key}": value.clone() for key, value in self.optimizer.state[parameter].items()}
        return state


def assert_bitwise_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name]), name
