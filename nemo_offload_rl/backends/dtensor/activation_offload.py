"""Activations of decoder layers on the host between a micro-batch's forward and backward pass.

What autograd saves inside a layer leaves behind the next layer's forward, and comes back ahead of the layer's backward,
beside that of the layer above it. A storage crosses once, however many tensors of it are saved; parameters, and what
all layers are given (rotary angles, masks), stay. With activation checkpointing a layer saves nothing but its input,
which then is what moves. What comes back is bit for bit what left.

Hooks for saved tensors: https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from nemo_offload_rl.backends.host_buffers import (
    HostBufferPool,
    round_up,
    tokens_of_a_micro_batch,
)
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.residency import new_region_on

logger = logging.getLogger(__name__)

SMALLEST_BYTES = 1 << 20  # a copy below this size costs the host more time than the link
_SPARE = 1.5  # for a micro-batch whose graph still lives
_GIB = 2**30


class ActivationOffloading:
    """Hooks on the decoder layers of a model.

    Args:
        layers: In the order in which a pass runs them.
        fraction: The share of them, from the first on, whose activations leave. The last one's never do: its backward
            pass comes first.
        host_limit_bytes: Host memory that is taken at most. What does not fit there stays on the device.
        device: Where the model computes.
    """

    def __init__(
        self, layers: Sequence[nn.Module], fraction: float, host_limit_bytes: int, device: torch.device
    ) -> None:
        self._device = device
        self._link = _CudaLink(device) if device.type == "cuda" else _HostLink()
        self._pool = HostBufferPool(host_limit_bytes, new_region_on(device), self._link.synchronize)
        self._smallest_bytes = SMALLEST_BYTES if device.type == "cuda" else 0
        self._open: _LayerPass | None = None
        self._last: _LayerPass | None = None  # of this forward pass
        self._hooks: saved_tensors_hooks | None = None
        self._is_full = False
        self._unused: list[Tensor] = []  # buffers of graphs that are gone
        num_moved = num_offloaded_layers(len(layers), fraction)
        for layer in layers[:num_moved]:
            self._attach(layer, is_first=layer is layers[0])
        if num_moved:
            layers[num_moved].register_forward_hook(self._pass_on)

    @property
    def host_bytes(self) -> int:
        """Host memory that the buffers take."""
        return self._pool.total_bytes

    def close(self) -> None:
        """Give back the host memory of graphs that are gone."""
        self._last = None
        self._take_back()
        self._pool.close_free()

    def _attach(self, layer: Any, *, is_first: bool) -> None:
        if getattr(layer, "gradient_checkpointing", False):
            # A hook would run inside of what is computed again.
            checkpointed = layer._gradient_checkpointing_func

            def around(forward: Callable[..., Any], *args: Any) -> Any:
                with self._layer(layer, args[1:], is_first):
                    return checkpointed(forward, *args)

            layer._gradient_checkpointing_func = around
        else:
            layer.register_forward_pre_hook(partial(self._enter, is_first), with_kwargs=True)
            layer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, is_first: bool, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        previous = None if is_first else self._last
        self._open = _LayerPass(previous, self._link, (*layer.parameters(), *tree_iter((args[1:], kwargs))))
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def _leave(self, *_: Any) -> None:
        if self._open is None or self._hooks is None:
            return
        self._hooks.__exit__(None, None, None)
        left, self._open, self._hooks = self._open, None, None
        left.leave()
        if left.previous is not None:
            left.previous.free_device()
        self._last = left

    @contextmanager
    def _layer(self, layer: nn.Module, given: Iterable[Any], is_first: bool) -> Iterator[None]:
        self._enter(is_first, layer, (None, *given), {})
        try:
            yield
        finally:
            self._leave()

    def _pass_on(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        """After the first layer that keeps its activations: those before it have left, and come with its gradient."""
        if not torch.is_grad_enabled() or self._last is None:
            return
        last = self._last
        last.free_device()
        for value in tree_iter(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _grad: last.come())

    def _pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in a tensor's place; the tensor itself where it stays."""
        opened = self._open
        if opened is None or type(tensor) is not Tensor or tensor.device.type != self._device.type:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() <= self._smallest_bytes or isinstance(tensor._base, nn.Parameter):
            return tensor
        moved = opened.moved_of(storage)
        if moved is None and not opened.stays(storage):
            moved = self._begin(opened, storage)
        if moved is None:
            return tensor
        return _View(moved, tensor)

    def _take_back(self) -> None:
        while self._unused:
            self._pool.free(self._unused.pop())

    def _begin(self, opened: _LayerPass, storage: torch.UntypedStorage) -> _Moved | None:
        self._take_back()
        if not self._pool.has_room(storage.nbytes()):
            if not self._is_full:
                self._is_full = True
                logger.warning(
                    "Activations need more than %.2f GiB of host memory; what does not fit stays on the device. Raise "
                    "policy.dtensor_cfg.activation_offload_host_limit_gib to offload all of them.",
                    self._pool.limit_bytes / _GIB,
                )
            return None
        on_host = self._pool.allocate((storage.nbytes(),), torch.uint8)
        return opened.add(storage, on_host, self._unused)


