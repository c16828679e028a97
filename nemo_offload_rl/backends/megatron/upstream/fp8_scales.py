"""Scales of 8-bit layers, which a resumed run with `fp8_recipe: delayed` needs.

Delayed scaling derives a tensor's scale from the largest values of earlier steps; other recipes derive it from the
tensor and keep no state. Transformer Engine saves this state as a pickle (`_extra_state`), and reads that only if an
environment variable allows it. Here it is saved as tensors. Names are those of Transformer Engine 2.20.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from nemo_offload_rl.keys.megatron import MegatronFp8Config


def keeps_scales(cfg: MegatronFp8Config) -> bool:
    """Return whether training depends on the scales of earlier steps."""
    return cfg.enabled and cfg.fp8_recipe == "delayed"


def scales(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    """Copy scales and histories of largest values to the CPU, by layer; a layer has none before its first pass."""
    found = {}
    for name, layer in _layers(chunks):
        by_direction = layer.get_fp8_meta_tensors()
        if by_direction is not None:
            on_cpu = {key: [tensor.cpu() for tensor in tensors] for key, tensors in by_direction.items()}
            found[name] = {"num_gemms": layer.fp8_meta["num_gemms"], "tensors": on_cpu}
    return found


def set_scales(chunks: Sequence[nn.Module], saved: Mapping[str, Any], recipe: Any) -> None:
    """Restore the result of `scales`.

    Args:
        chunks: The model.
        saved: Scales and histories by layer.
        recipe: Transformer Engine's recipe for the next pass.
    """
    for name, layer in _layers(chunks):
        if name in saved:
            layer.fp8_meta |= {"num_gemms": saved[name]["num_gemms"], "recipe": recipe}
            layer.init_fp8_meta_tensors(recipe)
            layer.reset_fp8_meta_tensors(saved[name]["tensors"])


def _layers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    base: Any = sys.modules.get("transformer_engine.pytorch.module.base")
    if base is None:
        return
    for index, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if isinstance(module, base.TransformerEngineBaseModule):
                yield f"{index}/{name}", module
