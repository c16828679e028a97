"""The end of a run: its causes, the last save, its last lines and its exit status.

A run ends after its last step, at `checkpointing.checkpoint_must_save_by`, by an error, or by one of `STOP_SIGNALS`.
Every end completes a save that has begun. It also saves the last finished step, unless it is on disk already, a key
forbids it, or the state cannot be saved:

| when the run ends | the policy's state | saved |
|---|---|---|
| before the end of the first step | initial | nothing |
| between steps; during rollouts; in passes without an update | of the last finished step | the last finished step |
| between the first and the last update of a step, by an error | partly updated | nothing |
| after the last update of a step, such as in validation | of this step | this step |

A signal never interrupts an update or a save.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import NoReturn, Self

from nemo_offload_rl.algorithms.checkpoints import EXPORT_FOLDER, CheckpointKeeper, SaveDeadline
from nemo_offload_rl.data.loader import LoaderState
from nemo_offload_rl.errors import CheckpointError, UserError
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.utils.cli import BY_SIGNAL, STOP_SIGNALS, LastLines
from nemo_offload_rl.utils.progress import aligned, shown_path, shown_python

logger = logging.getLogger(__name__)

# `timeout`, srun and a shell's trap may each forward the same signal.
_REPEAT_S = 1.0
_NUDGE_S = 0.2


class StopSignals:
    """Handles signals that ask the run to stop, in a `with` block of the main thread.

    The first signal is only noted, so that the current step can end. After `grace_s`, `KeyboardInterrupt` interrupts
    the main thread as soon as `may_break_off` permits. A second signal raises `KeyboardInterrupt` at once. Signals
    that the process ignored from its start, as under `nohup`, stay ignored.

    Args:
        grace_s: Seconds for the current step.
        may_break_off: Tells whether the main thread may be interrupted; called in its signal handler.

    Attributes:
        received: The first signal; None before it.
        is_urgent: A second signal has come.
        has_broken_off: `KeyboardInterrupt` was raised; libraries on its way may turn it into another error.
        grace_is_over: `grace_s` seconds have passed since the first signal.
    """

    def __init__(self, grace_s: float, may_break_off: Callable[[], bool]) -> None:
        self._grace_s = grace_s
        self._may_break_off = may_break_off
        self._received_s = 0.0
        self._is_nudge = False
        self._is_ending = False
        self._wakes: SimpleQueue[bool] = SimpleQueue()  # its `put` may be called in a signal handler
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._thread = threading.Thread(target=self._count_down, name="grace", daemon=True)
        self.received: signal.Signals | None = None
        self.is_urgent = False
        self.has_broken_off = False
        self.grace_is_over = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._thread.start()
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self.begin_ending()

    def begin_ending(self) -> None:
        """Mark the end of the current step: from now on only a second signal interrupts the main thread."""
        self._is_ending = True
        self._wakes.put(True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_nudge:
            self._is_nudge = False
            if not self._is_ending and self._may_break_off():
                self.has_broken_off = True
                raise KeyboardInterrupt
        elif self.received is None:
            self.received, self._received_s = signal.Signals(number), time.monotonic()
            self._wakes.put(False)
        elif time.monotonic() - self._received_s > _REPEAT_S:
            self.is_urgent = self.has_broken_off = True
            raise KeyboardInterrupt

    def _count_down(self) -> None:
        if self._wakes.get():
            return
        assert self.received is not None
        logger.warning(
            "%s: the run saves and ends after this step; if the step takes more than %g s (checkpointing.grace_s), the "
            "run ends without it. A second signal ends it at once",
            self.received.name,
            self._grace_s,
        )
        wait_s, main_thread = self._grace_s, threading.main_thread().ident
        assert main_thread is not None
        while True:
            try:
                self._wakes.get(timeout=wait_s)
                return
            except Empty:
                self.grace_is_over, wait_s = True, _NUDGE_S
                self._is_nudge = True
                signal.pthread_kill(main_thread, self.received)


@dataclass(frozen=True)
class _Finished:
    """A step whose last update is done, as a checkpoint records it."""

    step: int
    loader: LoaderState
    metrics: Mapping[str, Mapping[str, float]]


class RunEnd:
    """Ends a run of training. The loop runs inside `watching`, and reports the progress of each step.

    Args:
        checkpoints: Saves, by the keys `checkpointing.*`.
        policy: The policy to save.
        run_dir: Folder of metrics, named in the last lines.
        say: Shows a line to the user.
        waits_for_rollouts: Tells whether the main thread generates or scores rollouts, which may be interrupted.
        make_room: Called before a save in the middle of a step. It waits for other threads. If the weights are
            exported, which needs them on the devices, it also ends the engines.
    """

    def __init__(
        self,
        checkpoints: CheckpointKeeper,
        policy: Policy,
        run_dir: Path,
        *,
        say: Callable[[str], object],
        waits_for_rollouts: Callable[[], bool] = lambda: False,
        make_room: Callable[[bool], object] = lambda exports: None,
    ) -> None:
        self._checkpoints = checkpoints
        self._settings = checkpoints.settings
        self._policy = policy
        self._run_dir = run_dir
        self._say = say
        self._waits_for_rollouts = waits_for_rollouts
        self._make_room = make_room
        self._signals = StopSignals(self._settings.grace_s, self._may_break_off)
        self._deadline = SaveDeadline(self._settings.checkpoint_must_save_by, self._settings.grace_s)
        self._finished: _Finished | None = None
        self._saved_step = 0  # last step on disk
        self._begun_step = 0  # last step whose save has begun
        self._is_between = False  # a step's updates are done, but `trained` has not been called yet
        self._is_saving = False
        self._is_stopping = False

    # -- what the loop tells

    @contextmanager
    def watching(self, step: int, last_step: int) -> Generator[None]:
        """Wrap the loop; at its end save what is not saved, and raise the exception that sets the exit status.

        Args:
            step: Last step that is on disk already.
            last_step: The run's last step.

        Raises:
            KeyboardInterrupt: SIGINT stopped the run.
            SystemExit: Another signal stopped it; the status is 128 + its number.
        """
        self._saved_step = self._begun_step = step
        self._deadline.start()
        with self._signals:
            try:
                yield
            except BaseException as error:
                self._end(error)
                raise
            self._end(None)

    @contextmanager
    def updating(self) -> Generator[None]:
        """Wrap the policy's updates of a step; the caller then reports the step with `trained`."""
        if self._signals.grace_is_over:
            raise KeyboardInterrupt
        yield  # if this raises, the workers know whether they have updated anything
        self._finished, self._is_between = None, True

    def trained(self, step: int, loader: LoaderState, metrics: Mapping[str, float]) -> None:
        """Report that the updates of a step are done.

        Args:
            step: Number of the step.
            loader: Position in the data.
            metrics: Metrics of the step's training, with `total_tokens`.
        """
        self._finished = _Finished(step, loader, {"train": metrics, "val": {}})
        self._is_between = False

    def save_is_due(self, step: int, is_last: bool) -> bool:
        """Tell whether a checkpoint belongs to this step; called once a step, before its save."""
        self._deadline.step_done()
        return self._checkpoints.is_due(step, is_last or self._deadline.reached)

    def save(self, validation: Mapping[str, float], *, prunes: bool = True) -> str | None:
        """Save the last trained step with its validation metrics; return the reason if it cannot be saved, else None.

        Raises:
            CheckpointError: This save or the previous one failed.
        """
        finished = self._finished
        assert finished is not None, "no step was trained"
        problem = self._policy.save_problem()
        if problem is not None:
            logger.warning("step %d is not saved: %s", finished.step, problem)
            return problem
        metrics = {**finished.metrics, "val": validation}
        with self._saving():
            self._checkpoints.finish()  # the previous save
        with self._saving():
            self._begun_step = finished.step
            self._checkpoints.save(finished.step, self._policy, finished.loader, metrics, prunes=prunes)
        return None

    def step_done(self, step: int, last_step: int) -> bool:
        """Complete a save that is written by now, and tell whether the run ends with this step.

        Raises:
            CheckpointError: The save could not be written.
        """
        with self._saving():
            self._checkpoints.poll()
        if step >= last_step:
            return True
        if self._deadline.reached and self._signals.received is None:
            self._say(f"ended after step {step} of {last_step}, as checkpointing.checkpoint_must_save_by asks")
        self._is_stopping = self._deadline.reached or self._signals.received is not None
        return self._is_stopping

    # -- inside

    def _may_break_off(self) -> bool:
        if self._is_saving or self._is_between:
            return False
        return self._unsaved is None or self._waits_for_rollouts()

    @property
    def _unsaved(self) -> _Finished | None:
        finished = self._finished
        return None if finished is None or finished.step <= self._begun_step else finished

    @contextmanager
    def _saving(self) -> Generator[None]:
        """Wrap a call that begins or ends saves; only a second signal interrupts it."""
        self._is_saving = True
        try:
            with self._deadline.saving():
                yield
        except BaseException:
            self._begun_step = self._saved_step
            raise
        finally:
            self._is_saving = False
        if not self._checkpoints.is_saving:
            self._saved_step = self._begun_step
            self._deadline.save_ended()

    def _end(self, error: BaseException | None) -> None:
        """Save the last finished step and report; if a signal stopped the run, raise its exception."""
        self._signals.begin_ending()
        try:
            trouble = "a second signal came" if self._signals.is_urgent else self._save_what_is_left(error)
        except KeyboardInterrupt:
            trouble = "a second signal came"
        except UserError as failed:
            failed.add_note(LastLines(self._last_lines("the save failed", is_complete=False)))
            raise
        is_complete = error is None and not self._is_stopping
        lines = self._last_lines(trouble, is_complete=is_complete)
        received = None if is_complete else self._signals.received
        is_stopped = self._signals.has_broken_off or error is None or isinstance(error, UserError | KeyboardInterrupt)
        if received is not None and is_stopped:
            if isinstance(error, UserError):
                logger.warning("after %s: %s", received.name, error)
            _raise_stopped(received, lines, error)
        if error is None:
            self._say(f"the run is complete\n{lines}" if is_complete else lines)
        else:
            error.add_note(LastLines(lines))

    def _save_what_is_left(self, error: BaseException | None) -> str | None:
        """Complete a save that has begun and save the last finished step; return the reason if one is not saved."""
        if isinstance(error, CheckpointError):
            return "the save failed" if self._unsaved else None
        if not self._checkpoints.is_saving and (self._unsaved is None or not self._settings.enabled):
            return None
        if not self._policy.settle(self._settings.grace_s):
            return f"a policy worker has died, or not answered for {self._settings.grace_s:g} s (checkpointing.grace_s)"
        try:
            with self._saving():
                self._checkpoints.finish()
            if self._unsaved is None or not self._settings.save_at_end:
                return None
            self._make_room(self._checkpoints.exports_weights)
            logger.info("saving step %d", self._unsaved.step)
            problem = self.save({}, prunes=False)
            with self._saving():
                self._checkpoints.finish()
        except UserError as failed:  # a worker has died, or the disk is full
            if error is None:
                raise
            return str(failed)
        return problem

    def _last_lines(self, trouble: str | None, *, is_complete: bool) -> str:
        """Say what is not saved, where everything is, and how to go on."""
        unsaved = self._unsaved
        facts: dict[str, str] = {}
        if unsaved is not None:
            key = "checkpointing.save_at_end" if self._settings.enabled else "checkpointing.enabled"
            first = self._saved_step + 1
            steps = f"step {first}" if first == unsaved.step else f"steps {first} to {unsaved.step}"
            facts["not saved"] = f"{steps}: {trouble or f'{key} is false'}"
        elif trouble is not None:
            facts["not saved"] = trouble
        newest = self._checkpoints.newest_folder()
        if newest is not None:
            facts["checkpoint"] = shown_path(newest)
            if (newest / EXPORT_FOLDER).is_dir():
                facts["hf export"] = shown_path(newest / EXPORT_FOLDER)
        facts["logs"] = shown_path(self._run_dir)
        facts["report"] = f"{shown_python()} -m nemo_offload_rl.report {shown_path(self._run_dir)}"
        if newest is not None and self._settings.save_optimizer:
            longer = f"raise {self._checkpoints.algorithm}.{self._checkpoints.bound}, then " if is_complete else ""
            facts["go on"] = f"{longer}start the same command again"
        return aligned(facts)


def _raise_stopped(received: signal.Signals, lines: str, cause: BaseException | None) -> NoReturn:
    stopped = KeyboardInterrupt() if received is signal.SIGINT else SystemExit(BY_SIGNAL + received)
    stopped.add_note(LastLines(lines))
    raise stopped from cause
