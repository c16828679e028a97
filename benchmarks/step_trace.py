"""Reads a trace of torch's profiler: what the GPU did in a piece of a step, and what the host waited for.

`training_profile.py` prints it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")
LONG_CALL_US = 5000.0
NUM_GAPS = 6
STACK_DEPTH = 4


@dataclass(frozen=True)
class Event:
    """An entry of the trace; microseconds.

    Attributes:
        queue: The stream of what ran on the GPU, the thread of what ran on the host.
    """

    name: str
    kind: str
    start: float
    end: float
    queue: Any
    num_bytes: int = 0

    @property
    def took(self) -> float:
        return self.end - self.start

    @property
    def label(self) -> str:
        """Its name, short enough for a line; of kernels without arguments and templates."""
        return self.name.removeprefix("void ").split("(")[0].split("<")[0][:60] if self.kind == "kernel" else self.name


def events_of(entries: Sequence[dict[str, Any]]) -> list[Event]:
    """Events of a Chrome trace that have a duration, in the order of their start."""
    found = []
    for entry in entries:
        if entry.get("ph") == "X":
            kind, arguments, start = entry.get("cat", ""), entry.get("args", {}), float(entry["ts"])
            queue = arguments.get("stream") if kind in ON_GPU else entry.get("tid")
            num_bytes = int(arguments.get("bytes", 0))
            found.append(Event(entry["name"], kind, start, start + float(entry.get("dur", 0)), queue, num_bytes))
    return sorted(found, key=lambda event: event.start)


def describe(events: Sequence[Event]) -> list[str]:
    """Busy time by stream, gaps of the stream that computes, long calls of the host; times are from the first event."""
    if not events:
        return ["nothing was traced"]
    begin = events[0].start
    on_gpu = [event for event in events if event.kind in ON_GPU]
    return [*_busy(on_gpu), *_gaps(on_gpu, begin), *_long_calls(events, begin)]


def _busy(on_gpu: Sequence[Event]) -> list[str]:
    of: dict[tuple[Any, str], list[Event]] = defaultdict(list)
    for event in on_gpu:
        kind = " ".join(event.name.split()[:2]) if event.kind == "gpu_memcpy" else event.kind
        of[event.queue, kind].append(event)
    lines = []
    for (stream, kind), some in sorted(of.items(), key=lambda item: str(item[0])):
        line = f"stream {stream}, {kind}: {len(some)}, busy {_ms(busy_us(some))}"
        if num_bytes := sum(event.num_bytes for event in some):
            line += f", {num_bytes / 1e9:.2f} GB"
        lines.append(line)
    return lines


def busy_us(events: Sequence[Event]) -> float:
    """Microseconds in which at least one of the events ran. They are in the order of their start."""
    busy, until = 0.0, float("-inf")
    for event in events:
        busy += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return busy


def _gaps(on_gpu: Sequence[Event], begin: float) -> list[str]:
    """The largest of the stream with most time in kernels: what ends each, and what ended elsewhere before that."""
    by_stream: dict[Any, float] = defaultdict(float)
    for event in on_gpu:
        by_stream[event.queue] += event.took if event.kind == "kernel" else 0.0
    if not by_stream:
        return []
    stream = max(by_stream, key=lambda key: by_stream[key])
    mine, others = [e for e in on_gpu if e.queue == stream], [e for e in on_gpu if e.queue != stream]
    pairs = sorted(itertools.pairwise(mine), key=lambda pair: pair[0].end - pair[1].start)[:NUM_GAPS]
    lines = [f"stream {stream} computes; its largest gaps:"]
    for last, following in pairs:
        line = f"  {_ms(following.start - last.end)} from {_ms(last.end - begin)}, ended by {following.label}"
        if ended := [event for event in others if event.end <= following.start]:
            cause = max(ended, key=lambda event: event.end)
            line += f"; {cause.label} of stream {cause.queue} ended {_ms(following.start - cause.end)} before"
        lines.append(line)
    return lines


def _long_calls(events: Sequence[Event], begin: float) -> list[str]:
    calls = [event for event in events if event.kind in HOST_CALLS and event.took > LONG_CALL_US]
    frames = [event for event in events if event.kind == "python_function"]
    lines = [f"calls of the host over {_ms(LONG_CALL_US)}:"]
    for call in calls:
        around = [f for f in frames if f.queue == call.queue and f.start <= call.start and f.end >= call.end]
        innermost = " < ".join(_place(frame.name) for frame in reversed(around[-STACK_DEPTH:]))
        lines.append(f"  {call.name} {_ms(call.took)} from {_ms(call.start - begin)}: {innermost or 'no Python frame'}")
    by_name: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in HOST_CALLS:
            by_name[event.name].append(event)
    most = sorted(by_name.items(), key=lambda item: -sum(event.took for event in item[1]))[:8]
    lines += [f"  all {name}: {len(some)} in {_ms(sum(event.took for event in some))}" for name, some in most]
    return lines


def _place(frame: str) -> str:
    """A frame without the folders above its package."""
    for mark in ("site-packages/", "nemo_offload_rl/"):
        _, found, rest = frame.rpartition(mark)
        if found:
            return rest
    return frame


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms"
