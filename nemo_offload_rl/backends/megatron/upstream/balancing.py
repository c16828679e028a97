"""Balancing of tokens over experts: auxiliary losses of routers, and biases for the choice of experts.

Megatron-core adds an auxiliary loss to the gradients of a backward pass as `coefficient * loss * tokens of the
micro-batch`, times a scale that a callback returns. The callback here divides by the step's tokens, which weighs each
micro-batch by its tokens. Sources: Switch Transformers (arXiv 2101.03961), DeepSeek-V3 (arXiv 2412.19437).
"""

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
    """Return whether training adds an auxiliary loss of the routers."""
    return cfg.moe_router_load_balancing_type != "none" and cfg.moe_aux_loss_coeff > 0


def num_tokens_of_step(micro_batches: Sequence[TokenBatch], device: torch.device) -> int:
    """Count the tokens of all data-parallel ranks without padding; a collective."""
    mine = sum(int(batch.input_lengths.sum()) for batch in micro_batches)
    return int(sum_over_ranks([mine], parallel.data_parallel_group(), device)[0])


def router_loss_scale(config: Any, num_tokens: int, device: torch.device) -> Tensor:
    """Return Megatron-core's factor for `loss * tokens of a micro-batch`.

    Args:
        config: Megatron's config, for the scale of the main loss.
        num_tokens: Number of tokens of the step.
        device: Device of the losses.
    """
    return config.grad_scale_func(torch.ones(1, device=device)) / num_tokens


def weigh_losses_by_real_tokens(chunks: Sequence[Any]) -> None:
    """Multiply each auxiliary loss by the number of its tokens, even if devices share rows.

    Each device that shares rows computes a loss of its part. Megatron-core 0.19.2 intends to multiply it by the part's
    tokens and the number of parts. But its count (`get_tokens_per_expert_and_token_count`) is summed over devices in
    place, so it covers all parts. A part's own count would be wrong too: padding at the end of rows makes parts differ.
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
    if router.training and torch.is_grad_enabled():  # otherwise there is neither a loss nor a padding mask
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
    """Call megatron-core's function with a count that gives the group's tokens when multiplied by the parts."""
    count = router.num_real_tokens.clone()
    if group.size() > 1:
        torch.distributed.all_reduce(count, group=group)
    options["valid_token_count"] = count / router.tp_cp_group.size()
    return attach(weights_TE, coefficient, loss, name, group, **options)


class ExpertBiases:
    """Biases of a model's experts, updated once in each step that is not skipped.

    Megatron-core would update them after each backward pass, and its count fails if padding is excluded. The biases are
    float32 buffers in the group `params`; checkpoints, refits and exports treat them like parameters.

    Args:
        chunks: The model.
        rate: Amount that an update adds or subtracts; 0 for no updates.
    """

    def __init__(self, chunks: Sequence[Any], rate: float) -> None:
        self._chunks = chunks
        self._rate = rate
        self._counts_LE: Tensor | None = None
        for router in self._routers():
            # Stops Megatron-core's own counts and updates; the bias is used in any case.
            router.enable_expert_bias, router.frozen_expert_bias = False, True
            if rate > 0:
                router.register_forward_hook(_count)

    def _routers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter) and module.expert_bias is not None:
                    yield module

    def collect(self) -> None:
        """Add the counts of a backward pass, before Megatron-core resets them."""
        counts = [router.local_tokens_per_expert for router in self._routers()] if self._rate > 0 else []
        if counts:
            counts_LE = torch.stack(counts)
            self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE

    @torch.no_grad()
    def update(self) -> None:
        """Update the biases by the counts of all ranks; a collective."""
        if self._counts_LE is None:
            return
        routers = list(self._routers())
        biases_LE = torch.stack([router.expert_bias for router in routers])
        moved_LE = get_updated_expert_bias(self._counts_LE, biases_LE, self._rate)
        for router, moved_E in zip(routers, moved_LE, strict=True):
            router.expert_bias.copy_(moved_E)

    def forget(self) -> None:
        """Drop all counts, including those of a pass that raised."""
        self._counts_LE = None
        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.reset_global_aux_loss_tracker()
                    if module.local_tokens_per_expert is not None:
                        module.local_tokens_per_expert.zero_()


def _count(router: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    """Count each expert's tokens without padding, once if recomputed and only in passes with gradients."""
    if not (router.training and torch.is_grad_enabled()):
        return
    is_chosen_TE, is_padding_LR = outputs[1].detach(), inputs[1]
    router.local_tokens_per_expert += (is_chosen_TE & ~is_padding_LR.reshape(-1, 1)).sum(dim=0)
