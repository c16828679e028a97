"""Splits a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.data.batching import group_lengths, pack_rows, plan_micro_batches, rows_of_groups, split_to_count
from nemo_offload_rl.keys.worker import PolicySettings


def micro_batch_rows(
    settings: PolicySettings, batch: TokenBatch, all_reduce_max: Callable[[int], int], *, is_training: bool, size: int
) -> list[list[int]]:
    """Return the row indices of each micro-batch: `size` rows, or as many as fit a budget of tokens.

    Every data-parallel rank gets the same number of micro-batches. Rows of a group stay together.
    """
    per_group = batch.rows_per_group
    by_tokens = {plan_micro_batches: settings.dynamic_batching, pack_rows: settings.sequence_packing}
    for make_plan, batching in by_tokens.items():
        if batching.enabled:
            packed = make_plan is pack_rows
            max_tokens = batching.train_mb_tokens if is_training else batching.logprob_mb_tokens
            round_to = settings.length_multiple(batching)
            lengths = batch.input_lengths.tolist()
            if per_group > 1:
                lengths = group_lengths(lengths, per_group, round_to=round_to, packed=packed)
                max_tokens = max_tokens if packed else max_tokens // per_group
            plan = make_plan(lengths, max_tokens, round_to)
            return rows_of_groups(split_to_count(plan, all_reduce_max(len(plan))), per_group)
    return [list(range(start, min(start + size, len(batch)))) for start in range(0, len(batch), size)]


def in_rows_of(batch: TokenBatch, plan: Sequence[Sequence[int]], pieces: Sequence[Tensor]) -> Tensor:
    """Merge results of micro-batches into [B, S, ...], by the rows in `plan`; columns that were trimmed are 0."""
    shape = batch.input_ids.shape
    whole = torch.zeros((*shape, *pieces[0].shape[2:]), dtype=pieces[0].dtype)
    for rows, piece in zip(plan, pieces, strict=True):
        whole[torch.as_tensor(rows), : piece.shape[1]] = piece
    return whole
