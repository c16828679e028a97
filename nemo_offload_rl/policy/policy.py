"""The policy as the driver sees it: one object in front of all ranks, with the workers' verbs.

Rows are dealt out so that every optimizer step sees its own global batch: rank r of data-parallel size D gets the r-th
of D equal runs of rows out of each global batch. Neighbouring rows stay neighbours (preference pairs rely on it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.data.batch import TokenBatch, TrainBatch
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.interfaces import LossFn, TrainResult, WorkerGroup
from nemo_offload_rl.policy.settings import PolicySettings
from nemo_offload_rl.residency import TransitionReport
from nemo_offload_rl.weight_sync.interfaces import WeightBucket


def deal_rows(num_rows: int, rows_per_step: int, dp_size: int) -> list[list[int]]:
    """Row indices by data-parallel rank, global batch by global batch.

    Args:
        num_rows: A multiple of `rows_per_step`.
        rows_per_step: Rows of one global batch, a multiple of `dp_size`.
        dp_size: Data-parallel ranks.
    """
    run = rows_per_step // dp_size
    return [
        [row for start in range(rank * run, num_rows, rows_per_step) for row in range(start, start + run)]
        for rank in range(dp_size)
    ]


def pad_rows[Batch: TokenBatch](batch: Batch, multiple: int) -> Batch:
    """Repeat the first row until the rows divide by `multiple`; repeated rows have `sample_mask` 0."""
    num_added = -len(batch) % multiple
    if not num_added:
        return batch
    padded = batch.select([*range(len(batch)), *[0] * num_added])
    if isinstance(padded, TrainBatch):
        sample_mask = padded.sample_mask.clone()
        sample_mask[len(batch) :] = 0
        padded = replace(padded, sample_mask=sample_mask)
    return padded


class Policy:
    """Driver side of the policy workers.

    Args:
        group: Workers by rank, rank = dp_rank * tp_size + tp_rank.
        settings: The workers' settings.
        dp_size: Data-parallel ranks.
        tp_size: Ranks that share one shard of the data.
    """

    def __init__(self, group: WorkerGroup, settings: PolicySettings, dp_size: int, tp_size: int) -> None:
        if group.world_size != dp_size * tp_size:
            raise ValueError(f"{group.world_size} workers are not dp_size={dp_size} times tp_size={tp_size}")
        self._group = group
        self._settings = settings
        self._dp_size = dp_size
        self._tp_size = tp_size

    # -- phases ----------------------------------------------------------------------------------------------------

    def prepare_for_training(self) -> list[TransitionReport]:
        """See `PolicyWorker`; one report by rank."""
        return self._group.run_all("prepare_for_training")

    def prepare_for_lp_inference(self) -> list[TransitionReport]:
        """See `PolicyWorker`; one report by rank."""
        return self._group.run_all("prepare_for_lp_inference")

    def offload_before_refit(self) -> list[TransitionReport]:
        """See `PolicyWorker`; one report by rank."""
        return self._group.run_all("offload_before_refit")

    def offload_after_refit(self) -> list[TransitionReport]:
        """See `PolicyWorker`; one report by rank."""
        return self._group.run_all("offload_after_refit")

    def residency_plan(self) -> str:
        """The resolved plan of rank 0 as a table with sizes; the other ranks have the same."""
        return self._group.run_all("residency_plan")[0]

    def residency_reports(self) -> list[list[TransitionReport]]:
        """Transitions since the last call, by rank."""
        return self._group.run_all("residency_reports")

    # -- compute ---------------------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch, loss_fn: LossFn) -> TrainResult:
        """One optimizer step for each `train_global_batch_size` rows, in their order.

        Raises:
            ConfigError: The rows are no whole global batches, or those do not divide by the data-parallel ranks.
        """
        rows = self._settings.train_global_batch_size
        if len(batch) % rows or not len(batch):
            raise ConfigError(
                f"A training batch of {len(batch)} rows is no multiple of policy.train_global_batch_size={rows}; "
                "change one of them."
            )
        if rows % self._dp_size:
            raise ConfigError(
                f"policy.train_global_batch_size={rows} does not divide by the {self._dp_size} data-parallel ranks; "
                "make it a multiple."
            )
        return self._run_sharded("train", batch, deal_rows(len(batch), rows, self._dp_size), loss_fn)[0]

    def evaluate(self, batch: TrainBatch, loss_fn: LossFn) -> TrainResult:
        """The loss of the whole batch as one global batch, without gradients."""
        padded = pad_rows(batch, self._dp_size)
        return self._run_sharded("evaluate", padded, deal_rows(len(padded), len(padded), self._dp_size), loss_fn)[0]

    def get_logprobs(self, batch: TokenBatch) -> Tensor:
        """[B, S] float32 logprobs under the policy, rows as in `batch`; column 0 and padding are 0."""
        return self._logprobs("get_logprobs", batch)

    def get_reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """The same under the frozen initial parameters."""
        return self._logprobs("get_reference_logprobs", batch)

    def _logprobs(self, method: str, batch: TokenBatch) -> Tensor:
        # Only what a logprob needs travels: a training batch has five more tensors of this size.
        tokens = TokenBatch(**{field.name: getattr(batch, field.name) for field in fields(TokenBatch)})
        padded = pad_rows(tokens, self._dp_size)
        pieces = self._run_sharded(method, padded, deal_rows(len(padded), len(padded), self._dp_size))
        return torch.cat(pieces)[: len(batch)]

    def _run_sharded(
        self, method: str, batch: TokenBatch, rows_by_dp: Sequence[Sequence[int]], *args: Any
    ) -> list[Any]:
        """Call `method` with each rank's rows; results by data-parallel rank (tensor-parallel ranks give the same)."""
        shards = [batch.select(rows) for rows in rows_by_dp]
        per_rank = [(shards[rank // self._tp_size], *args) for rank in range(self._group.world_size)]
        return self._group.run_each(method, per_rank)[:: self._tp_size]

    # -- refit -----------------------------------------------------------------------------------------------------

    def start_refit(self) -> None:
        """Begin to send weights; an unfinished refit is dropped."""
        self._group.run_all("start_refit")

    def next_bucket(self) -> WeightBucket | None:
        """Rank 0's next bucket, None after the last; every rank takes part."""
        return self._group.run_all("next_bucket")[0]

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Path) -> None:
        """Write model, optimizer, schedule and random state into the folder `path`, which appears whole."""
        self._group.run_all("save_checkpoint", path)

    def load_checkpoint(self, path: Path) -> None:
        """Read what `save_checkpoint` wrote."""
        self._group.run_all("load_checkpoint", path)

    def export_hf(self, path: Path) -> None:
        """Write a Hugging Face folder with the weights in the compute precision."""
        self._group.run_all("export_hf", path)

    def shutdown(self) -> None:
        """End the workers; safe to call twice."""
        self._group.shutdown()
