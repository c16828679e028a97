"""One rank of the policy: a backend, the residency manager and the sender of weights. Plain Python; Ray wraps it.

Life of a worker in one step of RL with colocated generation:
1. `prepare_for_lp_inference`, `get_logprobs`, `get_reference_logprobs`;
2. `prepare_for_training`, `train` (each optimizer step inside OPTIM_STEP);
3. `offload_before_refit`, `start_refit`, `next_bucket` until the last;
4. `offload_after_refit`: everything is on the host while the engine generates.
Every rank makes the same calls, since each of them gathers over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nemo_offload_rl.data.batch import LossNorm, TokenBatch, TrainBatch
from nemo_offload_rl.data.dynamic_batching import plan_micro_batches, split_to_count
from nemo_offload_rl.data.packing import pack_rows
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.backends.base import ProcessInfo, StepResult
from nemo_offload_rl.policy.backends.factory import build_backend
from nemo_offload_rl.policy.interfaces import LossFn, TrainResult
from nemo_offload_rl.policy.memory_history import explain_out_of_memory, record_memory_history
from nemo_offload_rl.policy.residency_setup import REFERENCE, build_manager
from nemo_offload_rl.policy.settings import PolicySettings
from nemo_offload_rl.residency import Phase, TransitionReport
from nemo_offload_rl.weight_sync.interfaces import WeightBucket
from nemo_offload_rl.weight_sync.sender import BucketSender, DiscardingSender
from nemo_offload_rl.weight_sync.shared_memory import SharedMemorySender


class PolicyWorker:
    """Model, optimizer and residency of one rank.

    Args:
        settings: The policy's settings.
        process: This rank and how it joins the others.
        keep_reference: Keep a frozen copy of the initial parameters on the host for `get_reference_logprobs`.
    """

    def __init__(self, settings: PolicySettings, process: ProcessInfo, keep_reference: bool) -> None:
        self._settings = settings
        self._backend = build_backend(settings, process)
        self.residency, self._group_bytes = build_manager(settings, self._backend, keep_reference)
        self._sender: BucketSender | None = None
        if settings.memory_snapshot_dir is not None and self._backend.device.type == "cuda":
            record_memory_history(Path(settings.memory_snapshot_dir), process.rank)

    # -- phases ----------------------------------------------------------------------------------------------------

    def prepare_for_training(self) -> TransitionReport:
        """Parameters and optimizer on the device (the plan has the details)."""
        return self.residency.enter(Phase.TRAINING)

    def prepare_for_lp_inference(self) -> TransitionReport:
        """Parameters on the device, gradients freed."""
        return self.residency.enter(Phase.LP_INFERENCE)

    def offload_before_refit(self) -> TransitionReport:
        """Leave only the parameters on the device."""
        return self.residency.enter(Phase.REFIT)

    def offload_after_refit(self) -> TransitionReport:
        """Leave nothing on the device."""
        return self.residency.enter(Phase.GENERATION)

    def residency_plan(self) -> str:
        """The resolved plan as a table, with the groups' sizes."""
        return self.residency.plan.render(self._group_bytes)

    def residency_reports(self) -> list[TransitionReport]:
        """Transitions since the last call."""
        return self.residency.reports.drain()

    def _require(self, verb: str, *phases: Phase) -> None:
        if self.residency.phase not in phases:
            now = self.residency.phase.value if self.residency.phase else "start"
            raise RuntimeError(f"{verb} was called in phase {now}; it needs {' or '.join(p.value for p in phases)}")

    # -- training --------------------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch, loss_fn: LossFn) -> TrainResult:
        """One optimizer step for each global batch in this rank's shard.

        Args:
            batch: Rows of this data-parallel rank, `train_global_batch_size / dp_size` for each step in turn.
            loss_fn: See `LossFn`.
        """
        rows_per_step = self._rows_per_step()
        if len(batch) % rows_per_step or not len(batch):
            raise ConfigError(
                f"A training batch has {len(batch)} rows on each data-parallel rank, which are no whole global batches "
                f"of {rows_per_step}; make the batch a multiple of policy.train_global_batch_size."
            )
        result = TrainResult(loss=[], grad_norm=[], learning_rate=[])
        for start in range(0, len(batch), rows_per_step):
            loss, metrics = self.forward_backward(batch.select(range(start, start + rows_per_step)), loss_fn)
            step = self.optim_step()
            result.loss.append(loss)
            result.grad_norm.append(step.grad_norm)
            result.learning_rate.append(step.learning_rate)
            for name, value in metrics.items():
                result.metrics.setdefault(name, []).append(value)
        return result

    def _rows_per_step(self) -> int:
        dp_size, global_rows = self._backend.rank_info.dp_size, self._settings.train_global_batch_size
        if global_rows % dp_size:
            raise ConfigError(
                f"policy.train_global_batch_size={global_rows} does not divide by the {dp_size} data-parallel ranks; "
                "make it a multiple."
            )
        return global_rows // dp_size

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn) -> tuple[float, dict[str, float]]:
        """Gradients of one global batch (this rank's rows of it); opens a training step.

        Returns:
            The loss and metrics of the global batch.
        """
        self._require("forward_backward", Phase.TRAINING)
        micro_batches = [batch.select(rows) for rows in self._micro_batches(batch, is_training=True)]
        norm = self._loss_norm(batch)
        self.residency.step_opened()
        try:
            with explain_out_of_memory(self.residency):
                return self._backend.forward_backward(self._paced(self._trim(micro_batches)), loss_fn, norm)
        except BaseException:
            # Part of the gradients is there; using them would be a wrong step.
            self.zero_grad()
            raise

    def _paced(self, micro_batches: Sequence[TrainBatch]) -> Iterator[TrainBatch]:
        """The micro-batches, with the residency's turn before each.

        Memory of what left is given up, and what the optimizer step needs starts to come before the last one.
        """
        for index, micro_batch in enumerate(micro_batches):
            self.residency.poll()
            if index == len(micro_batches) - 1:
                self.residency.prefetch(Phase.OPTIM_STEP)
            yield micro_batch

    def optim_step(self) -> StepResult:
        """Use the gradients; closes the training step."""
        with self.residency.during(Phase.OPTIM_STEP):
            # Before the update: an update that fails half-way has written too.
            self.residency.mark_written("params", "optimizer")
            result = self._backend.optim_step()
        self.residency.step_closed()
        return result

    def zero_grad(self) -> None:
        """Give up the gradients of an open step."""
        self._backend.drop_grads()
        self.residency.step_closed()

    def evaluate(self, batch: TrainBatch, loss_fn: LossFn) -> TrainResult:
        """The loss of the whole batch as one global batch, without gradients; one entry, gradient norm 0."""
        self._require("evaluate", Phase.TRAINING, Phase.LP_INFERENCE)
        micro_batches = [batch.select(rows) for rows in self._micro_batches(batch, is_training=True)]
        loss, metrics = self._backend.evaluate(self._trim(micro_batches), loss_fn, self._loss_norm(batch))
        return TrainResult([loss], [0.0], [0.0], {name: [value] for name, value in metrics.items()})

    def _loss_norm(self, batch: TrainBatch) -> LossNorm:
        tokens = (batch.token_mask * batch.sample_mask.unsqueeze(1)).double().sum()
        num_seqs, num_tokens = self._backend.all_reduce_sum([float(batch.sample_mask.double().sum()), float(tokens)])
        return LossNorm(num_valid_seqs=num_seqs, num_valid_tokens=num_tokens)

    # -- logprobs --------------------------------------------------------------------------------------------------

    def get_logprobs(self, batch: TokenBatch) -> Tensor:
        """Logprobs under the policy.

        Returns:
            [B, S] float32 on the CPU; column 0 and padding are 0.
        """
        self._require("get_logprobs", Phase.LP_INFERENCE, Phase.TRAINING)
        plan = self._micro_batches(batch, is_training=False)
        with explain_out_of_memory(self.residency):
            pieces = self._backend.logprobs(self._trim([batch.select(rows) for rows in plan]))
        logprobs_BS = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
        for rows, piece in zip(plan, pieces, strict=True):
            logprobs_BS[torch.as_tensor(rows), : piece.shape[1]] = piece
        return logprobs_BS

    def get_reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """Logprobs under the frozen initial parameters; the policy's are back afterwards, also after an error."""
        self._require("get_reference_logprobs", Phase.LP_INFERENCE, Phase.TRAINING)
        with self.residency.swapped_in(REFERENCE):
            return self.get_logprobs(batch)

    # -- micro-batches ---------------------------------------------------------------------------------------------

    def _micro_batches(self, batch: TokenBatch, *, is_training: bool) -> list[list[int]]:
        """Row indices by micro-batch; the same number of micro-batches on every data-parallel rank."""
        settings = self._settings
        by_tokens = {plan_micro_batches: settings.dynamic_batching, pack_rows: settings.sequence_packing}
        for make_plan, batching in by_tokens.items():
            if batching.enabled:
                max_tokens = batching.train_mb_tokens if is_training else batching.logprob_mb_tokens
                round_to = max(batching.sequence_length_round, settings.make_sequence_length_divisible_by)
                plan = make_plan(batch.input_lengths.tolist(), max_tokens, round_to)
                return split_to_count(plan, self._backend.all_reduce_max(len(plan)))
        size = settings.train_micro_batch_size if is_training else settings.logprob_batch_size
        return [list(range(start, min(start + size, len(batch)))) for start in range(0, len(batch), size)]

    def _trim[Batch: TokenBatch](self, batches: Sequence[Batch]) -> list[Batch]:
        return [batch.trim(self._settings.make_sequence_length_divisible_by) for batch in batches]

    # -- refit -----------------------------------------------------------------------------------------------------

    def start_refit(self) -> None:
        """Begin to send weights; an unfinished refit is dropped."""
        self._require("start_refit", Phase.REFIT, Phase.LP_INFERENCE, Phase.TRAINING)
        if self._sender is None:
            sender = SharedMemorySender if self._backend.rank_info.rank == 0 else DiscardingSender
            buffer_bytes = int(self._settings.refit_buffer_size_gib * 2**30)
            self._sender = sender(self._backend.weight_specs(), buffer_bytes)
        self._sender.start(self._backend.named_weights())

    def next_bucket(self) -> WeightBucket | None:
        """The next bucket of the refit, None after the last; only rank 0's holds bytes."""
        if self._sender is None:
            raise RuntimeError("next_bucket was called before start_refit")
        self.residency.poll()
        return self._sender.next_bucket()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names, as a refit sends them."""
        return self._backend.named_weights()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Path) -> None:
        """Write model, optimizer, schedule and random state into the folder `path`, in any phase."""
        with self.residency.checkpoint_view():
            self._backend.save(path)

    def load_checkpoint(self, path: Path) -> None:
        """Read what `save_checkpoint` wrote, in any phase. The reference stays what the worker was made with."""
        with self.residency.checkpoint_view():
            self.residency.mark_written("params", "optimizer")
            self._backend.load(path)

    def export_hf(self, path: Path) -> None:
        """Write a Hugging Face folder with weights in the compute precision, in any phase."""
        with self.residency.checkpoint_view():
            self._backend.export_hf(path)

    def shutdown(self) -> None:
        """Free host memory and leave the process group; the worker is of no use afterwards."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self.residency.close()
        self._backend.close()
