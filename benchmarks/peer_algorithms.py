"""Peers' ways of moving optimizer state between a GPU and the host, each written from a reading of its source.

Every class has the same three calls: `prepare` is what a job can do before its first step, `offload` returns when the
memory is free for another process, `reload` when the state can be used. `state` maps names to device tensors; a class
may replace the tensors, since most of these algorithms do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from nemo_offload_rl.residency import (
    Phase,
    ResidencyManager,
    ResidencySettings,
    StateGroup,
    make_device,
    resolve_plan,
)

ALIGNMENT_BYTES = 512


class Algorithm:
    """Moves `state`. The base class has what most share: nothing to prepare."""

    source = ""

    def __init__(self, state: dict[str, Tensor], device: torch.device) -> None:
        self.state = state
        self.device = device

    def prepare(self) -> None:
        """Before the first step."""

    def offload(self) -> None:
        """Device to host."""
        raise NotImplementedError

    def reload(self) -> None:
        """Host to device."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def give_back(self) -> None:
        """Return cached memory to the driver."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class NemoOffloadRl(Algorithm):
    """This project: storages, one registered arena taken before the first step, side streams."""

    source = "nemo_offload_rl/residency"

    def prepare(self) -> None:
        settings = ResidencySettings(
            colocated=True, use_pinned_optimizer_offload=True, offload_optimizer_states_for_logprob=True
        )
        group = StateGroup("optimizer", lambda: self.state.items())
        self.manager = ResidencyManager(plan=resolve_plan(settings), groups=[group], device=make_device(self.device))
        self.manager.enter(Phase.TRAINING)
        self.manager.reserve({"optimizer": sum(-(-t.nbytes // 512) * 512 for t in self.state.values())})

    def offload(self) -> None:
        # In training the step has just written every byte: nothing may be saved by a copy that is still right.
        self.manager.mark_written("optimizer")
        self.manager.enter(Phase.GENERATION)

    def reload(self) -> None:
        self.manager.enter(Phase.OPTIM_STEP)
        self.synchronize()


class NemoRlHead(Algorithm):
    """Per tensor `.to("cpu")` into fresh pageable memory, synchronous."""

    source = "NVIDIA-NeMo/RL 7ea279abf megatron_policy_worker.py move_optimizer"

    def offload(self) -> None:
        for name in list(self.state):
            self.state[name] = self.state[name].to("cpu")
        self.give_back()

    def reload(self) -> None:
        for name in list(self.state):
            self.state[name] = self.state[name].to(self.device)
        self.synchronize()


class NemoRl2248(Algorithm):
    """One cached pinned buffer with aligned slices, non-blocking copies, one synchronisation; fresh device tensors."""

    source = "NVIDIA-NeMo/RL pull request 2248, coalesced"

    def __init__(self, state: dict[str, Tensor], device: torch.device) -> None:
        super().__init__(state, device)
        self.buffer: Tensor | None = None

    def offload(self) -> None:
        offsets, total = {}, 0
        for name, tensor in self.state.items():
            offsets[name] = total
            total += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self.buffer is None or self.buffer.numel() < total:
            self.buffer = torch.empty(total, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for name, tensor in list(self.state.items()):
            raw = self.buffer[offsets[name] : offsets[name] + tensor.nbytes]
            host = raw.view(tensor.dtype).view(tensor.shape)
            host.copy_(tensor, non_blocking=True)
            self.state[name] = host
        self.synchronize()
        self.give_back()

    def reload(self) -> None:
        for name in list(self.state):
            self.state[name] = self.state[name].to(self.device, non_blocking=True)
        self.synchronize()


class Verl(Algorithm):
    """Per tensor `.to("cpu", non_blocking=True)`, which pins a fresh tensor inside torch."""

    source = "verl 1dda039b9 utils/megatron_utils.py offload_megatron_optimizer"

    def offload(self) -> None:
        for name in list(self.state):
            self.state[name] = self.state[name].to("cpu", non_blocking=True)
        self.synchronize()
        self.give_back()

    def reload(self) -> None:
        for name in list(self.state):
            self.state[name] = self.state[name].to(self.device, non_blocking=True)
        self.synchronize()


class DeepSpeed(Algorithm):
    """Masters as one flat pinned buffer, Adam's states in a pinned buffer each, all kept; fresh device tensors."""

    source = "DeepSpeed edaa72212 runtime/zero/stage3.py offload_states, offload_states.py"

    def __init__(self, state: dict[str, Tensor], device: torch.device) -> None:
        super().__init__(state, device)
        self.host: dict[str, Tensor] = {}

    def offload(self) -> None:
        pin = self.device.type == "cuda"
        if not self.host:
            masters = {name: tensor for name, tensor in self.state.items() if name.startswith("master/")}
            flat = torch.empty(sum(t.numel() for t in masters.values()), dtype=torch.float32, pin_memory=pin)
            names, offset = set(masters), 0
            del masters  # it would keep device memory through the first cycle
            for name, tensor in self.state.items():
                if name in names:
                    self.host[name] = flat[offset : offset + tensor.numel()].view(tensor.shape)
                    offset += tensor.numel()
                else:
                    self.host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        for name in list(self.state):
            self.host[name].copy_(self.state[name], non_blocking=True)
            self.state[name] = self.host[name]
        self.synchronize()
        self.give_back()

    def reload(self) -> None:
        for name in list(self.state):
            self.state[name] = self.host[name].to(self.device, non_blocking=True)
        self.synchronize()


class MegatronCore(Algorithm):
    """Per tensor `.cpu()` and `.cuda()`; masters through `p.data`."""

    source = "megatron-core 0.19.2 core/optimizer/optimizer.py offload_to_cpu, restore_from_cpu"

    def offload(self) -> None:
        for name in list(self.state):
            if name.startswith("master/"):
                self.state[name].data = self.state[name].data.cpu()
            else:
                self.state[name] = self.state[name].cpu()
        self.give_back()

    def reload(self) -> None:
        for name in list(self.state):
            if name.startswith("master/"):
                self.state[name].data = self.state[name].data.to(self.device)
            else:
                self.state[name] = self.state[name].to(self.device)
        self.synchronize()


class TorchMemorySaver(Algorithm):
    """The real package: state allocated in a region with host backup, `pause` and `resume`."""

    source = "torch_memory_saver 0.0.10"
    retain = False

    def prepare(self) -> None:
        from torch_memory_saver import torch_memory_saver  # type: ignore[import-not-found]

        self.saver = torch_memory_saver
        if self.retain:
            self.saver.retain_cpu_backup = True

    def offload(self) -> None:
        self.synchronize()
        self.saver.pause()

    def reload(self) -> None:
        self.saver.resume()
        self.synchronize()


class TorchMemorySaverRetained(TorchMemorySaver):
    """The same with the host backup kept between pauses."""

    retain = True


ALGORITHMS: dict[str, Callable[[dict[str, Tensor], torch.device], Algorithm]] = {
    "nemo_offload_rl": NemoOffloadRl,
    "nemo_rl_head": NemoRlHead,
    "nemo_rl_2248": NemoRl2248,
    "verl": Verl,
    "deepspeed": DeepSpeed,
    "megatron_core": MegatronCore,
    "torch_memory_saver": TorchMemorySaver,
    "torch_memory_saver_retained": TorchMemorySaverRetained,
}
