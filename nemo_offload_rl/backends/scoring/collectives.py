"""Collectives with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce sum; backward returns the gradient unchanged, since every rank uses the same result."""
    return _Sum.apply(value, group)  # type: ignore[no-any-return]


def gathered(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather tensors of equal shape to [ranks, ...]; backward sums all ranks' gradients of each tensor."""
    return _Gather.apply(value, group)  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        found = value.new_empty(group.size() * len(value), *value.shape[1:])  # the only form that gloo supports
        dist.all_gather_into_tensor(found, value.contiguous(), group=group)
        return found.unflatten(0, (group.size(), len(value)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        grad = grad_outputs[0].contiguous()
        mine = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_tensor(mine, grad.flatten(0, 1), group=ctx.group)
        return mine, None
