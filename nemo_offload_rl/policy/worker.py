"""One rank of the policy: a backend, the residency manager and the sender of weights. A plain class, wrapped by Ray.

Calls of a worker in one step of RL with colocated generation:
1. `prepare_for_lp_inference`, `get_logprobs`, `get_reference_logprobs`;
2. `prepare_for_training`, `train` (each optimizer step inside OPTIM_STEP);
3. `offload_before_refit`, `start_refit`, `next_bucket` until the last;
4. `offload_after_refit`: everything is on the host while the engine generates.
Every rank makes the same calls, since they contain collectives of all ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.backends.factory import build_backend, expected_bytes
from nemo_offload_rl.backends.ranks import join_process_group, limit_collectives
from nemo_offload_rl.backends.scoring.readers import ReadHiddenStates, ReadTopK
from nemo_offload_rl.data.batch import LossNorm, TokenBatch, TrainBatch, logprob_inputs
from nemo_offload_rl.keys.worker import PolicySettings, TeacherSettings
from nemo_offload_rl.memory.host_plan import render_host_plan
from nemo_offload_rl.policy.checkpointing import CheckpointSaver
from nemo_offload_rl.policy.communicators import make_communicators
from nemo_offload_rl.policy.early_start import return_memory
from nemo_offload_rl.policy.passes import Passes, TrainingPace, in_rows_of, micro_batch_rows, told_out_of_memory
from nemo_offload_rl.policy.peers import Peers
from nemo_offload_rl.policy.process import closing, record_memory_history, use_deterministic_algorithms
from nemo_offload_rl.policy.residency_setup import begin_host_memory, build_manager, limit_gpu_memory
from nemo_offload_rl.policy.skipped_updates import SkippedUpdates, parameters_not_finite, warn_of_skipped
from nemo_offload_rl.policy.teacher import Teacher
from nemo_offload_rl.protocols.backend import ExpectedBytes, ProcessInfo, StepResult, WeightSpec
from nemo_offload_rl.protocols.loss import LossFn, TrainResult
from nemo_offload_rl.protocols.refit import RefitGroupAddress, WeightBucket
from nemo_offload_rl.residency import (
    BASE,
    OPTIMIZER,
    PARAMS,
    REFERENCE,
    PassKind,
    Phase,
    TransitionReport,
    make_device,
)
from nemo_offload_rl.utils.checksums import damaged_files, file_checksums, files_below
from nemo_offload_rl.utils.garbage import collect_garbage
from nemo_offload_rl.utils.traces import ProcessTrace, named_range
from nemo_offload_rl.weight_sync.cuda_ipc import CudaIpcSender
from nemo_offload_rl.weight_sync.nccl import NcclGroup, NcclSender
from nemo_offload_rl.weight_sync.sender import BucketSender, DiscardingSender
from nemo_offload_rl.weight_sync.shared_memory import SharedMemorySender


class PolicyWorker:
    """Model, optimizer and residency of one rank.

    Args:
        settings: The policy's settings.
        process: This rank, and how it joins the others.
        keep_reference: Keep a frozen copy of the initial parameters for `get_reference_logprobs`.
        teacher: A separate frozen model for `read_teacher`.
    """

    def __init__(
        self,
        settings: PolicySettings,
        process: ProcessInfo,
        keep_reference: bool,
        teacher: TeacherSettings | None = None,
    ) -> None:
        self._settings = settings
        if settings.deterministic:
            use_deterministic_algorithms()
        device = make_device(torch.device(process.device))
        return_memory(process)
        limit_gpu_memory(settings.gpu_memory_limit_gib, device, process)
        self._communicators = make_communicators(settings, torch.device(process.device))
        # With a teacher, the sizes of both models are known only after they are built.
        expected = expected_bytes(settings, process) if teacher is None else ExpectedBytes({}, 0, 0)
        with ExitStack() as made:
            # First, because the workers of a host then agree on their shares of its memory.
            join_process_group(process, made)
            arena = begin_host_memory(settings, expected, keep_reference, device)
            made.push(closing(arena))
            self._backend = build_backend(settings, process)
            made.push(closing(self._backend))
            self._backend.clear_caches()  # building may have filled some, and the engine needs the memory next
            self._teacher = None if teacher is None else Teacher(teacher, process, self._backend)
            if self._teacher is not None:
                made.push(closing(self._teacher))
            peers = None
            if self._backend.rank_info.world_size > 1:
                peers = Peers(self._backend.device, self._backend.pass_groups())
                made.callback(peers.close)
            limit_collectives(process)  # of all process groups
            self.residency, self._host_need = build_manager(
                settings, self._backend, keep_reference, arena, device, self._teacher
            )
            self._made = made.pop_all()  # `shutdown` ends them
        self._workers_per_host = process.workers_per_host
        if self._teacher is not None:
            self._teacher.model.use_stream(self.residency.streamed_layers)
        self._saver = CheckpointSaver(self.residency)
        make_room, gather_again = self._backend.make_room, self._backend.gather_again
        self._passes = Passes(
            settings, self.residency, peers=peers, backend_makes_room=make_room, gather_again=gather_again
        )
        self._skipped = SkippedUpdates(settings.max_skipped_updates, self._backend.state_groups)
        self._trace = ProcessTrace()
        self._is_whole = True  # False if an update broke off, or not all updates of a step were made
        self._sender: BucketSender | None = None
        self._refit_group: NcclGroup | None = None
        self._sends_to_other_devices = False
        record_memory_history(settings.memory_snapshot_dir, self._backend.device, process.rank)

    # -- phases ----------------------------------------------------------------------------------------------------

    def prepare_for_training(self) -> TransitionReport:
        """Bring parameters and optimizer to the device, as the residency plan says."""
        return self._enter(Phase.TRAINING)

    def prepare_for_lp_inference(self) -> TransitionReport:
        """Bring the parameters to the device and free gradients."""
        return self._enter(Phase.LP_INFERENCE)

    def prepare_for_teacher(self) -> TransitionReport:
        """Bring the teacher to the device; the policy may follow if there is room."""
        return self._enter(Phase.TEACHER_INFERENCE)

    def offload_before_refit(self) -> TransitionReport:
        """Leave only the parameters on the device."""
        self._backend.clear_caches()
        return self._enter(Phase.REFIT)

    def release_memory(self, to_driver: bool = True) -> None:
        """Release the memory of finished copies out. With `to_driver`, also release it to the driver and start more."""
        self.residency.release_finished(to_driver=to_driver, starts_more=to_driver)

    def finish_leaving(self) -> None:
        """Wait for the remaining copies out and collect garbage; runs during generation, so no caller waits."""
        self.residency.finish_leaving()
        collect_garbage()

    def offload_after_refit(self, wait_for_all: bool = True) -> TransitionReport:
        """Offload state for generation, and suspend communicators if that is on.

        Without `wait_for_all`, returns as soon as the engine has its share of the device.
        """
        if self._sender is not None:
            self._sender.release()
        return self._enter(Phase.GENERATION, waits_for_all=wait_for_all)

    def _enter(self, phase: Phase, *, waits_for_all: bool = True) -> TransitionReport:
        name = f"transition to {phase.value}"
        with named_range(name), told_out_of_memory(self.residency, f"the {name}", self._passes.state_advice):
            return self._communicators.enter(self.residency, phase, waits_for_all=waits_for_all)

    def residency_plan(self) -> str:
        """Render the resolved plan as a table with the groups' sizes, and below it the use of host memory."""
        line = render_host_plan(self._host_need, self._backend.device.type, self._workers_per_host)
        return f"{self.residency.plan.render(self._host_need.resolve().sizes)}\n{line.replace(' (of', '\n  (of')}"

    def residency_reports(self) -> list[TransitionReport]:
        """Return the transitions since the last call."""
        return self.residency.reports.drain()

    def start_trace(self) -> None:
        """Begin a trace of this process."""
        self._trace.start()

    def stop_trace(self, prefix: str) -> str | None:
        """Write the trace to `prefix`_policy_RANK.json.gz; see `ProcessTrace.stop`."""
        return self._trace.stop(f"{prefix}_policy_{self._backend.rank_info.rank}")

    def _require(self, verb: str, *phases: Phase) -> None:
        if self.residency.phase not in phases:
            now = self.residency.phase.value if self.residency.phase else "start"
            raise RuntimeError(f"{verb} was called in phase {now}; it needs {' or '.join(p.value for p in phases)}")

    # -- training --------------------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch, loss_fn: LossFn, global_rows: int | None = None) -> TrainResult:
        """Make one optimizer step for each global batch in this rank's shard, then advance the schedule once.

        All these steps have the same learning rate, as in NeMo-RL. The schedule stays if every update was skipped.

        Args:
            batch: Rows of this data-parallel rank, `train_global_batch_size / dp_size` for each step in turn. `Policy`
                refuses other numbers.
            loss_fn: See `LossFn`.
            global_rows: Replaces `train_global_batch_size` if not None.
        """
        rows_per_step = (global_rows or self._settings.train_global_batch_size) // self._backend.rank_info.dp_size
        result = TrainResult(loss=[], grad_norm=[], learning_rate=[])
        for start in range(0, len(batch), rows_per_step):
            loss, metrics = self.forward_backward(batch.select(range(start, start + rows_per_step)), loss_fn)
            step = self.optim_step(before_refit=start + rows_per_step == len(batch))
            result.loss.append(loss)
            result.grad_norm.append(step.grad_norm)
            result.learning_rate.append(step.learning_rate)
            result.is_skipped.append(step.is_skipped)
            for name, value in metrics.items():
                result.metrics.setdefault(name, []).append(value)
        self._is_whole = True
        num_splits, self._passes.num_splits = self._passes.num_splits, 0
        if not all(result.is_skipped):
            self._backend.advance_schedule()
        if self._backend.rank_info.rank == 0:
            warn_of_skipped(result)
        return replace(result, oom_splits=num_splits)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn) -> tuple[float, dict[str, float]]:
        """Compute the gradients of this rank's rows of one global batch; opens a training step.

        Returns:
            The loss and metrics of the global batch.
        """
        self._require("forward_backward", Phase.TRAINING)
        rows = self._rows(batch, is_training=True, size=self._settings.train_micro_batch_size)
        norm = self._loss_norm(batch)
        loss, metrics = 0.0, dict[str, float]()
        self.residency.step_opened()
        try:
            # A failed pass leaves incomplete gradients, which must not be used.
            for attempt in self._passes.attempts(PassKind.TRAINING, batch, rows, self._drop_broken_training):
                pace = TrainingPace(self.residency, len(attempt.micro_batches))
                with attempt:
                    loss, metrics = self._backend.forward_backward(
                        attempt.micro_batches, loss_fn, norm, pace.before_micro_batch
                    )
        except BaseException:
            self._backend.abandon_pass()
            self.zero_grad()
            raise
        return loss, metrics

    def _drop_broken_training(self) -> None:
        self._backend.abandon_pass()
        self._backend.drop_grads()

    def optim_step(self, *, before_refit: bool = False) -> StepResult:
        """Apply the gradients, or skip the update if they are not finite; closes the training step.

        Args:
            before_refit: A refit may follow, if an engine shares the device (`ResidencyManager.streamed`).

        Raises:
            NonFiniteGradientsError: On every rank, if more than `policy.max_skipped_updates` in a row are skipped.
        """
        self._saver.wait_before_write()
        with (
            named_range("update"),
            told_out_of_memory(self.residency, "the update", self._passes.state_advice),
            self.residency.during(Phase.OPTIM_STEP),
            self.residency.writing_state(),
        ):
            was_whole, self._is_whole = self._is_whole, False
            result = self._backend.optim_step(self.residency.streamed(before_refit=before_refit))
            self._is_whole = result.is_skipped and was_whole
        self.residency.step_closed()
        self._skipped.count(result)
        return result

    def zero_grad(self) -> None:
        """Drop the gradients of an open step and close it."""
        self._backend.drop_grads()
        self.residency.step_closed()

    def evaluate(self, batch: TrainBatch, loss_fn: LossFn, micro_batch_size: int | None = None) -> TrainResult:
        """Compute the loss of the whole batch as one global batch, without gradients; one entry, gradient norm 0.

        `micro_batch_size` is in rows; None for that of training. It is ignored if micro-batches are made by tokens.
        """
        self._require("evaluate", Phase.TRAINING, Phase.LP_INFERENCE)
        size = micro_batch_size or self._settings.train_micro_batch_size
        rows = self._rows(batch, is_training=True, size=size)
        norm = self._loss_norm(batch)
        loss, metrics = 0.0, dict[str, float]()
        for attempt in self._passes.attempts(PassKind.EVALUATION, batch, rows, self._backend.abandon_pass):
            with attempt:
                loss, metrics = self._backend.evaluate(attempt.micro_batches, loss_fn, norm)
        return TrainResult([loss], [0.0], [0.0], {name: [value] for name, value in metrics.items()})

    def _loss_norm(self, batch: TrainBatch) -> LossNorm:
        counts = [float(mask.double().sum()) for mask in (batch.sample_mask, batch.loss_mask)]
        return LossNorm(*self._backend.all_reduce_sum([*counts, batch.num_positive_tokens()]))

    # -- logprobs --------------------------------------------------------------------------------------------------

    def get_logprobs(self, batch: TokenBatch, counted_only: bool = False) -> Tensor:
        """Compute logprobs under the policy, over the tokens that rollouts are drawn from.

        Args:
            batch: Any tokens.
            counted_only: Compute only tokens that the loss of a `TrainBatch` counts.

        Returns:
            [B, S] float32 on the CPU; column 0, padding and uncomputed tokens are 0.
        """
        self._require("get_logprobs", Phase.LP_INFERENCE, Phase.TRAINING)
        batch = logprob_inputs(batch, counted_only=counted_only, replays=True)
        rows = self._rows(batch, is_training=False, size=self._settings.logprob_batch_size)
        found: list[Tensor] = []
        for attempt in self._passes.attempts(PassKind.LOGPROBS, batch, rows, self._backend.abandon_pass):
            with attempt:
                found = self._backend.logprobs(attempt.micro_batches)
            rows = attempt.micro_batches.rows
        return in_rows_of(batch, rows, found)

    def get_reference_logprobs(self, batch: TokenBatch, counted_only: bool = False) -> Tensor:
        """Compute logprobs under the frozen initial parameters, swapped in for this, over the whole vocabulary."""
        self._require("get_reference_logprobs", Phase.LP_INFERENCE, Phase.TRAINING)
        batch = logprob_inputs(batch, counted_only=counted_only)
        rows = self._rows(batch, is_training=False, size=self._settings.logprob_batch_size)
        found: list[Tensor] = []
        with self.residency.swapped_in(REFERENCE):
            for attempt in self._passes.attempts(PassKind.REFERENCE, batch, rows, self._backend.abandon_pass):
                with attempt:
                    found = self._backend.logprobs(attempt.micro_batches, whole=True)
                rows = attempt.micro_batches.rows
        return in_rows_of(batch, rows, found)

    # -- the teacher -----------------------------------------------------------------------------------------------

    def read_teacher(self, batch: TokenBatch) -> tuple[Tensor, ...]:
        """Read the teacher's distribution at each token that the loss counts; 0 elsewhere.

        Returns:
            On the CPU. With a top-k, [B, S, K] float32 logprobs and [B, S, K] int32 ids; for whole distributions,
            [B, S, H] last hidden states in the teacher's compute type.
        """
        self._require("read_teacher", Phase.TEACHER_INFERENCE)
        teacher = self._teacher
        assert teacher is not None, "the worker was made without a teacher"
        inputs = logprob_inputs(batch, counted_only=True)
        settings, topk = teacher.settings.model, teacher.settings.topk
        reader = ReadHiddenStates() if topk is None else ReadTopK(topk)
        rows = micro_batch_rows(
            settings, inputs, teacher.model.all_reduce_max, is_training=False, size=settings.logprob_batch_size
        )
        found: list[Any] = []
        for attempt in self._passes.attempts(PassKind.TEACHER, inputs, rows, teacher.model.abandon_pass):
            with attempt:
                found = teacher.model.read(attempt.micro_batches, reader)
            rows = attempt.micro_batches.rows
        return tuple(in_rows_of(inputs, rows, pieces) for pieces in zip(*found, strict=True))

    def _rows(self, batch: TokenBatch, *, is_training: bool, size: int) -> list[list[int]]:
        """Return the row indices of each micro-batch."""
        return micro_batch_rows(self._settings, batch, self._backend.all_reduce_max, is_training=is_training, size=size)

    # -- refit -----------------------------------------------------------------------------------------------------

    def refit_work_bytes(self) -> int:
        """Return the device bytes that sending weights takes in addition to them; 0 before the first refit."""
        return self.residency.work.needed_bytes(Phase.REFIT)

    def start_refit(self) -> None:
        """Begin to send weights, and drop an unfinished refit."""
        self._require("start_refit", Phase.REFIT, Phase.LP_INFERENCE, Phase.TRAINING)
        self.residency.wait_parameters()
        if self._sender is None:
            self._sender = self._new_sender()
        self._sender.start(self._refit_weights())

    def join_refit_group(self, address: RefitGroupAddress) -> None:
        """Send refits over NCCL from now on: rank 0 joins the engines' communicator and sends for all ranks."""
        self._sends_to_other_devices = True
        if self._backend.rank_info.rank == 0:
            self._refit_group = NcclGroup(address, 0, self._backend.device)

    def _new_sender(self) -> BucketSender:
        """Make this rank's sender: every rank sends on its own GPU, but only rank 0 to other devices and on CPU."""
        settings, backend = self._settings, self._backend
        specs = backend.weight_specs() if settings.sends_weights else []
        if settings.sends_adapters:
            specs += [WeightSpec(name, tuple(it.shape), it.dtype) for name, it in backend.named_adapters()]
        buffer_bytes = int(settings.refit_buffer_size_gib * 2**30)
        if self._refit_group is not None:
            return NcclSender(specs, buffer_bytes, self._refit_group)
        if backend.device.type == "cuda" and not self._sends_to_other_devices:
            return CudaIpcSender(specs, buffer_bytes, backend.device)
        return (SharedMemorySender if backend.rank_info.rank == 0 else DiscardingSender)(specs, buffer_bytes)

    def _refit_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self._settings.sends_weights:
            yield from self._backend.named_weights(self.residency.host_view, merges=not self._settings.sends_adapters)
        if self._settings.sends_adapters:
            yield from self._backend.named_adapters()

    def next_bucket(self, starts_copies: bool = True) -> WeightBucket | None:
        """Return the next bucket of the refit, None after the last; with `starts_copies`, start more copies out."""
        if self._sender is None:
            raise RuntimeError("next_bucket was called before start_refit")
        with named_range("refit bucket"):
            self.residency.release_finished(to_driver=False, starts_more=starts_copies)
            return self._sender.next_bucket()

    def abandon_refit(self) -> None:
        """Give up an unfinished refit with its memory, and the communicator with engines that are gone."""
        if self._refit_group is not None:
            # First, because a pending send never completes and blocks all later work on the device.
            self._refit_group.close()
            self._refit_group = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under their Hugging Face names, adapters merged into them."""
        self.residency.wait_parameters()
        return self._backend.named_weights(self.residency.host_view)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Path) -> None:
        """Write model, optimizer, schedule and random state into the folder `path`, atomically."""
        self.start_save(path, in_background=False)
        self.finish_save()

    def start_save(self, path: Path, in_background: bool) -> None:
        """Begin a save, in any phase, without moving state.

        Args:
            path: Final folder, created by `finish_save`.
            in_background: Return once the state on the device is copied; see `CheckpointSaver.wait_before_write`.

        Raises:
            CheckpointError: The folder cannot be made, or the previous save failed.
        """
        self._saver.start(path, self._backend.stage_save, in_background)
        self._skipped.saved()

    def save_problem(self) -> str | None:
        """Return the reason why this rank's state must not be saved, in any phase; None if it may be."""
        if not self._is_whole:
            return "an update broke off in the middle, or not all updates of the step were made"
        if self._skipped.leave_nothing_to_save:
            return "every update since the last save was skipped, because its gradients were not finite"
        broken = parameters_not_finite(self._backend.state_groups(), self.residency.host_view)
        return f"{len(broken)} parameters are not finite, {broken[0]} first" if broken else None

    def save_is_done(self) -> bool:
        """Tell whether `finish_save` would not wait."""
        return self._saver.is_done()

    def finish_save(self) -> Mapping[str, str]:
        """Wait for the save under way, if any, and give its folder its final name.

        Returns:
            Checksum of each file that this rank has written, by its path in the folder.

        Raises:
            CheckpointError: The save failed; its files are removed.
        """
        return self._saver.finish()

    def damaged_files(self, folder: Path, checksums: Mapping[str, str]) -> dict[str, str]:
        """Find files that changed since they were written; see `utils.checksums`."""
        return damaged_files(folder, checksums)

    def load_checkpoint(self, path: Path) -> None:
        """Read a checkpoint, in any phase. The reference does not change.

        This takes no more device memory than a training step: streamed parts of the optimizer come one by one.
        """
        self._saver.wait_before_write()
        with (
            self._communicators.resumed(),
            self.residency.checkpoint_view(PARAMS, OPTIMIZER),
            self.residency.writing_state(loads=True),
        ):
            self._backend.load(path, self.residency.streamed())

    def export_hf(self, path: Path) -> dict[str, str]:
        """Write a Hugging Face folder with weights in the compute precision, in any phase.

        Returns:
            Checksum of each file by its path in the folder, on rank 0, which writes; else {}.
        """
        with self._communicators.resumed(), self.residency.checkpoint_view(PARAMS, BASE):
            self._backend.export_hf(path)
        return file_checksums(path, files_below(path)) if self._backend.rank_info.rank == 0 else {}

    def shutdown(self) -> None:
        """Free host memory and leave the process group; the worker cannot be used afterwards."""
        self._saver.wait_before_write()
        self._trace.drop()
        with ExitStack() as ends:
            ends.callback(self._made.close)
            ends.callback(self.residency.close)
            ends.callback(self._communicators.resume)  # NCCL cannot destroy suspended ones
            self.abandon_refit()
