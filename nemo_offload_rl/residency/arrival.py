"""Arriving in the order of use: a forward pass starts while the parameters of its later layers are on their way.

Copies go in the order in which a forward pass first reads them, and before its own forward each layer has the device
wait for those up to its own. The host waits for none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import nn

from nemo_offload_rl.residency.storage import StorageRecord, unique_storages

if TYPE_CHECKING:
    from nemo_offload_rl.residency.group_state import GroupState


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


class LayerWaits:
    """Hooks that have each layer wait for its own parameters, whichever groups hold them.

    They come before the hooks that a layer has already: FSDP's reads the layer's parameters.

    Args:
        states: All groups of a worker.
    """

    def __init__(self, states: Iterable[GroupState]) -> None:
        self._layers: dict[nn.Module, list[tuple[GroupState, int]]] = {}
        for state in states:
            for place, layer in enumerate(state.group.layers, start=1):
                self._layers.setdefault(layer, []).append((state, place))
        self._hooks = [layer.register_forward_pre_hook(self._before, prepend=True) for layer in self._layers]

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, layer: nn.Module, inputs: tuple[object, ...]) -> None:
        late = [(state, place) for state, place in self._layers[layer] if state.is_arriving]
        for state, place in late:
            state.wait_arrival(place)
        if late:
            late[0][0].group.layer_arrived(layer)
