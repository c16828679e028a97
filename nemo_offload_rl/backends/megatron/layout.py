"""How the rows of a micro-batch lie in the model's input: padded or packed, whole or split over context parallelism.

Shape suffixes: B samples, S positions of a sample, R rows and T positions of the model's input (padded: R = B; packed:
R = 1), L positions that this context-parallel rank has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from nemo_offload_rl.backends.megatron import parallel
from nemo_offload_rl.data.batch import TokenBatch, on_device


@dataclass(frozen=True)
class ModelInput:
    """Input of this rank, and what brings the targets' values back to the samples' places.

    Attributes:
        ids_RL: Token ids.
        positions_RL: Position of each token in its sample.
        targets_RL: The token after each one; arbitrary where there is none.
        sources_RL: Its place in the flattened samples; arbitrary where there is none.
        is_padding_RL: Which tokens are of no sample.
        places_N: Of the places that `by_place` makes, those in which any rank has a token to score.
        packed: Where samples begin, for packed input.
        scored_K: Positions in the flattened whole input, in the samples' order, whose targets' logprobs are wanted.
        tokens_K: Which tokens of the flattened samples those targets are.
        samples_shape: [B, S].
        order_T: Position in the whole input of each position that the ranks hold, rank after rank; None for one rank.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    targets_RL: Tensor
    sources_RL: Tensor
    is_padding_RL: Tensor
    places_N: Tensor
    packed: PackedSeqParams | None
    scored_K: Tensor
    tokens_K: Tensor
    samples_shape: torch.Size
    order_T: Tensor | None

    def of_samples(self, scored_RL: Tensor) -> Tensor:
        """[B, S, ...] by the convention of logprobs, from [R, L, ...] of the positions' targets; 0 where not scored."""
        scored_RT = scored_RL if self.order_T is None else _gather_positions(scored_RL, self.order_T)
        found_K = scored_RT.flatten(0, 1).index_select(0, self.scored_K)
        shape = (self.samples_shape.numel(), *found_K.shape[1:])
        return found_K.new_zeros(shape).index_copy(0, self.tokens_K, found_K).unflatten(0, self.samples_shape)


def by_place(value_RL: Tensor, splits: int) -> Tensor:
    """[P, splits]: what the sequence-parallel ranks, of which each has P positions, have in the same place."""
    return value_RL.t().unflatten(0, (splits, -1)).flatten(1).t()


def lay_out(
    batch: TokenBatch, *, device: torch.device, pack: bool, sequence_parallel_size: int, token_multiple: int
) -> ModelInput:
    """The model's input for a micro-batch.

    Args:
        batch: The micro-batch on the host: on a GPU each look at it would wait for all work that is queued there.
        device: Where the input goes.
        pack: Put the samples end to end, without padding but what the splits below need.
        sequence_parallel_size: Positions of a rank are a multiple of it.
        token_multiple: Tokens that a rank has between two exchanges are a multiple of it: 8-bit products ask for that.
    """
    cp_group = parallel.context_parallel_group()
    cp_size = cp_group.size()
    # Each rank gets an early and a late piece, so that causal attention costs all of them the same.
    multiple = sequence_parallel_size * (2 * cp_size if cp_size > 1 else 1)
    row_multiple = math.lcm(multiple, token_multiple * sequence_parallel_size * cp_size)
    ids_BS, num_columns = batch.input_ids, batch.input_ids.shape[1]
    is_scored_BS = batch.is_scored()
    if pack:
        lengths_B = -(-batch.input_lengths // multiple) * multiple
        lengths_B[-1] += -lengths_B.sum() % row_multiple
    else:
        lengths_B = torch.full_like(batch.input_lengths, -(-num_columns // row_multiple) * row_multiple)
    width = max(num_columns, int(lengths_B.max()))
    source_BS = torch.arange(ids_BS.numel()).view_as(ids_BS)
    ids_BP, source_BP, is_scored_BP = (
        F.pad(value, (0, width - num_columns)) for value in (ids_BS, source_BS, is_scored_BS)
    )
    position_BP = torch.arange(width).expand_as(ids_BP)
    is_padding_BP = position_BP >= batch.input_lengths.unsqueeze(1)
    packed = None
    if pack:
        is_kept_BP = position_BP < lengths_B.unsqueeze(1)
        ids_BP, source_BP, position_BP, is_scored_BP, is_padding_BP = (
            value[is_kept_BP].unsqueeze(0) for value in (ids_BP, source_BP, position_BP, is_scored_BP, is_padding_BP)
        )
        packed = _packed_params(lengths_B, device, multiple)
    # The token after the last is the first, which is not scored.
    targets_RT, sources_RT, is_scored_RT = (value.roll(-1, dims=1) for value in (ids_BP, source_BP, is_scored_BP))
    order_T = None
    if cp_size > 1:
        starts = lengths_B.cumsum(0) - lengths_B if pack else lengths_B.new_zeros(1)
        order_T = _zigzag(starts.tolist(), (lengths_B if pack else lengths_B[:1]).tolist(), cp_size)
    mine = slice(None) if order_T is None else order_T.chunk(cp_size)[cp_group.rank()]
    is_scored_PX = by_place(is_scored_RT[:, mine], sequence_parallel_size)

    def move(value: Tensor) -> Tensor:
        return on_device(value, device)

    return ModelInput(
        ids_RL=move(ids_BP[:, mine]),
        positions_RL=move(position_BP[:, mine]),
        targets_RL=move(targets_RT[:, mine]),
        sources_RL=move(sources_RT[:, mine]),
        is_padding_RL=move(is_padding_BP[:, mine]),
        places_N=move(is_scored_PX.any(dim=1).nonzero().squeeze(1)),
        packed=packed,
        scored_K=move(is_scored_RT.flatten().nonzero().squeeze(1)),
        tokens_K=move(is_scored_BS.flatten().nonzero().squeeze(1)),
        samples_shape=ids_BS.shape,
        order_T=None if order_T is None else move(order_T),
    )


def _packed_params(lengths_B: Tensor, device: torch.device, multiple: int) -> PackedSeqParams:
    ends = F.pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32).to(device, non_blocking=True)
    # To the kernels a bound only. What they prepare for each of its values is prepared seldom: powers of two are few.
    longest = multiple << (int(lengths_B.max()) // multiple - 1).bit_length()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _zigzag(starts: list[int], lengths: list[int], cp_size: int) -> Tensor:
    """[T] positions of all ranks, rank after rank: of each sample's 2 * cp_size pieces, rank r has r and its mirror."""
    by_rank = []
    for rank in range(cp_size):
        for start, length in zip(starts, lengths, strict=True):
            pieces = torch.arange(start, start + length).chunk(2 * cp_size)
            by_rank += [pieces[rank], pieces[2 * cp_size - 1 - rank]]
    return torch.cat(by_rank)


class _GatherPositions(torch.autograd.Function):
    """All context-parallel ranks' positions; every rank goes on with the whole, so its gradient is its own part."""

    @staticmethod
    def forward(ctx: Any, scored_RL: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.width = group.rank(), scored_RL.shape[1]
        pieces = [torch.empty_like(scored_RL) for _ in range(group.size())]
        dist.all_gather(pieces, scored_RL.contiguous(), group=group)
        return torch.cat(pieces, dim=1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0].narrow(1, ctx.rank * ctx.width, ctx.width).contiguous(), None


def _gather_positions(scored_RL: Tensor, order_T: Tensor) -> Tensor:
    gathered_RT: Any = _GatherPositions.apply(scored_RL, parallel.context_parallel_group())
    return torch.empty_like(gathered_RT).index_copy(1, order_T, gathered_RT)
