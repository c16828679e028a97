"""Processes that grade, and are killed when they get stuck.

1. A worker starts, does the warm-up job (imports, mostly), and says that it is ready.
2. The pool hands each idle worker one job and notes the deadline.
3. A worker that answers gets the next job.
4. A worker past its deadline, or dead, is killed and replaced; its job's outcome is `TimedOut` or `Failed`.

A worker ends by itself when the pool's process is gone: an idle one sees its pipe close, a stuck one is ended by an
alarm that the kernel delivers.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from nemo_offload_rl.errors import UserCodeError, UserError, WorkerDiedError

_ALARM_SLACK_S = 30.0  # how much later than the pool's deadline a worker's own alarm goes off
_START_TIMEOUT_S = 120.0  # interpreter, imports and warm-up, on a busy machine
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from nemo_offload_rl.environments.grading_pool import work; work(int(sys.argv[1]))"
)

# What sympy and LaTeX parsers raise about text that is no formula. Anything else is a bug and ends the worker loudly.
_GRADING_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class TimedOut:
    """The job did not end in time and its worker was killed."""


@dataclass(frozen=True)
class Failed:
    """The job raised, or its worker died; `reason` says how."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """The job raised a `UserError`, whose message this is."""

    message: str


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    is_ready: bool = False
    job: int | None = None
    deadline: float = 0.0


class GradingPool:
    """Runs `grade(*job)` for many jobs in worker processes, each with a time limit.

    Args:
        grade: A function or object that can be pickled. Whatever it imports is imported in the workers.
        num_workers: Processes; they start at once, and stay.
        timeout_s: Seconds for one job.
        warm_up: A job that each worker does first, without this limit; None for none.
    """

    def __init__(
        self,
        grade: Callable[..., Any],
        *,
        num_workers: int,
        timeout_s: float,
        warm_up: tuple[Any, ...] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._task = pickle.dumps((grade, warm_up, timeout_s + _ALARM_SLACK_S))
        self._workers = [self._start_worker() for _ in range(num_workers)]

    def wait_until_ready(self) -> None:
        """Return when every worker has done its warm-up.

        Raises:
            UserCodeError: Code from outside of the package failed in the warm-up.
            WorkerDiedError: A worker process did not start.
        """
        for worker in self._workers:
            self._wait_until_ready(worker)

    def map(self, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The outcome of each job in order: what `grade` returned, `TimedOut`, `Failed` or `Refused`.

        Raises:
            UserCodeError: Code from outside of the package failed in the warm-up of a new worker.
            WorkerDiedError: A worker process did not start.
        """
        outcomes: list[Any] = [None] * len(jobs)
        waiting = list(range(len(jobs)))[::-1]
        while waiting or any(worker.job is not None for worker in self._workers):
            for index, worker in enumerate(self._workers):
                if worker.job is None and waiting:
                    self._workers[index] = self._hand_out(worker, waiting.pop(), jobs)
            self._collect(outcomes)
        return outcomes

    def close(self) -> None:
        """Kill the workers; safe to call twice."""
        for worker in self._workers:
            self._kill(worker)
        self._workers = []

    def _hand_out(self, worker: _Worker, job: int, jobs: Sequence[tuple[Any, ...]]) -> _Worker:
        if worker.process.poll() is not None:  # died while idle: nothing is lost
            self._kill(worker)
            worker = self._start_worker()
        self._wait_until_ready(worker)
        worker.pipe.send(jobs[job])
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
            status = _exit_code(worker.process)
            raise WorkerDiedError(
                f"a grading process ended while it started (exit code {status}); its output says why"
            ) from error
        if refused is not None:
            raise UserCodeError(refused.message)
        worker.is_ready = True

    def _collect(self, outcomes: list[Any]) -> None:
        """Wait for the first answer, death or deadline, and take all that is there."""
        busy = {worker.pipe: index for index, worker in enumerate(self._workers) if worker.job is not None}
        first_deadline = min(self._workers[index].deadline for index in busy.values())
        ready = wait(list(busy), timeout=max(0.0, first_deadline - time.monotonic()))
        now = time.monotonic()
        for pipe, index in busy.items():
            worker = self._workers[index]
            assert worker.job is not None
            if pipe in ready:
                outcomes[worker.job] = self._receive(worker)
                worker.job = None
            elif now >= worker.deadline:
                outcomes[worker.job] = TimedOut()
                self._replace(index)

    def _receive(self, worker: _Worker) -> Any:
        try:
            return worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            return Failed(f"the grading process ended with exit code {_exit_code(worker.process)}")

    def _replace(self, index: int) -> None:
        self._kill(self._workers[index])
        self._workers[index] = self._start_worker()

    def _start_worker(self) -> _Worker:
        # A new interpreter, not a fork: the driver has threads (Ray, vLLM), and a fork may copy a lock that one holds.
        # Nor multiprocessing's, which would run the user's script again in each worker.
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        pipe = Connection(ours.detach())
        pipe.send_bytes(self._task)
        return _Worker(process=process, pipe=pipe)

    @staticmethod
    def _kill(worker: _Worker) -> None:
        worker.process.kill()
        worker.process.wait()
        worker.pipe.close()


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Of a process whose pipe is closed: it has ended, or ends now."""
    try:
        return process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def work(descriptor: int) -> None:
    """The life of one worker: one job after the other until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.set_inheritable(descriptor, False)  # processes that a job starts do not keep the pipe open
    pipe = Connection(descriptor)
    try:
        grade, warm_up, alarm_s = pickle.loads(pipe.recv_bytes())
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
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        pipe.send(_outcome(grade, job))
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _outcome(grade: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    try:
        return grade(*job)
    except UserError as error:
        return Refused(str(error))
    except _GRADING_ERRORS as error:
        return Failed(f"{type(error).__name__}: {error}")
