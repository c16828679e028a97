"""Measures the rates of the present machine's GPU and link, in about 20 seconds, for plans of runs on it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from nemo_offload_rl.memory.gpus import Gpu, GpuRates
from nemo_offload_rl.residency import meminfo_bytes

_SECONDS_EACH = 3.0  # of repeating one measurement
_LAUNCHES = 1000


def calibrate(device: torch.device, seconds_each: float = _SECONDS_EACH) -> Gpu:
    """Measure matrix products, memory, both ways of the link and the cost of a launch.

    Args:
        device: A GPU; a CPU shows at a small size that it works.
        seconds_each: Seconds for each of the five measurements.
    """
    on_gpu = device.type == "cuda"
    side, num_bytes = (8192, 2**30) if on_gpu else (128, 2**20)
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    source, target = (torch.zeros(num_bytes, device=device, dtype=torch.uint8) for _ in range(2))
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    small = torch.zeros(8, device=device)

    def best_s(work: Callable[[], object]) -> float:
        return _best_s(work, device, seconds_each)

    rates = GpuRates(
        matrix_flops=2 * side**3 / best_s(lambda: left @ right),
        memory_bytes_per_s=2 * num_bytes / best_s(lambda: target.copy_(source)),  # read and written
        out_bytes_per_s=num_bytes / best_s(lambda: host.copy_(source, non_blocking=True)),
        in_bytes_per_s=num_bytes / best_s(lambda: target.copy_(host, non_blocking=True)),
        launch_s=best_s(lambda: [small.add_(1.0) for _ in range(_LAUNCHES)]) / _LAUNCHES,
        source=f"measured by --calibrate on {time.strftime('%Y-%m-%d')}",
    )
    if on_gpu:
        properties = torch.cuda.get_device_properties(device)
        return Gpu(properties.name, properties.total_memory, rates)
    return Gpu("CPU", meminfo_bytes("MemTotal"), rates)


def _best_s(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest of the repetitions, each of which is waited for; the first one does not count."""

    def once_s() -> float:
        begin_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin_s

    once_s()
    end_s = time.perf_counter() + seconds
    best_s = once_s()
    while time.perf_counter() < end_s:
        best_s = min(best_s, once_s())
    return best_s
