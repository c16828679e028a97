"""Loads stacked experts: one tensor for each layer and projection instead of three for each expert.

Both backends send these tensors for the E experts of a layer, with inner size I and hidden size H. `<place>` is as in
the family's checkpoints, such as `model.layers.0.mlp` or `model.layers.0.block_sparse_moe`:

| name | shape | of expert e |
|---|---|---|
| `<place>.experts.gate_up_proj` | [E, 2 I, H] | rows 0 to I: the gate's weight; the rest: the up projection's |
| `<place>.experts.down_proj` | [E, H, I] | the down projection's weight |

Experts without a gate (Nemotron 3) come as `<place>.experts.up_proj` [E, I, H] instead of the first.

Each tensor goes into vLLM's fused parameter with one copy, or two if tensor parallelism takes rows from both halves.
vLLM's own loaders copy expert by expert: 18,432 copies for a model of 48 layers with 128 experts. They still load
single experts, under the checkpoint's names.

Experts with biases (gpt-oss) come in the layout of that family's checkpoints, transposed, with gate and up projection
interleaved:

| name | shape | of expert e |
|---|---|---|
| `<place>.experts.gate_up_proj` | [E, H, 2 I] | columns 0, 2, ...: the gate's weight; 1, 3, ...: the up projection's |
| `<place>.experts.gate_up_proj_bias` | [E, 2 I] | the biases of these |
| `<place>.experts.down_proj` | [E, I, H] | the down projection's weight |
| `<place>.experts.down_proj_bias` | [E, H] | its bias |

An engine with 8-bit weights gets the stacked tensors quantized block by block, with their scales.

With tensor parallelism, vLLM's own loader of the family sets the bias of the down projection to 0 in the buffer that
all workers read.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nemo_offload_rl.generation.vllm.fp8_loading import SCALES, quantize_blocks
from nemo_offload_rl.generation.vllm.write_recorder import reads_not_counted

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
_GATE_UP_BIAS, _DOWN_BIAS = "gate_up_proj_bias", "down_proj_bias"
PARAMETERS = {GATE_UP: "w13_weight", DOWN: "w2_weight", _GATE_UP_BIAS: "w13_bias", _DOWN_BIAS: "w2_bias"}
"""vLLM's name of each parameter."""
_FEW = 8  # experts that are quantized at once


class StackedExperts:
    """Writes stacked tensors into `model`, this worker's part of vLLM's model."""

    def __init__(self, model: nn.Module) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        self._layers: dict[str, Any] = {
            place_of(name): module for name, module in model.named_modules() if isinstance(module, RoutedExperts)
        }
        self._mapper: Any = getattr(model, "hf_to_vllm_mapper", None)

    def takes(self, name: str) -> bool:
        """Tell whether `load` writes a tensor of this name."""
        place, own_name = self._place(name)
        parameter = _parameter_of(own_name)
        return parameter is not None and place in self._layers and hasattr(self._layers[place], parameter)

    def _place(self, name: str) -> tuple[str, str]:
        """Return a tensor's place in vLLM's model, which may have another name in checkpoints, and its own name."""
        place, _, own_name = name.rpartition(".")
        if place not in self._layers and self._mapper is not None:
            place = next(iter(self._mapper.apply_list([place])), place)
        return place, own_name

    @torch.no_grad()
    def load(self, name: str, stacked: Tensor) -> None:
        """Write this worker's part of the stacked experts.

        Args:
            name: A name for which `takes` is True.
            stacked: The tensor, in the layout of the module docstring.

        Raises:
            ValueError: The tensor has another shape.
        """
        place, own_name = self._place(name)
        layer, parameter_name = self._layers[place], str(_parameter_of(own_name))
        parallel, has_bias = layer.moe_config.moe_parallel_config, layer.moe_config.has_bias
        parameter, hidden = getattr(layer, parameter_name), layer.moe_config.hidden_dim_unpadded
        wanted = _shape(own_name, layer.global_num_experts, layer.moe_config.intermediate_size, hidden, has_bias)
        if tuple(stacked.shape) != wanted:
            raise ValueError(f"its shape is {list(stacked.shape)} instead of {list(wanted)}")
        stacked = _taken(stacked, [expert for expert, _ in local_experts(layer)])
        if parameter.dtype != torch.float8_e4m3fn:
            _write(parameter, stacked, own_name, has_bias, parallel)
            return
        scales = getattr(layer, f"{parameter_name}{SCALES}")
        # A few experts at a time: temporary memory is a fraction of a bucket.
        for few, its_scales, sent in zip(parameter.split(_FEW), scales.split(_FEW), stacked.split(_FEW), strict=True):
            data, data_scales = quantize_blocks(sent)
            _write(few, data, own_name, has_bias, parallel)
            with reads_not_counted():
                _write(its_scales, data_scales, own_name, has_bias, parallel)


def _write(parameter: Tensor, stacked: Tensor, own_name: str, has_bias: bool, parallel: Any) -> None:
    """Write this worker's part of its experts into a parameter of the same experts, or scales into scales."""
    if own_name == _DOWN_BIAS and parallel.tp_rank > 0:
        parameter.zero_()  # the workers' results are summed, and rank 0 adds the bias
        return
    if has_bias and stacked.dim() == 3:
        stacked = stacked.transpose(1, 2)
    if stacked.shape == parameter.shape:
        parameter.copy_(stacked)
        return
    # Padding stays as it is.
    if own_name != _GATE_UP_BIAS:
        hidden_dim = 2 if own_name in (GATE_UP, UP) else 1
        parameter = parameter.narrow(hidden_dim, 0, stacked.shape[hidden_dim])
    if own_name == _DOWN_BIAS:
        parameter.copy_(stacked)
        return
    halves, dim = (
        (1, 2) if own_name == DOWN else (1 if has_bias or own_name == UP else 2, 1)
    )  # tensor parallelism splits inner sizes
    size = stacked.shape[dim] // halves
    length, room = size // parallel.tp_size, parameter.shape[dim] // halves
    for half in range(halves):
        source = stacked.narrow(dim, half * size + parallel.tp_rank * length, length)
        parameter.narrow(dim, half * room, length).copy_(source)


def _shape(own_name: str, num_experts: int, inner: int, hidden: int, has_bias: bool) -> tuple[int, ...]:
    if own_name in (_GATE_UP_BIAS, _DOWN_BIAS):
        return num_experts, 2 * inner if own_name == _GATE_UP_BIAS else hidden
    rows, columns = (hidden, inner) if own_name == DOWN else (inner if own_name == UP else 2 * inner, hidden)
    return (num_experts, columns, rows) if has_bias else (num_experts, rows, columns)


def _parameter_of(own_name: str) -> str | None:
    """Return vLLM's name of the parameter that a stacked tensor goes to; None for other tensors."""
    return PARAMETERS[GATE_UP] if own_name == UP else PARAMETERS.get(own_name)


def place_of(name: str) -> str:
    """Return the checkpoint's name of a layer's experts, given that of vLLM's module with their weights.

    The module's own `layer_name` is another one for MiniMax-M2.
    """
    return name.removesuffix(".routed_experts")


def local_experts(layer: Any) -> Iterator[tuple[int, int]]:
    """Return (number in the model, number in this worker) of this worker's experts of a layer (`RoutedExperts`)."""
    experts = layer.expert_map
    places = range(layer.global_num_experts) if experts is None else experts.tolist()
    return ((expert, local) for expert, local in enumerate(places) if local >= 0)


def _taken(stacked: Tensor, experts: list[int]) -> Tensor:
    """Select these experts; a view if they are neighbours."""
    if experts == list(range(experts[0], experts[0] + len(experts))):
        return stacked.narrow(0, experts[0], len(experts))
    return stacked[experts]
