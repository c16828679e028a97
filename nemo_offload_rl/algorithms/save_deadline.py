"""`checkpointing.checkpoint_must_save_by`: a run on a cluster with a time limit saves in time, and ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

_UNITS_S = (86400, 3600, 60, 1)


def seconds_of(text: str) -> int | None:
    """Seconds of days:hours:minutes:seconds, such as 00:03:45:00; None where the text is nothing of the kind."""
    if re.fullmatch(r"\d+(:\d+){3}", text) is None:
        return None
    return sum(int(part) * unit_s for part, unit_s in zip(text.split(":"), _UNITS_S, strict=True))


class SaveDeadline:
    """Whether the step after this one could end too late to be saved.

    Args:
        text: Days:hours:minutes:seconds after `start`; None for no deadline.
        clock: Seconds.
    """

    def __init__(self, text: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = None if text is None else seconds_of(text)
        self._clock = clock
        self._started_s = clock()
        self._num_steps = 0
        self._reached = False

    @property
    def reached(self) -> bool:
        """Whether the step that has ended is the run's last."""
        return self._reached

    def start(self) -> None:
        """The run begins."""
        self._started_s = self._clock()

    def step_done(self) -> None:
        """A step has ended: one more that takes as long as those until now has to end before the deadline."""
        self._num_steps += 1
        elapsed_s = self._clock() - self._started_s
        if self._limit_s is not None:
            self._reached = elapsed_s + elapsed_s / self._num_steps >= self._limit_s
