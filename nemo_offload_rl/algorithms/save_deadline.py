"""`checkpointing.checkpoint_must_save_by`: a run on a cluster with a time limit saves in time, and ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_UNITS_S = (86400, 3600, 60, 1)


def seconds_of(text: str) -> int | None:
    """Seconds of days:hours:minutes:seconds, such as 00:03:45:00; None where the text is nothing of the kind."""
    if re.fullmatch(r"\d+(:\d+){3}", text) is None:
        return None
    return sum(int(part) * unit_s for part, unit_s in zip(text.split(":"), _UNITS_S, strict=True))


class SaveDeadline:
    """Tell whether the step after this one, or its save, could end too late.

    One more step is expected to take as long as the longest until now, and its save as long as the longest save.

    Args:
        text: Days:hours:minutes:seconds after `start`; None for no deadline.
        margin_s: Seconds that are to be left then.
        clock: Seconds.
    """

    def __init__(self, text: str | None, margin_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = None if text is None else seconds_of(text)
        self._margin_s = margin_s
        self._clock = clock
        self._started_s = self._step_began_s = clock()
        self._longest_step_s = self._longest_save_s = 0.0
        self._save_began_s: float | None = None
        self._reached = False

    @property
    def reached(self) -> bool:
        """Whether the step that has ended is the run's last."""
        return self._reached

    def start(self) -> None:
        """The run begins."""
        self._started_s = self._step_began_s = self._clock()

    def step_done(self) -> None:
        """A step has ended, but for its save: one more, and its save, have to end before the deadline."""
        now_s = self._clock()
        self._longest_step_s = max(self._longest_step_s, now_s - self._step_began_s)
        self._step_began_s = now_s
        if self._limit_s is not None:
            needed_s = self._longest_step_s + self._longest_save_s + self._margin_s
            self._reached = now_s - self._started_s + needed_s >= self._limit_s

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The run waits for a save to begin or to end, which is no part of a step."""
        began_s = self._clock()
        self._save_began_s = began_s if self._save_began_s is None else self._save_began_s
        yield
        self._step_began_s += self._clock() - began_s

    def save_ended(self) -> None:
        """The save that began with the first `saving` since the one before is complete."""
        if self._save_began_s is not None:
            self._longest_save_s = max(self._longest_save_s, self._clock() - self._save_began_s)
        self._save_began_s = None
