"""The only Ray actor class: it builds any plain class from an import path and forwards calls to it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray


def import_factory(path: str) -> Any:
    """The class or function that `"package.module:name"` stands for."""
    module, separator, name = path.partition(":")
    if not separator:
        raise ValueError(f"A factory is written package.module:name, not {path}")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class WorkerLocation:
    """Where a worker runs.

    Attributes:
        node_id: Ray's name of the host.
        pid: Process id on that host.
        stderr_path: The file on that host to which Ray sends what the process writes to standard error.
    """

    node_id: str
    pid: int
    stderr_path: str


class HostedWorker:
    """What runs inside the actor's process. Its constructor is empty, so that errors of `build` keep their type."""

    def __init__(self) -> None:
        self._worker: Any = None

    def location(self) -> WorkerLocation:
        """Where this worker runs."""
        return WorkerLocation(ray.get_runtime_context().get_node_id(), os.getpid(), os.readlink("/proc/self/fd/2"))

    def build(self, factory: str, kwargs: Mapping[str, Any]) -> None:
        """Make the worker; heavy imports happen here."""
        self._worker = import_factory(factory)(**kwargs)

    def call(self, method: str, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Forward one call."""
        args, kwargs = arguments
        return getattr(self._worker, method)(*args, **kwargs)

    def close(self) -> None:
        """Let the worker end what it owns."""
        worker, self._worker = self._worker, None
        shutdown = getattr(worker, "shutdown", None)
        if shutdown is not None:
            shutdown()


WorkerActor = ray.remote(max_restarts=0, max_task_retries=0)(HostedWorker)
