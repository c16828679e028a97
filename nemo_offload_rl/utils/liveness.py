"""Signs of life of a worker process, which other processes of its host read.

1. A worker calls `show_progress` after each piece of its work: a micro-batch, a tensor, a finished response. This
   touches the file of its standard error. Any output to this file counts as progress too, and to Ray's file of its
   standard output, where loaders show theirs.
2. After `dump_stacks_on_signal` it writes the Python stacks of its threads there on SIGUSR2, even while its main thread
   is stuck in native code and holds the interpreter's lock.
3. `examine` reads both.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_STANDARD_ERROR = 2
_DUMP_SIGNAL = signal.SIGUSR2
_DUMP_TIMEOUT_S = 10.0
_QUIET_S = 0.5  # stacks that are written without a pause of this length are one dump
_POLL_S = 0.05
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class ProcessState:
    """A worker process as its host sees it.

    Attributes:
        stopped_pids: The process and its descendants that a signal or a debugger has stopped.
        idle_s: Seconds since its last sign of progress; None if it is gone or shows none.
        stacks: Python stacks of all threads of the process and of its descendants; "" if not requested.
    """

    stopped_pids: tuple[int, ...]
    idle_s: float | None
    stacks: str = ""


def show_progress() -> None:
    """Tell `examine` that this process has done a piece of its work."""
    with suppress(OSError):  # standard error is closed, or a terminal of another user
        os.utime(_STANDARD_ERROR)


def dump_stacks_on_signal() -> None:
    """Have SIGUSR2 write the stacks of all threads of this process to standard error."""
    faulthandler.register(_DUMP_SIGNAL, file=_STANDARD_ERROR, all_threads=True)


def own_stacks() -> str:
    """Python stacks of the threads of this process, without the calling one.

    They are complete even for more than 100 threads, unlike a dump by signal, but need the interpreter's lock.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            name = names.get(ident, "of native code")
            texts.append(f"Thread {name} (most recent call last):\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(texts)


def examine(pid: int, stderr_path: str, *, with_stacks: bool) -> ProcessState:
    """Look at a worker process of this host.

    Args:
        pid: The process.
        stderr_path: The file of its standard error.
        with_stacks: Also read its stacks, and those of descendants that can dump them.
    """
    processes = list(_family(pid))
    stopped = tuple(process.pid for process in processes if _status(process) in _STOPPED)
    idle_s: float | None = None
    for path in (Path(stderr_path), Path(stderr_path).with_suffix(".out")):
        with suppress(OSError):
            found_s = max(0.0, time.time() - path.stat().st_mtime)
            idle_s = found_s if idle_s is None else min(idle_s, found_s)
    if not processes:
        return ProcessState((), None)
    dumping = [process for process in processes if process.pid not in stopped and _dumps(process)]
    return ProcessState(stopped, idle_s, _dump(dumping, Path(stderr_path)) if with_stacks else "")


def _family(pid: int) -> Iterator[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def _dumps(process: psutil.Process) -> bool:
    """Tell whether the process has a handler for the signal; without one the signal would end it."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught.group(1), 16) >> (_DUMP_SIGNAL - 1) & 1)


def _dump(processes: list[psutil.Process], path: Path) -> str:
    """Ask processes for their stacks, and return the text that they write to their common file."""
    try:
        start_bytes = path.stat().st_size
    except OSError:
        return ""
    for process in processes:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.send_signal(_DUMP_SIGNAL)
    deadline_s = time.monotonic() + _DUMP_TIMEOUT_S
    size_bytes, grown_s = start_bytes, None
    while processes and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        now_bytes = path.stat().st_size
        if now_bytes > size_bytes:
            size_bytes, grown_s = now_bytes, time.monotonic()
        elif grown_s is not None and time.monotonic() - grown_s > _QUIET_S:
            break
    with path.open("rb") as file:
        file.seek(start_bytes)
        text = file.read().decode(errors="replace")
    # Threads of native code; a server has hundreds.
    return re.sub(r"(?m)^Thread 0x\w+ \(most recent call first\):\n  <no Python frame>\n\n?", "", text).strip()
