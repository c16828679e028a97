"""Logprobs of given tokens from logits, computed in fp32, with one chunk of logits alive at a time.

On a GPU the kernels of `logprob_kernels.py` read the logits as they are, so that they never exist in fp32.

Shape suffixes: B samples, S positions, V vocabulary (V is this rank's part under tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class VocabShard:
    """Which rows of the output layer this rank has; `group` is None where it has all of them."""

    start: int
    group: dist.ProcessGroup | None

    def reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """`value` reduced in place over the ranks that share the vocabulary."""
        if self.group is not None:
            dist.all_reduce(value, op=op, group=self.group)
        return value


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[targets]; saves the logits as they came, not an fp32 copy."""

    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, targets_BS: Tensor, temperature: float, shard: VocabShard) -> Tensor:
        shifted_BSV = _scaled(logits_BSV, temperature)
        max_BS = shard.reduce(shifted_BSV.amax(dim=-1), dist.ReduceOp.MAX)
        shifted_BSV -= max_BS.unsqueeze(-1)
        local_BS = targets_BS - shard.start
        is_mine_BS = (local_BS >= 0) & (local_BS < logits_BSV.shape[-1])
        index_BS1 = local_BS.clamp(0, logits_BSV.shape[-1] - 1).unsqueeze(-1)
        picked_BS = shifted_BSV.gather(-1, index_BS1).squeeze(-1) * is_mine_BS
        picked_BS = shard.reduce(picked_BS, dist.ReduceOp.SUM)
        log_sum_BS = shard.reduce(shifted_BSV.exp_().sum(dim=-1), dist.ReduceOp.SUM).log_()
        ctx.save_for_backward(logits_BSV, max_BS, log_sum_BS, index_BS1, is_mine_BS)
        ctx.temperature = temperature
        return picked_BS - log_sum_BS

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        logits_BSV, max_BS, log_sum_BS, index_BS1, is_mine_BS = ctx.saved_tensors
        grad_BS1 = grad_outputs[0].unsqueeze(-1)
        # The same subtractions in the same order as forward, so that large logits lose no digits.
        grad_BSV = _scaled(logits_BSV, ctx.temperature)
        grad_BSV -= max_BS.unsqueeze(-1)
        grad_BSV -= log_sum_BS.unsqueeze(-1)
        grad_BSV.exp_().mul_(-grad_BS1)
        grad_BSV.scatter_add_(-1, index_BS1, grad_BS1 * is_mine_BS.unsqueeze(-1))
        if ctx.temperature != 1.0:
            grad_BSV /= ctx.temperature
        return grad_BSV.to(logits_BSV.dtype), None, None, None


def _scaled(logits_BSV: Tensor, temperature: float) -> Tensor:
    """A fresh fp32 copy of the logits, divided by the temperature."""
    scaled = logits_BSV.to(torch.float32, copy=True)
    if temperature != 1.0:
        scaled /= temperature
    return scaled


class _FusedTokenLogprobs(torch.autograd.Function):
    """The same by Triton kernels. The logits' memory becomes the gradient's: only for logits that nobody else has."""

    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, targets_BS: Tensor, temperature: float, shard: VocabShard) -> Tensor:
        from nemo_offload_rl.policy.backends.logprob_kernels import logit_stats

        logits_BSV = logits_BSV.contiguous()
        local_max_BS, sum_BS, picked_BS = logit_stats(logits_BSV, targets_BS, temperature, shard.start)
        max_BS = shard.reduce(local_max_BS.clone(), dist.ReduceOp.MAX)
        log_sum_BS = shard.reduce(sum_BS * (local_max_BS - max_BS).exp_(), dist.ReduceOp.SUM).log_()
        picked_BS = shard.reduce(picked_BS, dist.ReduceOp.SUM)
        ctx.save_for_backward(logits_BSV, targets_BS, max_BS, log_sum_BS)
        ctx.temperature, ctx.start = temperature, shard.start
        return picked_BS - max_BS - log_sum_BS

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        from nemo_offload_rl.policy.backends.logprob_kernels import logit_gradient_

        logits_BSV, targets_BS, max_BS, log_sum_BS = ctx.saved_tensors
        stats = (max_BS, log_sum_BS)
        grad = logit_gradient_(logits_BSV, targets_BS, stats, grad_outputs[0], ctx.temperature, ctx.start)
        return grad, None, None, None


def token_logprobs(
    logits_BSV: Tensor, targets_BS: Tensor, temperature: float, shard: VocabShard, *, owns_logits: bool = False
) -> Tensor:
    """Logprob of each target under softmax(logits / temperature).

    Args:
        logits_BSV: [B, S, V] any float type; this rank's vocabulary columns.
        targets_BS: [B, S] int64, ids in the whole vocabulary.
        temperature: What the sampler divided its logits by; above 0.
        shard: Which columns these are.
        owns_logits: Nobody else uses the logits: on a GPU backward may write the gradient over them.

    Returns:
        [B, S] float32, equal on all ranks of `shard.group`.
    """
    if logits_BSV.is_cuda:
        if not owns_logits:
            logits_BSV = logits_BSV.clone()
        return _FusedTokenLogprobs.apply(logits_BSV, targets_BS, temperature, shard)  # type: ignore[return-value]
    return _TokenLogprobs.apply(logits_BSV, targets_BS, temperature, shard)  # type: ignore[return-value]


def chunked_logprobs(
    output_layer: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_size: int | None,
    shard: VocabShard,
) -> Tensor:
    """Logprob of the target at each of N positions, which may be none at all.

    With a `chunk_size`, logits exist for that many positions at a time, and backward computes them again.

    Args:
        output_layer: Hidden states of some positions to logits of this rank's vocabulary columns, of the shape of
            their `targets` and V.
        hidden: [N, ...] last hidden states.
        targets: [N, ...] int64 token ids.
        temperature: See `token_logprobs`.
        chunk_size: Positions per chunk; None takes all at once.
        shard: See `token_logprobs`.

    Returns:
        float32 in the shape of `targets`.
    """

    def score(chunk: tuple[Tensor, Tensor]) -> Tensor:
        return token_logprobs(output_layer(chunk[0]), chunk[1], temperature, shard, owns_logits=True)

    def score_again_in_backward(chunk: tuple[Tensor, Tensor]) -> Tensor:
        return checkpoint(score, chunk, use_reentrant=False)  # pyright: ignore[reportReturnType]

    if chunk_size is None:
        return score((hidden, targets))
    chunks = zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    return torch.cat([(score_again_in_backward if torch.is_grad_enabled() else score)(chunk) for chunk in chunks])
