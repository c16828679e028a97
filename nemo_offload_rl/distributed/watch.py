"""Watches calls of workers: warns of slow calls, and ends a call in which no worker makes progress any more.

1. While a caller waits for workers, it calls `CallWatch.tick` about once a second.
2. After `cluster.call_warning_s`, and after each doubling of that time, a warning names the workers that have not
   answered. The first warning waits at least twice the longest time that this method has taken before, or that a call
   of it had taken when it warned: of the calls of a pool of rollouts, one warns for all.
3. After `cluster.call_timeout_s` the workers are examined on their hosts. Recent progress of a worker (see
   `utils/liveness.py`) postpones the end; otherwise the Python stacks of all workers are logged, and `WorkerHungError`
   is raised.

Only time in which this process ran counts, so that a job survives a suspension of hours.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_offload_rl.distributed.actors import WorkerLocation
from nemo_offload_rl.errors import WorkerHungError
from nemo_offload_rl.keys.run import ClusterConfig
from nemo_offload_rl.utils.liveness import ProcessState, examine

logger = logging.getLogger(__name__)

TICK_S = 1.0
_LONGEST_TICK_S = 10.0
_HOST_TIMEOUT_S = 60.0
_NUM_NAMED = 4


class Workers(Protocol):
    """The workers of a group."""

    def label(self, rank: int) -> str:
        """Return name and number, such as "policy worker 1"."""
        ...

    def locations(self) -> Mapping[int, WorkerLocation]:
        """Return locations by rank, without workers that have not started yet."""
        ...

    def own_stacks(self) -> Mapping[int, str]:
        """Return stacks by rank, from workers that can run this call while they run another."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...


@dataclass
class CallTimes:
    """Time limits of a group's calls, and the longest time that a call of each method has taken.

    Attributes:
        warning_s: `cluster.call_warning_s`.
        timeout_s: `cluster.call_timeout_s`.
        longest_s: Longest time by method, of calls that have ended or warned.
    """

    warning_s: float
    timeout_s: float | None
    longest_s: dict[str, float]

    @classmethod
    def of(cls, settings: ClusterConfig) -> CallTimes:
        """Take the configured limits, before any call."""
        return cls(settings.call_warning_s, settings.call_timeout_s, {})


class _StackLog:
    """Logs stacks only once if several threads wait for workers that hang for the same reason."""

    _PAUSE_S = 60.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown_s = -self._PAUSE_S

    def show(self, groups: Iterable[Workers]) -> None:
        """Log the stacks of all workers, unless that was done within the last `_PAUSE_S`."""
        with self._lock:
            if time.monotonic() - self._shown_s >= self._PAUSE_S:
                logger.error("the Python stacks of all workers:\n%s", render_stacks(groups))
                self._shown_s = time.monotonic()


_stack_log = _StackLog()


