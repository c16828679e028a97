"""Divergence of a student's next-token distribution from a teacher's, from the student's logits, with gradient.

With s and t the student's and the teacher's probabilities at one position and w the weight of the forward KL, the
divergence is w * KL(t || s) + (1 - w) * KL(s || t). The teacher is given
- by its top-k logprobs and their tokens: student and teacher are renormalized over these tokens, or, with
  `zero_outside_topk`, the student keeps its probabilities and the teacher has `OUTSIDE_LOGPROB` everywhere else, as in
  NeMo-RL's `DistillationLossFn`;
- by its logits over the whole vocabulary, for one chunk of positions.
w = 1 and w = 0 are beta = 0 and beta = 1 of generalized knowledge distillation (arXiv 2306.13649).

Shape suffixes: N positions (any number of dimensions), V this rank's part of the vocabulary, K tokens of a top-k. All
ranks that share a vocabulary get the same values; each gets the gradient of its own columns.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_offload_rl.backends.ranks import sum_over
from nemo_offload_rl.protocols.loss import Divergence
from nemo_offload_rl.protocols.vocab import VocabShard

OUTSIDE_LOGPROB = -100.0
"""The teacher's logprob outside of its top-k with `zero_outside_topk`: a finite stand-in for log 0."""


class TopK(NamedTuple):
    """A teacher's most likely tokens, the likeliest first.

    Attributes:
        logprobs: [N, K] float32, normalized over the whole vocabulary.
        ids: [N, K] int32.
    """

    logprobs: Tensor
    ids: Tensor


def vocab_log_softmax(logits_NV: Tensor, temperature: float, shard: VocabShard) -> Tensor:
    """Return [N, V] float32 logprobs of this rank's columns, a new tensor without gradient."""
    scaled_NV = logits_NV.to(torch.float32, copy=True)
    if temperature != 1.0:
        scaled_NV /= temperature
    return scaled_NV.sub_(_logsumexp(scaled_NV, shard).unsqueeze(-1))


@torch.no_grad()
def topk_logprobs(logits_NV: Tensor, k: int, temperature: float, shard: VocabShard) -> TopK:
    """Return the k most likely tokens of the whole vocabulary, which must have at least k."""
    local = logits_NV.float().topk(min(k, logits_NV.shape[-1]), dim=-1)
    values_NK, ids_NK = local.values / temperature, local.indices + shard.start
    sum_N = _logsumexp(logits_NV.float() / temperature, shard)
    if shard.group is not None:
        # The first k of all are among the first k of their shards.
        values_NK, ids_NK = (shard.side_by_side(value) for value in (values_NK, ids_NK))
        values_NK, places_NK = values_NK.topk(k, dim=-1)
        ids_NK = ids_NK.gather(-1, places_NK)
    return TopK(values_NK - sum_N.unsqueeze(-1), ids_NK.to(torch.int32))


def topk_divergence(
    logits_NV: Tensor, teacher: TopK, divergence: Divergence, temperature: float, shard: VocabShard
) -> Tensor:
    """Return [N] float32 divergence from a teacher whose top-k is known, with gradient."""
    teacher_NK = teacher.logprobs.log_softmax(-1)
    if divergence.zero_outside_topk:
        local_NK = teacher.ids.long() - shard.start
        is_mine_NK = (local_NK >= 0) & (local_NK < logits_NV.shape[-1])
        # Tokens of other ranks go into an extra column, which is dropped.
        places_NK = torch.where(is_mine_NK, local_NK, logits_NV.shape[-1])
        shape = (*logits_NV.shape[:-1], logits_NV.shape[-1] + 1)
        padded = logits_NV.new_full(shape, OUTSIDE_LOGPROB, dtype=torch.float32).scatter_(-1, places_NK, teacher_NK)
        return _dense_divergence(logits_NV, padded[..., :-1], divergence, temperature, shard)
    student_NK = _picked(logits_NV, teacher.ids.long(), temperature, shard).log_softmax(-1)
    difference_NK, weight = student_NK - teacher_NK, divergence.forward_weight
    terms_NK = (1 - weight) * student_NK.exp() * difference_NK - weight * teacher_NK.exp() * difference_NK
    return terms_NK.sum(-1)


def full_divergence(
    logits_NV: Tensor,
    teacher_NV: Tensor,
    divergence: Divergence,
    temperature: float,
    shard: VocabShard,
    *,
    teacher_temperature: float,
) -> Tensor:
    """Return [N] float32 divergence from a teacher's logits of the same columns, with gradient."""
    teacher_NV = vocab_log_softmax(teacher_NV, teacher_temperature, shard)
    return _dense_divergence(logits_NV, teacher_NV, divergence, temperature, shard)


def _dense_divergence(
    logits_NV: Tensor, teacher_NV: Tensor, divergence: Divergence, temperature: float, shard: VocabShard
) -> Tensor:
    return _DenseDivergence.apply(logits_NV, teacher_NV, divergence.forward_weight, temperature, shard)  # type: ignore[no-any-return]


class _DenseDivergence(torch.autograd.Function):
    """Divergence from the teacher's logprobs, which are overwritten; forward also computes the gradient.

    In addition to the logits, forward needs three float32 tensors of their size; one tensor of their type is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, teacher_NV: Tensor, weight: float, temperature: float, shard: VocabShard
    ) -> Tensor:
        student_NV = vocab_log_softmax(logits_NV, temperature, shard)
        difference_NV = student_NV - teacher_NV
        student_NV, teacher_NV = student_NV.exp_(), teacher_NV.exp_()
        reverse_N = shard.reduce(torch.linalg.vecdot(student_NV, difference_NV), dist.ReduceOp.SUM)
        forward_N = shard.reduce(-torch.linalg.vecdot(teacher_NV, difference_NV), dist.ReduceOp.SUM)
        if ctx.needs_input_grad[0]:
            # w * (s - t) + (1 - w) * s * (log s - log t - KL(s || t))
            slope_NV = difference_NV.sub_(reverse_N.unsqueeze(-1)).mul_(1 - weight).add_(weight).mul_(student_NV)
            slope_NV.sub_(teacher_NV, alpha=weight).div_(temperature)
            ctx.save_for_backward(slope_NV.to(logits_NV.dtype))
        return weight * forward_N + (1 - weight) * reverse_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope_NV,) = ctx.saved_tensors
        return slope_NV * grad_outputs[0].unsqueeze(-1).to(slope_NV.dtype), None, None, None, None


def _picked(logits_NV: Tensor, ids_NK: Tensor, temperature: float, shard: VocabShard) -> Tensor:
    """Return [N, K] float32 logits / temperature of these tokens, from all ranks, with gradient."""
    local_NK = ids_NK - shard.start
    is_mine_NK = (local_NK >= 0) & (local_NK < logits_NV.shape[-1])
    found_NK = logits_NV.gather(-1, local_NK.clamp(0, logits_NV.shape[-1] - 1)).float() / temperature
    found_NK = found_NK * is_mine_NK
    return found_NK if shard.group is None else sum_over(found_NK, shard.group)


def _logsumexp(scaled_NV: Tensor, shard: VocabShard) -> Tensor:
    sum_N = scaled_NV.logsumexp(-1)
    if shard.group is None:
        return sum_N
    highest_N = shard.reduce(sum_N.clone(), dist.ReduceOp.MAX)
    return highest_N + shard.reduce((sum_N - highest_N).exp(), dist.ReduceOp.SUM).log()
