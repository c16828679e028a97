"""Samples of memory by owner during a run: of GPUs several times a second, of the host at the end of a step.

A thread of the driver reads GPU memory. Each sample is a line of memory.jsonl in the run folder, and the highest values
of a step are metrics. Only GPUs of the driver's host that a known process uses are sampled.
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from nemo_offload_rl.utils.gpu_memory import GpuUse, read_gpus

logger = logging.getLogger(__name__)

MEMORY_FILE = "memory.jsonl"
OTHER = "other"
DRIVER = "driver"
_SEARCH_PERIOD_S = 30.0


class MemorySampler:
    """A context in which samples are taken.

    Args:
        owners: Process id to owner, such as `policy` or `engine`.
        path: The file to append to.
        period_s: Seconds between samples.
        read: Reads all GPUs.
    """

    def __init__(
        self,
        owners: Mapping[int, str],
        path: Path,
        period_s: float,
        read: Callable[[], Mapping[str, GpuUse]] = read_gpus,
    ) -> None:
        self._owners = dict(owners)
        self._host = HostMemory(owners)
        self._path = path
        self._read = read
        self._period_s = period_s
        self._phase: Callable[[], str] = str
        self._step = 0
        self._highest: dict[str, int] = {}
        self._lock = threading.Lock()
        self._is_refused = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> Self:
        if self._owners and self._read():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def follow(self, phase: Callable[[], str]) -> None:
        """Ask `phase` for the name of the present phase at each sample."""
        self._phase = phase

    def set_owners(self, owners: Mapping[int, str]) -> None:
        """Replace the processes from now on."""
        self._owners = dict(owners)
        self._host = HostMemory(owners)

    def drain(self, next_step: int) -> dict[str, float]:
        """Highest GiB of any GPU since the last call, as `<phase>_<owner>_gib`, and `peak_gib` of all owners.

        Also `host_<owner>_gib`, the main memory of the owner's processes and their children now; the calling process
        is `driver`.
        """
        with self._lock:
            highest, self._highest = self._highest, {}
            self._step = next_step
        for owner, num_bytes in self._host.read().items():
            highest[f"host_{owner}"] = num_bytes
        return {f"{name}_gib": num_bytes / 2**30 for name, num_bytes in highest.items()}

    def _run(self) -> None:
        begin_s = time.perf_counter()
        while not self._stop.wait(self._period_s):
            line = self._sample(time.perf_counter() - begin_s)
            if self._is_refused:
                continue
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line)
            except OSError as error:
                self._is_refused = True  # a part of the line may stand there
                logger.warning(
                    "%s gets no more samples: %s; the metrics still have the highest values of each step",
                    self._path,
                    error,
                )

    def _sample(self, now_s: float) -> str:
        """Take a sample, note its highest values, and return its line."""
        phase = self._phase() or "between"
        uses = {uuid: use.by_owner(self._owners) for uuid, use in self._read().items()}
        ours = {uuid: use for uuid, use in uses.items() if any(use[owner] for owner in use if owner != OTHER)}
        with self._lock:
            step = self._step
            for use in ours.values():
                for owner, num_bytes in use.items():
                    self._raise(f"{phase}_{owner}", num_bytes)
                self._raise("peak", sum(use.values()))
        gpus = {uuid: {owner: round(size / 2**30, 3) for owner, size in use.items()} for uuid, use in ours.items()}
        return json.dumps({"t_s": round(now_s, 3), "step": step, "phase": phase, "gib": gpus}) + "\n"

    def _raise(self, name: str, num_bytes: int) -> None:
        self._highest[name] = max(num_bytes, self._highest.get(name, 0))


class HostMemory:
    """Resident bytes by owner on this host; a page that two processes share counts for both.

    The search for child processes takes milliseconds on a busy host, so it runs every `_SEARCH_PERIOD_S` only.

    Args:
        owners: Process id to owner; children count for their parent, except those of the driver, the workers.
    """

    def __init__(self, owners: Mapping[int, str]) -> None:
        self._owners = {**owners, os.getpid(): DRIVER}
        self._processes: list[tuple[str, psutil.Process]] = []
        self._searched_s = -math.inf

    def read(self) -> dict[str, int]:
        """Bytes by owner now, without owners that have no live process."""
        if time.monotonic() - self._searched_s > _SEARCH_PERIOD_S:
            self._processes = list(self._search())
            self._searched_s = time.monotonic()
        held: dict[str, int] = {}
        for owner, process in self._processes:
            with suppress(psutil.Error):
                held[owner] = held.get(owner, 0) + process.memory_info().rss
        return held

    def _search(self) -> Iterator[tuple[str, psutil.Process]]:
        for pid, owner in self._owners.items():
            with suppress(psutil.Error):
                root = psutil.Process(pid)
                yield owner, root
                if owner != DRIVER:
                    yield from ((owner, child) for child in root.children(recursive=True))
