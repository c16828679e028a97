"""A worker group in this process, for tests and debuggers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LocalWorkerGroup:
    """One worker behind the `WorkerGroup` protocol, without another process; calls run at once in this thread.

    Args:
        worker: A worker of world size 1.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._is_shut_down = False

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def run_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` and return its result in a list."""
        return [getattr(self._worker, method)(*args, **kwargs)]

    def run_each(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` with the one element of `per_rank_args`."""
        (args,) = per_rank_args
        return self.run_all(method, *args)

    def start_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` now; `join` returns the result."""
        return self.run_all(method, *args, **kwargs)

    def join(self, handle: list[Any]) -> list[Any]:
        """What `start_all` returned."""
        return handle

    def shutdown(self) -> None:
        """Shut the worker down; safe to call twice."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._worker.shutdown()
