"""Products of a layer's experts by one kernel, torch's `grouped_mm`, instead of a cuBLAS call for each expert.

Transformer Engine starts the products of `GroupedLinear` one by one, at about 60 microseconds of host time each. With
64 experts and a few thousand tokens in a micro-batch, the GPU waits for the host (docs/measurements/mechanisms.md).

Shape suffixes: R rows (one for each token and expert), I input size, O output size, E experts of this rank.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm


def use_grouped_products(chunks: Sequence[nn.Module]) -> None:
    """Let Transformer Engine's grouped bfloat16 layers without biases compute with `grouped_mm`.

    Parameters, checkpoints, gradients and refits do not change. In a chunk that Megatron has wrapped for data
    parallelism, the backward pass adds gradients directly to the wrapper's buffers.
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
    """Return whether a grouped layer has bfloat16 matrices, no biases, and sizes that the kernel supports."""
    weight = getattr(layer, "weight0", None)
    if weight is None or layer.use_bias or weight.dtype != torch.bfloat16:
        return False
    return all(size * weight.itemsize % 16 == 0 for size in weight.shape)


def grouped_forward(layer: Any, rows_RI: Tensor, num_rows: Sequence[int], ddp: Any = None) -> tuple[Tensor, None]:
    """Compute the output of `layer` for its experts' rows.

    Args:
        layer: Layer with `num_gemms` matrices `weight0`, `weight1` and so on.
        rows_RI: Rows in the order of the experts.
        num_rows: Rows of each expert; may be 0.
        ddp: Megatron's wrapper for data parallelism around the model, to add the gradient of each matrix to its
            `main_grad`. If it is None, or if rows need no gradient, autograd handles these gradients.

    Returns:
        The output [R, O], and None for the bias.
    """
    weights = [getattr(layer, f"weight{expert}") for expert in range(layer.num_gemms)]
    ends_E = torch.tensor(num_rows, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends_E = ends_E.to(rows_RI.device, non_blocking=True)
    if not rows_RI.requires_grad:
        ddp = None  # only the matrices then connect this node to the backward pass
    # With `ddp` the matrices are hidden from autograd, which would run a node and Megatron's hook for each of them even
    # if the gradients were None.
    made_RO: Any = _Products.apply(rows_RI, ends_E, weights, ddp, *(weights if ddp is None else ()))
    return made_RO, None


class _Products(torch.autograd.Function):
    """Product of rows and the transposed matrix of their expert.

    The matrices are stacked for each product. The stack is not kept: it takes as much memory as a layer's experts.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_RI: Tensor, ends_E: Tensor, weights: list[Tensor], ddp: Any, *seen_by_autograd: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_RI, ends_E)
        ctx.weights, ctx.ddp = weights, ddp  # not among the saved tensors, which may be offloaded
        return grouped_mm(rows_RI, torch.stack(weights).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of the rows and of each matrix that autograd sees; 0 for an expert without rows."""
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
    """Add gradients to Megatron's buffers, in place of its hooks.

    Buffers of the gradients' type need a few kernels in all, others one for each gradient.
    """
    trained = [(weight, grad_OI) for weight, grad_OI in zip(weights, grads_OI, strict=True) if weight.requires_grad]
    sums = [weight.main_grad for weight, _ in trained]
    torch._foreach_add_(sums, [grad_OI for _, grad_OI in trained])  # pyright: ignore[reportPrivateImportUsage]
    if ddp.ddp_config.overlap_grad_reduce:
        for weight, _ in trained:
            ddp.param_to_bucket_group[weight].register_grad_ready(weight, ddp.force_all_reduce)
