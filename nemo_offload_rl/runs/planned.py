"""The plan of a run on its own GPUs, as metrics to compare with what is measured."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_offload_rl.keys.master import RunConfig
from nemo_offload_rl.memory.account import Account
from nemo_offload_rl.memory.gpus import Gpu, gpu_here
from nemo_offload_rl.memory.machine import Machine
from nemo_offload_rl.memory.seconds import step_seconds, work_of

_GIB = 2**30


def planned_metrics(config: RunConfig, gpu: Gpu | None = None) -> Mapping[str, float]:
    """Return the planned peak of a GPU in each phase, and the planned seconds of a step and its stages.

    Seconds are those of sequences of the longest length. Empty without GPUs or if the model's size is unknown; no
    seconds for a GPU of unknown rates.

    Args:
        config: The run.
        gpu: The GPU to plan for; None for the smallest of this machine.
    """
    gpu = gpu or gpu_here()
    if gpu is None or not config.cluster.gpus_per_node:
        return {}
    account = Account(config, Machine(gpu.memory_bytes), without_weights=True)
    planned = {f"{use.phase.value}_gib": use.peak_bytes / _GIB for use in account.phases}
    stages = step_seconds(account, gpu.rates, work_of(account)) if gpu.rates is not None and planned else None
    if stages is None:
        return planned
    planned |= {f"{stage.value}_s": seconds.total_s for stage, seconds in stages.items()}
    return planned | {"step_s": sum(seconds.total_s for seconds in stages.values())}