class _Moved:
    """One storage of a layer's activations: on the device, in a host buffer, or both."""

    def __init__(self, of: _LayerPass, storage: torch.UntypedStorage, on_host: Tensor, unused: list[Tensor]) -> None:
        self.of = of
        self.on_device: Tensor | None = _bytes_of(storage)
        self.on_host = on_host
        # Kept for the pool: a graph may go at any time, in the middle of what the pool does too.
        weakref.finalize(self, unused.append, on_host).atexit = False


class _View:
    """Stands for one saved tensor."""

    def __init__(self, moved: _Moved, tensor: Tensor) -> None:
        self._moved, self._dtype = moved, tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        storage = self._moved.of.on_device(self._moved).untyped_storage()
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        return empty.set_(storage, self._offset, self._size, self._stride)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def _unpack(packed: Any) -> Tensor:
    return packed.tensor() if isinstance(packed, _View) else packed


class _LayerPass:
    """The storages that one layer saved in one forward pass.

    Args:
        previous: That of the layer before it.
        link: How bytes move.
        stay: Values with tensors that do not move.

    Attributes:
        previous: As given.
    """

    def __init__(self, previous: _LayerPass | None, link: _CudaLink | _HostLink, stay: Iterable[Any]) -> None:
        self.previous = previous
        self._next: weakref.ref[_LayerPass] | None = None
        if previous is not None:
            previous._next = weakref.ref(self)
        self._link = link
        tensors = (value for value in stay if isinstance(value, Tensor))
        self._staying = {_address(tensor) for tensor in tensors}
        self._saved: dict[int, _Moved] = {}  # by address, while the forward pass is in the layer
        self._moved: list[weakref.ref[_Moved]] = []  # autograd's graph holds them
        self._left: Any = None
        self._came: Any = None

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is a parameter's, or one of what all layers are given."""
        return storage.data_ptr() in self._staying

    def moved_of(self, storage: torch.UntypedStorage) -> _Moved | None:
        """What was begun for the storage."""
        return self._saved.get(storage.data_ptr())

    def add(self, storage: torch.UntypedStorage, on_host: Tensor, unused: list[Tensor]) -> _Moved:
        """Take a storage, which leaves when the layer ends.

        Args:
            storage: On the device.
            on_host: [bytes] where it goes.
            unused: Gets `on_host` when nothing can ask for the storage any more.
        """
        moved = _Moved(self, storage, on_host, unused)
        self._saved[storage.data_ptr()] = moved
        self._moved.append(weakref.ref(moved))
        return moved

    def leave(self) -> None:
        """Start the copies out; a layer that raised has none left by then."""
        pairs = [(moved.on_host, moved.on_device) for moved in self._saved.values() if moved.on_device is not None]
        self._left = self._link.copy_out(pairs)
        self._saved.clear()

    def free_device(self) -> None:
        """Let the next kernels have the device's memory, which wait for the copies; not in a backward pass."""
        if self._came is None:
            self._link.wait(self._left)
            self._drop()

    def on_device(self, moved: _Moved) -> Tensor:
        """The bytes of a storage where the backward pass reads them now; the layer before this one begins to come."""
        above = self._next() if self._next is not None else None
        if above is not None and above._came is not None:
            above._drop()  # its backward pass has ended
            above._came = None
        self.come()
        if self.previous is not None:
            self.previous.come()
        if moved.on_device is None:  # asked for a second time, after its layer's backward pass
            moved.on_device = torch.empty_like(moved.on_host, device=self._link.device)
            self._came = self._link.copy_in([(moved.on_device, moved.on_host)], self._left)
        self._link.wait(self._came)
        return moved.on_device

    def come(self) -> None:
        """Start the copies in, unless they were."""
        if self._came is not None:
            return
        pairs = []
        for moved in self._alive():
            if moved.on_device is None:
                moved.on_device = torch.empty_like(moved.on_host, device=self._link.device)
                pairs.append((moved.on_device, moved.on_host))
        self._came = self._link.copy_in(pairs, self._left)

    def _drop(self) -> None:
        for moved in self._alive():
            moved.on_device = None

    def _alive(self) -> Iterator[_Moved]:
        return (moved for reference in self._moved if (moved := reference()) is not None)


