"""Router replay: Megatron's routers use given experts, and weigh them as their family does.

Megatron-core 0.19.2 asks a router's `RouterReplay` for the experts. Its own class needs to be told of each pass and of
each recomputation, knows no tokens without routing, and keeps every router in a global list.

Shape suffixes: T tokens of this rank's routers, D decoder layers, K experts per token, E experts of a layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from nemo_offload_rl.data.batch import routing_or

_NO_BACKWARD = -1


class ReplayedExperts:
    """Makes the routers of a model's chunks use the experts that `use` gets, and until then their own choice."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._replays: list[tuple[int, RouterReplay]] = []
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    assert module.layer_number is not None
                    module.router_replay = _GivenExperts()
                    self._replays.append((module.layer_number - 1, module.router_replay))

    def use(self, experts_TDK: Tensor, *, is_computed_again: bool) -> None:
        """Use these experts in the next forward pass.

        With `is_computed_again`, recomputations in backward passes use them too, in the order of the forward passes.
        """
        for layer, replay in self._replays:
            replay.set_target_indices(experts_TDK[:, layer])
            if not is_computed_again:
                replay.replay_backward_list.clear()

    def forget(self) -> None:
        """Let routers choose again."""
        for _, replay in self._replays:
            replay.clear_indices()


class _GivenExperts(RouterReplay):
    def __init__(self) -> None:
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return [T, K] scores and indices of the given experts, for scores [T, E]."""
        assert default_compute_topk is not None
        values_TK, own_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.target_topk_idx is None:
            return values_TK, own_TK
        is_computed_again = torch._C._current_graph_task_id() != _NO_BACKWARD
        given_TK = self.replay_backward_list.pop(0) if is_computed_again else self.target_topk_idx
        experts_TK = routing_or(given_TK, own_TK)
        return scores.gather(1, experts_TK), experts_TK
