"""Causal attention inside each sequence of a packed row, by torch's flash attention for variable lengths.

Hugging Face's own way with `sdpa` is a mask of the whole row, [1, 1, T, T]: memory and time in T squared, and it
keeps flash attention from being used. Only for CUDA and half precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

PACKED_ATTENTION = "nemo_offload_rl_packed"


def register_packed_attention() -> None:
    """Make `attn_implementation=PACKED_ATTENTION` known to transformers; safe to call twice."""
    AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The bounds say it all."""
    return None


def _packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one row: query [1, heads, T, D], key and value [1, kv heads, T, D]; returns [1, T, heads, D]."""
    query_TND, key_TKD, value_TKD = (states[0].transpose(0, 1) for states in (query, key, value))
    num_groups = query_TND.shape[1] // key_TKD.shape[1]
    if num_groups > 1:
        key_TKD, value_TKD = (states.repeat_interleave(num_groups, dim=1) for states in (key_TKD, value_TKD))
    attended = varlen_attn(
        query_TND,
        key_TKD,
        value_TKD,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1, 0),
    )
    assert isinstance(attended, Tensor)
    return attended.unsqueeze(0), None
