"""Attention by kernels that need no mask, if the model allows it.

To decide about a mask, Hugging Face reads every batch's positions, for which the host waits for the GPU. For a packed
row it makes a mask [1, 1, T, T], which takes memory and time in T squared and excludes flash attention. It makes none
for an implementation that is registered without a mask function.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nemo_offload_rl.backends.dtensor.context_parallel import context_attention, seen_keys
from nemo_offload_rl.models.families import (
    attention_softcap,
    has_attention_sinks,
    has_sliding_window,
    tells_attention_bounds,
)

MASKED = "sdpa"
CAPPED = "eager"  # the others silently ignore soft-caps of scores
CAUSAL = "nemo_offload_rl_causal"
PACKED = "nemo_offload_rl_packed"
CONTEXT = "nemo_offload_rl_context"
SINKS = "nemo_offload_rl_sinks"
TAKES_BOUNDS = (PACKED, SINKS)
"""Attention that gets the bounds of the sequences in a packed row; other kinds find them by positions."""

_SPARE = 8  # added head dimensions for sinks; kernels need multiples of 8


def choose_attention(
    config: Any,
    device: torch.device,
    compute_dtype: torch.dtype,
    *,
    longest: int,
    packs: bool,
    shares_rows: bool = False,
) -> str:
    """Register the attention for a model with `transformers`, and return its name.

    Args:
        config: The model's config. Sliding windows need Hugging Face's masks, soft-caps its eager attention, and sinks
            this module's attention.
        device: The model's device.
        compute_dtype: Type of passes; the kernel for packed rows supports 16-bit types on a GPU only.
        longest: Most tokens of a row, without padding; a window of that size is ignored.
        packs: Rows are packed; else they are padded on the right. A model that does not pass bounds to its attention
            gets Hugging Face's masks, which are made from positions.
        shares_rows: Ranks share each row; excludes soft-caps, sinks and packed rows.
    """
    if shares_rows:
        AttentionInterface.register(CONTEXT, context_attention)
        return CONTEXT
    contents = config.to_dict()
    if attention_softcap(contents) is not None:
        return CAPPED
    if has_attention_sinks(contents):
        AttentionInterface.register(SINKS, _attention_with_sinks)
        return SINKS
    if has_sliding_window(contents, longest):
        return MASKED
    if not packs:
        AttentionInterface.register(CAUSAL, sdpa_attention_forward)
        return CAUSAL
    if device.type == "cuda" and compute_dtype != torch.float32 and tells_attention_bounds(contents):
        AttentionInterface.register(PACKED, _packed_attention)
        return PACKED
    return MASKED


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
    """Attend in one packed row: query [1, heads, T, D], key and value [1, kv heads, T, D]; returns [1, T, heads, D].

    Values may be smaller than D (DeepSeek-V3); they are padded with zeros for the kernel.
    """
    value_dim = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - value_dim))
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
    return attended[..., :value_dim].unsqueeze(0), None


def _attention_with_sinks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with a sink: a learned score for each head that takes part in the softmax and adds no value.

    The sink is an extra key that all tokens see, with value 0. Queries get an extra dimension, a 1, in which this key
    has the head's score and all others have 0. So any kernel that takes masks computes it, gradients included.

    Args:
        module: The attention module, with `sinks` [heads].
        query: [B, heads, S, D].
        key: [B, kv heads, S, D].
        value: [B, kv heads, S, D].
        attention_mask: None; masks are made here, since gpt-oss asks for none of packed rows.
        scaling: Factor of the scores, except the sinks'.
        sliding_window: Tokens that each token sees, itself included; None for all up to itself.
        dropout: Share of attention weights that are dropped.
        cu_seq_lens_q: [sequences + 1] starts of the sequences in a packed row; None for padded rows.
        kwargs: Arguments for other implementations; not read.

    Returns:
        [B, S, heads, D].
    """
    num_heads, num_tokens, head_dim = query.shape[1:]
    num_groups = num_heads // key.shape[1]
    key, value = (states.repeat_interleave(num_groups, dim=1) for states in (key, value))
    one = F.pad(query.new_ones(1), (0, _SPARE - 1)).expand(*query.shape[:-1], _SPARE)
    score = (module.sinks / scaling).view(1, num_heads, 1, 1).expand(len(query), -1, -1, -1)
    query = torch.cat([query, one], dim=-1)
    key = torch.cat([F.pad(score, (head_dim, _SPARE - 1)), F.pad(key, (0, _SPARE))], dim=2)
    value = F.pad(value, (0, 0, 1, 0))
    seen = F.pad(_seen(num_tokens, sliding_window, cu_seq_lens_q, query.device), (1, 0), value=True)
    attended = F.scaled_dot_product_attention(query, key, value, seen, dropout_p=dropout, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def _seen(num_tokens: int, window: int | None, bounds: Tensor | None, device: torch.device) -> Tensor:
    """Return [T, T] bool: the tokens that each token sees."""
    seen_TT = seen_keys(num_tokens, num_tokens, window, device)
    if bounds is not None:
        row_T = torch.bucketize(torch.arange(num_tokens, device=device), bounds, right=True)
        seen_TT &= row_T.unsqueeze(1) == row_T
    return seen_TT
