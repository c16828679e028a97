"""Wall time by named phase."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

TOTAL = "total"


class PhaseTimer:
    """Seconds spent in each phase since the last `drain`.

    A phase entered several times adds up. A phase inside another is recorded as `outer/inner`; only outer phases count
    in `shares`, so that shares never add up to more than one.

    Args:
        clock: Seconds from any fixed point.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._began = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body, also when it raises."""
        self._open.append(name)
        key = "/".join(self._open)
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[key] = self._seconds.setdefault(key, 0.0) + self._clock() - began
            self._open.pop()

    def current(self) -> str:
        """The outer phase that is open, "" for none; other threads may call it."""
        return next(iter(self._open), "")

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in the order the phases were first left, and `total` since the last `drain`."""
        return {**self._seconds, TOTAL: self._clock() - self._began}

    def drain(self) -> dict[str, float]:
        """Return `seconds`, and begin anew."""
        seconds = self.seconds()
        self._seconds = {}
        self._began = self._clock()
        return seconds


def timing_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase as metrics `<phase>_s`, to be logged with the prefix `timing`."""
    return {f"{name}_s": value for name, value in seconds.items()}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each outer phase's share of `total`, 0 to 1, and `other` for the rest, from `PhaseTimer.seconds`."""
    total = seconds[TOTAL]
    if total <= 0:
        return {}
    outer = {name: value / total for name, value in seconds.items() if name != TOTAL and "/" not in name}
    return {**outer, "other": max(0.0, 1.0 - sum(outer.values()))}
