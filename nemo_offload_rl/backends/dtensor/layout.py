"""Places of a micro-batch's tokens in the rows of the model, and of the tokens to score.

They are computed on the host: reading lengths from a GPU would wait for all work that is queued there.

Shape suffixes: B rows of S columns, as the micro-batch has them; R rows of L tokens, as the model gets them; N tokens.
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
    """Rows of the model for a micro-batch.

    Attributes:
        scored_N: Places in the flattened rows of the micro-batch: the tokens to score.
        before_N: Places in the flattened rows of the model: the tokens before them.
        tokens_RL: Places in the flattened rows of the micro-batch: the tokens of the model's rows. None for the
            micro-batch as it is.
        positions_RL: Their positions; one row for all is enough. None for those of columns.
        bounds: Of packed rows, [sequences + 1] int32: where each begins, and L.
        longest: Tokens of the longest of them.
    """

    scored_N: Tensor
    before_N: Tensor
    tokens_RL: Tensor | None = None
    positions_RL: Tensor | None = None
    bounds: Tensor | None = None
    longest: int = 0

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **{name: on_device(value, device) for name, value in tensors.items()})


def padded_rows(is_scored_BS: Tensor, multiple: int) -> ModelRows:
    """Rows of a micro-batch that are padded on the right.

    Args:
        is_scored_BS: [B, S] bool, tokens to score: real, and never a row's first.
        multiple: Of the model's columns; beyond S they have any token.
    """
    (num_rows, width), scored_N = is_scored_BS.shape, _places(is_scored_BS)
    added = -width % multiple
    if not added:
        return ModelRows(scored_N, scored_N - 1)
    column_L = torch.arange(width + added).clamp(max=width - 1)
    tokens_BL = torch.arange(num_rows).unsqueeze(1) * width + column_L
    return ModelRows(scored_N, scored_N + scored_N // width * added - 1, tokens_BL)


def shared_rows(is_scored_BS: Tensor, multiple: int, rank: int, num_ranks: int) -> ModelRows:
    """One rank's part of rows that are padded on the right and that ranks share.

    It scores those tokens before which it has the token; the other ranks score the others.

    Args:
        is_scored_BS: [B, S] bool, tokens to score: real, and never a row's first.
        multiple: Of the tokens that a rank has of a row; beyond S they are any.
        rank: Among those that share the rows.
        num_ranks: How many of them there are.
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
    """The real tokens of a micro-batch's rows end to end in one row.

    Args:
        lengths_B: [B] tokens of each row.
        is_scored_BS: [B, S] bool, tokens to score: real, and never a row's first.
        multiple: Of the row's tokens; those that are added are a sequence of their own.
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
