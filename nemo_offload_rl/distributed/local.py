"""A worker group in this process, for tests and debuggers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_offload_rl.keys.worker import PolicySettings, TeacherSettings
    from nemo_offload_rl.policy.policy import Policy
    from nemo_offload_rl.protocols.loss import Method


def start_local_policy(
    settings: PolicySettings, keep_reference: bool, device: str = "cpu", teacher: TeacherSettings | None = None
) -> Policy:
    """Start a policy of one worker in this process; `device` is torch's name with its index."""
    from nemo_offload_rl.policy.policy import Policy
    from nemo_offload_rl.policy.worker import PolicyWorker
    from nemo_offload_rl.protocols.backend import ProcessInfo  # here, since the model library takes seconds

    process = ProcessInfo(rank=0, world_size=1, init_method="", device=device)
    return Policy(LocalWorkerGroup(PolicyWorker(settings, process, keep_reference, teacher)), settings, teacher)


class LocalWorkerGroup:
    """One worker behind the `WorkerGroup` protocol; calls run at once in this thread.

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

    def run_all[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return [getattr(self._worker, method.__name__)(*args, **kwargs)]

    def run_on[**P, R](self, rank: int, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return getattr(self._worker, method.__name__)(*args, **kwargs)

    def run_each[*Args, R](self, method: Callable[[Any, *Args], R], per_rank_args: Sequence[tuple[*Args]]) -> list[R]:
        (args,) = per_rank_args
        return [getattr(self._worker, method.__name__)(*args)]

    def start_all[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> Callable[[], list[R]]:
        results = self.run_all(method, *args, **kwargs)
        return lambda: results

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
