"""A vocabulary that several ranks share, and the tokens of it that a sampler may draw.

Shape suffixes: N positions, V vocabulary (V is this rank's part under tensor parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_offload_rl.keys.worker import TokenFilter

# Of the logits that are sorted at once, over the whole vocabulary: 64 MiB in float32, and twice that of places.
_SORTED_AT_ONCE = 2**24
# In the place of logits that a filter takes out: no probability is left of them, and no difference of two is no number.
_NOTHING = -1e30


@dataclass(frozen=True)
class VocabShard:
    """Which rows of the output layer this rank has; `group` is None where it has all of them."""

    start: int
    group: dist.ProcessGroup | None

    def reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """`value` reduced in place over the ranks that share the vocabulary."""
        if self.group is not None:
            dist.all_reduce(value, op=op, group=self.group)  # pyright: ignore[reportUnknownMemberType]
        return value

    def side_by_side(self, value: Tensor) -> Tensor:
        """Every rank's tensor, one beside the other in the last dimension; of one shape on all ranks."""
        if self.group is None:
            return value
        pieces = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.group.size())]
        dist.all_gather(pieces, value.contiguous(), group=self.group)  # pyright: ignore[reportUnknownMemberType]
        return torch.cat(pieces, dim=-1)


@torch.no_grad()
def is_drawn(logits_NV: Tensor, kept: TokenFilter, temperature: float, shard: VocabShard) -> Tensor:
    """[N, V] bool: which tokens top-k and then top-p leave, as vLLM's sampler finds them.

    Of the `top_k` most likely tokens those stay for which all likelier ones together have less than `top_p` of the
    probability that the top-k has. Tokens as likely as the last one that stays do so too: which of several a sampler
    takes is not defined, and what it drew must be in the set.

    Args:
        logits_NV: This rank's columns; any number of dimensions before V.
        kept: What stays.
        temperature: What logits are divided by.
        shard: Which columns these are.
    """
    rows_NV = logits_NV.flatten(0, -2)
    num_columns = logits_NV.shape[-1] * (1 if shard.group is None else shard.group.size())
    pieces = torch.split(rows_NV, max(1, _SORTED_AT_ONCE // num_columns))
    return torch.cat([piece >= _least(piece, kept, temperature, shard) for piece in pieces]).view(logits_NV.shape)


def _least(logits_NV: Tensor, kept: TokenFilter, temperature: float, shard: VocabShard) -> Tensor:
    """[N, 1] the lowest logit that stays, in the logits' own type."""
    found_NK = logits_NV
    if kept.top_k is not None:  # whoever is among the first k of all is among the first k of its own shard
        found_NK = logits_NV.topk(min(kept.top_k, logits_NV.shape[-1]), dim=-1).values
    found_NK = shard.side_by_side(found_NK)
    found_NK = found_NK.sort(dim=-1, descending=True).values[..., : kept.top_k]
    shares_NK = (found_NK.float() / temperature).softmax(-1)
    likelier_NK = shares_NK.cumsum(-1) - shares_NK
    num_kept_N1 = (likelier_NK < kept.top_p).sum(-1, keepdim=True).clamp(min=1)
    return found_NK.gather(-1, num_kept_N1 - 1)


def without(logits_NV: Tensor, is_drawn_NV: Tensor) -> Tensor:
    """The logits with nothing left of tokens that are not drawn; these get no gradient."""
    return logits_NV.masked_fill(~is_drawn_NV, max(_NOTHING, torch.finfo(logits_NV.dtype).min / 4))
