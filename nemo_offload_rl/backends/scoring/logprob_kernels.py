"""Triton kernels for logprobs of given tokens: one pass over the logits forward, one backward, no fp32 copy.

The forward pass can also compute the sum for the entropy.

Plain torch takes about ten passes over an fp32 copy of the logits; with a vocabulary of 152,000 that costs a third of a
0.6 B model's forward pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_LOWEST = tl.constexpr(-1e30)  # below every logit, and finite, since inf - inf is NaN


@triton.jit
def _stats_kernel(
    logits,
    targets,
    max_out,
    sum_out,
    picked_out,
    weighted_out,
    num_columns,
    temperature,
    start,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # pragma: no cover - compiled
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * num_columns
    lane = tl.arange(0, BLOCK)
    # Each lane keeps its own maximum and sums, which are combined after the loop. `weighted` is the sum of
    # exp(x - maximum) * (x - maximum); a new maximum changes both the factor and the difference.
    highest = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_columns, BLOCK):
        column = first + lane
        value = tl.load(base + column, mask=column < num_columns, other=_LOWEST).to(tl.float32) / temperature
        value = tl.maximum(value, _LOWEST)
        new_highest = tl.maximum(highest, value)
        if WITH_ENTROPY:
            drop = highest - new_highest
            rest = value - new_highest
            weighted = (weighted + total * drop) * tl.exp(drop) + tl.exp(rest) * rest
        total = total * tl.exp(highest - new_highest) + tl.exp(value - new_highest)
        highest = new_highest
    row_max = tl.max(highest, axis=0)
    tl.store(max_out + row, row_max)
    tl.store(sum_out + row, tl.sum(total * tl.exp(highest - row_max), axis=0))
    if WITH_ENTROPY:
        drop = highest - row_max
        tl.store(weighted_out + row, tl.sum((weighted + total * drop) * tl.exp(drop), axis=0))
    local = tl.load(targets + row) - start
    is_mine = (local >= 0) & (local < num_columns)
    picked = tl.load(base + local, mask=is_mine, other=0.0).to(tl.float32) / temperature
    tl.store(picked_out + row, picked)


@triton.jit
def _gradient_kernel(
    logits, targets, row_max, log_sum, grad, out, num_columns, temperature, start, BLOCK: tl.constexpr
):  # pragma: no cover - compiled
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    value = tl.load(logits + row * num_columns + column, mask=mask, other=_LOWEST).to(tl.float32) / temperature
    probability = tl.exp(value - tl.load(row_max + row) - tl.load(log_sum + row))
    is_target = column == tl.load(targets + row) - start
    slope = tl.load(grad + row) / temperature
    result = (tl.where(is_target, 1.0, 0.0) - probability) * slope
    tl.store(out + row * num_columns + column, result.to(out.dtype.element_ty), mask=mask)


def logit_stats(
    logits: Tensor, targets: Tensor, temperature: float, start: int, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the maximum, the sum of exponentials and the target's value of each row of logits / temperature.

    Args:
        logits: [..., V] contiguous, any float type.
        targets: [...] int64 ids. A target in another shard gives the value 0.
        temperature: Above 0.
        start: Token id of column 0.
        with_entropy: Also return the last result, which is None otherwise.

    Returns:
        Tensors [...] float32: max, sum of exp(x - max), x at the target, sum of exp(x - max) * (x - max).
    """
    num_columns = logits.shape[-1]
    highest, total, picked = (torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(3))
    weighted = torch.empty_like(total) if with_entropy else None
    if targets.numel():
        _stats_kernel[(targets.numel(),)](
            logits,
            targets.contiguous(),
            highest,
            total,
            picked,
            total if weighted is None else weighted,  # a placeholder: not written without entropy
            num_columns,
            float(temperature),
            start,
            WITH_ENTROPY=with_entropy,  # pyright: ignore[reportArgumentType]
            BLOCK=_block(num_columns),  # pyright: ignore[reportArgumentType]
            num_warps=8,  # pyright: ignore[reportCallIssue]
        )
    return highest, total, picked, weighted


def logit_gradient_(
    logits: Tensor, targets: Tensor, stats: tuple[Tensor, Tensor], grad: Tensor, temperature: float, start: int
) -> Tensor:
    """Overwrite the logits with the gradient of their logprobs, and return them.

    Args:
        logits: As in `logit_stats`.
        targets: As in `logit_stats`.
        stats: [...] over the whole vocabulary: max of x = logits / temperature, and log of the sum of exp(x - max).
        grad: [...] float32 gradient of the logprobs.
        temperature: As in `logit_stats`.
        start: As in `logit_stats`.
    """
    num_columns = logits.shape[-1]
    if targets.numel():
        block = _block(num_columns)
        _gradient_kernel[(targets.numel(), triton.cdiv(num_columns, block))](
            logits,
            targets.contiguous(),
            stats[0].contiguous(),
            stats[1].contiguous(),
            grad.contiguous(),
            logits,
            num_columns,
            float(temperature),
            start,
            BLOCK=block,  # pyright: ignore[reportArgumentType]
            num_warps=8,  # pyright: ignore[reportCallIssue]
        )
    return logits


def _block(num_columns: int) -> int:
    return min(_BLOCK, 1 << (num_columns - 1).bit_length())
