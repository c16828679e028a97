"""Router replay: the mixtures of a Hugging Face model use given experts, and weigh them as their family does.

The routers of all families choose with `torch.topk` over a token's scores of all experts, and take from its result
either the values or the indices to look up other scores. So one replacement of that result serves all families.

Shape suffixes: T tokens of the model's input, D decoder layers, K experts per token, E experts of a layer.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nemo_offload_rl.backends.dtensor.experts import has_stacked_experts
from nemo_offload_rl.data.batch import routing_or
from nemo_offload_rl.models.shape import ModelShape

_TOP_K = (torch.topk, Tensor.topk)


class ReplayedExperts:
    """Makes a model's mixtures use the experts that `use` gets.

    The experts stay in use for the backward pass, in which layers may be computed again.

    Args:
        layers: The decoder layers.
        config: The model's config.
    """

    def __init__(self, layers: nn.ModuleList, config: Any) -> None:
        self._experts_TDK: Tensor | None = None
        self._num_experts = ModelShape.of(config.to_dict()).num_experts
        for index, layer in enumerate(layers):
            for block in _mixtures(layer):
                block.forward = partial(self._forward, block.forward, index)

    def use(self, experts_TDK: Tensor | None) -> None:
        """Use these experts in all passes from now on; None for the model's own choice."""
        self._experts_TDK = experts_TDK

    def _forward(self, forward: Any, index: int, *args: Any, **kwargs: Any) -> Any:
        if self._experts_TDK is None:
            return forward(*args, **kwargs)
        with _GivenExperts(self._experts_TDK[:, index], self._num_experts) as given:
            result = forward(*args, **kwargs)
        if given.num_choices != 1:
            raise RuntimeError(f"layer {index} chose experts {given.num_choices} times instead of once")
        return result


def _mixtures(layer: nn.Module) -> list[Any]:
    """Return the modules of a layer that choose experts."""
    has_experts = (module for module in layer.modules() if any(map(has_stacked_experts, module.children())))
    return [*has_experts, *(module for module in layer.modules() if type(module).__name__ == "GraniteMoeHybridMoE")]


class _GivenExperts(TorchFunctionMode):
    """Replaces the result of a router's `topk` within the context."""

    def __init__(self, experts_TK: Tensor, num_experts: int) -> None:
        super().__init__()
        self.num_choices = 0
        self._experts_TK = experts_TK
        self._num_experts = num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOP_K or found.indices.shape != self._experts_TK.shape:
            return found
        scores_TE = args[0]
        if scores_TE.shape[-1] != self._num_experts:  # a choice of groups of experts
            return found
        self.num_choices += 1
        experts_TK = routing_or(self._experts_TK, found.indices)
        return torch.return_types.topk((scores_TE.gather(-1, experts_TK), experts_TK))
