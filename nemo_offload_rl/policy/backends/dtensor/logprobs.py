"""Logprobs of given tokens from logits, in fp32, with one chunk of fp32 logits alive at a time.

Shape suffixes: B samples, S positions, V vocabulary (V is this rank's part under tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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


def token_logprobs(logits_BSV: Tensor, targets_BS: Tensor, temperature: float, shard: VocabShard) -> Tensor:
    """Logprob of each target under softmax(logits / temperature).

    Args:
        logits_BSV: [B, S, V] any float type; this rank's vocabulary columns.
        targets_BS: [B, S] int64, ids in the whole vocabulary.
        temperature: What the sampler divided its logits by; above 0.
        shard: Which columns these are.

    Returns:
        [B, S] float32, equal on all ranks of `shard.group`.
    """
    return _TokenLogprobs.apply(logits_BSV, targets_BS, temperature, shard)  # type: ignore[return-value]


def sequence_logprobs(
    output_layer: Callable[[Tensor], Tensor],
    hidden_BSH: Tensor,
    input_ids_BS: Tensor,
    input_lengths_B: Tensor,
    *,
    temperature: float,
    chunk_size: int | None,
    shard: VocabShard,
) -> Tensor:
    """Logprobs of every token given those before it, by the package's convention (column 0 is 0, padding is 0).

    With a `chunk_size`, logits exist for that many positions at a time, and backward computes them again.

    Args:
        output_layer: Hidden states to logits of this rank's vocabulary columns.
        hidden_BSH: [B, S, H] last hidden states.
        input_ids_BS: [B, S] int64.
        input_lengths_B: [B] int64.
        temperature: See `token_logprobs`.
        chunk_size: Positions per chunk; None takes all at once.
        shard: See `token_logprobs`.

    Returns:
        [B, S] float32.
    """

    def score(hidden: Tensor, targets: Tensor) -> Tensor:
        return token_logprobs(output_layer(hidden), targets, temperature, shard)

    num_scored = input_ids_BS.shape[1] - 1
    step = chunk_size or max(num_scored, 1)
    recompute = chunk_size is not None and torch.is_grad_enabled()
    pieces = []
    for start in range(0, max(num_scored, 1), step):
        stop = min(start + step, num_scored)
        hidden, targets = hidden_BSH[:, start:stop], input_ids_BS[:, start + 1 : stop + 1]
        pieces.append(checkpoint(score, hidden, targets, use_reentrant=False) if recompute else score(hidden, targets))
    logprobs = F.pad(torch.cat(pieces, dim=1), (1, 0))
    is_real = torch.arange(input_ids_BS.shape[1], device=logprobs.device) < input_lengths_B.unsqueeze(1)
    return torch.where(is_real, logprobs, 0.0)
