"""Sizes of a model, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Keys of Qwen, of Mixtral and gpt-oss, of DeepSeek, and of ERNIE and Hunyuan.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_ACTIVE_EXPERTS = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
_NUM_SHARED_EXPERTS = ("num_shared_experts", "n_shared_experts", "moe_num_shared_experts", "num_shared_expert")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; None for a size that config.json leaves to the model library's default.

    Attributes:
        head_dim: Size of queries and keys; values of latent attention (DeepSeek-V3) have another.
        num_experts: Experts of each mixture-of-experts layer, without shared ones; 0 in a dense model.
        num_active_experts: Experts that each token is sent to.
        num_shared_experts: Further experts that get every token.
        has_gate: MLPs multiply one product by another one, the gate; those with relu2 have one product.
    """

    num_layers: int | None
    hidden_size: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    intermediate_size: int | None
    vocab_size: int | None
    num_experts: int
    num_active_experts: int
    num_shared_experts: int
    has_gate: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the sizes of a config.json."""
        hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        if config.get("kv_lora_rank"):  # `head_dim`, if given, is the size of the rotated part only
            parts = _size(config, "qk_nope_head_dim"), _size(config, "qk_rope_head_dim")
            head_dim = None if None in parts else sum(part for part in parts if part is not None)
        elif (head_dim := _size(config, "head_dim")) is None and hidden_size and num_heads:
            head_dim = hidden_size // num_heads
        return cls(
            num_layers=_num_layers(config),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads") or num_heads,
            head_dim=head_dim,
            intermediate_size=_size(config, "intermediate_size"),
            vocab_size=_size(config, "vocab_size"),
            num_experts=_first(config, _NUM_EXPERTS) if _has_mixtures(config) else 0,
            num_active_experts=_first(config, _NUM_ACTIVE_EXPERTS),
            num_shared_experts=_first(config, _NUM_SHARED_EXPERTS),
            has_gate="relu2" not in (config.get("hidden_act"), config.get("mlp_hidden_act")),
        )


def _size(config: Mapping[str, Any], name: str) -> int | None:
    """Return a size of the file; None unless it is a whole number (the model library refuses other values)."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _num_layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers; transformers writes only the kinds of a Nemotron-H's layers, one for each."""
    kinds = config.get("layers_block_type")
    written = _size(config, "num_hidden_layers")
    return len(kinds) if written is None and isinstance(kinds, list) else written


def _has_mixtures(config: Mapping[str, Any]) -> bool:
    """Tell whether a layer may have experts: a dense Nemotron-H has their number as well."""
    if config.get("model_type") != "nemotron_h":
        return True
    pattern, types = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    return "moe" in types if isinstance(types, list) else "E" in pattern if isinstance(pattern, str) else True


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the size with the first of the names that the file has; of sizes by layer, the first layer's."""
    values = (config.get(name) for name in names)
    firsts = ({"size": value[0] if isinstance(value, list) and value else value} for value in values)
    return next((size for first in firsts if (size := _size(first, "size"))), 0)


def odd_blocks(
    config: Mapping[str, Any], num_parts: int, block: int, *, whole_experts: bool = False
) -> tuple[str, int] | None:
    """Find a size of a model's linear layers that is not a multiple of a block on each of several devices.

    Args:
        config: The model's config.json.
        num_parts: Devices that queries, keys, values and inner sizes are split over (tensor parallelism).
        block: Rows and columns of a block.
        whole_experts: Experts are not split over devices.

    Returns:
        The size's name, and what each device has of it; None if there is no such size, or sizes are unknown.
    """
    shape = ModelShape.of(config)
    if shape.hidden_size is not None and shape.hidden_size % block:
        return "hidden_size", shape.hidden_size
    if config.get("kv_lora_rank"):
        latent = {"q_lora_rank": _size(config, "q_lora_rank")}
        values, rest = _size(config, "v_head_dim"), _size(config, "qk_nope_head_dim")
        heads = {"keys and values": (rest or 0) + (values or 0), "values": values, "queries": shape.head_dim}
        if odd := next(((name, size) for name, size in latent.items() if size and size % block), None):
            return odd
        widths = {name: (shape.num_heads, size) for name, size in heads.items()}
    else:
        widths = {"queries": (shape.num_heads, shape.head_dim), "keys and values": (shape.num_kv_heads, shape.head_dim)}
    parts = {name: max(1, heads // num_parts) * size for name, (heads, size) in widths.items() if heads and size}
    inner = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    of_experts = "moe_intermediate_size" if _size(config, "moe_intermediate_size") else "intermediate_size"
    whole = of_experts if whole_experts and shape.num_experts else None
    parts |= {name: size if name == whole else size // num_parts for name in inner if (size := _size(config, name))}
    return next(((name, size) for name, size in parts.items() if size % block), None)
