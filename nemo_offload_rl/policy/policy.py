"""The driver's view of the policy: one object in front of all ranks, with the workers' methods.

Each global batch is split into D equal runs of rows, D the data-parallel size, and rank r gets run r. So every
optimizer step sees its own global batch, and neighbouring rows stay neighbours, which preference pairs rely on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nemo_offload_rl.data.batch import TokenBatch, TrainBatch, logprob_inputs
from nemo_offload_rl.errors import ConfigError, share_problem
from nemo_offload_rl.keys.backend import ModelParallel
from nemo_offload_rl.keys.worker import PolicySettings, TeacherSettings
from nemo_offload_rl.policy.skipped_updates import ZeroGradients
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.loss import LossFn, TrainResult, WorkerGroup
from nemo_offload_rl.protocols.refit import RefitGroupAddress, WeightBucket
from nemo_offload_rl.residency import TransitionReport
from nemo_offload_rl.weight_sync.cuda_ipc import join_handles


def deal_rows(num_rows: int, rows_per_step: int, dp_size: int) -> list[list[int]]:
    """Return the row indices of each data-parallel rank, global batch by global batch.

    Args:
        num_rows: A multiple of `rows_per_step`.
        rows_per_step: Rows of one global batch, a multiple of `dp_size`.
        dp_size: Number of data-parallel ranks.
    """
    run = rows_per_step // dp_size
    return [
        [row for start in range(rank * run, num_rows, rows_per_step) for row in range(start, start + run)]
        for rank in range(dp_size)
    ]


def pad_rows[Batch: TokenBatch](batch: Batch, multiple: int) -> Batch:
    """Repeat the first group of rows until `multiple` divides the number of groups; repeats have `sample_mask` 0."""
    group = batch.rows_per_group
    num_added = -len(batch) % (multiple * group)
    if not num_added:
        return batch
    padded = batch.select([*range(len(batch)), *[index % group for index in range(num_added)]])
    if isinstance(padded, TrainBatch):
        sample_mask = padded.sample_mask.clone()
        sample_mask[len(batch) :] = 0
        padded = replace(padded, sample_mask=sample_mask)
    return padded


def _concatenated[Batch: TokenBatch](batches: Sequence[Batch]) -> Batch:
    names = batches[0].tensors()
    return replace(batches[0], **{name: torch.cat([getattr(batch, name) for batch in batches]) for name in names})


def _merged(by_rank: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {name: value for mapping in by_rank for name, value in mapping.items()}


def _num_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


class _Ranks:
    """Deals rows to ranks; ranks with the same data-parallel rank get the same rows and return the same results."""

    def __init__(self, parallel: ModelParallel, world_size: int) -> None:
        self.dp_size = world_size // parallel.ranks_per_copy
        self._dp_ranks = [parallel.data_parallel_rank(rank, world_size) for rank in range(world_size)]

    def deal[Batch: TokenBatch](self, batch: Batch, rows_per_step: int | None = None) -> list[Batch]:
        """Split a batch by rank, in global batches of `rows_per_step`; None for one that is padded to fit the ranks."""
        if rows_per_step is None:
            batch = pad_rows(batch, self.dp_size)
        shares = deal_rows(len(batch), rows_per_step or len(batch), self.dp_size)
        shards = [batch.select(rows) for rows in shares]
        return [shards[dp_rank] for dp_rank in self._dp_ranks]

    def each_once[Result](self, results: Sequence[Result]) -> list[Result]:
        """Select one result for each data-parallel rank."""
        return [results[self._dp_ranks.index(dp_rank)] for dp_rank in range(self.dp_size)]


class Policy:
    """Driver side of the policy workers.

    Args:
        group: Workers by rank, numbered as `settings.backend.model_parallel` says.
        settings: The workers' settings.
        teacher: The workers' teacher.

    Raises:
        ConfigError: The number of workers is no multiple of the ranks that a copy of the model takes.
    """

    def __init__(self, group: WorkerGroup, settings: PolicySettings, teacher: TeacherSettings | None = None) -> None:
        parallel, world_size = settings.backend.model_parallel, group.world_size
        if world_size % parallel.ranks_per_copy:
            raise ConfigError(
                f"{world_size} policy workers cannot hold whole copies of a model that is spread over "
                f"{parallel.ranks_per_copy} of them; change the parallel sizes or the number of devices."
            )
        self._group = group
        self._settings = settings
        self._ranks = _Ranks(parallel, world_size)
        self._teacher = teacher
        self._zero_gradients = ZeroGradients()

    # -- phases ----------------------------------------------------------------------------------------------------

    def prepare_for_training(self) -> list[TransitionReport]:
        """See `PolicyWorker`; one report by rank."""
        return self._group.run_all(PolicyWorker.prepare_for_training)

    def prepare_for_lp_inference(self) -> list[TransitionReport]:
        """See `PolicyWorker`; one report by rank."""
        return self._group.run_all(PolicyWorker.prepare_for_lp_inference)

    def prepare_for_teacher(self) -> list[TransitionReport]:
        """See `PolicyWorker`; one report by rank."""
        return self._group.run_all(PolicyWorker.prepare_for_teacher)

    def offload_before_refit(self) -> list[TransitionReport]:
        """See `PolicyWorker`; one report by rank."""
        return self._group.run_all(PolicyWorker.offload_before_refit)

    def release_memory(self, to_driver: bool = True) -> None:
        """See `PolicyWorker`."""
        self._group.run_all(PolicyWorker.release_memory, to_driver)

    def offload_after_refit(self, wait_for_all: bool = True) -> list[TransitionReport]:
        """See `PolicyWorker`; one report by rank."""
        return self._group.run_all(PolicyWorker.offload_after_refit, wait_for_all)

    def finish_leaving(self) -> None:
        """See `PolicyWorker`; returns without waiting. If it fails, the next call fails."""
        self._group.start_all(PolicyWorker.finish_leaving)

    def residency_plan(self) -> str:
        """Render the resolved plan of rank 0 as a table with sizes; the other ranks have the same."""
        return self._group.run_all(PolicyWorker.residency_plan)[0]

    def residency_reports(self) -> list[list[TransitionReport]]:
        """Return the transitions since the last call, by rank."""
        return self._group.run_all(PolicyWorker.residency_reports)

    def start_trace(self) -> None:
        """See `Traced`."""
        self._group.run_all(PolicyWorker.start_trace)

    def stop_trace(self, prefix: str) -> list[str]:
        """See `Traced`."""
        return [problem for problem in self._group.run_all(PolicyWorker.stop_trace, prefix) if problem is not None]

    # -- compute ---------------------------------------------------------------------------------------------------

    @property
    def rows_per_update(self) -> int:
        """Number of rows of a global batch."""
        return self._settings.train_global_batch_size

    def train(self, batch: TrainBatch, loss_fn: LossFn, updates: Sequence[Tensor] | None = None) -> TrainResult:
        """Make one optimizer step for each `train_global_batch_size` rows, in their order.

        Args:
            batch: All rows.
            loss_fn: See `LossFn`.
            updates: Rows of each optimizer step, if their number varies; else None.

        Raises:
            ConfigError: The rows are no whole global batches, or ranks could not share a global batch equally.
        """
        rows, dp_size = self._settings.train_global_batch_size, self._ranks.dp_size
        if updates is not None:
            rows = max(map(len, updates))
            rows += -rows % dp_size
            dealt = _concatenated([pad_rows(batch.select(update), rows) for update in updates])
        elif len(batch) % rows or not len(batch):
            raise ConfigError(
                f"policy.train_global_batch_size {rows} does not divide the {len(batch)} rows of the training batch, "
                "so some would not be trained on; change one of the two"
            )
        elif problem := share_problem("policy.train_global_batch_size", rows, dp_size):
            raise ConfigError(problem)
        else:
            dealt = batch
        calls = [(shard, loss_fn, rows) for shard in self._ranks.deal(dealt, rows)]
        results = self._ranks.each_once(self._group.run_each(PolicyWorker.train, calls))
        result = replace(results[0], oom_splits=sum(each.oom_splits for each in results))
        self._zero_gradients.count(batch, result)
        return result

    def evaluate(self, batch: TrainBatch, loss_fn: LossFn, micro_batch_size: int | None = None) -> TrainResult:
        """Compute the loss of the whole batch as one global batch, without gradients; see `PolicyWorker`."""
        calls = [(shard, loss_fn, micro_batch_size) for shard in self._ranks.deal(batch)]
        return self._group.run_each(PolicyWorker.evaluate, calls)[0]

    def get_logprobs(self, batch: TokenBatch, *, counted_only: bool = False) -> Tensor:
        """Compute logprobs under the policy, [B, S] float32, rows as in `batch`; column 0 and padding are 0.

        With `counted_only`, tokens that the loss of a `TrainBatch` does not count are 0 too, and cost no logits.
        """
        # Send only what a logprob needs: a training batch has up to five more tensors of this size.
        shards = self._ranks.deal(logprob_inputs(batch, counted_only=counted_only, replays=True))
        found = self._group.run_each(PolicyWorker.get_logprobs, [(shard, counted_only) for shard in shards])
        return torch.cat(self._ranks.each_once(found))[: len(batch)]

    def get_reference_logprobs(self, batch: TokenBatch, *, counted_only: bool = False) -> Tensor:
        """See `get_logprobs`; under the frozen initial parameters, over the whole vocabulary."""
        shards = self._ranks.deal(logprob_inputs(batch, counted_only=counted_only))
        found = self._group.run_each(PolicyWorker.get_reference_logprobs, [(shard, counted_only) for shard in shards])
        return torch.cat(self._ranks.each_once(found))[: len(batch)]

    def read_teacher(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        """See `PolicyWorker`; rows as in `batch`."""
        assert self._teacher is not None, "the workers were made without a teacher"
        ranks = _Ranks(self._teacher.model.backend.model_parallel, self._group.world_size)
        shards = ranks.deal(logprob_inputs(batch, counted_only=True))
        found = ranks.each_once(self._group.run_each(PolicyWorker.read_teacher, [(shard,) for shard in shards]))
        return tuple(torch.cat(pieces)[: len(batch)] for pieces in zip(*found, strict=True))

    # -- refit -----------------------------------------------------------------------------------------------------

    def join_refit_group(self, address: RefitGroupAddress) -> None:
        """Have rank 0 join the refit communicator with engines on other devices, which must join at the same time."""
        self._group.run_all(PolicyWorker.join_refit_group, address)

    def refit_work_bytes(self) -> int:
        """See `PolicyWorker`; the maximum over all ranks."""
        return max(self._group.run_all(PolicyWorker.refit_work_bytes))

    def start_refit(self) -> None:
        """Begin to send weights, and drop an unfinished refit."""
        self._group.run_all(PolicyWorker.start_refit)

    def request_bucket(self, starts_copies: bool = True) -> Callable[[], WeightBucket | None]:
        """Have every rank fill its next bucket; return a function that waits for it and returns None after the last."""
        buckets = self._group.start_all(PolicyWorker.next_bucket, starts_copies)
        return lambda: join_handles(buckets())

    def abandon_refit(self) -> None:
        """Have every rank give up an unfinished refit and leave the communicator with engines that are gone."""
        self._group.run_all(PolicyWorker.abandon_refit)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Path) -> None:
        """Write model, optimizer, schedule and random state into the folder `path`, atomically."""
        self.start_save(path, in_background=False)
        self.finish_save()

    def start_save(self, path: Path, in_background: bool) -> None:
        """Begin a save; with `in_background`, training may go on until `finish_save` gives the folder its name."""
        self._group.run_all(PolicyWorker.start_save, path, in_background)

    def save_is_done(self) -> bool:
        """Tell whether every rank has written its part of the save under way, or failed to."""
        return all(self._group.run_all(PolicyWorker.save_is_done))

    def finish_save(self) -> dict[str, str]:
        """Wait for the save under way, if any, and raise its error if it failed.

        Returns:
            Checksum of each file by its path in the folder.
        """
        return _merged(self._group.run_all(PolicyWorker.finish_save))

    def damaged_files(self, folder: Path, checksums: Mapping[str, str]) -> dict[str, str]:
        """Find files that changed since they were written; faults by path. Ranks share the files, largest first.

        Args:
            folder: Folder of the files.
            checksums: Checksum of each file when it was written, by its path in `folder`.
        """
        sizes = {name: _num_bytes(folder / name) for name in checksums}
        names, num_ranks = sorted(sizes, key=lambda name: (-sizes[name], name)), self._group.world_size
        shares = [{name: checksums[name] for name in names[rank::num_ranks]} for rank in range(num_ranks)]
        return _merged(self._group.run_each(PolicyWorker.damaged_files, [(folder, share) for share in shares]))

    def save_problem(self) -> str | None:
        """Return the first rank's reason why the state must not be saved, else None; see `PolicyWorker`."""
        problems = self._group.run_all(PolicyWorker.save_problem)
        return next((problem for problem in problems if problem is not None), None)

    def settle(self, timeout_s: float) -> bool:
        """See `WorkerGroup`."""
        return self._group.settle(timeout_s)

    def load_checkpoint(self, path: Path) -> None:
        """Read a checkpoint."""
        self._group.run_all(PolicyWorker.load_checkpoint, path)

    def export_hf(self, path: Path) -> dict[str, str]:
        """Write a Hugging Face folder with the weights in the compute precision.

        Returns:
            Checksum of each file by its path in the folder.
        """
        return _merged(self._group.run_all(PolicyWorker.export_hf, path))

    def pids(self) -> list[int]:
        """Return the workers' process ids, by rank."""
        return self._group.pids()

    def local_pids(self) -> list[int]:
        """Return process ids of the workers on the driver's host."""
        return self._group.local_pids()

    def shutdown(self) -> None:
        """End the workers; safe to call twice."""
        self._group.shutdown()
