"""Binds a worker's threads to the CPUs near its GPU, so that host memory is accessed on one NUMA node."""

import logging
import os
from pathlib import Path

import torch

from nemo_offload_rl.residency.host.regions import numa_node_of_gpu

logger = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")


def bind_to_numa_node_of(device: torch.device) -> None:
    """Restrict this process to the CPUs of the GPU's NUMA node; do nothing if the node is unknown.

    Megatron's own front ends do this through NVML and cuda-python, but a worker that builds the model itself does not
    use them.
    """
    if device.type != "cuda":
        return
    node = numa_node_of_gpu(device.index or 0)
    if node is None:
        logger.info("The machine does not say which NUMA node %s is on; its worker may run on any CPU", device)
        return
    bind_to_numa_node(node)


def bind_to_numa_node(node: int, nodes: Path = NODES) -> set[int] | None:
    """Restrict all threads of this process to its allowed CPUs on one NUMA node.

    Returns:
        These CPUs; None if there are none and nothing was changed.
    """
    try:
        near = parse_cpu_list((nodes / f"node{node}" / "cpulist").read_text())
    except OSError:
        logger.info("There is no list of the CPUs of NUMA node %d; the worker may run on any", node)
        return None
    allowed = os.sched_getaffinity(0) & near
    if not allowed:
        logger.info("None of the CPUs that this worker may use is on the GPU's NUMA node %d", node)
        return None
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), allowed)
        except ProcessLookupError:  # the thread has ended
            continue
    logger.info("The worker runs on %d CPUs of NUMA node %d", len(allowed), node)
    return allowed


def parse_cpu_list(text: str) -> set[int]:
    """Parse the kernel's list format for numbers, such as `0-3,8,10-11`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
