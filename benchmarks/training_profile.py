"""Profile of a micro-batch: its seconds, and how GPU and host spent them.

    python benchmarks/training_profile.py --shape 12-layers --length 2304 --json results/profile.json
    python benchmarks/training_profile.py --backend dtensor --shape 12-layers --length 2304
    python benchmarks/training_profile.py --device cpu --shape moe-tiny --length 64

Steps of a policy worker, forward, backward and update, on random weights and tokens, micro-batches of one row. First
without a profiler: seconds of a step with one micro-batch, and of each further one. Then torch's profiler looks at a
step of two. It prints the operations by the host's own time, the kernels by the GPU's, busy time by stream, the largest
gaps of the stream that computes and long calls of the host, then all seconds. A GPU that is busy for a small part of
the unprofiled time waits for the host. The profiler makes the host slower, not the GPU.
Docs: docs/measurements/two-gpus.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import NLL, make_model, measured_with, write_result
from qwen3_shapes import MOE_SHAPES, SHAPES
from step_trace import ON_GPU, Event, busy_us, describe, events_of
from workers import Run, on_device, random_batch, worker_of

NUM_LINES = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="megatron", choices=["megatron", "dtensor"])
    parser.add_argument("--shape", default="12-layers", choices=[*SHAPES, *MOE_SHAPES])
    parser.add_argument("--length", type=int, default=2304, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=4, help="of the larger of the two steps that are timed")
    parser.add_argument("--steps", type=int, default=3, help="of each size, after one that warms up")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="training_profile_") as name, on_device(arguments.device):
        make_model(Path(name), arguments.shape, arguments.device)
        run = Run(
            arguments.shape,
            name,
            arguments.device,
            (arguments.length,),
            arguments.rows,
            arguments.steps,
            1,
            tuple(arguments.overrides),
            arguments.backend,
        )
        found = measure(run)
    write_result(arguments.json, {**measured_with(), **found})
    for title in ("host", "gpu"):
        print(f"{title} {found[f'{title}_table']}", flush=True)
    print("\n".join(found["trace"]))
    print(summary(found))


def measure(run: Run) -> dict[str, Any]:
    """Seconds without a profiler, then what the profiler sees of a step of two micro-batches."""
    worker = worker_of(run)
    worker.prepare_for_training()
    batch = random_batch(run, run.lengths[0], torch.Generator().manual_seed(0))
    seconds = {rows: [step_s(worker, batch, rows) for _ in range(1 + run.steps)][1:] for rows in (1, run.rows)}
    one_s, all_s = (statistics.median(some) for some in seconds.values())
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, with_stack=True) as profile:
        profiled_s = step_s(worker, batch, min(2, run.rows))
    averages = profile.key_averages()
    events = exported_events(profile)
    on_gpu = [event for event in events if event.kind in ON_GPU]
    return {
        "first_micro_batch_s": one_s,
        "micro_batch_s": (all_s - one_s) / max(run.rows - 1, 1),
        "profiled_s": profiled_s,
        "profiled_micro_batches": min(2, run.rows),
        "gpu_busy_s": busy_us(on_gpu) / 1e6,
        "num_kernels": sum(event.kind == "kernel" for event in on_gpu),
        "trace": describe(events),
        "host_table": averages.table(sort_by="self_cpu_time_total", row_limit=NUM_LINES, max_name_column_width=60),
        "gpu_table": averages.table(sort_by="self_device_time_total", row_limit=NUM_LINES, max_name_column_width=60),
    }


def exported_events(profile: torch.profiler.profile) -> list[Event]:
    """Events of a finished profile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return events_of(json.loads(path.read_text())["traceEvents"])


def gpu_events(call: Callable[[], object]) -> list[Event]:
    """What runs on the GPU during a call; the host is not traced, so it is hardly slower."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event for event in exported_events(profile) if event.kind in ON_GPU]


def step_s(worker: Any, batch: Any, rows: int) -> float:
    """Seconds of a training step with so many micro-batches of one row."""
    worker.residency_reports()
    begin = time.perf_counter()
    worker.train(batch.select(range(rows)), NLL(), global_rows=rows)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def summary(found: dict[str, Any]) -> str:
    """Say it in a line."""
    share = found["gpu_busy_s"] / found["profiled_micro_batches"]
    return (
        f"a step of one micro-batch {found['first_micro_batch_s']:.3f} s, each further one "
        f"{found['micro_batch_s']:.3f} s; profiled, {found['profiled_micro_batches']} micro-batches and the update: "
        f"{found['profiled_s']:.3f} s, GPU busy {found['gpu_busy_s']:.3f} s ({share:.3f} s each), "
        f"{found['num_kernels']} kernels"
    )


if __name__ == "__main__":
    main()
