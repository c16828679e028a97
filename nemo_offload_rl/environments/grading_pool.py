"""Pool of grading processes, which are killed when they get stuck.

1. A worker starts, does the warm-up job (imports, mostly), and reports that it is ready.
2. The pool hands each idle worker one job and notes the deadline.
3. A worker that answers gets the next job. Several threads may have jobs done; each gets workers as they become idle.
4. A worker past its deadline, or dead, is killed and replaced; its job's outcome is `TimedOut` or `Failed`.

Each worker has a keeper, the process that forked it. Processes that a worker starts become the keeper's children when
their parents end, even in other sessions (PR_SET_CHILD_SUBREAPER). The keeper kills all of them when the worker ends,
the pool closes the keeper's standard input, or the pool's process ends. So no process that a job starts outlives its
timeout or the run.
"""

import ctypes
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from nemo_offload_rl.environments.sandboxed_process import die_with_parent
from nemo_offload_rl.errors import UserCodeError, UserError, WorkerDiedError
from nemo_offload_rl.targets import UserCode

_LOOK_S = 0.05
_KEEPER_S = 30.0  # for a keeper to kill all processes of its worker, on a busy machine
_START_TIMEOUT_S = 120.0  # interpreter, imports and warm-up, on a busy machine
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from nemo_offload_rl.environments.grading_pool import keep; keep(int(sys.argv[1]), int(sys.argv[3]))"
)
_PR_SET_CHILD_SUBREAPER = 36

