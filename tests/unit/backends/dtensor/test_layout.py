"""Which tokens the model gets, and where the hidden states before the scored ones are."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from policy_cases import make_batch, make_sparse_batch
from torch import Tensor

from nemo_offload_rl.backends.dtensor.model import ModelRows, packed_rows, padded_rows, shared_rows


def tokens_before(ids_BS: Tensor, rows: ModelRows) -> Tensor:
    """Of the scored tokens, where the model's hidden states are the ids themselves."""
    ids_RL = ids_BS if rows.tokens_RL is None else ids_BS.take(rows.tokens_RL)
    return ids_RL.flatten()[rows.before_N]


@pytest.mark.parametrize(("width", "multiple"), product((9, 14), (1, 2, 4)))
def test_scored_tokens_follow_the_tokens_before_them_however_rows_are_laid_out(width: int, multiple: int) -> None:
    for batch in (make_batch(width=width), make_sparse_batch(width=width)):
        unique_BS = torch.arange(batch.input_ids.numel()).view(batch.input_ids.shape)
        is_scored_BS = batch.is_scored()
        whole = [padded_rows(is_scored_BS, multiple), packed_rows(batch.input_lengths, is_scored_BS, multiple)]
        for rows in whole:
            assert torch.equal(rows.scored_N, is_scored_BS.flatten().nonzero().squeeze(1))
            assert torch.equal(tokens_before(unique_BS, rows), rows.scored_N - 1)
            assert rows.tokens_RL is None or rows.tokens_RL.shape[1] % multiple == 0
        for num_ranks in (2, 3, 4):
            parts = [shared_rows(is_scored_BS, multiple, rank, num_ranks) for rank in range(num_ranks)]
            for part in parts:
                assert torch.equal(tokens_before(unique_BS, part), part.scored_N - 1)
                assert part.tokens_RL is not None and part.tokens_RL.shape[1] % multiple == 0
                assert part.positions_RL is not None and torch.equal(part.tokens_RL[:1], part.positions_RL)
            assert len({part.tokens_RL.shape for part in parts if part.tokens_RL is not None}) == 1
            assert torch.equal(torch.cat([part.scored_N for part in parts]).sort().values, whole[0].scored_N)


def test_a_packed_row_is_filled_up_with_a_sequence_of_its_own() -> None:
    lengths_B = torch.tensor([3, 2])
    is_scored_BS = torch.tensor([[False, True, True], [False, True, False]])
    rows = packed_rows(lengths_B, is_scored_BS, multiple=4)
    assert rows.positions_RL is not None and rows.positions_RL.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert rows.bounds is not None and rows.bounds.tolist() == [0, 3, 5, 8] and rows.bounds.dtype == torch.int32
    assert max(rows.lengths) == 3
