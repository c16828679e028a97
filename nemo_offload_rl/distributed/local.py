"""A worker group in this process, for tests and debuggers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_offload_rl.keys.worker import PolicySettings, TeacherSettings
    from nemo_offload_rl.policy.policy import Policy


def start_local_policy(
    settings: PolicySettings, keep_reference: bool, device: str = "cpu", teacher: TeacherSettings | None = None
) -> Policy:
    """A policy of one worker in this process; `device` as torch names it, with its index."""
    from nemo_offload_rl.policy.policy import Policy
    from nemo_offload_rl.policy.worker import PolicyWorker
    from nemo_offload_rl.protocols.backend import ProcessInfo  # here, since the model library takes seconds

    process = ProcessInfo(rank=0, world_size=1, init_method="", device=device)
    return Policy(LocalWorkerGroup(PolicyWorker(settings, process, keep_reference, teacher)), settings, teacher)


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

    def settle(self, timeout_s: float) -> bool:
        """No call is under way."""
        return True

    def pids(self) -> list[int]:
        """This process."""
        return [os.getpid()]

    def local_pids(self) -> list[int]:
        """This process."""
        return self.pids()

    def shutdown(self) -> None:
        """Shut the worker down; safe to call twice."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._worker.shutdown()
