"""Memory of one decoder layer's passes, from a run of the layer's own code on tensors without data.

The layer runs on the meta device, where results have shapes but take neither memory nor time. A dispatch mode sees
every operation, so that the most bytes that are alive at once are known, and the autograd graph tells what is kept for
the backward pass. `torch.compile` keeps less: what matrix products and attention save, and for everything else the
tensors from which it is computed again (checked in tests/unit/memory/test_passes.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Parts of the names of operations and autograd nodes that a compiler neither fuses nor repeats.
_HEAVY = ("mm", "attention", "attn", "matmul")


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of a layer's activations, without parameters and their gradients.

    Attributes:
        kept_bytes: Kept between forward and backward pass.
        forward_bytes: Most at once in a pass without gradients, the layer's input included.
        backward_bytes: Most at once in the backward pass in addition to `kept_bytes`, gradients of inputs and outputs
            included.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int


class _Operations(TorchDispatchMode):
    """Records operations, in order, and the most bytes of results that are alive at once.

    Args:
        ignored: Storages that do not count.
        ignored_shapes: Sorted shapes of results that do not count: gradients of parameters.
        keeps_all: Keep all results alive, so that each has a storage of its own.
    """

    def __init__(
        self, ignored: set[int], ignored_shapes: set[tuple[int, ...]] | None = None, *, keeps_all: bool = False
    ) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.records: list[tuple[str, list[int], list[int]]] = []  # name, storages of inputs, of new results
        self.sizes: dict[int, int] = {}
        self._live_bytes = 0
        self._ignored, self._ignored_shapes = ignored, ignored_shapes or set()
        self._all: list[Any] | None = [] if keeps_all else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [_key(it) for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
        made = [key for it in tree_leaves(result) if isinstance(it, Tensor) and (key := self.add(it)) is not None]
        if self._all is not None and made:
            self.records.append((str(func), given, made))
        return result

    def add(self, tensor: Tensor) -> int | None:
        """Count a tensor from now until it is freed; return its storage, None if it is counted or ignored already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes or key in self._ignored or tuple(sorted(tensor.shape)) in self._ignored_shapes:
            return None
        self.sizes[key] = storage.nbytes()
        self._live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        if self._all is not None:
            self._all.append(storage)
        else:
            weakref.finalize(storage, self._drop, key).atexit = False
        return key

    def _drop(self, key: int) -> None:
        self._live_bytes -= self.sizes.pop(key)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass
class LayerCall:
    """A call of a layer by its model.

    Attributes:
        layer: The layer, on the meta device in the compute type.
        hidden: Its input.
        args: Its other arguments.
        kwargs: Its arguments by keyword.
    """

    layer: nn.Module
    hidden: Tensor
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def run(self, hidden: Tensor) -> Tensor:
        """Return the layer's output."""
        result = self.layer(hidden, *self.args, **self.kwargs)
        return result[0] if isinstance(result, tuple) else result


def trace_layer(call: LayerCall, *, is_compiled: bool) -> LayerMemory:
    """Measure a layer's memory in passes with this input, whose number of tokens should be no size of the model.

    Args:
        call: The call.
        is_compiled: `torch.compile` compiles the layer.
    """
    layer, hidden = call.layer, call.hidden.detach()
    outside = {
        _key(it)
        for it in tree_leaves((list(layer.parameters()), list(layer.buffers()), call.args, call.kwargs))
        if isinstance(it, Tensor)
    }
    with _flash_attention():
        whole = _Operations(outside, keeps_all=True)
        given = hidden.clone().requires_grad_()
        with whole:
            whole.add(given)
            output = call.run(given)
        kept = _kept(output, whole, is_compiled=is_compiled)
        forward_bytes = _fused_bytes(whole, _key(given), _key(output)) if is_compiled else _forward_bytes(call, outside)
        kept_bytes = sum(whole.sizes[key] for key in kept)
        del output, given, whole
        return LayerMemory(kept_bytes, forward_bytes, _backward_bytes(call, outside))


@torch.no_grad()
def _forward_bytes(call: LayerCall, outside: set[int]) -> int:
    live = _Operations(outside)
    with live:
        hidden = torch.empty_like(call.hidden)
        call.run(hidden)
    return live.peak_bytes


