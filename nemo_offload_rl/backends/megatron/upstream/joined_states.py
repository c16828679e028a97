"""Joins small optimizer states in a few storages, since each storage that moves takes host time.

A mixture of experts has tens of thousands of state tensors, three for each weight of each expert. The optimizer
allocates a storage for each, and updates them in place in any storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.residency import aligned

SMALL_BYTES = 32 << 20  # larger tensors are not joined: the copy costs as much as joining saves
JOINED_BYTES = 256 << 20  # most bytes of a joined storage, which exists together with the replaced ones for a moment

type _Place = tuple[dict[str, Any], str]
"""An optimizer's states of a parameter, and the name of one state."""


@torch.no_grad()
def join_states(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Move these parameters' small states, which are on the device, to joined storages; values do not change.

    Returns:
        True if any of the parameters has states.
    """
    small: dict[torch.dtype, list[_Place]] = defaultdict(list)
    has_states = False
    for parameter in parameters:
        # `state[parameter]` would create an entry.
        for key, value in optimizer.state.get(parameter, {}).items():
            has_states = True
            if type(value) is Tensor and value.dim() > 0 and value.is_contiguous() and 0 < value.nbytes < SMALL_BYTES:
                small[value.dtype].append((optimizer.state[parameter], key))
    for places in small.values():
        for some in joined_runs(places, lambda place: place[0][place[1]].nbytes):
            _join(some)
    return has_states


def joined_runs[T](items: Iterable[T], num_bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Divide items into runs of at most `JOINED_BYTES` with alignment; a larger item is a run of its own."""
    run: list[T] = []
    held_bytes = 0
    for item in items:
        num_bytes = aligned(num_bytes_of(item))
        if run and held_bytes + num_bytes > JOINED_BYTES:
            yield run
            run, held_bytes = [], 0
        run.append(item)
        held_bytes += num_bytes
    if run:
        yield run


def _join(places: Sequence[_Place]) -> None:
    tensors = [state[key] for state, key in places]
    size = tensors[0].element_size()
    joined = tensors[0].new_empty(sum(aligned(tensor.nbytes) for tensor in tensors) // size)
    views, offset = list[Tensor](), 0
    for tensor in tensors:
        views.append(joined[offset : offset + tensor.numel()].view(tensor.shape))
        offset += aligned(tensor.nbytes) // size
    torch._foreach_copy_(views, tensors)  # pyright: ignore[reportPrivateImportUsage]
    for (state, key), view in zip(places, views, strict=True):
        state[key] = view