class CallWatch:
    """Watches the time of one call.

    Args:
        workers: The workers that are called.
        everyone: All groups of the run, whose stacks are logged if the call hangs.
        method: The call.
        times: Time limits of the group.
    """

    def __init__(self, workers: Workers, everyone: Sequence[Workers], method: str, times: CallTimes) -> None:
        self._workers = workers
        self._everyone = everyone
        self._method = method
        self._times = times
        self._last_s = time.monotonic()
        self._waited_s = 0.0
        self._ends_after_s = times.timeout_s

    def tick(self, ranks: Sequence[int]) -> None:
        """Count the time since the last tick.

        Args:
            ranks: Workers that have not answered.

        Raises:
            WorkerHungError: None of these workers has made progress for `cluster.call_timeout_s`.
        """
        self._count()
        if self._waited_s >= max(self._times.warning_s, 2 * self._times.longest_s.get(self._method, 0.0)):
            self._note_time()
            self._warn(ranks)
        if self._ends_after_s is not None and self._waited_s >= self._ends_after_s:
            self._end_or_put_off(ranks)

    def answered(self) -> None:
        """Note that all workers have answered, and remember the time of the call."""
        self._count()
        self._note_time()

    def _note_time(self) -> None:
        longest_s = self._times.longest_s
        longest_s[self._method] = max(self._waited_s, longest_s.get(self._method, 0.0))

    def _count(self) -> None:
        now_s = time.monotonic()
        self._waited_s += min(now_s - self._last_s, _LONGEST_TICK_S)
        self._last_s = now_s

    def _warn(self, ranks: Sequence[int]) -> None:
        here = ray.get_runtime_context().get_node_id()
        local = {
            rank: location
            for rank, location in self._workers.locations().items()
            if rank in ranks and location.node_id == here
        }
        states = [examine(place.pid, place.stderr_path, with_stacks=False) for place in local.values()]
        logger.warning(
            "%s not answered yet: %s has taken %.0f s%s",
            self._named(ranks),
            self._method,
            self._waited_s,
            _stopped(states),
        )

    def _named(self, ranks: Sequence[int]) -> str:
        names = [self._workers.label(rank) for rank in ranks[:_NUM_NAMED]]
        if len(ranks) > _NUM_NAMED:
            names.append(f"{len(ranks) - _NUM_NAMED} more")
        return f"{' and '.join(names)} {'has' if len(ranks) == 1 else 'have'}"

    def _end_or_put_off(self, ranks: Sequence[int]) -> None:
        limit_s = self._times.timeout_s
        assert limit_s is not None
        states = examine_workers([self._workers], with_stacks=False)
        waited_for = {rank: states[self._workers.label(rank)] for rank in ranks}
        idle_s = min((s.idle_s for s in waited_for.values() if s is not None and s.idle_s is not None), default=None)
        if idle_s is not None and idle_s < limit_s:
            self._ends_after_s = self._waited_s + limit_s - idle_s
            return
        _stack_log.show(self._everyone)
        raise WorkerHungError(
            f"{self._named(ranks)} not answered: {self._method} has taken {self._waited_s:.0f} s, the last "
            f"{limit_s:.0f} s without progress{_stopped(waited_for.values())}. The Python stacks of all workers are in "
            "the log; raise cluster.call_timeout_s if a healthy call may pause for so long"
        )


def examine_workers(groups: Iterable[Workers], *, with_stacks: bool) -> dict[str, ProcessState | None]:
    """Examine workers on their hosts.

    Returns:
        States by label; None for a worker that has not started, or whose host does not answer.
    """
    found: dict[str, ProcessState | None] = {}
    by_host: dict[str, dict[str, WorkerLocation]] = {}
    for group in groups:
        locations = group.locations()
        for rank in range(group.world_size):
            found[group.label(rank)] = None
            if rank in locations:
                by_host.setdefault(locations[rank].node_id, {})[group.label(rank)] = locations[rank]
    here = by_host.pop(ray.get_runtime_context().get_node_id(), {})
    asked = [
        _examine_there.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(places, with_stacks)
        for node_id, places in by_host.items()
    ]
    found |= _examine_here(here, with_stacks)
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_HOST_TIMEOUT_S) if asked else ([], [])
    for answer in answered:
        with suppress(RayError):  # the host is gone
            found |= ray.get(answer)
    return found


def _examine_here(places: Mapping[str, WorkerLocation], with_stacks: bool) -> dict[str, ProcessState]:
    return {label: examine(place.pid, place.stderr_path, with_stacks=with_stacks) for label, place in places.items()}


_examine_there = ray.remote(max_retries=0)(_examine_here)


def render_stacks(groups: Iterable[Workers]) -> str:
    """Render the stacks of all workers as text; workers with the same stacks share one entry."""
    groups = list(groups)
    alike: dict[str, list[str]] = {}
    own = {group.label(rank): text for group in groups for rank, text in group.own_stacks().items()}
    for label, state in examine_workers(groups, with_stacks=True).items():
        if state is None:
            text = "no stacks: it has not started, or its host does not answer"
        elif state.stopped_pids and not state.stacks:
            text = f"no stacks{_stopped([state])}"
        else:
            text = re.sub(r"(?m)^(Current thread|Thread) 0x[0-9a-f]+", r"\1", state.stacks) + _stopped([state])
        if label in own:
            text = f"{own[label]}\n{text}"
        alike.setdefault(text or "no stacks: its process has ended", []).append(label)
    return "\n\n".join(f"{', '.join(labels)}:\n{text}" for text, labels in alike.items())


def _stopped(states: Iterable[ProcessState | None]) -> str:
    """Name processes that a signal has stopped, as the end of a sentence."""
    pids = [pid for state in states if state is not None for pid in state.stopped_pids]
    if not pids:
        return ""
    listed = " ".join(map(str, pids))
    return f"; stopped by a signal or a debugger: process {listed} (`kill -CONT {listed}` resumes it)"
