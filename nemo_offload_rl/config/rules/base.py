"""What rules share."""

from __future__ import annotations

from collections.abc import Callable

from nemo_offload_rl.config.schema import GrpoMasterConfig

Rule = Callable[[GrpoMasterConfig], str | None]
"""From a configuration whose keys all have their documented type to one message (fact, reason, mend) or None."""


def world_size(cfg: GrpoMasterConfig) -> int:
    """Policy workers in all."""
    cluster = cfg["cluster"]
    per_node = cluster["gpus_per_node"] or cluster["cpu_workers_per_node"]
    return per_node * cluster["num_nodes"]


def data_parallel_size(cfg: GrpoMasterConfig) -> int:
    """Policy workers that see different data."""
    dtensor = cfg["policy"]["dtensor_cfg"]
    return world_size(cfg) // (dtensor["tensor_parallel_size"] * dtensor["context_parallel_size"])
