"""Splits a batch into micro-batches, and runs passes over them while residency has copies under way."""

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from nemo_offload_rl.backends.ranks import failing_together, max_over_all_ranks
from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.data.batching import group_lengths, pack_rows, plan_micro_batches, rows_of_groups, split_to_count
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.memory.passes import advice, streaming_advice
from nemo_offload_rl.policy.peers import LostConnectionError, Peers
from nemo_offload_rl.residency import DeviceOutOfMemoryError, PassKind, Phase, ResidencyManager, row_of
from nemo_offload_rl.utils.traces import named_range

logger = logging.getLogger(__name__)

MANY_MICRO_BATCHES = 8
_STILL_TOO_LARGE = 0.9  # share of the size that ran out of memory; without it, packs of about one size fail one by one
_GIB = 2**30
# Errors of CUDA and its libraries where they find no memory outside of torch's allocator.
_FROM_LIBRARIES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


class MicroBatches[Batch: TokenBatch](Sequence[Batch]):
    """The micro-batches of a pass, in order.

    Args:
        rows: See the attribute.
        micro_batches: The micro-batches.
        before_each: Called before one is returned; it may raise.

    Attributes:
        rows: Row indices of each micro-batch.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        micro_batches: Sequence[Batch],
        before_each: Callable[[], None] = lambda: None,
    ) -> None:
        self.rows = rows
        self._last = 0
        self._micro_batches = micro_batches
        self._before_each = before_each

    def __len__(self) -> int:
        return len(self._micro_batches)

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        self._before_each()
        found = self._micro_batches[index]
        self._last = (index.start or 0) if isinstance(index, slice) else index
        return found

    def last(self) -> tuple[Sequence[int], Batch]:
        """Return rows and micro-batch that were read last: the micro-batch that a pass works on, unless it has ended.

        Of a slice, the first counts.
        """
        return self.rows[self._last], self._micro_batches[self._last]

    def largest(self) -> tuple[Sequence[int], Batch]:
        """Return the rows and the micro-batch with the most cells of all that were read."""
        read = range(self._last + 1)
        index = max(read, key=lambda it: self._micro_batches[it].input_ids.numel())
        return self.rows[index], self._micro_batches[index]


class Attempt[Batch: TokenBatch]:
    """A context to run a pass in; it catches and keeps the error of running out of device memory.

    Args:
        micro_batches: See the attribute.
        peers: The other ranks of the pass; None if there are none.
        name: Name of the pass in traces.

    Attributes:
        micro_batches: The micro-batches of the pass.
        error: This rank's error; None if there was none.
        is_broken: This rank has left the pass before its end, because of its own error or another rank's.
    """

    def __init__(self, micro_batches: MicroBatches[Batch], peers: Peers | None = None, name: str = "pass") -> None:
        self.micro_batches = micro_batches
        self.error: BaseException | None = None
        self.is_broken = False
        self._peers = peers
        self._range = named_range(name)

    def __enter__(self) -> None:
        self._range.__enter__()
        if self._peers is not None:
            self._peers.begin_pass()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        self._range.__exit__(None, None, None)
        peers = self._peers
        was_aborted = peers is not None and peers.has_aborted  # then memory ran out over arbitrary results
        if not was_aborted and _is_out_of_memory(error):
            self.error = error
        self.is_broken = self.error is not None
        if peers is not None:
            peers.end_pass(failed=self.is_broken)
            self.is_broken |= isinstance(error, Exception) and peers.failed_rank_is_known
        return self.is_broken


def _is_out_of_memory(error: BaseException | None) -> bool:
    is_kind = isinstance(error, (torch.OutOfMemoryError, DeviceOutOfMemoryError))
    return is_kind or (isinstance(error, RuntimeError) and any(text in str(error) for text in _FROM_LIBRARIES))


class Passes:
    """Runs passes so that running out of device memory does not end them.

    1. Before a pass with more tokens than all earlier ones of its kind, prefetched state is evicted if both may not
       fit. If the pass still does not fit, by what earlier ones took, several ranks agree on smaller micro-batches.
    2. If a rank runs out of memory, all leave the pass (see `Peers`) and repeat it from its start, since a backward
       pass that broke off leaves parts of its gradients. The rank makes room by, in this order, the backend (for one
       rank only), eviction of state that the pass does not read, and cutting the failed micro-batch in two.
    3. What was too large is remembered by all ranks: later micro-batches of that size are cut before the pass starts,
       into equally many on each rank.

    Losses are divided by counts of the global batch, so smaller micro-batches change no more than rounding.

    Args:
        settings: The policy's settings.
        residency: Manager of the rank's state.
        peers: The other ranks of the passes; None if there are none.
        backend_makes_room: See `PolicyBackend.make_room`.
        gather_again: See `PolicyBackend.gather_again`.

    Attributes:
        num_splits: Number of micro-batches that were cut in two.
    """

    def __init__(
        self,
        settings: PolicySettings,
        residency: ResidencyManager,
        *,
        peers: Peers | None = None,
        backend_makes_room: Callable[[], bool] = lambda: False,
        gather_again: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_splits = 0
        self._settings = settings
        self._residency = residency
        self._peers = peers
        self._backend_makes_room = backend_makes_room
        self._gather_again = gather_again
        self._packs = settings.sequence_packing.enabled
        self._too_large: dict[PassKind, int] = {}  # fewest tokens of a micro-batch that is too large
        self._foreseen: set[PassKind] = set()  # kinds of which micro-batches were cut by what earlier ones took

    def attempts[Batch: TokenBatch](
        self,
        kind: PassKind,
        batch: Batch,
        rows: Sequence[Sequence[int]],
        after_failure: Callable[[], None],
    ) -> Iterator[Attempt[Batch]]:
        """Yield a context to run a pass in; after each attempt that runs out of memory, yield one to run it again.

        Args:
            kind: Kind of the pass.
            batch: All rows.
            rows: Row indices of each micro-batch. Those of an attempt may be smaller.
            after_failure: Cleans up after a failed pass, without collectives.

        Raises:
            UserError: Memory ran out, and there is no way to make room; on every rank.
            LostConnectionError: Another rank ran out of memory, and the ranks could not be connected again.
        """
        may_evict = True
        while True:
            attempt = Attempt(self._ready(kind, batch, rows), self._peers, f"{kind} pass")
            yield attempt
            if not self._has_failed(kind, attempt):
                return
            if self._peers is not None:
                self._peers.abort()
            after_failure()
            if self._peers is None:
                may_evict = self._make_room(kind, batch, attempt, may_evict=may_evict)
            else:
                self._reconnect(kind, attempt)
                with failing_together(UserError):
                    if attempt.error is not None:
                        may_evict = self._make_room(kind, batch, attempt, may_evict=may_evict)
                too_large = -max_over_all_ranks(-self._too_large.get(kind, sys.maxsize))
                self._too_large[kind] = too_large
            rows = attempt.micro_batches.rows
            attempt.error = None  # its traceback holds the failed pass's tensors
            gc.collect()

    def _has_failed(self, kind: PassKind, attempt: Attempt[Any]) -> bool:
        """Tell whether the pass failed on any rank; a collective of several ranks."""
        if self._peers is None:
            return attempt.is_broken
        try:
            return self._peers.someone_failed(failed=attempt.is_broken)
        except LostConnectionError as lost:
            raise self._ending(kind, attempt, lost) from (attempt.error or lost)

    def _reconnect(self, kind: PassKind, attempt: Attempt[Any]) -> None:
        """Connect the ranks again; a collective."""
        assert self._peers is not None
        try:
            self._peers.reconnect()
        except LostConnectionError as lost:
            raise self._ending(kind, attempt, lost) from (attempt.error or lost)
        if kind is not PassKind.TEACHER:  # then the policy's parameters may be away
            self._gather_again()

    def _ending(self, kind: PassKind, attempt: Attempt[Any], lost: LostConnectionError) -> Exception:
        """Return the error to end with if the pass cannot be run again: this rank's own, or that of the connection."""
        if attempt.error is None:
            return lost
        rows, failed = self._blamed(attempt)
        work = f"a {kind} pass over {len(rows)} rows with {self._num_tokens(failed)} tokens; {lost}"
        fix = advice(self._settings, kind)
        return _refusal(self._residency, work, held_on_device(self._residency), attempt.error, fix)

    def _blamed[Batch: TokenBatch](self, attempt: Attempt[Batch]) -> tuple[Sequence[int], Batch]:
        """Return rows and micro-batch that ran out of memory; in a pipeline, several are under way."""
        is_pipeline = self._settings.backend.model_parallel.pipeline > 1
        return attempt.micro_batches.largest() if is_pipeline else attempt.micro_batches.last()

    def _ready[Batch: TokenBatch](
        self, kind: PassKind, batch: Batch, rows: Sequence[Sequence[int]]
    ) -> MicroBatches[Batch]:
        """Announce a pass, and return its micro-batches, cut where they are known to be too large."""
        micro_batches = self._cut(batch, rows, self._too_large.get(kind, sys.maxsize))
        if self._peers is not None:
            micro_batches = self._agreed(kind, batch, micro_batches)
        self._residency.expect_work(kind, self._most_tokens(micro_batches))
        return micro_batches

    def _agreed[Batch: TokenBatch](
        self, kind: PassKind, batch: Batch, micro_batches: MicroBatches[Batch]
    ) -> MicroBatches[Batch]:
        """Cut micro-batches that may be too large for any rank, equally many on each rank; a collective."""
        num_tokens = self._most_tokens(micro_batches)
        too_large = -max_over_all_ranks(-self._residency.too_large_size(kind, num_tokens))
        if too_large == sys.maxsize == self._too_large.get(kind, sys.maxsize):
            return micro_batches
        if too_large < sys.maxsize and kind not in self._foreseen:
            self._foreseen.add(kind)
            logger.warning(
                "a %s pass over micro-batches of up to %d tokens may run out of memory, by what earlier ones took: "
                "those of %d tokens or more are cut in two; to save that time, %s",
                kind,
                num_tokens,
                too_large,
                advice(self._settings, kind),
            )
        size = batch.rows_per_group
        groups = [
            [row // size for row in some[::size]] for some in self._cut(batch, micro_batches.rows, too_large).rows
        ]
        count = max_over_all_ranks(len(groups))
        return self._cut(batch, rows_of_groups(split_to_count(groups, count), size), sys.maxsize)

    def _cut[Batch: TokenBatch](
        self, batch: Batch, rows: Sequence[Sequence[int]], too_large: int
    ) -> MicroBatches[Batch]:
        """Make micro-batches, each cut in two until it is smaller than `too_large` tokens or one group of rows."""
        size, multiple = batch.rows_per_group, self._settings.make_sequence_length_divisible_by
        done: list[Sequence[int]] = []
        micro_batches: list[Batch] = []
        waiting = [*reversed(rows)]
        while waiting:
            some = waiting.pop()
            micro_batch = batch.select(some).trim(multiple)
            if self._num_tokens(micro_batch) >= too_large and len(some) > size:
                middle = (len(some) // size + 1) // 2 * size
                waiting += [some[middle:], some[:middle]]
                self.num_splits += 1
                continue
            done.append(some)
            micro_batches.append(micro_batch)
        if self._peers is None:
            return MicroBatches(done, micro_batches)
        return MicroBatches(done, micro_batches, self._peers.leave_if_aborted)

    def _most_tokens(self, micro_batches: Sequence[TokenBatch]) -> int:
        return max(map(self._num_tokens, micro_batches), default=0)

    def _num_tokens(self, micro_batch: TokenBatch) -> int:
        return micro_batch.num_tokens(packed=self._packs)

    def _make_room(self, kind: PassKind, batch: TokenBatch, attempt: Attempt[Any], *, may_evict: bool) -> bool:
        """Make room for a pass that ran out of memory; return whether state may be evicted in another failure.

        Either the backend takes less, or state is evicted, or the micro-batch that failed is to be cut in two.

        Raises:
            UserError: Neither is possible.
        """
        error = attempt.error
        assert error is not None
        if self._peers is None and kind is not PassKind.TEACHER and self._backend_makes_room():
            logger.info("a %s pass is run again: %s", kind, _in_one_line(error))
            return may_evict
        held = held_on_device(self._residency)
        told, phase = _in_one_line(error), self._residency.phase
        if may_evict and (num_bytes := self._residency.evict(after_failure=True)):
            logger.warning(
                "out of memory in a pass of phase %s (%s); it is run again without %.2f GiB on the device that it does "
                "not read",
                phase.value if phase else "start",
                told,
                num_bytes / _GIB,
            )
            return False
        rows, failed = self._blamed(attempt)
        is_divisible = len(rows) > batch.rows_per_group
        fix = advice(self._settings, kind, is_divisible=is_divisible)
        num_tokens = self._num_tokens(failed)
        if not is_divisible:
            each = (f"row {row} of {len(batch)} ({int(batch.input_lengths[row])} tokens)" for row in rows)
            work = f"a {kind} pass over {' and '.join(each)} alone"
            raise _refusal(self._residency, work, held, error, fix) from error
        self._too_large[kind] = int(_STILL_TOO_LARGE * num_tokens)
        logger.warning(
            "out of memory in a %s pass (%s); it is run again with its micro-batch of %d rows and %d tokens cut in "
            "two, and later ones of %d tokens or more are cut before their pass; to save that time, %s",
            kind,
            told,
            len(rows),
            num_tokens,
            self._too_large[kind],
            fix,
        )
        return may_evict

    @property
    def state_advice(self) -> str:
        """Advice on how to make room for state."""
        # Streamed parameters are for one worker only, so more GPUs are no option.
        last = "use a GPU with more memory" if self._settings.backend.streams_parameters else "use more GPUs"
        return ", or ".join([*streaming_advice(self._settings), last])


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
