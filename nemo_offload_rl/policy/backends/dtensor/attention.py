"""How a model attends: by kernels that need no mask, wherever the model allows it.

Hugging Face looks at every batch's positions to decide about a mask, for which the host waits for the GPU, and where
rows are packed it makes one of the whole row, [1, 1, T, T]: memory and time in T squared, and no flash attention. An
implementation that is registered without a mask function is not asked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nemo_offload_rl.models.families import attention_softcap, has_sliding_window

MASKED = "sdpa"
CAPPED = "eager"  # the others leave soft-caps of scores out, without a word
CAUSAL = "nemo_offload_rl_causal"
PACKED = "nemo_offload_rl_packed"


def choose_attention(config: Any, device: torch.device, compute_dtype: torch.dtype, *, packs: bool) -> str:
    """The name by which `transformers` finds the attention for a model.

    Args:
        config: The model's; layers with a sliding window need Hugging Face's masks, soft-caps its plain products.
        device: Where it runs.
        compute_dtype: In which precision: the kernel for packed rows knows 16-bit numbers on a GPU only.
        packs: Whether rows are packed, else they are padded on the right.
    """
    contents = config.to_dict()
    if attention_softcap(contents) is not None:
        return CAPPED
    if has_sliding_window(contents):
        return MASKED
    if not packs:
        AttentionInterface.register(CAUSAL, sdpa_attention_forward)
        return CAUSAL
    if device.type == "cuda" and compute_dtype != torch.float32:
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
