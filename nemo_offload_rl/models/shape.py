"""Sizes of a model, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Keys of Qwen, of Mixtral and gpt-oss, of DeepSeek, and of ERNIE and Hunyuan.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_ACTIVE_EXPERTS = ("num_experts_per_tok", "moe_k", "moe_topk")
_NUM_SHARED_EXPERTS = ("num_shared_experts", "n_shared_experts", "moe_num_shared_experts", "num_shared_expert")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; None for a size that config.json leaves to the model library's default.

    Attributes:
        head_dim: Size of queries and keys; values of latent attention (DeepSeek-V3) have another.
        num_experts: Experts of each mixture-of-experts layer, without shared ones; 0 in a dense model.
        num_active_experts: Experts that each token is sent to.
        num_shared_experts: Further experts that get every token.
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
            num_layers=_size(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads") or num_heads,
            head_dim=head_dim,
            intermediate_size=_size(config, "intermediate_size"),
            vocab_size=_size(config, "vocab_size"),
            num_experts=_first(config, _NUM_EXPERTS),
            num_active_experts=_first(config, _NUM_ACTIVE_EXPERTS),
            num_shared_experts=_first(config, _NUM_SHARED_EXPERTS),
        )


def _size(config: Mapping[str, Any], name: str) -> int | None:
    """Return a size of the file; None unless it is a whole number (the model library refuses other values)."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the size with the first of the names that the file has; of sizes by layer, the first layer's."""
    values = (config.get(name) for name in names)
    firsts = ({"size": value[0] if isinstance(value, list) and value else value} for value in values)
    return next((size for first in firsts if (size := _size(first, "size"))), 0)
