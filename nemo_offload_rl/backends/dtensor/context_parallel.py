"""Context parallelism: the ranks of a group share each row, and each attends to the whole row's keys.

A row is cut into 2N pieces for N ranks. Rank r has the r-th piece from the front and the r-th from the back, so all
ranks compute equally much causal attention. All else works on single positions. A layer's keys and values are gathered
(arXiv 2407.21783, section 3.3.2), and their gradients are summed over the ranks.

Shape suffixes: B rows of the micro-batch, H heads, K key-value heads, S tokens of a row, L tokens of a row on one rank,
D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from nemo_offload_rl.backends.scoring.collectives import gathered

_GROUP = "nemo_offload_rl_context_group"  # attribute of layers' submodules


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
