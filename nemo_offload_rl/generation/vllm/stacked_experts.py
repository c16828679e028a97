"""Experts that come stacked: one tensor a layer and projection instead of three for each expert.

What is sent, by either backend, for the experts of one layer, E of them with inner size I and hidden size H; the
place is the one that the family's checkpoints have, as `model.layers.0.mlp` or `model.layers.0.block_sparse_moe`:

| name | shape | of expert e |
|---|---|---|
| `<place>.experts.gate_up_proj` | [E, 2 I, H] | rows 0 to I: the gate's weight; the rest: the up projection's |
| `<place>.experts.down_proj` | [E, H, I] | the down projection's weight |

They are written into vLLM's fused parameters by one copy each, or two where tensor parallelism takes rows out of both
halves. vLLM's own loaders copy expert by expert: 18,432 copies for a model of 48 layers with 128 experts. Tensors of
single experts under the checkpoint's names are loaded as ever. Families whose experts have biases (gpt-oss) have their
own stacked layout in checkpoints too, which vLLM's loader of that family takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

GATE_UP, DOWN = "gate_up_proj", "down_proj"


class StackedExperts:
    """Writes stacked tensors into a model of vLLM.

    Args:
        model: This worker's part of it.
    """

    def __init__(self, model: nn.Module) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        self._layers: dict[str, Any] = {
            module.layer_name: module
            for module in model.modules()
            if isinstance(module, RoutedExperts) and not module.moe_config.has_bias
        }

    def takes(self, name: str) -> bool:
        """Whether a tensor of this name is written here."""
        place, _, own_name = name.rpartition(".")
        return own_name in (GATE_UP, DOWN) and place in self._layers

    @torch.no_grad()
    def load(self, name: str, stacked: Tensor) -> None:
        """Write this worker's experts, and its part of each.

        Args:
            name: One that `takes` knows.
            stacked: See the file header.

        Raises:
            ValueError: It has another shape.
        """
        place, _, own_name = name.rpartition(".")
        layer = self._layers[place]
        parallel, num_experts = layer.moe_config.moe_parallel_config, layer.global_num_experts
        halves, dim = (2, 1) if own_name == GATE_UP else (1, 2)  # inner sizes are split over tensor parallelism
        parameter = layer.w13_weight if own_name == GATE_UP else layer.w2_weight
        inner, hidden = layer.moe_config.intermediate_size, layer.moe_config.hidden_dim_unpadded
        wanted = (num_experts, 2 * inner, hidden) if own_name == GATE_UP else (num_experts, hidden, inner)
        if tuple(stacked.shape) != wanted:
            raise ValueError(f"its shape is {list(stacked.shape)} instead of {list(wanted)}")
        stacked = _taken(stacked, [expert for expert, _ in local_experts(layer)])
        if stacked.shape == parameter.shape:
            parameter.copy_(stacked)
            return
        # A padded parameter keeps its padding.
        parameter = parameter.narrow(3 - dim, 0, hidden)
        length, room = inner // parallel.tp_size, parameter.shape[dim] // halves
        for half in range(halves):
            source = stacked.narrow(dim, half * inner + parallel.tp_rank * length, length)
            parameter.narrow(dim, half * room, length).copy_(source)


def local_experts(layer: Any) -> Iterator[tuple[int, int]]:
    """(number in the model, number in this worker) of each expert that a worker holds of a layer (`RoutedExperts`)."""
    experts = layer.expert_map
    places = range(layer.global_num_experts) if experts is None else experts.tolist()
    return ((expert, local) for expert, local in enumerate(places) if local >= 0)


def _taken(stacked: Tensor, experts: list[int]) -> Tensor:
    """These experts, without a copy where they are neighbours."""
    if experts == list(range(experts[0], experts[0] + len(experts))):
        return stacked.narrow(0, experts[0], len(experts))
    return stacked[experts]
