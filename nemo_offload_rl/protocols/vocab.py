"""A vocabulary that is split over ranks, and the tokens that a sampler may draw.

Shape suffixes: N positions, V vocabulary (V is this rank's part under tensor parallelism).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_offload_rl.keys.worker import TokenFilter

# Most logits that are sorted at once, over the whole vocabulary: 64 MiB in float32, and 128 MiB of int64 indices.
_SORTED_AT_ONCE = 2**24
# Replaces logits that a filter takes out: their probability becomes 0, and a difference of two is never NaN.
_NOTHING = -1e30


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of the output layer; `group` is None if the rank has all of them."""

    start: int
    group: dist.ProcessGroup | None

    def reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce `value` in place over the ranks that share the vocabulary."""
        if self.group is not None:
            dist.all_reduce(value, op=op, group=self.group)  # pyright: ignore[reportUnknownMemberType]
        return value

    def side_by_side(self, value: Tensor) -> Tensor:
        """Concatenate all ranks' tensors along the last dimension; their shapes must be equal."""
        if self.group is None:
            return value
        pieces = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.group.size())]
        dist.all_gather(pieces, value.contiguous(), group=self.group)  # pyright: ignore[reportUnknownMemberType]
        return torch.cat(pieces, dim=-1)


@torch.no_grad()
def is_drawn(logits_NV: Tensor, kept: TokenFilter, temperature: float, shard: VocabShard) -> Tensor:
    """Return [N, V] bool: the tokens that top-k and then top-p leave, as in vLLM's sampler.

    One of the `top_k` most likely tokens stays if all likelier ones together have less than `top_p` of the top-k's
    probability. Tokens that tie with the last one stay too: it is undefined which of them a sampler takes, and the
    drawn token must be in the set.

    Args:
        logits_NV: This rank's columns; any number of dimensions before V.
        kept: The filter.
        temperature: Divisor of the logits.
        shard: The columns of `logits_NV`.
    """
    rows_NV = logits_NV.flatten(0, -2)
    num_columns = logits_NV.shape[-1] * (1 if shard.group is None else shard.group.size())
    pieces = torch.split(rows_NV, max(1, _SORTED_AT_ONCE // num_columns))
    return torch.cat([piece >= _least(piece, kept, temperature, shard) for piece in pieces]).view(logits_NV.shape)


def _least(logits_NV: Tensor, kept: TokenFilter, temperature: float, shard: VocabShard) -> Tensor:
    """Return [N, 1] the lowest logit that stays, in the logits' own type."""
    found_NK = logits_NV
    if kept.top_k is not None:  # the first k of all are among the first k of their shards
        found_NK = logits_NV.topk(min(kept.top_k, logits_NV.shape[-1]), dim=-1).values
    found_NK = shard.side_by_side(found_NK)
    found_NK = found_NK.sort(dim=-1, descending=True).values[..., : kept.top_k]
    shares_NK = (found_NK.float() / temperature).softmax(-1)
    likelier_NK = shares_NK.cumsum(-1) - shares_NK
    num_kept_N1 = (likelier_NK < kept.top_p).sum(-1, keepdim=True).clamp(min=1)
    return found_NK.gather(-1, num_kept_N1 - 1)


def without(logits_NV: Tensor, is_drawn_NV: Tensor) -> Tensor:
    """Mask the logits of tokens that are not drawn; these get no gradient."""
    return logits_NV.masked_fill(~is_drawn_NV, max(_NOTHING, torch.finfo(logits_NV.dtype).min / 4))
