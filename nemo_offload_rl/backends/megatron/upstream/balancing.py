"""How tokens are spread over experts: auxiliary losses of routers, and biases that choose experts.

Megatron-core adds an auxiliary loss to the gradients of a backward pass as `coefficient * loss * tokens of the
micro-batch`, multiplied by a scale that it asks for; with the number of a step's tokens below, each micro-batch counts
as many times as it has tokens. Sources: Switch Transformers (arXiv 2101.03961), DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from nemo_offload_rl.backends.megatron import parallel
from nemo_offload_rl.backends.ranks import sum_over_ranks
from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.keys.megatron import MegatronConfig


def adds_router_loss(cfg: MegatronConfig) -> bool:
    """Whether training adds an auxiliary loss of the routers."""
    return cfg.moe_router_load_balancing_type != "none" and cfg.moe_aux_loss_coeff > 0


def num_tokens_of_step(micro_batches: Sequence[TokenBatch], device: torch.device) -> int:
    """Tokens of all data-parallel ranks without padding; a collective."""
    mine = sum(int(batch.input_lengths.sum()) for batch in micro_batches)
    return int(sum_over_ranks([mine], parallel.data_parallel_group(), device)[0])


def router_loss_scale(config: Any, num_tokens: int, device: torch.device) -> Tensor:
    """What Megatron-core multiplies `loss * tokens of a micro-batch` by.

    Args:
        config: Megatron's, which knows the scale of the main loss.
        num_tokens: Of the step.
        device: Of the losses.
    """
    return config.grad_scale_func(torch.ones(1, device=device)) / num_tokens


def weigh_losses_by_real_tokens(chunks: Sequence[Any]) -> None:
    """Let auxiliary losses be multiplied by the tokens that they are of, whoever shares these.

    Devices that share rows have the loss of their parts. Megatron-core 0.19.2 means to multiply it by a part's tokens
    and the number of parts, but its count (`get_tokens_per_expert_and_token_count`) is that of all parts: the sum over
    devices is taken in place. One part's would not do either: where rows end in padding, parts differ.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                router: Any = module
                router.register_forward_pre_hook(_remember_tokens)
                router.attach_and_log_load_balancing_loss = partial(
                    _attach_loss, router, router.attach_and_log_load_balancing_loss
                )


def _remember_tokens(router: Any, inputs: tuple[Any, ...]) -> None:
    if router.training and torch.is_grad_enabled():  # else there is no loss, nor is padding known
        router.num_real_tokens = (~inputs[1]).sum().float()


def _attach_loss(
    router: Any,
    attach: Callable[..., Tensor],
    weights_TE: Tensor,
    coefficient: float,
    loss: Tensor,
    name: str,
    group: Any,
    **options: Any,
) -> Tensor:
    """Call megatron-core's with what gives the tokens of the loss's group, multiplied by the number of parts."""
    count = router.num_real_tokens.clone()
    if group.size() > 1:
        torch.distributed.all_reduce(count, group=group)
    options["valid_token_count"] = count / router.tp_cp_group.size()
    return attach(weights_TE, coefficient, loss, name, group, **options)


class ExpertBiases:
    """The biases of a model's experts, which are updated once a step, by steps that are not skipped.

    Megatron-core would update them behind each backward pass, and its own count fails where padding is left out. They
    are buffers of float32: of the group `params`, in checkpoints, refits and exports as parameters are.

    Args:
        chunks: The model.
        rate: What an update adds or takes; 0 for none.
    """

    def __init__(self, chunks: Sequence[Any], rate: float) -> None:
        self._chunks = chunks
        self._rate = rate
        self._counts_LE: Tensor | None = None
        for router in self._routers():
            # What Megatron-core asks before it counts and updates; the bias itself is used in any case.
            router.enable_expert_bias, router.frozen_expert_bias = False, True
            if rate > 0:
                router.register_forward_hook(_count)

    def _routers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter) and module.expert_bias is not None:
                    yield module

    def collect(self) -> None:
        """Take over what a backward pass counted, before Megatron-core forgets it."""
        counts = [router.local_tokens_per_expert for router in self._routers()] if self._rate > 0 else []
        if counts:
            counts_LE = torch.stack(counts)
            self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by the counts of all ranks; a collective."""
        if self._counts_LE is None:
            return
        routers = list(self._routers())
        biases_LE = torch.stack([router.expert_bias for router in routers])
        moved_LE = get_updated_expert_bias(self._counts_LE, biases_LE, self._rate)
        for router, moved_E in zip(routers, moved_LE, strict=True):
            router.expert_bias.copy_(moved_E)

    def forget(self) -> None:
        """Drop all counts, those of a pass that raised included."""
        self._counts_LE = None
        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.reset_global_aux_loss_tracker()
                    if module.local_tokens_per_expert is not None:
                        module.local_tokens_per_expert.zero_()


def _count(router: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    """Add the tokens of each expert, padding left out; not in passes without gradients, nor twice when recomputed."""
    if not (router.training and torch.is_grad_enabled()):
        return
    is_chosen_TE, is_padding_LR = outputs[1].detach(), inputs[1]
    router.local_tokens_per_expert += (is_chosen_TE & ~is_padding_LR.reshape(-1, 1)).sum(dim=0)
