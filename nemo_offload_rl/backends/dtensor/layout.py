"""Indices that map a micro-batch's tokens, and the tokens to score, to the model's rows.

Computed on the host: reading lengths from a GPU would wait for all queued work.

Shape suffixes: B rows of S columns of the micro-batch; R rows of L tokens of the model's input; N scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_offload_rl.backends.dtensor.context_parallel import own_pieces
from nemo_offload_rl.data.batch import on_device


@dataclass(frozen=True)
class ModelRows:
    """The model's rows for a micro-batch.

    Attributes:
        scored_N: Indices of the tokens to score in the flattened rows of the micro-batch.
        before_N: Indices of the tokens before them in the flattened rows of the model.
        tokens_RL: Indices of the model's tokens in the flattened rows of the micro-batch; None if the model gets the
            micro-batch's rows unchanged.
        positions_RL: Positions of the model's tokens, [1, L] if equal in all rows; None for column numbers.
        bounds: [sequences + 1] int32, with packed rows: the start of each sequence, and L.
        longest: Tokens of the longest packed sequence.
    """

    scored_N: Tensor
    before_N: Tensor
    tokens_RL: Tensor | None = None
    positions_RL: Tensor | None = None
    bounds: Tensor | None = None
    longest: int = 0

    def to(self, device: torch.device) -> Self:
        """Return a copy on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **{name: on_device(value, device) for name, value in tensors.items()})


def padded_rows(is_scored_BS: Tensor, multiple: int) -> ModelRows:
    """Lay out rows that are padded on the right.

    Args:
        is_scored_BS: [B, S] bool, tokens to score: real, and never a row's first.
        multiple: Divisor of L; columns beyond S have any token.
    """
    (num_rows, width), scored_N = is_scored_BS.shape, _places(is_scored_BS)
    added = -width % multiple
    if not added:
        return ModelRows(scored_N, scored_N - 1)
    column_L = torch.arange(width + added).clamp(max=width - 1)
    tokens_BL = torch.arange(num_rows).unsqueeze(1) * width + column_L
    return ModelRows(scored_N, scored_N + scored_N // width * added - 1, tokens_BL)


def shared_rows(is_scored_BS: Tensor, multiple: int, rank: int, num_ranks: int) -> ModelRows:
    """Lay out one rank's part of rows that are padded on the right and shared by ranks.

    A rank scores the tokens whose preceding token it has.

    Args:
        is_scored_BS: [B, S] bool, tokens to score: real, and never a row's first.
        multiple: Divisor of the length of a rank's pieces; columns beyond S have any token.
        rank: This rank among those that share the rows.
        num_ranks: Number of ranks that share the rows.
    """
    width, scored_N = is_scored_BS.shape[1], _places(is_scored_BS)
    length = -(-width // (2 * num_ranks))
    length += -length % multiple
    pieces = [torch.arange(index * length, (index + 1) * length) for index in own_pieces(rank, num_ranks)]
    column_L = torch.cat(pieces)
    place_P = torch.full((2 * num_ranks * length,), -1).index_copy(0, column_L, torch.arange(len(column_L)))
    before_N = scored_N - 1
    row_N, place_N = before_N // width, place_P.index_select(0, before_N % width)
    is_mine_N = place_N >= 0
    column_L = column_L.clamp(max=width - 1)
    return ModelRows(
        scored_N[is_mine_N],
        (row_N * len(column_L) + place_N)[is_mine_N],
        tokens_RL=torch.arange(len(is_scored_BS)).unsqueeze(1) * width + column_L,
        positions_RL=column_L.unsqueeze(0),
    )


def packed_rows(lengths_B: Tensor, is_scored_BS: Tensor, multiple: int) -> ModelRows:
    """Lay out the real tokens of a micro-batch's rows end to end in one row.

    Args:
        lengths_B: [B] tokens of each row.
        is_scored_BS: [B, S] bool, tokens to score: real, and never a row's first.
        multiple: Divisor of L; added tokens are a sequence of their own.
    """
    width, scored_N = is_scored_BS.shape[1], _places(is_scored_BS)
    is_real_BS = torch.arange(width) < lengths_B.unsqueeze(1)
    tokens_L = _places(is_real_BS)
    place_BS = is_real_BS.flatten().cumsum(0) - 1
    added = -len(tokens_L) % multiple
    if added:
        lengths_B = torch.cat([lengths_B, lengths_B.new_tensor([added])])
    return ModelRows(
        scored_N,
        place_BS.index_select(0, scored_N) - 1,
        tokens_RL=F.pad(tokens_L, (0, added)).unsqueeze(0),
        positions_RL=torch.cat([tokens_L % width, torch.arange(added)]).unsqueeze(0),
        bounds=F.pad(lengths_B.cumsum(0, dtype=torch.int32), (1, 0)),
        longest=int(lengths_B.max()),
    )


def _places(is_wanted_BS: Tensor) -> Tensor:
    return is_wanted_BS.flatten().nonzero().squeeze(1)
