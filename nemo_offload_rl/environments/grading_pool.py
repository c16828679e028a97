"""Processes that grade, and are killed when they get stuck.

1. A worker starts, does the warm-up job (imports, mostly), and says that it is ready.
2. The pool hands each idle worker one job and notes the deadline.
3. A worker that answers gets the next job.
4. A worker past its deadline, or dead, is killed and replaced; its job's outcome is `TimedOut` or `Failed`.

A worker ends by itself when the pool's process is gone: an idle one sees its pipe close, a stuck one is ended by an
alarm that the kernel delivers.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from nemo_offload_rl.errors import WorkerDiedError

_ALARM_SLACK_S = 30.0  # how much later than the pool's deadline a worker's own alarm goes off
_START_TIMEOUT_S = 120.0  # interpreter, imports and warm-up, on a busy machine

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


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    is_ready: bool = False
    job: int | None = None
    deadline: float = 0.0


class GradingPool:
    """Runs `grade(*job)` for many jobs in worker processes, each with a time limit.

    Args:
        grade: A function that can be imported by name. Whatever it imports is imported in the workers.
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
        # Spawned, not forked: the driver has threads (Ray, vLLM), and a fork may copy a lock that one of them holds.
        self._context = multiprocessing.get_context("spawn")
        self._grade = grade
        self._timeout_s = timeout_s
        self._warm_up = warm_up
        self._workers = [self._start_worker() for _ in range(num_workers)]

    def map(self, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The outcome of each job in order: what `grade` returned, `TimedOut`, or `Failed`.

        Raises:
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
        if not worker.process.is_alive():  # died while idle: nothing is lost
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
            worker.pipe.recv()
        except EOFError as error:
            worker.process.join(timeout=1.0)
            raise WorkerDiedError(
                f"a grading process ended while it started (exit code {worker.process.exitcode}); its output says why"
            ) from error
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
            worker.process.join(timeout=1.0)
            return Failed(f"the grading process ended with exit code {worker.process.exitcode}")

    def _replace(self, index: int) -> None:
        self._kill(self._workers[index])
        self._workers[index] = self._start_worker()

    def _start_worker(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(theirs, self._grade, self._warm_up, self._timeout_s + _ALARM_SLACK_S), daemon=True
        )
        process.start()
        theirs.close()
        return _Worker(process=process, pipe=ours)

    @staticmethod
    def _kill(worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


def _work(pipe: Connection, grade: Callable[..., Any], warm_up: tuple[Any, ...] | None, alarm_s: float) -> None:
    """The life of one worker: one job after the other until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if warm_up is not None:
        grade(*warm_up)
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
    except _GRADING_ERRORS as error:
        return Failed(f"{type(error).__name__}: {error}")
