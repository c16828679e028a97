"""Sizes of a rank's state in bytes, from the model's configuration alone."""

from collections.abc import Iterable, Sequence
from math import ceil, prod

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.dtensor.activation_offload import host_bytes_at_most
from nemo_offload_rl.backends.dtensor.model import decoder_layers
from nemo_offload_rl.backends.dtensor.torch_optim import optimizer_spec
from nemo_offload_rl.backends.hf.export import load_config
from nemo_offload_rl.backends.hf.model_folder import check_model_folder
from nemo_offload_rl.backends.optimizer_parts import num_streamed
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.protocols.backend import ExpectedBytes, compute_dtype
from nemo_offload_rl.residency import GRADS_PART, OPTIMIZER, OPTIMIZER_PART, PARAMS, PARAMS_PART, aligned

_FP32_BYTES = 4


def expected_state_bytes(settings: PolicySettings, world_size: int, device: torch.device) -> ExpectedBytes:
    """Compute one rank's host bytes of parameters and optimizer states by row of the residency plan; reads no weight.

    Exact without tensor parallelism; an upper bound with it, since the split dimension of a weight is not known here.
    """
    check_model_folder(settings.model_name)
    config = load_config(settings.model_name, settings.hf_config_overrides)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tp_size = settings.dtensor_cfg.tensor_parallel_size
    dp_size = max(1, world_size // tp_size)  # building the backend refuses sizes that do not divide
    elements = [_shard_elements(parameter.shape, dp_size, tp_size) for parameter in model.parameters()]
    params_bytes = _parameter_bytes(model, elements, _FP32_BYTES)
    # Layers are gathered in the compute type, so the reference is kept in it.
    read_bytes = compute_dtype(settings.precision).itemsize
    reference_bytes = _parameter_bytes(model, elements, read_bytes)
    rows = {PARAMS: params_bytes, **optimizer_row_bytes(settings, model.parameters(), elements, device)}
    if settings.dtensor_cfg.cpu_offload:
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        modules = [embedding, *decoder_layers(model), *([] if output.weight is embedding.weight else [output])]
        rows |= part_row_bytes(module.parameters() for module in modules)
        rows[PARAMS] -= rows[PARAMS_PART]
    # A rank reads its part of one tensor at a time, at most the whole tensor.
    loading_bytes = max(_FP32_BYTES * parameter.numel() for parameter in model.parameters())
    return ExpectedBytes(
        state=rows,
        loading=loading_bytes,
        reference=reference_bytes,
        activations=host_bytes_at_most(settings, config.num_hidden_layers, config.hidden_size),
        reference_is_cast=read_bytes < _FP32_BYTES,
    )


def part_row_bytes(parts: Iterable[Iterable[Tensor]]) -> dict[str, int]:
    """Compute the bytes of the rows of parameters and gradients that pass through the device part by part.

    Args:
        parts: The parameters of each part; FSDP keeps a part's gradients in one storage.
    """
    sizes = [[_FP32_BYTES * parameter.numel() for parameter in part] for part in parts]
    params_bytes = sum(aligned(size) for part in sizes for size in part)
    return {PARAMS_PART: params_bytes, GRADS_PART: sum(aligned(sum(part)) for part in sizes)}


def optimizer_row_bytes(
    settings: PolicySettings, parameters: Iterable[Tensor], elements: Sequence[int], device: torch.device
) -> dict[str, int]:
    """Compute the bytes of the optimizer's rows in the host arena; empty for an optimizer without states.

    Args:
        settings: The policy's settings.
        parameters: The trained parameters, whole.
        elements: Number of elements of one rank's shard of each.
        device: Device of the parameters.

    Raises:
        ConfigError: The optimizer cannot train here.
    """
    if settings.optimizer is None:
        return {}
    spec = optimizer_spec(settings.optimizer, on_gpu=device.type == "cuda")
    num = num_streamed([parameter.numel() for parameter in parameters], settings.dtensor_cfg.streamed_share)
    rows = {OPTIMIZER_PART: elements[:num], OPTIMIZER: elements[num:]}
    sizes = {
        row: sum(aligned(count * dtype.itemsize) for count in some for dtype in spec.states.values())
        for row, some in rows.items()
    }
    return {row: size for row, size in sizes.items() if size}


def _parameter_bytes(model: nn.Module, elements: Iterable[int], element_bytes: int) -> int:
    """Compute the host arena's bytes of one rank's parameters (`element_bytes` per element) and buffers."""
    return sum(aligned(count * element_bytes) for count in elements) + sum(
        aligned(buffer.nbytes) for buffer in model.buffers()
    )


def _shard_elements(shape: Iterable[int], dp_size: int, tp_size: int) -> int:
    """Count the elements of one rank's shard: FSDP splits the first dimension into equal, padded parts."""
    rows, *rest = shape
    if not rest:  # norms and biases: whole on every tensor-parallel rank
        return ceil(rows / dp_size)
    by_rows = ceil(ceil(rows / tp_size) / dp_size) * prod(rest)
    by_columns = ceil(rows / dp_size) * ceil(prod(rest) / tp_size)
    return max(by_rows, by_columns)
