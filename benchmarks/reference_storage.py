"""A reference in host memory or in a file: what a reference pass costs, and what the disk and the page cache give.

    python benchmarks/reference_storage.py --shape 8B --dir /scratch --out benchmarks/results/reference_storage.json

First the file alone: `--file-gib` are written from the device and read back into it, from the disk (the page cache
dropped before) and from the page cache. Then each variant is a Megatron worker with a reference (a Qwen3 shape with
random weights), that goes through GRPO's phases: training, refit, generation, logprobs and the reference's. Of each:
host GiB of the reference, seconds until the worker is there, and medians of `--steps` rounds for

- `ahead`: the reference comes behind the policy's logprobs, where there is room;
- `in place`: it is written into the policy's own storages, and the policy's come back from their host copy;
- `cold`, with a file: `ahead`, with the page cache dropped while the engine would generate.

In seconds: the policy's logprobs, the reference's, what their transitions exposed, and GB that came in.

`--device cpu --shape tiny --lengths 32 --file-gib 0.1` shows that the script works: there nothing comes ahead.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from megatron_runs import GIB, KEY, Run, Variant, add_arguments, make_worker, on_device, random_batch, run_children
from residency_overlap import NLL

GB = 1e9
FILE, HOST, DISK = "the file alone", "host", "disk"


def drop_page_cache(folder: Path) -> None:
    """Of the files without a name that this process has in a folder; they were synced as they were written."""
    for descriptor in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd") / descriptor
        if path.is_symlink() and os.readlink(path).startswith(str(folder.resolve())):
            os.posix_fadvise(int(descriptor), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_file(device_name: str, folder: Path, num_bytes: int, times: int) -> dict[str, float]:
    """GB/s of one file: written once, and read from the disk and from the page cache."""
    from nemo_offload_rl.residency import HostAllowance, make_device
    from nemo_offload_rl.residency.state.disk_copy import DiskCopy
    from nemo_offload_rl.residency.state.frozen import Content
    from nemo_offload_rl.residency.table.groups import unique_storages

    device = make_device(torch.device(device_name))
    whole = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device_name)
    ((key, record),) = unique_storages([("whole", whole)]).items()
    arena = device.new_arena(True, HostAllowance())
    copy = DiskCopy("file", folder, num_bytes, arena)

    def rate(is_cold: bool) -> float:
        if is_cold:
            drop_page_cache(folder)
        begin_s = time.perf_counter()
        copy.copy_in(device, [(key, whole)])
        return num_bytes / GB / (time.perf_counter() - begin_s)

    begin_s = time.perf_counter()
    copy.keep(device, [Content(record, whole, torch.uint8)])
    written = num_bytes / GB / (time.perf_counter() - begin_s)
    cold = statistics.median(rate(is_cold=True) for _ in range(times))
    warm = statistics.median(rate(is_cold=False) for _ in range(times))
    copy.close()
    arena.close()
    return {"write_gb_per_s": written, "cold_gb_per_s": cold, "warm_gb_per_s": warm}


def run_variant(run: Run, variant: Variant) -> dict[str, Any]:
    """The file alone, or a worker's rounds in each way."""
    settings = dict(override.split("=", 1) for override in variant.overrides)
    folder = Path(settings.get("policy.reference_dir", "."))
    if variant.name == FILE:
        return measure_file(run.device, folder, int(settings["num_bytes"]), run.steps)
    with on_device(run.device):
        begin_s = time.perf_counter()
        worker = make_worker(run, variant, keep_reference=True)
        start_s = time.perf_counter() - begin_s
        host_gib = worker.residency.host_bytes()["reference"] / GIB
        batch = random_batch(run, run.lengths[0], torch.Generator().manual_seed(0))
        ways = ("ahead", "in place", *(["cold"] if variant.name == DISK else []))
        measured = {way: rounds(worker, batch, run, way, folder) for way in ways}
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.shutdown()
    return {"start_s": start_s, "reference_host_gib": host_gib, "ways": measured}


def rounds(worker: Any, batch: Any, run: Run, way: str, folder: Path) -> dict[str, Any]:
    """Medians after those that warm up: what passes need is known from the second round on."""
    found = [one_round(worker, batch, run.device, way, folder) for _ in range(run.warmup_steps + run.steps)]
    kept = found[run.warmup_steps :]
    return {**{name: statistics.median(it[name] for it in kept) for name in kept[0]}, "rounds": found}


def one_round(worker: Any, batch: Any, device: str, way: str, folder: Path) -> dict[str, float]:
    """A step of GRPO without an engine."""

    def now_s() -> float:
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    worker.prepare_for_training()
    worker.train(batch, NLL())
    worker.offload_before_refit()
    worker.offload_after_refit()
    if way == "cold":
        drop_page_cache(folder)
    worker.residency_reports()
    begin_s = now_s()
    worker.prepare_for_lp_inference()
    worker.get_logprobs(batch)
    own_s = now_s()
    if way == "in place":
        worker.residency.evict()  # not timed: in a run nothing would have come
    ready_s = now_s()
    worker.get_reference_logprobs(batch)
    ended_s = now_s()
    reports = worker.residency_reports()
    return {
        "logprobs_s": own_s - begin_s,
        "reference_s": ended_s - ready_s,
        "exposed_s": sum(report.exposed_s for report in reports),
        "reference_gb_in": sum(r.groups["reference"].bytes_in for r in reports if "reference" in r.groups) / GB,
        "ahead_gb": sum(r.groups["reference"].bytes_in for r in reports[:1] if "reference" in r.groups) / GB,
    }


def table(results: dict[str, Any]) -> str:
    """The file's GB/s, and a line for each variant and way."""
    lines = [f"{results['machine']['gpu']}, {results['shape']}"]
    header = f"{'reference':14}{'way':10}{'host GiB':>9}{'logprobs s':>12}{'reference s':>13}{'exposed s':>11}"
    lines.append(f"{header}{'GB in':>8}{'ahead':>8}")
    for row in results["rows"]:
        if "error" in row:
            lines.append(f"{row['variant']:14}{row['error'][:90]}")
        elif "ways" not in row:
            rates = (f"{name} {row[f'{name}_gb_per_s']:.1f}" for name in ("write", "cold", "warm"))
            lines.append(f"{row['variant']}, GB/s: {', '.join(rates)}")
        for way, found in row.get("ways", {}).items():
            cells = f"{row['reference_host_gib']:9.3f}{found['logprobs_s']:12.3f}{found['reference_s']:13.3f}"
            cells += f"{found['exposed_s']:11.3f}{found['reference_gb_in']:8.2f}{found['ahead_gb']:8.2f}"
            lines.append(f"{row['variant']:14}{way:10}{cells}")
    return "\n".join(lines)


def main() -> None:
    """Run every variant and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "4096", shape="8B", rows=4)
    parser.add_argument("--dir", type=Path, required=True, help="folder on the disk that is measured")
    parser.add_argument("--file-gib", type=float, default=16.0, help="size of the file that is measured alone")
    args = parser.parse_args()
    streams = (f"{KEY}.optimizer.offload_optimizer_states=true",)
    on_disk = f"policy.reference_dir={args.dir}"
    variants = (
        Variant(FILE, (on_disk, f"num_bytes={int(args.file_gib * GIB)}")),
        Variant(DISK, (*streams, on_disk)),
        Variant(HOST, streams),
    )
    args.overrides = [f"{KEY}.activation_checkpointing=true", *args.overrides]
    print(table(run_children(args, variants, run_variant, may_share_process=True, ties_embeddings=False)))


if __name__ == "__main__":
    main()
