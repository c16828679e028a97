"""Arriving in the order of use: a forward pass starts while the parameters of its later layers are on their way.

Copies go in the order in which a forward pass first reads them, and before its own forward each layer has the device
wait for those up to its own. The host waits for none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

from torch import nn
from torch.utils.hooks import RemovableHandle

from nemo_offload_rl.residency.storage import StorageRecord, unique_storages


def in_order_of_use(
    records: Mapping[int, StorageRecord], layers: Sequence[nn.Module]
) -> tuple[list[StorageRecord], list[int]]:
    """Storages in the order in which a forward pass first reads them.

    Args:
        records: Storages of one group, by key.
        layers: `StateGroup.layers`.

    Returns:
        The storages of no layer, then those of each layer in turn; and how many there are up to each of these points,
        `len(layers) + 1` numbers.
    """
    place_of: dict[int, int] = {}
    for place, layer in enumerate(layers, start=1):
        for key in unique_storages(layer.named_parameters()):
            place_of.setdefault(key, place)
    ordered = sorted(records.values(), key=lambda record: place_of.get(record.key, 0))
    num_at = Counter(place_of.get(record.key, 0) for record in ordered)
    return ordered, list(accumulate(num_at[place] for place in range(len(layers) + 1)))


def before_each(layers: Sequence[nn.Module], wait: Callable[[int], None]) -> list[RemovableHandle]:
    """Call `wait` before each forward of a layer, with the number of layers up to and including it.

    This comes before the hooks that a layer has already: FSDP's reads the layer's parameters.
    """
    return [
        layer.register_forward_pre_hook(partial(_wait_first, wait, place), prepend=True)
        for place, layer in enumerate(layers, start=1)
    ]


def _wait_first(wait: Callable[[int], None], place: int, layer: nn.Module, inputs: tuple[object, ...]) -> None:
    wait(place)
