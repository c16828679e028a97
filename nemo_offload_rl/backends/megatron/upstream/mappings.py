"""Adds names of parameters that Megatron-Bridge 0.6.2 does not map.

All bridges map the experts of Transformer Engine's grouped layers, but only some map those of Megatron-core's local
layers, which have one module for each expert. Qwen3-MoE's bridge lacks dense layers between layers with experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_DENSE = "decoder.layers.*.mlp.linear_fc"
_GROUPED, _LOCAL = ".mlp.experts.linear_", ".mlp.experts.local_experts.*.linear_"


def complete_bridge(auto_bridge: Any) -> Any:
    """Return a subclass of Megatron-Bridge's `AutoBridge` that also converts this module's parameters."""

    class CompleteBridge(auto_bridge):
        @property
        def _model_bridge(self) -> Any:
            bridge = super()._model_bridge
            own_registry = bridge.mapping_registry

            def mapping_registry() -> Any:
                registry = own_registry()
                return type(registry)(*registry.mappings, *_missing(registry.mappings))

            bridge.mapping_registry = mapping_registry
            return bridge

    return CompleteBridge


def _missing(mappings: list[Any]) -> Iterator[Any]:
    known = {mapping.megatron_param for mapping in mappings}
    for mapping in mappings:
        name = mapping.megatron_param
        if _GROUPED in name and name.endswith("*"):
            local = name.replace(_GROUPED, _LOCAL).removesuffix("*")
            if local not in known:
                yield _renamed(mapping, local)
    if any(_GROUPED in name for name in known) and _DENSE + "1.weight" not in known:
        yield from _dense_layers()


def _dense_layers() -> Iterator[Any]:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping

    place = "model.layers.*"
    gate, up = (f"{place}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    yield GatedMLPMapping(f"{_DENSE}1.weight", gate=gate, up=up)
    yield AutoMapping(f"{_DENSE}2.weight", f"{place}.mlp.down_proj.weight")
    yield AutoMapping(f"{_DENSE}1.layer_norm_weight", f"{place}.post_attention_layernorm.weight")


def _renamed(mapping: Any, name: str) -> Any:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping

    kind: Any = type(mapping)
    if issubclass(kind, GatedMLPMapping):
        return kind(name, **mapping.hf_param)
    if not issubclass(kind, AutoMapping):
        raise TypeError(f"{mapping} of {mapping.megatron_param} is no mapping of one tensor or of two halves")
    options = [mapping.transpose_on_export] if hasattr(mapping, "transpose_on_export") else []
    return kind(name, mapping.hf_param, mapping.permute_dims, *options)
