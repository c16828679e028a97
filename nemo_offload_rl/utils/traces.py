"""Traces of steps by torch's profiler (`logger.profile_steps`), one file for each worker and step, and named ranges.

Perfetto (https://ui.perfetto.dev) reads the files; Nsight Systems shows the ranges as NVTX ranges.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from nemo_offload_rl.utils.timer import PhaseTimer

logger = logging.getLogger(__name__)

TRACES_FOLDER = "traces"


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Name the body in traces; without a profiler this costs microseconds."""
    on_gpu = torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()


class ProcessTrace:
    """The trace of one worker. A process has one profiler, so of several workers in it the first one writes for all."""

    _running: ClassVar[ProcessTrace | None] = None

    def __init__(self) -> None:
        self._profiler: torch.profiler.profile | None = None

    def start(self) -> None:
        """Begin a trace of this process, its GPU work included; dropped if the one before was not written."""
        if ProcessTrace._running not in (None, self):
            return
        self.drop()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # it is used once
            self._profiler.start()
        ProcessTrace._running = self

    def stop(self, name: str) -> str | None:
        """End the trace and write it, if one was begun here.

        Args:
            name: Path of the file without `.json.gz`; its folder is made if need be.

        Returns:
            The reason why it could not be written; None if all is well.
        """
        profiler = self.drop()
        if profiler is None:
            return None
        path = Path(f"{name}.json.gz")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            return f"{path}: {error.strerror}"
        return None

    def drop(self) -> torch.profiler.profile | None:
        """End the trace without writing it, and return the profiler; None if there was none."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            ProcessTrace._running = None
        return profiler


class Traced(Protocol):
    """Workers that trace themselves."""

    def start_trace(self) -> None:
        """Begin a trace of each worker."""
        ...

    def stop_trace(self, prefix: str) -> list[str]:
        """Write the traces to files whose names begin with `prefix`; return what could not be written, and why."""
        ...


class StepTraces:
    """Traces the steps of a run that `logger.profile_steps` names.

    Args:
        steps: Their numbers.
        run_dir: The run folder; traces go to the folder `traces` in it.
        traced: All workers.
        timer: Gets the phase `profile`.
        say: Tells the user where the traces are.
    """

    def __init__(
        self,
        steps: Sequence[int],
        run_dir: Path,
        traced: Sequence[Traced],
        timer: PhaseTimer,
        say: Callable[[str], object],
    ) -> None:
        self._steps = frozenset(steps)
        self._folder = run_dir.resolve() / TRACES_FOLDER
        self._traced = traced
        self._timer = timer
        self._say = say

    def begin(self, step: int) -> None:
        """Begin the traces of a step, if it is to be traced."""
        if step in self._steps:
            with self._timer.phase("profile"):
                for one in self._traced:
                    one.start_trace()

    def end(self, step: int) -> None:
        """Write the traces of a step that has ended; a trace that cannot be written costs a warning."""
        if step in self._steps:
            with self._timer.phase("profile"):
                problems = [text for one in self._traced for text in one.stop_trace(f"{self._folder}/step_{step}")]
            if problems:
                logger.warning("step %d: traces could not be written: %s", step, "; ".join(problems))
            self._say(f"traces of step {step}: {self._folder}/step_{step}_*.json.gz, for https://ui.perfetto.dev")
