"""The policy's side for tests of refits and of pipelines; `megatron_policy_worker` is imported by Ray's workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from nemo_offload_rl.protocols.backend import WeightSpec
from nemo_offload_rl.protocols.refit import WeightBucket
from nemo_offload_rl.weight_sync.shared_memory import SharedMemorySender

if TYPE_CHECKING:
    from nemo_offload_rl.policy.worker import PolicyWorker

_UNTIL_EXIT = ExitStack()


class RefitPolicy:
    """The refit side of a policy: sends the weights of a tiny model made from a seed, but one."""

    def __init__(self, family: str) -> None:
        self._family = family
        self._sender: SharedMemorySender | None = None
        self._weights: list[tuple[str, torch.Tensor]] = []

    def set_weights(self, seed: int, drop: str | None = None) -> None:
        from model_families import checkpoint_tensors, make_family

        tensors = checkpoint_tensors(make_family(self._family, seed))
        self._weights = [(name, tensor) for name, tensor in tensors.items() if name != drop]

    def offload_before_refit(self) -> None:
        """It holds nothing."""

    def release_memory(self, to_driver: bool = True) -> None:
        """It holds nothing."""

    def offload_after_refit(self, wait_for_all: bool = True) -> None:
        """It holds nothing."""

    def finish_leaving(self) -> None:
        """It holds nothing."""

    def refit_work_bytes(self) -> int:
        return 0

    def start_refit(self) -> None:
        self.shutdown()
        specs = [WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._weights]
        self._sender = SharedMemorySender(specs, 2**20)
        self._sender.start(iter(self._weights))

    def request_bucket(self, starts_copies: bool = True) -> Callable[[], WeightBucket | None]:
        assert self._sender is not None
        return self._sender.next_bucket  # filled once it is waited for

    def shutdown(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def megatron_policy_worker(**kwargs: Any) -> PolicyWorker:
    """A policy worker whose Megatron finds the CPU where it asks for CUDA, as long as its process lives."""
    from megatron_cpu_shim import megatron_on_cpu

    from nemo_offload_rl.policy.worker import PolicyWorker

    _UNTIL_EXIT.enter_context(megatron_on_cpu())
    return PolicyWorker(**kwargs)
