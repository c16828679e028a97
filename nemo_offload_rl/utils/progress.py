"""What a person sees of a run: how it begins and starts, its steps, and its end.

A stream that is gone or full ends the display with a warning; the run goes on.
"""

import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from nemo_offload_rl.utils.cli import stop_signals_blocked
from nemo_offload_rl.utils.timer import TOTAL, shares

logger = logging.getLogger(__name__)

_SHOWN_PHASES = 3
_SHOWN_PHASES_NARROW = 2
_WIDE_COLUMNS = 100
_BAR_COLUMNS = 20
_REFRESHES_PER_S = 4

type Starting = Callable[[str], AbstractContextManager[object]]
"""Wraps the start of a part of the run, such as the engine, by its name; `RunProgress.starting`."""


class RunProgress:
    """Shows the progress of a run.

    On a terminal: a bar at the bottom with what the run is doing now and the time left, and above it a few lines for
    each step, broken between figures. Otherwise one plain line for each step, so that a log file stays readable.

    Args:
        num_steps: Steps of the run in all.
        first_step: Steps that are done already (a resumed run).
        console: Receives the output; standard output by default.
        clock: Seconds from any fixed point.
        unit: Name of a step.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "step",
    ) -> None:
        # A notebook gets plain lines: its stream says that it is a terminal, but shows no bar that is drawn anew.
        is_terminal = False if Console().is_jupyter else None
        self._console = console if console is not None else _Console(force_jupyter=False, force_terminal=is_terminal)
        self._is_lost = False
        self._clock = clock
        self._num_steps = num_steps
        self._first_step = first_step
        self._unit = unit
        self._began_s = clock()
        self._about_validation = ""
        self._starting: tuple[str, float] | None = None  # name and begin of what starts now
        self._phase: Callable[[], str] = str
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._bar = Progress(
                _Activity(self.activity),
                BarColumn(_BAR_COLUMNS),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
                refresh_per_second=_REFRESHES_PER_S,
                transient=True,
            )
            self._task = self._bar.add_task(unit, total=num_steps, completed=first_step, left="")

    def __enter__(self) -> Self:
        self._began_s = self._clock()
        if self._bar is not None:
            with stop_signals_blocked():  # for the thread that draws the bar: signals go to the main thread
                self._show(self._bar.start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._show(self._bar.stop)

    def begin(self, title: str, facts: Mapping[str, str]) -> None:
        """Show what the run is: a title, and facts by name."""
        self.note(f"{title}\n{aligned(facts)}")

    @contextmanager
    def starting(self, name: str) -> Iterator[None]:
        """Wrap the start of a part of the run, such as the engine; afterwards show its seconds."""
        self._starting = (name, self._clock())
        try:
            yield
            self.note(f"{name} is ready after {self._clock() - self._starting[1]:.1f} s")
        finally:
            self._starting = None
            self._began_s = self._clock()

    def follow(self, phase: Callable[[], str]) -> None:
        """Ask `phase` for the name of the present phase whenever the bar is drawn."""
        self._phase = phase

    def activity(self) -> str:
        """Return what the run is doing now."""
        starting = self._starting
        if starting is not None:
            return f"starting {starting[0]}, {self._clock() - starting[1]:.0f} s"
        return self._phase()

    def step_done(self, step: int, figures: Mapping[str, str], seconds: Mapping[str, float]) -> None:
        """Show one finished step.

        Args:
            step: Its number, from 1.
            figures: Values to show, by name; those of the last validation follow, with its step.
            seconds: From the step's `PhaseTimer.drain`.
        """
        is_wide = self._bar is None or self._console.width >= _WIDE_COLUMNS
        ranked = sorted(shares(seconds).items(), key=lambda item: -item[1])
        largest = ranked[: _SHOWN_PHASES if is_wide else _SHOWN_PHASES_NARROW]
        phases = ", ".join(f"{name} {share:.0%}" for name, share in largest)
        seconds_left = self.seconds_left(step)
        left = "" if seconds_left is None else f"{duration(seconds_left)} left"
        parts = [
            f"{self._unit} {step}/{self._num_steps}",
            *(f"{name} {value}" for name, value in figures.items()),
            self._about_validation,
            f"{seconds[TOTAL]:.1f} s ({phases})",
        ]
        parts = [part for part in parts if part]
        if self._bar is None:
            self.note("  ".join([*parts, left] if left else parts))
            return
        self.note(flowed(parts, self._console.width))
        bar = self._bar
        self._show(lambda: bar.update(self._task, completed=step, left=left))

    def validated(self, step: int, figures: Mapping[str, str]) -> None:
        """Show the figures of a validation until the next one; its step is 0 before training."""
        listed = ", ".join(f"{name} {value}" for name, value in figures.items())
        self._about_validation = f"held-out {listed} (step {step})" if listed else ""
        if step == 0 and listed:
            self.note(f"before training: held-out {listed}")

    def note(self, text: str) -> None:
        """Show text, such as a validation's samples, without disturbing the bar."""
        encoding = self._console.encoding
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self._show(lambda: self._console.print(text, markup=False, highlight=False, soft_wrap=True))

    def seconds_left(self, step: int) -> float | None:
        """Seconds to the end of the run, from the mean of this run's steps; None before the first is done."""
        done = step - self._first_step
        if done <= 0:
            return None
        return (self._clock() - self._began_s) / done * (self._num_steps - step)

    def _show(self, act: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            act()
        except (OSError, ValueError) as error:  # the latter where the stream is closed
            self._is_lost = True
            logger.warning("progress is no longer shown, and the run goes on: %s", error)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise instead of ending the process, as Rich would."""
        raise BrokenPipeError("the reader of standard output has ended")


class _Activity(ProgressColumn):
    """What the run is doing, asked anew at each drawing."""

    def __init__(self, activity: Callable[[], str]) -> None:
        super().__init__(Column(no_wrap=True))
        self._activity = activity

    def render(self, task: Task) -> Text:
        return Text(self._activity(), style="bold")


def aligned(facts: Mapping[str, str]) -> str:
    """Facts by name, one a line, with the values below each other."""
    width = max(map(len, facts), default=0)
    return "\n".join(f"  {name.ljust(width)}  {value}" for name, value in facts.items())


def flowed(parts: Sequence[str], width: int) -> str:
    """Join parts into lines of at most `width` columns, broken between parts; later lines are indented.

    A part that is longer than a line has a line to itself.
    """
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}  {part}" if lines[-1].strip() else f"{lines[-1]}{part}"
        if len(longer) > width and lines[-1].strip():
            lines.append(f"    {part}")
        else:
            lines[-1] = longer
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def shown_path(path: str | Path) -> str:
    """A path as it is shown: relative to the working directory where it is below it."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def shown_python() -> str:
    """This Python as a command names it: `python` if the shell finds this one under that name, else its path."""
    return "python" if shutil.which("python") == sys.executable else shown_path(sys.executable)
