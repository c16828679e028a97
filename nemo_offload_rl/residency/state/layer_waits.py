"""A layer waits for the copies of its own parameters before its forward pass, and for no others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from nemo_offload_rl.residency.state.group_state import GroupState


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
