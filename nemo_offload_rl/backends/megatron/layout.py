"""Layout of a micro-batch in the model's input: padded or packed, whole or split over context parallelism.

Shape suffixes: B samples, S positions of a sample, R rows and T positions of the model's input (padded: R = B; packed:
R = 1), L positions on this context-parallel rank.
"""

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
    """Input of this rank, and the indices that map the targets' values back to the samples.

    Attributes:
        ids_RL: Token ids.
        positions_RL: Position of each token in its sample.
        places_RL: Index of each token in the flattened samples; 0 for tokens that were added.
        targets_RL: Next token of each token; arbitrary at the end of a sample.
        sources_RL: Index of each target in the flattened samples; arbitrary at the end of a sample.
        is_padding_RL: True for tokens that belong to no sample.
        places_N: Rows of `by_place` in which at least one rank scores a token.
        packed: Starts of the samples, for packed input.
        scored_K: Positions in the flattened whole input whose targets are scored, in the samples' order.
        tokens_K: Indices of those targets in the flattened samples.
        samples_shape: [B, S].
        order_T: Position in the whole input of each position on the ranks, rank after rank; None for one rank.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    places_RL: Tensor
    targets_RL: Tensor
    sources_RL: Tensor
    is_padding_RL: Tensor
    places_N: Tensor
    packed: PackedSeqParams | None
    scored_K: Tensor
    tokens_K: Tensor
    samples_shape: torch.Size
    order_T: Tensor | None

    def of_routers(self, value_BS: Tensor, part: int, num_parts: int) -> Tensor:
        """Convert the samples' values [B, S, ...] to [T, ...], in the order of the tokens of a rank's routers.

        Routers get positions first, then rows; with sequence parallelism one of `num_parts` equal parts of positions.
        """
        places_T = self.places_RL.t().chunk(num_parts)[part].flatten()
        return value_BS.flatten(0, 1).index_select(0, places_T)

    def of_samples(self, scored_RL: Tensor) -> Tensor:
        """Convert targets' values [R, L, ...] to [B, S, ...] in the layout of logprobs; 0 for unscored tokens."""
        scored_RT = scored_RL if self.order_T is None else _gather_positions(scored_RL, self.order_T)
        found_K = scored_RT.flatten(0, 1).index_select(0, self.scored_K)
        shape = (self.samples_shape.numel(), *found_K.shape[1:])
        return found_K.new_zeros(shape).index_copy(0, self.tokens_K, found_K).unflatten(0, self.samples_shape)


def by_place(value_RL: Tensor, splits: int) -> Tensor:
    """Return [P, splits]: each row has the values of all sequence-parallel ranks at one of their P positions."""
    return value_RL.t().unflatten(0, (splits, -1)).flatten(1).t()


def lay_out(
    batch: TokenBatch, *, device: torch.device, pack: bool, sequence_parallel_size: int, token_multiple: int
) -> ModelInput:
    """Return the model's input for a micro-batch.

    Args:
        batch: The micro-batch, on the host. On a GPU, reading values from it would wait for all queued work.
        device: Device of the input.
        pack: Concatenate the samples, padded only as the splits below require.
        sequence_parallel_size: Divides the number of positions on a rank.
        token_multiple: Divides the number of tokens on a rank between two exchanges, as 8-bit products require.
    """
    cp_group = parallel.context_parallel_group()
    cp_size = cp_group.size()
    # Each rank gets an early and a late piece, so that all have equal work in causal attention.
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
    # The last position's target wraps to the first token, which is not scored.
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
        places_RL=move(source_BP[:, mine]),
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
    sequence_T = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
    # The kernels use it only as a bound, and prepare anew for each value. Powers of two make few values.
    longest = multiple << (int(lengths_B.max()) // multiple - 1).bit_length()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        seq_idx=on_device(sequence_T.to(torch.int32).unsqueeze(0), device),
    )


def _zigzag(starts: list[int], lengths: list[int], cp_size: int) -> Tensor:
    """Return the positions of all ranks [T]; rank r has pieces r and 2 * cp_size - 1 - r of each sample."""
    by_rank = []
    for rank in range(cp_size):
        for start, length in zip(starts, lengths, strict=True):
            pieces = torch.arange(start, start + length).chunk(2 * cp_size)
            by_rank += [pieces[rank], pieces[2 * cp_size - 1 - rank]]
    return torch.cat(by_rank)


class _GatherPositions(torch.autograd.Function):
    """All-gather over context-parallel ranks; the backward pass slices the gradient, since every rank has all of it."""

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
