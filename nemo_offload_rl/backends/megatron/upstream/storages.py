"""Few storages for many tensors: joined optimizer states, and parameters that wait in main memory for their buffers.

Each storage that moves takes host time. A mixture of experts has tens of thousands of state tensors, three for each
weight of each expert. The optimizer allocates a storage for each, and updates them in place in any storage.

Megatron's wrapper for data parallelism allocates flat buffers for all parameters and gradients, then copies each
parameter into them. Meanwhile the GPU holds the gradients and two copies of the parameters. If these do not fit, the
parameters wait in main memory, and the GPU holds only the buffers.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from nemo_offload_rl.residency import aligned
from nemo_offload_rl.residency.device.cuda import uncached_free_bytes

logger = logging.getLogger(__name__)

SMALL_BYTES = 32 << 20  # larger tensors are not joined: the copy costs as much as joining saves
JOINED_BYTES = 256 << 20  # most bytes of a joined storage, which exists together with the replaced ones for a moment

type _Place = tuple[dict[str, Any], str]
"""An optimizer's states of a parameter, and the name of one state."""


@torch.no_grad()
def join_states(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Move these parameters' small states, which are on the device, to joined storages; values do not change.

    Returns:
        True if any of the parameters has states.
    """
    small: dict[torch.dtype, list[_Place]] = defaultdict(list)
    has_states = False
    for parameter in parameters:
        # `state[parameter]` would create an entry.
        for key, value in optimizer.state.get(parameter, {}).items():
            has_states = True
            if type(value) is Tensor and value.dim() > 0 and value.is_contiguous() and 0 < value.nbytes < SMALL_BYTES:
                small[value.dtype].append((optimizer.state[parameter], key))
    for places in small.values():
        for some in joined_runs(places, lambda place: place[0][place[1]].nbytes):
            _join(some)
    return has_states


def joined_runs[T](items: Iterable[T], num_bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Divide items into runs of at most `JOINED_BYTES` with alignment; a larger item is a run of its own."""
    run: list[T] = []
    held_bytes = 0
    for item in items:
        num_bytes = aligned(num_bytes_of(item))
        if run and held_bytes + num_bytes > JOINED_BYTES:
            yield run
            run, held_bytes = [], 0
        run.append(item)
        held_bytes += num_bytes
    if run:
        yield run


def _join(places: Sequence[_Place]) -> None:
    tensors = [state[key] for state, key in places]
    size = tensors[0].element_size()
    joined = tensors[0].new_empty(sum(aligned(tensor.nbytes) for tensor in tensors) // size)
    views, offset = list[Tensor](), 0
    for tensor in tensors:
        views.append(joined[offset : offset + tensor.numel()].view(tensor.shape))
        offset += aligned(tensor.nbytes) // size
    torch._foreach_copy_(views, tensors)  # pyright: ignore[reportPrivateImportUsage]
    for (state, key), view in zip(places, views, strict=True):
        state[key] = view


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
