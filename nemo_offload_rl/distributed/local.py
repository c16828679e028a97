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
        return [getattr(self._worker, method)(*args, **kwargs)]

    def run_each(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        (args,) = per_rank_args
        return self.run_all(method, *args)

    start_all = run_all

    def join(self, handle: list[Any]) -> list[Any]:
        return handle

    def settle(self, timeout_s: float) -> bool:
        return True

    def pids(self) -> list[int]:
        return [os.getpid()]

    local_pids = pids

    def shutdown(self) -> None:
        """Shut the worker down; safe to call twice."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._worker.shutdown()
