"""Attention by kernels that need no mask, if the model allows it, and attention of ranks that share rows.

To decide about a mask, Hugging Face reads every batch's positions, for which the host waits for the GPU. For a packed
row it makes a mask [1, 1, T, T], which takes memory and time in T squared and excludes flash attention. It makes none
for an implementation that is registered without a mask function.

Context parallelism: a row is cut into 2N pieces for N ranks. Rank r has the r-th piece from the front and the r-th from
the back, so all ranks compute equally much causal attention. All else works on single positions. A layer's keys and
values are gathered (arXiv 2407.21783, section 3.3.2), and their gradients are summed over the ranks.

Shape suffixes: B rows of the micro-batch, H heads, K key-value heads, S tokens of a row, L tokens of a row on one rank,
D head size.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nemo_offload_rl.backends.ranks import gathered
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

_LARGEST_HEAD = 256  # of the kernel for packed rows
_SPARE = 8  # added head dimensions for sinks; kernels need multiples of 8
_GROUP = "nemo_offload_rl_context_group"  # attribute of layers' submodules


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
        compute_dtype: Type of passes; the kernel for packed rows supports 16-bit types on a GPU only, and heads of at
            most 256 numbers.
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
    is_16_bit_on_gpu = device.type == "cuda" and compute_dtype != torch.float32
    has_large_heads = (contents.get("global_head_dim") or 0) > _LARGEST_HEAD
    if is_16_bit_on_gpu and tells_attention_bounds(contents) and not has_large_heads:
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


def own_pieces(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the indices of a rank's two pieces among a row's `2 * num_ranks`, in order."""
    return rank, 2 * num_ranks - 1 - rank


def share_rows(layers: nn.ModuleList, group: dist.ProcessGroup) -> None:
    """Store the group on the submodules of decoder layers, since not every family passes arguments on to them."""
    for layer in layers:
        for part in layer.children():
            setattr(part, _GROUP, group)


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention of a rank's queries to whole rows.

    Args:
        module: A submodule of a layer that `share_rows` was given.
        query: [B, H, L, D] of the rank's two pieces of each row.
        key: [B, K, L, D]
        value: [B, K, L, D]; latent attention has another D here.
        attention_mask: Not read: rows are padded on the right.
        scaling: Factor of the scores; None for 1 / sqrt(D).
        dropout: Share of attention weights that are dropped.
        sliding_window: Tokens that a query sees, its own included; None for all tokens up to its own.
        **kwargs: Not read.

    Returns:
        [B, L, H, D]
    """
    group = getattr(module, _GROUP)
    key_BKSD, value_BKSD = _whole(key, group), _whole(value, group)
    if sliding_window is not None and sliding_window >= key_BKSD.shape[2]:
        sliding_window = None
    num_groups = query.shape[1] // key.shape[1]
    if num_groups > 1:
        key_BKSD, value_BKSD = (states.repeat_interleave(num_groups, dim=1) for states in (key_BKSD, value_BKSD))
    attended = []
    for piece, index in zip(query.chunk(2, dim=2), own_pieces(group.rank(), group.size()), strict=True):
        length = piece.shape[2]
        start, end = index * length, (index + 1) * length
        first = 0 if sliding_window is None else max(0, start + 1 - sliding_window)
        keys, values = key_BKSD[:, :, first:end], value_BKSD[:, :, first:end]
        if sliding_window is None and query.device.type == "cuda":
            mask = causal_lower_right(length, end)  # supported by GPU kernels
        else:
            mask = seen_keys(length, end - first, sliding_window, query.device)
        attended.append(
            F.scaled_dot_product_attention(piece, keys, values, attn_mask=mask, dropout_p=dropout, scale=scaling)
        )
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


def seen_keys(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return [Q, K] bool: the keys that each query sees; the queries' own keys are the last ones."""
    before = num_keys - num_queries
    seen_QK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(before)
    return seen_QK if window is None else seen_QK.triu(before - window + 1)


def _whole(states_BKLD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [B, K, S, D] keys or values of all ranks, in the rows' order."""
    front, back = gathered(states_BKLD, group).chunk(2, dim=-2)
    return torch.cat([front, back.flip(0)]).movedim(0, 2).flatten(2, 3)
