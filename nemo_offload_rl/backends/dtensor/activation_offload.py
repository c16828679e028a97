"""Offloads the inputs of recomputed layers to the host between a micro-batch's forward and backward pass.

With activation checkpointing a layer keeps only its input for the backward pass. The input is copied to the host while
the layer computes, and its device memory is free when the layer ends. It comes back unchanged during the backward pass
of the layer above. With 8 B parameters and 32,768 tokens this saves 8.2 GiB at no cost of speed
(docs/measurements/activations.md). Other activations are recomputed faster than they are copied.

Hooks for saved tensors: https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.residency import HostArena, HostBlock, ResidencyError, aligned, new_region_on

logger = logging.getLogger(__name__)

_SPARE = 1.5  # room for a previous micro-batch whose graph still exists
_GIB = 2**30


class ActivationOffloading:
    """Moves layer inputs between a device and its own host arena.

    Args:
        host_limit_bytes: Host memory to reserve at the first input. Inputs that do not fit stay on the device.
        device: The model's device.
    """

    def __init__(self, host_limit_bytes: int, device: torch.device) -> None:
        self.device = device
        self._limit_bytes = aligned(host_limit_bytes)
        self._arena = HostArena(new_region_on(device), self._limit_bytes)
        is_gpu = device.type == "cuda"
        self._out, self._in = (torch.cuda.Stream(device) if is_gpu else None for _ in range(2))
        self._last: weakref.ref[KeptInput] | None = None  # last input of the present forward pass
        self._unused: list[HostBlock] = []  # blocks of inputs that are no longer referenced
        self._is_full = False

    @property
    def host_bytes(self) -> int:
        """Bytes of reserved host memory."""
        return self._arena.reserved_bytes

    def close(self) -> None:
        """Free the host memory."""
        self._take_back()
        with suppress(ResidencyError):  # a failed pass's traceback may still hold its graph
            self._arena.close()

    def attach(self, layers: Sequence[Any]) -> None:
        """Hook into checkpointed layers, so that passes offload their inputs.

        The last layer's input stays: its backward pass comes first.

        Args:
            layers: Decoder layers of `transformers`, in order.
        """
        for index, layer in enumerate(layers):
            layer._gradient_checkpointing_func = partial(
                self._run,
                layer._gradient_checkpointing_func,
                is_first=index == 0,
                stays=index == len(layers) - 1,
            )

    def keep(self, hidden: Tensor, below: KeptInput | None, *, stays: bool) -> KeptInput:
        """Begin to copy a layer's input to the host.

        Args:
            hidden: The input.
            below: The input of the layer before, which `read` brings back early.
            stays: Keep this input on the device.
        """
        moves = not stays and hidden.is_contiguous() and hidden.device.type == self.device.type
        block = self._block_of(hidden.nbytes) if moves else None
        kept = KeptInput(hidden, below, self, block)
        if block is not None:
            # Only listed here: a graph may be freed at any time, even while the arena is at work.
            weakref.finalize(kept, self._unused.append, block).atexit = False
        return kept

    def _run(
        self,
        checkpointed: Callable[..., Any],
        forward: Callable[..., Any],
        hidden: Tensor,
        *args: Any,
        is_first: bool,
        stays: bool,
    ) -> Any:
        if not torch.is_grad_enabled():
            return checkpointed(forward, hidden, *args)
        below = None if is_first or self._last is None else self._last()
        kept = self.keep(hidden, below, stays=stays)
        self._last = weakref.ref(kept)

        with saved_tensors_hooks(partial(_pack, kept, hidden.data_ptr(), hidden.shape), _unpack):
            output = checkpointed(forward, hidden, *args)
        kept.release()
        return output

    def _block_of(self, num_bytes: int) -> HostBlock | None:
        self._take_back()
        if not self._arena.reserved_bytes:
            self._arena.reserve(self._limit_bytes)
        block = self._arena.try_alloc(num_bytes, "inputs of layers")
        if block is None and not self._is_full:
            self._is_full = True
            logger.warning(
                "Inputs of layers need more than %.2f GiB of host memory; what does not fit stays on the device. Raise "
                "policy.dtensor_cfg.activation_offload_host_limit_gib to offload all of them.",
                self._limit_bytes / _GIB,
            )
        return block

    def _take_back(self) -> None:
        while self._unused:
            self._arena.free(self._unused.pop())

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy between host and device after all work queued on the compute stream; the event marks the copy's end."""
        if self._out is None or self._in is None:
            target.copy_(source)
            return None
        stream, other = (self._in, self._out) if target.is_cuda else (self._out, self._in)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        stream.wait_stream(other)  # it may still use the host memory
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def wait(self, copied: torch.cuda.Event | None) -> None:
        """Make the compute stream wait for a copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)


class KeptInput:
    """The input of one layer in one micro-batch: on the device, on the host, or both.

    Args:
        hidden: The input, on the device.
        below: The input of the layer before, which begins to come back when this one is read.
        offloading: Moves the input.
        block: Host memory for the input; None if it stays on the device.
    """

    def __init__(
        self,
        hidden: Tensor,
        below: KeptInput | None = None,
        offloading: ActivationOffloading | None = None,
        block: HostBlock | None = None,
    ) -> None:
        self._on_device: Tensor | None = hidden
        self._below = below
        self._offloading = offloading
        self._on_host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        if block is not None and offloading is not None:
            self._on_host = block.buffer.view(hidden.dtype).view(hidden.shape)
            self._copied = offloading.copy(self._on_host, hidden.detach())

    def release(self) -> None:
        """Free the device memory for later kernels, once the layer has been queued."""
        if self._on_host is not None and self._offloading is not None:
            self._offloading.wait(self._copied)
            self._on_device = None

    def read(self) -> Tensor:
        """Return the input on the device, without keeping a reference, and begin to bring back the one below."""
        hidden = self._come()
        if self._below is not None:
            self._below._come()
        self.release()
        return hidden

    @torch.no_grad()
    def _come(self) -> Tensor:
        if self._on_device is None:
            assert self._on_host is not None and self._offloading is not None
            self._on_device = torch.empty_like(self._on_host, device=self._offloading.device)
            self._copied = self._offloading.copy(self._on_device, self._on_host)
        return self._on_device


def _pack(kept: KeptInput, address: int, shape: torch.Size, tensor: Tensor) -> Any:
    """Replace the input by its handle; autograd keeps this function, so it must not hold the input itself."""
    return kept if tensor.data_ptr() == address and tensor.shape == shape else tensor


def _unpack(packed: Any) -> Tensor:
    return packed.read() if isinstance(packed, KeptInput) else packed


def host_bytes_at_most(settings: PolicySettings, num_layers: int, hidden_size: int) -> int:
    """Return the most host bytes that layer inputs of a micro-batch can take, within the configured limit."""
    config = settings.dtensor_cfg
    if not config.activation_offload:
        return 0
    element_bytes = 4 if settings.precision == "float32" else 2
    layer_bytes = settings.most_train_tokens * hidden_size * element_bytes
    limit_bytes = int(config.activation_offload_host_limit_gib * _GIB)
    return min(limit_bytes, int(_SPARE * (num_layers - 1) * aligned(layer_bytes)))
