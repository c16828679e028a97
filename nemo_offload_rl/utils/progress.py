"""Progress of a run for a person: a bar on a terminal, one line for each step elsewhere.

A stream that is gone or full ends the display with a warning; the run goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from nemo_offload_rl.utils.timer import TOTAL, shares

logger = logging.getLogger(__name__)

_SHOWN_PHASES = 3
_LEAST_SHARE = 0.005


class RunProgress:
    """Shows the progress of a run.

    On a terminal: a bar with the step's figures and the time left, and above it two lines for each step. Otherwise one
    plain line for each step, so that a log file stays readable.

    Args:
        num_steps: Steps of the run in all.
        first_step: Steps that are done already (a resumed run).
        console: Receives the output; standard output by default.
        clock: Seconds from any fixed point.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console if console is not None else _Console()
        self._is_lost = False
        self._clock = clock
        self._num_steps = num_steps
        self._first_step = first_step
        self._began = clock()
        self._about_validation = ""
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("step", total=num_steps, completed=first_step, figures="")

    def __enter__(self) -> Self:
        self._began = self._clock()
        if self._bar is not None:
            self._show(self._bar.start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._show(self._bar.stop)

    def step_done(self, step: int, figures: Mapping[str, str], seconds: Mapping[str, float]) -> None:
        """Show one finished step.

        Args:
            step: Its number, from 1.
            figures: Values to show, by name; those of the last validation follow.
            seconds: From the step's `PhaseTimer.drain`.
        """
        parts = [f"{name} {value}" for name, value in figures.items()]
        text = "  ".join([*parts, self._about_validation] if self._about_validation else parts)
        if self._bar is None:
            self._write_line(step, text, seconds)
            return
        self.note(step_summary(step, text, seconds))
        bar = self._bar
        self._show(lambda: bar.update(self._task, completed=step, figures=text))

    def validated(self, step: int, figures: Mapping[str, str]) -> None:
        """Show the figures of a validation until the next one; its step is 0 before training."""
        listed = ", ".join(f"{name} {value}" for name, value in figures.items())
        self._about_validation = f"held-out {listed} (step {step})" if listed else ""
        if step == 0 and listed:
            self.note(f"before training: held-out {listed}")

    def note(self, text: str) -> None:
        """Show one line of text, such as a validation's result, without disturbing the bar."""
        encoding = self._console.encoding
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self._show(lambda: self._console.print(text, markup=False, highlight=False, soft_wrap=True))

    def _show(self, act: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            act()
        except (OSError, ValueError) as error:  # the latter where the stream is closed
            self._is_lost = True
            logger.warning("progress is shown no more, and the run goes on: %s", error)

    def seconds_left(self, step: int) -> float | None:
        """Seconds to the end of the run, from the mean of this run's steps; None before the first is done."""
        done = step - self._first_step
        if done <= 0:
            return None
        return (self._clock() - self._began) / done * (self._num_steps - step)

    def _write_line(self, step: int, figures: str, seconds: Mapping[str, float]) -> None:
        largest = sorted(shares(seconds).items(), key=lambda item: -item[1])[:_SHOWN_PHASES]
        phases = ", ".join(f"{name} {share:.0%}" for name, share in largest)
        left = self.seconds_left(step)
        parts = [f"step {step}/{self._num_steps}", figures, f"{seconds[TOTAL]:.1f} s ({phases})"]
        if left is not None:
            parts.append(f"{left:.0f} s left")
        self.note("  ".join(parts))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise instead of ending the process, as Rich would."""
        raise BrokenPipeError("the reader of standard output has ended")


def step_summary(step: int, figures: str, seconds: Mapping[str, float]) -> str:
    """Two lines: the step's figures, and seconds and share of each phase that rounds to 1 % or more, longest first."""
    phases = sorted(shares(seconds).items(), key=lambda item: -item[1])
    total = seconds[TOTAL]
    listed = "  ".join(f"{name} {share * total:.2f} s {share:.0%}" for name, share in phases if share >= _LEAST_SHARE)
    return f"step {step}  {figures}  {total:.2f} s\n    {listed}"
