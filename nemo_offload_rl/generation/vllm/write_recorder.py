"""Records the memory that loading a tensor writes.

vLLM fuses, pads, shards and renames tensors, so names do not tell what was written. Every loader ends in a copy or a
fill, and those are recorded with their addresses.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

type Span = tuple[int, int]
"""Addresses of memory, from the first byte to the one after the last."""

_COPY = torch.ops.aten.copy_.default
_COUNTS_READS = ContextVar("counts_reads", default=True)
_FILLS = frozenset({torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default})


class WriteRecorder(TorchDispatchMode):
    """Records copies, and fills (which pad vocabularies), while it is active; ignores other writes."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: list[Span] = []
        self._num_read = 0

    def take(self) -> tuple[tuple[Span, ...], int]:
        """Return the spans written since the last call, and the number of elements that copies read."""
        taken = tuple(merged(self._spans)), self._num_read
        self._spans, self._num_read = [], 0
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _COPY:
            self._spans.extend(spans_of(args[0]))
            self._num_read += args[1].numel() if _COUNTS_READS.get() else 0
        elif func in _FILLS:
            self._spans.extend(spans_of(args[0]))
        return func(*args, **(kwargs or {}))


@contextmanager
def reads_not_counted() -> Iterator[None]:
    """Count no elements that copies in the `with` block read, since they were computed from others."""
    token = _COUNTS_READS.set(False)
    try:
        yield
    finally:
        _COUNTS_READS.reset(token)


def spans_of(tensor: Tensor) -> Iterator[Span]:
    """Yield the memory of a tensor's elements; a strided view has one span for each contiguous part."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        begin = tensor.data_ptr()
        yield begin, begin + tensor.numel() * tensor.element_size()
    else:
        for part in tensor.unbind():
            yield from spans_of(part)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Merge spans into ordered ones that neither overlap nor touch."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def gaps(tensor: Tensor, written: list[Span]) -> list[Span]:
    """List the parts of a tensor's memory that none of the merged spans covers."""
    missing: list[Span] = []
    for position, end in spans_of(tensor):
        for begin, stop in written[max(bisect_right(written, (position, position)) - 1, 0) :]:
            if begin >= end or position >= end:
                break
            if begin > position:
                missing.append((position, begin))
            position = max(position, stop)
        if position < end:
            missing.append((position, end))
    return missing
