"""The only Ray actor class, which builds any plain class from an import path and forwards calls to it."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from nemo_offload_rl.utils.cli import set_up_logging
from nemo_offload_rl.utils.garbage import freeze_objects
from nemo_offload_rl.utils.liveness import dump_stacks_on_signal, own_stacks, show_progress


def import_factory(path: str) -> Any:
    """Import the class or function that `"package.module:name"` stands for."""
    module, separator, name = path.partition(":")
    if not separator:
        raise ValueError(f"A factory is written package.module:name, not {path}")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class WorkerLocation:
    """Host and process of a worker.

    Attributes:
        node_id: Ray's name of the host.
        address: IP address of the host.
        pid: Process id on that host.
        stderr_path: File on that host with the standard error.
    """

    node_id: str
    address: str
    pid: int
    stderr_path: str


@dataclass(frozen=True)
class Outcome:
    """The result of a call, and this package's warnings in the process since the previous call."""

    value: Any
    warnings: list[str]


class HostedWorker:
    """The object in the actor's process; not the constructor but `build` can fail, so that errors keep their type."""

    def __init__(self) -> None:
        self._worker: Any = None
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent by a terminal; the driver decides how a run ends
        set_up_logging()  # into the process's own log file
        dump_stacks_on_signal()
        self._warnings = _Warnings()
        logging.getLogger("nemo_offload_rl").addHandler(self._warnings)

    def location(self) -> WorkerLocation:
        """Return the host and process of this worker."""
        return WorkerLocation(
            node_id=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            stderr_path=os.readlink("/proc/self/fd/2"),
        )

    def load(self, function: str, kwargs: Mapping[str, Any]) -> Outcome:
        """Call a function before the worker is built, such as one that imports its libraries.

        `build` returns its warnings.
        """
        return Outcome(import_factory(function)(**kwargs), [])

    def build(self, factory: str, kwargs: Mapping[str, Any]) -> Outcome:
        """Make the worker; heavy imports happen here."""
        self._worker = import_factory(factory)(**kwargs)
        freeze_objects()
        return Outcome(None, self._warnings.drain())

    def call(self, method: str, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Outcome:
        """Forward one call.

        Raises:
            RuntimeError: `build` has not ended, or `close` was called.
        """
        args, kwargs = arguments
        show_progress()
        if (worker := self._worker) is None:
            raise RuntimeError(f"{method} was called before the worker was built, or after it was closed")
        try:
            value = getattr(worker, method)(*args, **kwargs)
        except BaseException as error:
            for message in self._warnings.drain():
                error.add_note(f"Warned of before: {message}")
            raise
        return Outcome(value, self._warnings.drain())

    def stacks(self) -> str:
        """Return the Python stacks of the other threads, for workers that run several calls at a time."""
        return own_stacks()

    def close(self) -> None:
        """Shut the worker down."""
        worker, self._worker = self._worker, None
        shutdown = getattr(worker, "shutdown", None)
        if shutdown is not None:
            shutdown()


class _Warnings(logging.Handler):
    """Keeps warnings until they are drained."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())

    def drain(self) -> list[str]:
        messages, self._messages = self._messages, []
        return messages


WorkerActor = ray.remote(max_restarts=0, max_task_retries=0)(HostedWorker)
