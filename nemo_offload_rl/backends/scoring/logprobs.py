"""Logprobs of given tokens from logits, computed in fp32, with one chunk of logits alive at a time.

A `TokenStat` comes from the same pass over the logits, without gradient.

On a GPU the kernels of `logprob_kernels.py` read the logits in their own type, so no fp32 copy exists.

Shape suffixes: B samples, S positions, V vocabulary (V is this rank's part under tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_offload_rl.data.batch import LossNorm, TrainBatch
from nemo_offload_rl.keys.worker import TokenFilter
from nemo_offload_rl.protocols.loss import LossFn, ReferenceLoss, TokenStat
from nemo_offload_rl.protocols.vocab import VocabShard, is_drawn, without


class TokenScores(NamedTuple):
    """Scores of tokens, in float32 tensors of one shape.

    A tuple, since FSDP and Megatron search a model's result for tensors.

    Attributes:
        logprobs: With gradient; -inf, without gradient, for a token that the filter leaves out.
        stat: The requested `TokenStat`, without gradient; None if none was requested.
        whole: Logprobs over the whole vocabulary, with gradient; None if not requested, or if there is no filter, since
            `logprobs` are over it then.
    """

    logprobs: Tensor
    stat: Tensor | None
    whole: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> TokenScores:
        """Apply `change` to each tensor."""
        return TokenScores(*(None if value is None else change(value) for value in self))  # type: ignore[arg-type]


class _TokenScores(torch.autograd.Function):
    """Computes log softmax(logits / temperature)[targets] and the stat; saves the given logits, no fp32 copy."""

    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, targets_BS: Tensor, temperature: float, shard: VocabShard, stat: TokenStat | None
    ) -> tuple[Tensor, Tensor | None]:
        shifted_BSV = _scaled(logits_BSV, temperature)
        max_BS = shard.reduce(shifted_BSV.amax(dim=-1), dist.ReduceOp.MAX)
        shifted_BSV -= max_BS.unsqueeze(-1)
        local_BS = targets_BS - shard.start
        is_mine_BS = (local_BS >= 0) & (local_BS < logits_BSV.shape[-1])
        index_BS1 = local_BS.clamp(0, logits_BSV.shape[-1] - 1).unsqueeze(-1)
        picked_BS = shifted_BSV.gather(-1, index_BS1).squeeze(-1) * is_mine_BS
        picked_BS = shard.reduce(picked_BS, dist.ReduceOp.SUM)
        sum_BS = shard.reduce(shifted_BSV.exp_().sum(dim=-1), dist.ReduceOp.SUM)
        log_sum_BS = sum_BS.log()
        ctx.save_for_backward(logits_BSV, max_BS, log_sum_BS, index_BS1, is_mine_BS)
        ctx.temperature = temperature
        stat_BS = None
        if stat is TokenStat.ACCURACY:
            stat_BS = (picked_BS == 0).float()
        elif stat is TokenStat.ENTROPY:
            # -e log e in place, with e = exp(shifted logits): no second tensor of the logits' size.
            weighted_BS = torch.special.entr(shifted_BSV, out=shifted_BSV).sum(dim=-1)
            stat_BS = log_sum_BS + shard.reduce(weighted_BS, dist.ReduceOp.SUM) / sum_BS
        return _without_gradient(ctx, picked_BS - log_sum_BS, stat_BS)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_BSV, max_BS, log_sum_BS, index_BS1, is_mine_BS = ctx.saved_tensors
        grad_BS1 = grad_outputs[0].unsqueeze(-1)
        # Subtracts in the order of forward, so that large logits lose no digits.
        grad_BSV = _scaled(logits_BSV, ctx.temperature)
        grad_BSV -= max_BS.unsqueeze(-1)
        grad_BSV -= log_sum_BS.unsqueeze(-1)
        grad_BSV.exp_().mul_(-grad_BS1)
        grad_BSV.scatter_add_(-1, index_BS1, grad_BS1 * is_mine_BS.unsqueeze(-1))
        if ctx.temperature != 1.0:
            grad_BSV /= ctx.temperature
        return grad_BSV.to(logits_BSV.dtype), None, None, None, None


def _scaled(logits_BSV: Tensor, temperature: float) -> Tensor:
    """Return a new fp32 copy of the logits, divided by the temperature."""
    scaled = logits_BSV.to(torch.float32, copy=True)
    if temperature != 1.0:
        scaled /= temperature
    return scaled


def _without_gradient(ctx: Any, logprobs_BS: Tensor, stat_BS: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if stat_BS is not None:
        ctx.mark_non_differentiable(stat_BS)
    return logprobs_BS, stat_BS


class _FusedTokenScores(torch.autograd.Function):
    """`_TokenScores` by Triton kernels; backward overwrites the logits, so nothing else may use them."""

    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, targets_BS: Tensor, temperature: float, shard: VocabShard, stat: TokenStat | None
    ) -> tuple[Tensor, Tensor | None]:
        from nemo_offload_rl.backends.scoring.logprob_kernels import logit_stats

        logits_BSV = logits_BSV.contiguous()
        local_max_BS, local_sum_BS, picked_BS, weighted_BS = logit_stats(
            logits_BSV, targets_BS, temperature, shard.start, with_entropy=stat is TokenStat.ENTROPY
        )
        max_BS = shard.reduce(local_max_BS.clone(), dist.ReduceOp.MAX)
        below_BS = local_max_BS - max_BS
        sum_BS = shard.reduce(local_sum_BS * below_BS.exp(), dist.ReduceOp.SUM)
        log_sum_BS = sum_BS.log()
        picked_BS = shard.reduce(picked_BS, dist.ReduceOp.SUM)
        stat_BS = None
        if stat is TokenStat.ACCURACY:
            stat_BS = (picked_BS == max_BS).float()
        elif weighted_BS is not None:
            weighted_BS = (weighted_BS + local_sum_BS * below_BS) * below_BS.exp()
            stat_BS = log_sum_BS - shard.reduce(weighted_BS, dist.ReduceOp.SUM) / sum_BS
        ctx.save_for_backward(logits_BSV, targets_BS, max_BS, log_sum_BS)
        ctx.temperature, ctx.start = temperature, shard.start
        return _without_gradient(ctx, picked_BS - max_BS - log_sum_BS, stat_BS)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        from nemo_offload_rl.backends.scoring.logprob_kernels import logit_gradient_

        logits_BSV, targets_BS, max_BS, log_sum_BS = ctx.saved_tensors
        stats = (max_BS, log_sum_BS)
        grad = logit_gradient_(logits_BSV, targets_BS, stats, grad_outputs[0], ctx.temperature, ctx.start)
        return grad, None, None, None, None


def token_scores(
    logits_BSV: Tensor,
    targets_BS: Tensor,
    temperature: float,
    shard: VocabShard,
    *,
    stat: TokenStat | None = None,
    owns_logits: bool = False,
) -> TokenScores:
    """Compute the logprob of each target under softmax(logits / temperature), and a stat of that distribution.

    Args:
        logits_BSV: [B, S, V] any float type; this rank's vocabulary columns.
        targets_BS: [B, S] int64, ids in the whole vocabulary.
        temperature: The sampler's temperature, above 0.
        shard: The columns of `logits_BSV`.
        stat: Stat to measure too; None for none.
        owns_logits: Nothing else uses the logits, so on a GPU backward may overwrite them with the gradient.

    Returns:
        Tensors [B, S], equal on all ranks of `shard.group`.
    """
    if logits_BSV.is_cuda:
        if not owns_logits:
            logits_BSV = logits_BSV.clone()
        return TokenScores(*_FusedTokenScores.apply(logits_BSV, targets_BS, temperature, shard, stat))  # type: ignore[misc]
    return TokenScores(*_TokenScores.apply(logits_BSV, targets_BS, temperature, shard, stat))  # type: ignore[misc]


def drawn_scores(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature: float,
    shard: VocabShard,
    *,
    kept: TokenFilter | None,
    stat: TokenStat | None = None,
    with_whole: bool = False,
) -> TokenScores:
    """Compute `token_scores` over the tokens that a filter leaves; nothing else may use the logits.

    A token that the filter leaves out has probability 0: its logprob is -inf, without gradient. The engine can draw
    such a token, since rounding or older weights make its logits differ from the policy's.

    Args:
        logits_NV: This rank's columns; backward may write over them.
        targets_N: As for `token_scores`.
        temperature: As for `token_scores`.
        shard: As for `token_scores`.
        kept: The filter; None for the whole vocabulary.
        stat: Stat of the filtered distribution.
        with_whole: If there is a filter, also compute logprobs over the whole vocabulary.
    """
    if kept is None:
        return token_scores(logits_NV, targets_N, temperature, shard, stat=stat, owns_logits=True)
    is_drawn_NV = is_drawn(logits_NV, kept, temperature, shard)
    drawn = token_scores(without(logits_NV, is_drawn_NV), targets_N, temperature, shard, stat=stat, owns_logits=True)
    local_N, num_columns = targets_N - shard.start, logits_NV.shape[-1]
    is_mine_N = (local_N >= 0) & (local_N < num_columns)
    is_drawn_N = is_drawn_NV.gather(-1, local_N.clamp(0, num_columns - 1).unsqueeze(-1)).squeeze(-1) & is_mine_N
    is_drawn_N = shard.reduce(is_drawn_N.float(), dist.ReduceOp.SUM) > 0
    whole = token_scores(logits_NV, targets_N, temperature, shard, owns_logits=True).logprobs if with_whole else None
    return TokenScores(drawn.logprobs.masked_fill(~is_drawn_N, -torch.inf), drawn.stat, whole)


def chunked_scores(
    output_layer: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_size: int | None,
    shard: VocabShard,
    stat: TokenStat | None = None,
    kept: TokenFilter | None = None,
    with_whole: bool = False,
) -> TokenScores:
    """Compute the logprob of the target at each of N >= 0 positions, and a stat of the distribution there.

    With a `chunk_size`, logits exist for that many positions at a time, and backward computes them again.

    Args:
        output_layer: Maps hidden states of some positions to logits [..., V] of this rank's vocabulary columns.
        hidden: [N, ...] last hidden states.
        targets: [N, ...] int64 token ids.
        temperature: See `token_scores`.
        chunk_size: Positions per chunk; None takes all at once.
        shard: See `token_scores`.
        stat: See `token_scores`.
        kept: See `drawn_scores`.
        with_whole: See `drawn_scores`.

    Returns:
        Tensors in the shape of `targets`.
    """

    def score(chunk: tuple[Tensor, Tensor]) -> TokenScores:
        logits = output_layer(chunk[0])
        return drawn_scores(logits, chunk[1], temperature, shard, kept=kept, stat=stat, with_whole=with_whole)

    def score_again_in_backward(chunk: tuple[Tensor, Tensor]) -> TokenScores:
        return checkpoint(score, chunk, use_reentrant=False)  # pyright: ignore[reportReturnType]

    if chunk_size is None:
        return score((hidden, targets))
    chunks = zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    scores = [(score_again_in_backward if torch.is_grad_enabled() else score)(chunk) for chunk in chunks]
    return TokenScores(*(None if values[0] is None else torch.cat(values) for values in zip(*scores, strict=True)))  # type: ignore[arg-type]


def measured_loss(
    loss_fn: LossFn, scores_BS: TokenScores, batch: TrainBatch, norm: LossNorm
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute loss and metrics of a micro-batch, and its share of the mean of the loss's stat.

    Args:
        loss_fn: The loss.
        scores_BS: Tensors [B, S], with `loss_fn.token_stat`; 0 where nothing is scored.
        batch: The micro-batch.
        norm: Counts of the global batch.
    """
    if isinstance(loss_fn, ReferenceLoss):
        loss, metrics = loss_fn(scores_BS.logprobs, batch, norm, scores_BS.whole)
    else:
        loss, metrics = loss_fn(scores_BS.logprobs, batch, norm)
    measured = dict(metrics)
    if loss_fn.token_stat is not None:
        assert scores_BS.stat is not None
        share = (scores_BS.stat * batch.loss_mask).sum() / max(norm.num_valid_tokens, 1.0)
        measured[loss_fn.token_stat.value] = share
    return loss, measured
