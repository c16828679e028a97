"""Machine for which a run's memory is counted: the present one or a planned one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_offload_rl.keys.run import ClusterConfig
from nemo_offload_rl.memory.gpus import GpuRates, gpu_here
from nemo_offload_rl.memory.limits import HostLimit, as_started_here, host_limits, resident_bytes


@dataclass(frozen=True)
class Machine:
    """A host with GPUs.

    Attributes:
        gpu_bytes: Memory of its smallest GPU; None without one.
        planned_host_bytes: Main memory that a run may take of a planned machine; None for the present one.
        has_all_workers: Every worker of the run is on this machine. Otherwise each worker checks its own host.
        rates: Rates of its GPUs; None if they are unknown.
    """

    gpu_bytes: int | None
    planned_host_bytes: int | None = None
    has_all_workers: bool = True
    rates: GpuRates | None = None

    @classmethod
    def here(cls, cluster: ClusterConfig) -> Machine:
        """The present machine, as the driver of a run sees it."""
        gpu = gpu_here()
        has_all_workers = cluster.num_nodes == 1 and "RAY_ADDRESS" not in os.environ
        if gpu is None:
            return cls(None, has_all_workers=has_all_workers)
        return cls(gpu.memory_bytes, has_all_workers=has_all_workers, rates=gpu.rates)

    @property
    def is_planned(self) -> bool:
        """Tell whether this machine is a planned one, not the present one."""
        return self.planned_host_bytes is not None

    def host_limits(self, driver_bytes: int) -> Sequence[HostLimit]:
        """Limits of main memory for workers and engines, less the `driver_bytes` that the driver will take."""
        if self.planned_host_bytes is not None:
            limits = (HostLimit("planned", "the machine", self.planned_host_bytes, self.planned_host_bytes),)
        else:
            limits = [limit for limit in host_limits(as_started_here()) if not limit.name.startswith("RLIMIT")]
            driver_bytes = max(0, driver_bytes - resident_bytes())  # the driver holds these already
        return [
            HostLimit(limit.scope, limit.name, max(0, limit.left_bytes - driver_bytes), limit.whole_bytes)
            for limit in limits
        ]
