"""Splits a batch into micro-batches, and runs passes over them while residency has copies under way."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.data.batching import group_lengths, pack_rows, plan_micro_batches, rows_of_groups, split_to_count
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.residency import DeviceOutOfMemoryError, PassKind, Phase, ResidencyManager, row_of

logger = logging.getLogger(__name__)

MANY_MICRO_BATCHES = 8
_GIB = 2**30


class Passes:
    """Runs passes so that prefetched state does not take memory that a pass needs.

    Before a pass with more tokens than all earlier ones of its kind, prefetched state is evicted if both may not fit. A
    single rank that still runs out of memory repeats the pass once without that state. Several ranks cannot, since the
    others wait in a collective of the failed pass, so the run ends.

    Args:
        settings: The policy's settings.
        residency: Manager of the rank's state.
        is_alone: Passes have no collectives with other ranks.
    """

    def __init__(self, settings: PolicySettings, residency: ResidencyManager, *, is_alone: bool) -> None:
        self._settings = settings
        self._residency = residency
        self._is_alone = is_alone

    def attempts(
        self,
        kind: PassKind,
        micro_batches: Sequence[TokenBatch],
        after_failure: Callable[[], None] = lambda: None,
    ) -> Iterator[AbstractContextManager[object]]:
        """Yield a context to run a pass in, and a second one if the pass ran out of memory and must be repeated.

        Args:
            kind: Kind of the pass.
            micro_batches: Micro-batches of the pass.
            after_failure: Cleans up after a failed pass, before it is repeated.

        Raises:
            UserError: Memory ran out, and nothing can be offloaded to repeat the pass.
        """
        if not micro_batches:
            yield nullcontext()
            return
        packs = self._settings.sequence_packing.enabled
        largest = max(micro_batches, key=lambda batch: batch.num_tokens(packed=packs))
        num_tokens = largest.num_tokens(packed=packs)
        self._residency.expect_work(kind, num_tokens)
        work = f"a {kind} pass over micro-batches of up to {num_tokens} tokens"
        advice = self._advice(kind, is_divisible=len(largest) > largest.rows_per_group)
        first = _OutOfMemory()
        yield first
        if first.error is None:
            return
        held = held_on_device(self._residency)
        num_bytes = 0
        if self._is_alone:
            after_failure()
            num_bytes = self._residency.evict()
        if not num_bytes:
            raise _refusal(self._residency, work, held, first.error, advice) from first.error
        logger.warning(
            "out of memory in a pass of phase %s (%s); it is run again without %.2f GiB on the device that it does not "
            "read",
            self._residency.phase.value if self._residency.phase else "start",
            _in_one_line(first.error),
            num_bytes / _GIB,
        )
        first.error = None  # its traceback holds the failed pass's tensors
        gc.collect()
        yield told_out_of_memory(self._residency, work, advice)

    def _advice(self, kind: PassKind, *, is_divisible: bool) -> str:
        """Name keys that lower the device memory of a pass of this kind."""
        settings, changes = self._settings, []
        with_loss = kind in (PassKind.TRAINING, PassKind.EVALUATION)
        if is_divisible:
            name = "train_mb_tokens" if with_loss else "logprob_mb_tokens"
            by_rows = "policy.train_micro_batch_size" if with_loss else "policy.logprob_batch_size"
            if kind is PassKind.TEACHER:
                by_rows = "teacher.logprob_batch_size"
            for section in ("sequence_packing", "dynamic_batching"):
                if getattr(settings, section).enabled:
                    by_rows = f"policy.{section}.{name}"
            changes.append(f"lower {by_rows}")
        backend = settings.backend
        if kind is PassKind.TRAINING and not backend.activation_checkpointing:
            changes.append(f"set policy.{backend.section}.activation_checkpointing=true")
        if settings.logprob_chunk_size is None:
            changes.append("set policy.logprob_chunk_size=1024")
        if kind is PassKind.TRAINING:
            changes += self._streaming
        return ", or ".join([*changes, "lower policy.max_total_sequence_length"])

    @property
    def state_advice(self) -> str:
        """Advice on how to make room for state."""
        # Streamed parameters are for one worker only, so more GPUs are no option.
        last = "use a GPU with more memory" if self._settings.backend.streams_parameters else "use more GPUs"
        return ", or ".join([*self._streaming, last])

    @property
    def _streaming(self) -> list[str]:
        backend = self._settings.backend
        if backend.streamed_share > 0 or backend.keeps_optimizer_on_host:
            return []
        return [f"set {backend.streaming_section}.offload_optimizer_states=true"]


class _OutOfMemory:
    """Catches and keeps the error of a body that runs out of device memory."""

    error: torch.OutOfMemoryError | DeviceOutOfMemoryError | None = None

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, (torch.OutOfMemoryError, DeviceOutOfMemoryError)):
            self.error = error
        return self.error is not None


@contextmanager
def told_out_of_memory(residency: ResidencyManager, work: str, advice: str) -> Iterator[None]:
    """Turn an error of running out of device memory into a `UserError`.

    Args:
        residency: Manager of the rank's state.
        work: The body's work, for the message.
        advice: Changes that the message suggests.
    """
    try:
        yield
    except (torch.OutOfMemoryError, DeviceOutOfMemoryError) as error:
        raise _refusal(residency, work, held_on_device(residency), error, advice) from error


def held_on_device(residency: ResidencyManager) -> str:
    """Describe the state on the device, with sizes by row of the plan."""
    rows: dict[str, int] = {}
    for name, size in residency.device_bytes().items():
        rows[row_of(name)] = rows.get(row_of(name), 0) + size
    return ", ".join(f"{row} {size / _GIB:.2f} GiB" for row, size in rows.items() if size) or "no state"


def _refusal(residency: ResidencyManager, work: str, held: str, error: BaseException, advice: str) -> UserError:
    logger.warning("last transitions before memory ran out:\n%s", residency.reports.recent_lines())
    phase = residency.phase.value if residency.phase else "start"
    return UserError(
        f"out of memory on the device in phase {phase}, in {work}, with {held} on it ({_in_one_line(error)}); {advice}"
    )


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


@dataclass(frozen=True)
class TrainingPace:
    """Releases and prefetches state between the micro-batches of a training pass.

    Attributes:
        residency: Manager of the rank's state.
        num_micro_batches: Number of micro-batches of the pass.
    """

    residency: ResidencyManager
    num_micro_batches: int

    def before_micro_batch(self, index: int) -> None:
        """Release the memory of finished copies out, and prefetch state for the optimizer step. Does not block.

        A prefetch before the first micro-batch leaves most time for the copies, but the idle device waits while the
        host allocates their memory (0.25 s for 76 GiB on an H200). So with many micro-batches it is before the second.
        State that had no room then is prefetched before the last micro-batch.
        """
        first = 1 if self.num_micro_batches >= MANY_MICRO_BATCHES else 0
        if index in (first, self.num_micro_batches - 1):
            # Before releasing: state that is still on the device need not be copied again.
            self.residency.prefetch(Phase.OPTIM_STEP)
        self.residency.release_finished()


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
