"""Parameters of one size, the states of each a part of a streamed optimizer, driven through steps as a worker is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toy_training import settings

from nemo_offload_rl.backends.optimizer_parts import divide_optimizer
from nemo_offload_rl.residency import (
    CpuDevice,
    Device,
    GradsGroup,
    Phase,
    Placement,
    ResidencyManager,
    StateGroup,
    optimizer_tensors,
    resolve_plan,
)
from nemo_offload_rl.residency.needs import RESERVE_BYTES

NUM_PARTS = 8
WIDTH = 64
PART_BYTES = 2 * 4 * WIDTH


class PartsTraining:
    """`NUM_PARTS` parameters under a manager; a step as a worker runs it.

    Args:
        device: Where they are.
        width: Elements of a parameter.
        torch_device: That device's name in torch.
    """

    def __init__(
        self,
        device: Device | None = None,
        *,
        streamed: bool = True,
        colocated: bool = True,
        width: int = WIDTH,
        torch_device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(width).to(torch_device)) for _ in range(NUM_PARTS)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2, fused=torch_device != "cpu")
        self.device = device or CpuDevice()
        named = [(str(index), parameter) for index, parameter in enumerate(self.parameters)]
        self.parts = divide_optimizer(named, lambda p: 2 * p.nbytes, len(named) if streamed else 0, 2 * 4 * width)
        self.manager = ResidencyManager(
            plan=resolve_plan(settings(offload_optimizer_states=streamed, colocated=colocated)),
            groups=[
                StateGroup("params", lambda: named),
                GradsGroup(lambda: named),
                *self.parts.groups(lambda some: optimizer_tensors(self.optimizer, lambda: some)),
            ],
            device=self.device,
        )
        self.names = list(self.parts.parts)
        self.num_steps = 0
        self.most_held = 0

    def backward(self) -> None:
        """One micro-batch, before which residency does what it does before the first."""
        generator = torch.Generator().manual_seed(self.num_steps)
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.numel(), generator=generator).to(parameter.device)
        self.manager.enter(Phase.TRAINING)
        self.manager.step_opened()
        # The account has the new gradients from here on.
        self.device.observe([r.storage for found in self.manager._groups.records().values() for r in found.values()])
        self.manager.prefetch(Phase.OPTIM_STEP)
        self.manager.release_finished()

    def optim_step(
        self, after_each=lambda members: None, *, before_refit: bool = False, before_update=lambda: None
    ) -> None:
        def look(members) -> None:
            self.most_held = max(self.most_held, self.held_parts())
            after_each(members)

        with self.manager.during(Phase.OPTIM_STEP), self.manager.writing_state():
            streamed = self.manager.streamed(before_refit=before_refit)
            before_update()
            self.parts.step(self.optimizer, streamed, look)
            self.optimizer.zero_grad(set_to_none=False)
        self.manager.step_closed()
        self.num_steps += 1

    def step(self) -> None:
        self.backward()
        self.optim_step()

    def held_parts(self) -> int:
        """Parts with memory on the device."""
        return sum(size > 0 for name, size in self.manager.device_bytes().items() if name in self.names)

    def on_device(self) -> list[int]:
        return [i for i, name in enumerate(self.names) if self.manager.location(name) is Placement.DEVICE]

    def contents(self) -> dict[str, torch.Tensor]:
        with self.manager.checkpoint_view():
            found = {f"{i}": p.detach().clone() for i, p in enumerate(self.parameters)}
            for i, p in enumerate(self.parameters):
                found |= {f"{i}/{key}": value.clone() for key, value in self.optimizer.state[p].items()}
            return found


def give_room(training: PartsTraining, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Have a CUDA device say that so many parts fit beside passes."""

    def room_bytes(_: int) -> int:
        return RESERVE_BYTES + (room + 1 - training.held_parts()) * PART_BYTES + PART_BYTES // 2

    monkeypatch.setattr(training.device, "room_bytes", room_bytes)
    monkeypatch.setattr(training.device, "drain_peak_bytes", lambda: 0)
