"""The products of a layer's experts by one kernel, torch's `grouped_mm`, instead of a cuBLAS call for each expert.

Transformer Engine starts the products of `GroupedLinear` one by one, about 60 microseconds of host time each. With 64
experts and a few thousand tokens in a micro-batch, the GPU waits for the host (docs/measurements/mechanisms.md).

Shape suffixes: R rows, one for each token and expert, I size of the input, O of the output, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm


def use_grouped_products(chunks: Sequence[nn.Module]) -> None:
    """Let Transformer Engine's grouped layers compute in bfloat16 with `grouped_mm`, where they have no biases.

    Their parameters, and with them checkpoints, gradients and refits, stay as they are. In a chunk that Megatron has
    wrapped for data parallelism, backward passes add the gradients to its buffers themselves.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    for chunk in chunks:
        ddp = chunk if isinstance(chunk, DistributedDataParallel) else None
        for module in chunk.modules():
            if isinstance(module, TEGroupedLinear) and is_plain(module):
                layer: Any = module
                layer.forward = partial(grouped_forward, layer, ddp=ddp)


def is_plain(layer: Any) -> bool:
    """Whether a grouped layer has a matrix in bfloat16 for each expert, no biases, and sizes that the kernel takes."""
    weight = getattr(layer, "weight0", None)
    if weight is None or layer.use_bias or weight.dtype != torch.bfloat16:
        return False
    return all(size * weight.itemsize % 16 == 0 for size in weight.shape)


def grouped_forward(layer: Any, rows_RI: Tensor, num_rows: Sequence[int], ddp: Any = None) -> tuple[Tensor, None]:
    """What `layer` makes of its experts' rows.

    Args:
        layer: With `num_gemms` matrices `weight0` and so on.
        rows_RI: Those of the first expert, then those of the second, and so on.
        num_rows: Of each expert; may be 0.
        ddp: Megatron's wrapper for data parallelism around the model, if the gradients of the matrices are to be added
            to `main_grad` of each. They are autograd's without it, and for rows that need no gradient.

    Returns:
        [R, O], and no bias.
    """
    weights = [getattr(layer, f"weight{expert}") for expert in range(layer.num_gemms)]
    ends_E = torch.tensor(num_rows, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends_E = ends_E.to(rows_RI.device, non_blocking=True)
    if not rows_RI.requires_grad:
        ddp = None  # nothing but the matrices would lead a backward pass here
    # With the buffers autograd does not see the matrices: it would run a node and Megatron's hook for each of them,
    # even if the gradients were None.
    made_RO: Any = _Products.apply(rows_RI, ends_E, weights, ddp, *(weights if ddp is None else ()))
    return made_RO, None


class _Products(torch.autograd.Function):
    """Rows times the transposed matrix of their expert.

    The matrices are stacked for each product and not kept: a stack takes as much memory as the experts of a layer.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_RI: Tensor, ends_E: Tensor, weights: list[Tensor], ddp: Any, *seen_by_autograd: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_RI, ends_E)
        ctx.weights, ctx.ddp = weights, ddp  # beside the saved tensors, which may be offloaded
        return grouped_mm(rows_RI, torch.stack(weights).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the rows, and of each matrix that autograd sees; 0 for an expert without rows."""
        rows_RI, ends_E = ctx.saved_tensors
        grad_RO = grads[0].contiguous()
        grad_rows: Tensor | None = None
        grad_weights: tuple[Tensor | None, ...] = (None,) * len(ctx.needs_input_grad[4:])
        if ctx.needs_input_grad[0]:
            grad_rows = grouped_mm(grad_RO, torch.stack(ctx.weights), offs=ends_E)
        if any(weight.requires_grad for weight in ctx.weights):
            grads_OI = grouped_mm(grad_RO.t(), rows_RI, offs=ends_E).unbind()
            if ctx.ddp is None:
                grad_weights = grads_OI
            else:
                _add_to_buffers(ctx.ddp, ctx.weights, grads_OI)
        return grad_rows, None, None, None, *grad_weights


def _add_to_buffers(ddp: Any, weights: Sequence[Any], grads_OI: Sequence[Tensor]) -> None:
    """Do what Megatron's hooks would for each parameter and its gradient.

    Buffers of the gradients' type take them by a few kernels, others by one for each.
    """
    trained = [(weight, grad_OI) for weight, grad_OI in zip(weights, grads_OI, strict=True) if weight.requires_grad]
    sums = [weight.main_grad for weight, _ in trained]
    torch._foreach_add_(sums, [grad_OI for _, grad_OI in trained])  # pyright: ignore[reportPrivateImportUsage]
    if ddp.ddp_config.overlap_grad_reduce:
        for weight, _ in trained:
            ddp.param_to_bucket_group[weight].register_grad_ready(weight, ddp.force_all_reduce)