type _Pairs = Sequence[tuple[Tensor, Tensor]]
"""Where to, and where from."""


class _CudaLink:
    """Copies on a side stream for each direction; what it returns of a copy is an event."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy_out(self, pairs: _Pairs) -> torch.cuda.Event:
        """Copy what the compute stream has made."""
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        self._out.wait_stream(self._in)  # a buffer may have been read by a copy that is under way
        return self._copy(self._out, pairs)

    def copy_in(self, pairs: _Pairs, left: torch.cuda.Event) -> torch.cuda.Event:
        """Copy to memory that the compute stream may have used until now."""
        self._in.wait_stream(torch.cuda.current_stream(self.device))
        self._in.wait_event(left)
        return self._copy(self._in, pairs)

    def wait(self, event: torch.cuda.Event) -> None:
        """Have the compute stream wait."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def synchronize(self) -> None:
        """Wait for all copies."""
        self._out.synchronize()
        self._in.synchronize()

    @staticmethod
    def _copy(stream: torch.cuda.Stream, pairs: _Pairs) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return event


class _HostLink:
    """The same where main memory plays the device: copies have finished when they return."""

    device = torch.device("cpu")

    def copy_out(self, pairs: _Pairs) -> bool:
        """Copy."""
        for target, source in pairs:
            target.copy_(source)
        return True

    def copy_in(self, pairs: _Pairs, left: bool) -> bool:
        """Copy."""
        assert left
        return self.copy_out(pairs)

    def wait(self, event: bool) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def num_offloaded_layers(num_layers: int, fraction: float) -> int:
    """Of how many layers, from the first on, activations leave."""
    return math.ceil(fraction * (num_layers - 1))


def host_bytes_at_most(settings: PolicySettings, num_layers: int, hidden_size: int) -> int:
    """Host memory that activations can take: the limit, or what recomputed layers' inputs need where that is less.

    Args:
        settings: The policy's settings.
        num_layers: Of the model.
        hidden_size: Of the model.
    """
    config = settings.dtensor_cfg
    if not config.activation_offload:
        return 0
    limit_bytes = int(config.activation_offload_host_limit_gib * _GIB)
    if not config.activation_checkpointing:
        return limit_bytes
    element_bytes = 4 if settings.precision == "float32" else 2
    layer_bytes = tokens_of_a_micro_batch(settings) * hidden_size * element_bytes
    moved = num_offloaded_layers(num_layers, config.activation_offload_fraction)
    return min(limit_bytes, int(_SPARE * moved * round_up(layer_bytes)))


def _address(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]
