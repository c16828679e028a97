"""A GRPO run on the Megatron backend without a GPU and without other processes; run by tests as a process of its own.

`python tests/support/megatron_grpo.py ARGUMENTS`: those of examples/run_grpo.py. As one_process_grpo.py, with what
Megatron-core asks of CUDA answered by the CPU while the policy works.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import one_process_grpo
from megatron_cpu_shim import megatron_on_cpu

from nemo_offload_rl.backends.megatron import rules
from nemo_offload_rl.distributed.local import LocalWorkerGroup
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo


class _Group(LocalWorkerGroup):
    """Calls the worker as if the CPU were a GPU; `release_memory` comes from a thread of its own and asks nothing."""

    def run_all(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        with nullcontext() if method.__name__ == "release_memory" else megatron_on_cpu():
            return super().run_all(method, *args, **kwargs)

    def run_each(self, method: Any, per_rank_args: Any) -> list[Any]:
        with megatron_on_cpu():
            return super().run_each(method, per_rank_args)


def start_megatron(settings: PolicySettings, keep_reference: bool, teacher: None = None) -> Policy:
    """In place of `start_local_policy`."""
    with megatron_on_cpu():
        process = ProcessInfo(rank=0, world_size=1, init_method="", device="cpu")
        return Policy(_Group(PolicyWorker(settings, process, keep_reference)), settings, teacher)


if __name__ == "__main__":
    rules.megatron_trains_on_gpus.__code__ = (lambda cfg, megatron: None).__code__
    one_process_grpo.start_local_policy = start_megatron
    one_process_grpo.run_in_this_process()
