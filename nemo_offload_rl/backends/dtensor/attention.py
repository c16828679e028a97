"""Attention by kernels that need no mask, wherever the model allows it.

Hugging Face looks at every batch's positions to decide about a mask, for which the host waits for the GPU, and where
rows are packed it makes one of the whole row, [1, 1, T, T]: memory and time in T squared, and no flash attention. For
an implementation that is registered without a mask function it makes none.
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
CAPPED = "eager"  # the others leave soft-caps of scores out, without a word
CAUSAL = "nemo_offload_rl_causal"
PACKED = "nemo_offload_rl_packed"
CONTEXT = "nemo_offload_rl_context"
SINKS = "nemo_offload_rl_sinks"
TAKES_BOUNDS = (PACKED, SINKS)
"""Attention that gets the bounds of the rows in a packed row; other kinds see them from positions."""

_SPARE = 8  # numbers that heads get for sinks; kernels want their sizes in multiples of it


def choose_attention(
    config: Any,
    device: torch.device,
    compute_dtype: torch.dtype,
    *,
    longest: int,
    packs: bool,
    shares_rows: bool = False,
) -> str:
    """The name by which `transformers` finds the attention for a model.

    Args:
        config: The model's; layers with a sliding window need Hugging Face's masks, soft-caps its plain products,
            sinks what is here.
        device: Where it runs.
        compute_dtype: In which precision: the kernel for packed rows knows 16-bit numbers on a GPU only.
        longest: Tokens that no row exceeds, padding aside; a window of that size is none.
        packs: Whether rows are packed, else they are padded on the right. A model that does not tell its attention
            where packed rows begin gets Hugging Face's masks, which are made of positions.
        shares_rows: Whether ranks share each row, which excludes soft-caps, sinks and packed rows.
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
    """Attention of one row: query [1, heads, T, D], key and value [1, kv heads, T, D]; returns [1, T, heads, D].

    Values may have fewer numbers than D (DeepSeek-V3); the kernel gets zeros for the rest.
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
    """Attention whose softmax has a learned score more for each head, which takes its share and gives nothing.

    It is one key more, which all tokens see and whose value is 0: queries get a further number, a 1, for which this key
    has the head's score and the others have 0. So any kernel that takes masks computes it, gradients included.

    Args:
        module: With `sinks`, [heads].
        query: [B, heads, S, D].
        key: [B, kv heads, S, D].
        value: [B, kv heads, S, D].
        attention_mask: None; masks are made here, since gpt-oss asks for none of packed rows.
        scaling: Of scores, the sinks' excepted.
        sliding_window: Tokens that each sees, itself included; None for all before it.
        dropout: Of weights.
        cu_seq_lens_q: [rows + 1] where the rows of a packed row begin; None for padded rows.
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
    """[T, T] bool: which tokens each token sees."""
    seen_TT = seen_keys(num_tokens, num_tokens, window, device)
    if bounds is not None:
        row_T = torch.bucketize(torch.arange(num_tokens, device=device), bounds, right=True)
        seen_TT &= row_T.unsqueeze(1) == row_T
    return seen_TT