def _backward_bytes(call: LayerCall, outside: set[int]) -> int:
    shapes = {tuple(sorted(it.shape)) for it in call.layer.parameters()}
    output = call.run(call.hidden.detach().clone().requires_grad_())
    live = _Operations(outside, shapes)
    for _, tensor in _saved(output):
        if _key(tensor) not in outside:
            live.add(tensor)
    del tensor
    kept_bytes = live.peak_bytes
    with live:
        output.backward(torch.empty_like(output))
    for parameter in call.layer.parameters():
        parameter.grad = None
    return live.peak_bytes - kept_bytes


def _saved(output: Tensor) -> Iterator[tuple[bool, Tensor]]:
    """Yield the tensors that autograd keeps for a result, and whether a product or attention keeps it."""
    seen: set[Any] = set()
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        is_heavy = any(word in node.name().lower() for word in _HEAVY) or hasattr(node, "saved_tensors")
        values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        values += list(getattr(node, "saved_tensors", ()))
        yield from ((is_heavy, it) for it in tree_leaves(values) if isinstance(it, Tensor))


def _kept(output: Tensor, operations: _Operations, *, is_compiled: bool) -> set[int]:
    saved = [(is_heavy, _key(it)) for is_heavy, it in _saved(output) if _key(it) in operations.sizes]
    if not is_compiled:
        return {key for _, key in saved}
    sources = _sources(operations)
    return set().union(*({key} if is_heavy else sources(key) for is_heavy, key in saved))


def _sources(operations: _Operations) -> Callable[[int], set[int]]:
    """Return a function: the smallest set of tensors from which a tensor can be computed without products."""
    sizes = operations.sizes
    known: dict[int, set[int]] = {}
    for name, given, made in operations.records:
        found = set().union(*(known.get(key, {key}) for key in given if key in sizes))
        for key in made:
            is_smaller = 2 * sizes[key] <= sum(sizes[source] for source in found)
            known[key] = {key} if _is_heavy(name) or is_smaller else found
    return lambda key: known.get(key, {key})


def _is_heavy(name: str) -> bool:
    return any(word in name for word in _HEAVY)


def _fused_bytes(operations: _Operations, given: int, output: int) -> int:
    """Return the most bytes at once of a compiled pass: only inputs and results of products and attention exist.

    A result takes the memory of a tensor of its size from which it is computed, if nothing else reads that tensor.
    """
    heavy = [(inputs, made) for name, inputs, made in operations.records if _is_heavy(name)]
    existing = {given, output}.union(*({*inputs, *made} for inputs, made in heavy)) & operations.sizes.keys()
    sources: dict[int, set[int]] = {given: {given}}
    steps: list[tuple[set[int], list[int]]] = []  # existing tensors that are read, and that are made
    for name, inputs, made in operations.records:
        read = set().union(*({key} if key in existing else sources.get(key, set()) for key in inputs))
        sources |= {key: {key} if key in existing else read for key in made}
        steps.append(
            (read, [key for key in made if key in existing]) if _is_heavy(name) or existing & {*made} else (set(), [])
        )
    last = {key: index for index, (read, _) in enumerate(steps) for key in read} | {
        given: len(steps),
        output: len(steps),
    }
    live, peak_bytes = {given}, operations.sizes[given]
    for index, ((read, made), (name, _, _)) in enumerate(zip(steps, operations.records, strict=True)):
        ending = {key for key in read if last[key] == index}
        if not _is_heavy(name):
            live -= ending
        live |= {*made}
        peak_bytes = max(peak_bytes, sum(operations.sizes[key] for key in live))
        live -= ending
    return peak_bytes


def live_bytes(run: Callable[[], object], module: nn.Module) -> int:
    """Return the bytes that are alive after `run` because its result or its backward pass needs them."""
    live = _Operations({_key(it) for it in (*module.parameters(), *module.buffers())})
    with live:
        result = run()
    num_bytes = sum(live.sizes.values())
    del result
    return num_bytes


@contextmanager
def _flash_attention() -> Iterator[None]:
    """Let torch's attention be the kernel that GPUs have, instead of the products of the meta device."""
    plain: Any = F.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if isinstance(attn_mask, Tensor):
            needs_grad = torch.is_grad_enabled()
            mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
            return torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, needs_grad, 0.0, False, scale=scale
            )[0]
        value_dim = value.shape[-1]
        value = F.pad(value, (0, query.shape[-1] - value_dim)) if value_dim != query.shape[-1] else value
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)[0][
            ..., :value_dim
        ]

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain
