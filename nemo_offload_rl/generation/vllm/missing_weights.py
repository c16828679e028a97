"""Which weights of vLLM's model a refit did not write, by the names under which the policy would have sent them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from nemo_offload_rl.generation.vllm.stacked_experts import PARAMETERS, local_experts
from nemo_offload_rl.generation.vllm.write_recorder import Span, gaps


def missing_weights(model: nn.Module, written: list[Span]) -> list[str]:
    """Names of all weights of which at least one element lies in none of the spans.

    Args:
        model: vLLM's model, this worker's shard of it.
        written: Merged spans.
    """
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    modules = dict(model.named_modules())
    missing: list[str] = []
    # Tied parameters are one parameter and come once.
    for name, parameter in model.named_parameters():
        holes = gaps(parameter, written)
        if holes:
            place, _, own_name = name.rpartition(".")
            parts = list(_parts(modules[place], place, own_name, parameter, packed))
            found = [part for part, span in parts if _overlap(span, holes)]
            if len(found) == len(parts):
                found = _stacked(modules[place], own_name) or found
            missing += found or [name]
    return missing


def _stacked(module: nn.Module, own_name: str) -> list[str]:
    """The name of the one tensor that has all experts of a parameter; nothing for other parameters."""
    layer_name = getattr(module, "layer_name", None)
    kinds = [kind for kind, parameter in PARAMETERS.items() if parameter == own_name]
    return [f"{layer_name}.{kind}" for kind in kinds]


def _parts(
    module: nn.Module, place: str, own_name: str, parameter: nn.Parameter, packed: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Span]]:
    """Name and memory of each of the policy's tensors that share a fused parameter; nothing where it is not fused."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    if not parameter.is_contiguous():
        return
    row_bytes = parameter.stride(0) * parameter.element_size() if parameter.dim() else 0
    start = parameter.data_ptr()
    if isinstance(module, RoutedExperts) and parameter.dim() == 3:
        gate, up, down = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
        names = [gate, up] if own_name.startswith("w13") else [down]
        for expert, local in local_experts(module):
            begin, num_bytes = start + local * row_bytes, row_bytes // len(names)
            for index, name in enumerate(names):
                span = (begin + index * num_bytes, begin + (index + 1) * num_bytes)
                yield f"{module.layer_name}.{expert}.{name}.weight", span
    elif isinstance(module, ColumnParallelLinear):
        parent, _, fused = place.rpartition(".")
        names = packed.get(fused, ())
        if len(names) == len(module.output_partition_sizes):
            for name, num_rows in zip(names, module.output_partition_sizes, strict=True):
                yield f"{parent}.{name}.{own_name}", (start, start + num_rows * row_bytes)
                start += num_rows * row_bytes


def _overlap(span: Span, holes: list[Span]) -> bool:
    return any(begin < span[1] and span[0] < end for begin, end in holes)
