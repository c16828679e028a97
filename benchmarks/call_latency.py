"""Milliseconds of a call of a Ray worker that does nothing, by how its arguments travel.

    python benchmarks/call_latency.py --json benchmarks/results/call_latency.json

A step makes about ten such calls between training and generation, one after the other. `with the call` is what
`RayWorkerGroup` does; `by the object store` has the arguments put there first, for all workers together. Both in turn,
on a local Ray cluster without GPUs. It prints medians and 90th percentiles. Docs: docs/measurements/cpu.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import ray
from common import measured_with, write_result

from nemo_offload_rl.distributed.virtual_cluster import cluster_session
from nemo_offload_rl.distributed.worker_group import PendingCall, RayWorkerGroup, WorkerSpec
from nemo_offload_rl.keys.run import ClusterConfig

WARM_UP_CALLS = 20


class Nothing:
    """A worker whose only method does nothing."""

    def rest(self) -> None:
        """Return at once."""


def by_object_store(group: RayWorkerGroup) -> None:
    """A call whose arguments each worker fetches."""
    arguments = ray.put(((), {}))
    group._results(PendingCall("rest", tuple(actor.call.remote("rest", arguments) for actor in group._actors)))


def with_call(group: RayWorkerGroup) -> None:
    """A call as the trainers make it."""
    group.run_all(Nothing.rest)


WAYS = {"with the call": with_call, "by the object store": by_object_store}


def measure(num_workers: int, num_calls: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a call to all workers: median and 90th percentile."""
    settings = ClusterConfig(
        gpus_per_node=0,
        cpu_workers_per_node=num_workers,
        num_nodes=1,
        master_port_range_low=21000,
        master_port_range_high=21999,
        call_warning_s=30.0,
        call_timeout_s=None,
    )
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with cluster_session(settings) as cluster:
        group = RayWorkerGroup(cluster, WorkerSpec(name="idle", factory="call_latency:Nothing"))
        for number in range(WARM_UP_CALLS + num_calls):
            for way, call in WAYS.items():
                begin_s = time.perf_counter()
                call(group)
                if number >= WARM_UP_CALLS:
                    seconds[way].append(time.perf_counter() - begin_s)
    return {
        way: {"median_ms": 1e3 * statistics.median(took), "p90_ms": 1e3 * statistics.quantiles(took, n=10)[-1]}
        for way, took in seconds.items()
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])
    rows = measure(args.workers, args.calls)
    write_result(args.json, {**measured_with(), "ways": rows})
    for way, row in rows.items():
        print(f"{way:22} {row['median_ms']:8.2f} ms, nine of ten within {row['p90_ms']:.2f}")
    print(f"by the object store: {rows['by the object store']['median_ms'] / rows['with the call']['median_ms']:.1f} x")


if __name__ == "__main__":
    main()
