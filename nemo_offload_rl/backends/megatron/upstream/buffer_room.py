"""GPU memory for the buffers of data parallelism while a model is built.

Megatron's wrapper for data parallelism allocates flat buffers for all parameters and gradients, then copies each
parameter into them. Meanwhile the GPU holds the gradients and two copies of the parameters. If these do not fit, the
parameters wait in main memory, and the GPU holds only the buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from torch import nn

from nemo_offload_rl.backends.megatron.upstream.joined_states import joined_runs
from nemo_offload_rl.residency import aligned
from nemo_offload_rl.residency.device.cuda import uncached_free_bytes

logger = logging.getLogger(__name__)


def wrapped_for_16_bits(config: Any, module: Any, *, grads_in_fp32: bool) -> Float16Module:
    """Wrap a 16-bit model as Megatron does, and move trained parameters to main memory if the buffers do not fit.

    Args:
        config: Megatron's transformer config.
        module: The model, on the GPU with all of its weights.
        grads_in_fp32: Gradient buffers are float32.
    """
    wrapped = Float16Module(config, module)
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    if trained and trained[0].is_cuda:
        device = trained[0].device
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free_bytes = uncached_free_bytes(device) + cached_bytes
        if buffer_bytes(trained, grads_in_fp32=grads_in_fp32) > free_bytes:
            move_to_host(trained)
            torch.cuda.empty_cache()
    return wrapped


def buffer_bytes(parameters: Sequence[nn.Parameter], *, grads_in_fp32: bool) -> int:
    """Return the bytes of the buffers for parameters and gradients, without padding."""
    return sum(
        parameter.nbytes + parameter.numel() * (4 if grads_in_fp32 else parameter.element_size())
        for parameter in parameters
    )


@torch.no_grad()
def move_to_host(parameters: Sequence[nn.Parameter]) -> None:
    """Move parameters to main memory, from which the wrapper copies them.

    They share storages that are large enough for separate memory mappings. Thousands of small ones would lie in the C
    library's heap, which does not return freed memory: a process kept a mixture's 28 GiB until its end.
    """
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    logger.info("parameters of %.2f GiB wait in main memory for their buffers on the GPU", num_bytes / 2**30)
    for run in joined_runs(parameters, lambda parameter: parameter.nbytes):
        storage = torch.empty(sum(aligned(parameter.nbytes) for parameter in run), dtype=torch.uint8)
        offset_bytes = 0
        for parameter in run:
            piece = storage[offset_bytes : offset_bytes + parameter.nbytes]
            offset_bytes += aligned(parameter.nbytes)
            parameter.data = piece.view(parameter.dtype).view(parameter.shape).copy_(parameter.data)