# Errors that sympy and LaTeX parsers raise for text that is no formula. Any other error is a bug and ends the worker.
_GRADING_ERRORS = (
    ArithmeticError, AttributeError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class TimedOut:
    """The job did not end in time and its worker was killed."""


@dataclass(frozen=True)
class Failed:
    """The job raised, or its worker died; `reason` says how."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """The job raised a `UserError`; `reason` is its message."""

    reason: str


@dataclass
class _Worker:
    """The pool's record of one worker.

    Attributes:
        process: The worker's keeper.
        pipe: Connection to the worker.
        is_ready: The worker has done its warm-up.
        helpers: Process ids below the keeper after the warm-up: the worker, and processes that it needs for all jobs.
        job: Index of the current job.
        deadline: End of the job's time, by the monotonic clock.
    """

    process: subprocess.Popen[bytes]
    pipe: Connection
    is_ready: bool = False
    helpers: frozenset[int] = frozenset()
    job: int | None = None
    deadline: float = 0.0


class GradingPool:
    """Runs `grade(*job)` for many jobs in worker processes, each with a time limit.

    Args:
        grade: A function or object that can be pickled; its modules are imported in the workers.
        num_workers: Processes; they start at once and stay.
        timeout_s: Seconds for one job.
        warm_up: A job that each worker does first, without this limit; None for none.
        waits: Return from the constructor only when every worker has done its warm-up; errors as in `map`.
    """

    def __init__(
        self,
        grade: Callable[..., Any],
        *,
        num_workers: int,
        timeout_s: float,
        warm_up: tuple[Any, ...] | None = None,
        waits: bool = False,
    ) -> None:
        self._timeout_s = timeout_s
        self._task = pickle.dumps((grade, warm_up))
        self._changed = threading.Condition()  # guards these three
        self._idle = set(range(num_workers))
        self._num_waiting = 0  # threads that have jobs and no worker
        self._is_closed = False
        self._workers = [self._start_worker() for _ in range(num_workers)]
        if waits:
            try:
                for worker in self._workers:
                    self._wait_until_ready(worker)
            except BaseException:
                self.close()
                raise

    def map(self, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the outcome of each job in order: the result of `grade`, `TimedOut`, `Failed` or `Refused`.

        Raises:
            UserCodeError: A user's code failed in the warm-up of a new worker.
            WorkerDiedError: A worker process did not start.
            RuntimeError: `close` was called.
        """
        outcomes: list[Any] = [None] * len(jobs)
        waiting = list(range(len(jobs)))[::-1]
        busy: set[int] = set()  # workers that do jobs of this call
        try:
            while waiting or busy:
                while waiting and (index := self._claim(waits=not busy)) is not None:
                    busy.add(index)
                    self._workers[index] = self._hand_out(self._workers[index], waiting.pop(), jobs)
                self._release(self._collect(outcomes, busy, may_get_more=bool(waiting)))
        except (OSError, LookupError, WorkerDiedError):
            self._check_open()  # `close` takes workers from the threads that use them
            raise
        finally:
            if busy and not self._is_closed:  # after an error: their answers are not wanted any more
                for index in busy:
                    self._replace(index)
                self._release(busy)
        return outcomes

    def _claim(self, *, waits: bool) -> int | None:
        """Take an idle worker; None if there is none, or if other threads wait and this one does not."""
        with self._changed:
            if waits and not self._idle:
                self._num_waiting += 1
                self._changed.wait_for(lambda: self._idle or self._is_closed)
                self._num_waiting -= 1
            self._check_open()
            return self._idle.pop() if self._idle and (waits or not self._num_waiting) else None

    def _check_open(self) -> None:
        """Raise `RuntimeError` if `close` was called, which kills workers in the middle of their jobs."""
        if self._is_closed:
            raise RuntimeError("the grading processes were ended")

    def _release(self, workers: set[int]) -> None:
        with self._changed:
            self._idle |= workers
            self._changed.notify_all()

    def close(self) -> None:
        """Kill the workers and all that they have started; safe to call twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for worker in self._workers:
            _let_go(worker)
        for worker in self._workers:
            _end(worker)
        self._workers = []

    def _hand_out(self, worker: _Worker, job: int, jobs: Sequence[tuple[Any, ...]]) -> _Worker:
        """Give a worker a job; one that has ended while it was idle is replaced first, and nothing is lost."""
        # Not `send`: where it fails, its error keeps a view of an `io.BytesIO`, and Python 3.12 crashes when it
        # collects both as garbage (in `bytesiobuf_releasebuffer`).
        message = pickle.dumps(jobs[job])
        while True:
            if worker.process.poll() is not None:
                self._check_open()
                _end(worker)
                worker = self._start_worker()
            self._wait_until_ready(worker)
            try:
                worker.pipe.send_bytes(message)
                break
            except BrokenPipeError:
                _end(worker, by_itself=True)
        worker.job = job
        worker.deadline = time.monotonic() + self._timeout_s
        return worker

    def _wait_until_ready(self, worker: _Worker) -> None:
        if worker.is_ready:
            return
        if not worker.pipe.poll(_START_TIMEOUT_S):
            raise WorkerDiedError(
                f"a grading process was not ready after {_START_TIMEOUT_S:.0f} s: the machine is overloaded; "
                f"lower num_workers of the environment"
            )
        try:
            refused = worker.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            status = _end(worker, by_itself=True)
            raise WorkerDiedError(
                f"a grading process ended while it started (exit code {status}); its output says why"
            ) from error
        if refused is not None:
            raise UserCodeError(refused.reason)
        worker.is_ready = True
        worker.helpers = frozenset(_descendants(worker.process.pid))

    def _collect(self, outcomes: list[Any], busy: set[int], *, may_get_more: bool) -> set[int]:
        """Wait for the first answer, death or deadline of the busy workers, and take every answer that is there.

        With `may_get_more`, workers of other threads may become idle meanwhile, so the wait is short.

        Returns:
            The workers that have ended their jobs, which are removed from `busy`.
        """
        pipes = {self._workers[index].pipe: index for index in busy}
        left_s = min(self._workers[index].deadline for index in busy) - time.monotonic()
        if may_get_more and len(busy) < len(self._workers):
            left_s = min(left_s, _LOOK_S)
        ready = wait(list(pipes), timeout=max(0.0, left_s))
        now = time.monotonic()
        ended: set[int] = set()
        for pipe, index in pipes.items():
            worker = self._workers[index]
            assert worker.job is not None
            if pipe in ready:
                outcome = outcomes[worker.job] = self._receive(worker)
                worker.job = None
                ended.add(index)
                if _has_timed_out(outcome) and not worker.helpers.issuperset(_descendants(worker.process.pid)):
                    self._replace(index)  # an awaited call that timed out has left a process
            elif now >= worker.deadline:
                outcomes[worker.job] = TimedOut()
                ended.add(index)
                self._replace(index)
        busy -= ended
        return ended

    def _receive(self, worker: _Worker) -> Any:
        try:
            return worker.pipe.recv()
        except (EOFError, OSError):
            self._check_open()
            return Failed(f"the grading process ended with exit code {_end(worker, by_itself=True)}")

    def _replace(self, index: int) -> None:
        _end(self._workers[index])
        self._workers[index] = self._start_worker()

    def _start_worker(self) -> _Worker:
        # A new interpreter, not a fork: the driver has threads (Ray, vLLM), and a fork may copy a lock that one holds.
        # Not by multiprocessing, which would run the user's script again in each worker.
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        pipe = Connection(ours.detach())
        pipe.send_bytes(self._task)
        return _Worker(process=process, pipe=pipe)


def _has_timed_out(outcome: Any) -> bool:
    return isinstance(outcome, list) and any(isinstance(part, TimedOut) for part in outcome)


def _let_go(worker: _Worker) -> None:
    """Have the keeper end its worker."""
    assert worker.process.stdin is not None
    worker.process.stdin.close()


def _end(worker: _Worker, *, by_itself: bool = False) -> int:
    """End a worker with all processes that it has started, and return its exit code.

    Args:
        worker: The worker.
        by_itself: The worker's pipe is closed, so the worker has ended or ends now.
    """
    for may_end in (True, False) if by_itself else (False,):
        if not may_end:
            _let_go(worker)
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=1.0 if may_end else _KEEPER_S)
            break
    else:
        os.killpg(worker.process.pid, signal.SIGKILL)
    _let_go(worker)
    worker.pipe.close()
    return worker.process.wait()


# -- in the processes --------------------------------------------------------------------------------------------------


def keep(descriptor: int, pool: int) -> None:
    """Fork a worker, and kill all its processes once it ends, the pool lets it go, or the pool's process ends.

    Args:
        descriptor: The worker's end of its pipe.
        pool: Process id of the pool.
    """
    # The driver handles these signals, and all processes end with it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: None)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        die_with_parent(keeper)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        work(descriptor)
        return
    os.close(descriptor)
    threading.Thread(target=_kill_when_let_go, args=(worker, pool), daemon=True).start()
    code = None
    while code is None:
        ended, status = os.waitpid(-1, 0)
        if ended == worker:
            code = os.waitstatus_to_exitcode(status)
    with suppress(ChildProcessError):  # none is left
        while True:
            for pid in _descendants(keeper):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
    os._exit(code if code >= 0 else 128 - code)


def _kill_when_let_go(worker: int, pool: int) -> None:
    with suppress(ProcessLookupError), selectors.DefaultSelector() as selector:
        selector.register(os.pidfd_open(pool), selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        selector.select()
    os.kill(worker, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """List the process ids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(path.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found


def work(descriptor: int) -> None:
    """Do one job after the other until the pipe closes."""
    os.set_inheritable(descriptor, False)  # processes that a job starts do not keep the pipe open
    pipe = Connection(descriptor)
    try:
        grade, warm_up = pickle.loads(pipe.recv_bytes())
        if warm_up is not None:
            grade(*warm_up)
    except UserError as error:
        pipe.send(Refused(str(error)))
        return
    pipe.send(None)  # ready
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(graded(grade, job))


def graded(grade: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    """Return `grade(*job)`; a `UserError` becomes `Refused`, an error of grading `Failed`."""
    try:
        return grade(*job)
    except UserError as error:
        return Refused(str(error))
    except _GRADING_ERRORS as error:
        return Failed(f"{type(error).__name__}: {error}")


@dataclass
class MadeOnce:
    """An object of a user's class, made once in each process and not pickled.

    Attributes:
        part: The class, or the object itself.
    """

    part: UserCode
    _made: Any = None

    def made(self) -> Any:
        """Return the object; the first call makes it."""
        if self._made is None:
            self._made = self.part.make()
        return self._made

    def close(self) -> None:
        """Close the object of this process if it can be closed."""
        made, self._made = self._made, None
        if made is not None and hasattr(made, "close"):
            with self.part.telling():
                made.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None}
