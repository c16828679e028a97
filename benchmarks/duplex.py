"""Optimizer states that stream around the step: how much of the link they reach, and what of it a step waits for.

    python benchmarks/duplex.py --shape 8B --host-gib 100 --budget-s 200 --out benchmarks/results/duplex.json

The link is probed one way and both ways at once. Then each variant is a Megatron worker (a Qwen3 shape with random
weights, bf16, the precision-aware distributed optimizer, whole layers recomputed) that makes steps of `--rows`
micro-batches in four ways:

- `one after the other`: as SFT does, or GRPO with several updates for each rollout;
- `refit after each`: as GRPO with one update does; every weight is gathered, then everything leaves;
- `nothing ahead`: no part comes before the step, and the step's copies are waited for, so that all of them are in it;
- `two parts`: the same with no more than two parts on the device.

Of each way: seconds of passes and of the optimizer step (medians after the first step), seconds after it until the last
copy has left where nothing else follows, GB in and out with the step, GB/s each way from its begin to that end as a
share of the link both ways, exposed seconds by transition, peak GiB, and calls of the driver for memory in a step.
Each call of cudaFree waits for all copies, so more than a few calls in a step are to be explained; the file says how
often cached memory was released to find room (`alloc_retries`). Of the exposed seconds of a step those of releasing its
memory to the driver (`give_back_s`) come before the step and, where a refit follows, after the last copy out, for the
engine; in the step the others are those in which the GPU had nothing to run. Beside a variant with resident states,
whose step is the update alone, `unaccounted` is what a step took beyond that and its other exposed seconds: a wait that
no report knows of.

`--trace` then profiles a step and what follows it, in each of the first two ways: busy time by stream, the largest gaps
of the stream that computes, long calls of the host with their Python frames. It also probes whether a kernel, or the
read of a number, has to stand behind copies out on another stream.

Needs a GPU with Transformer Engine; `--device cpu --shape tiny --lengths 32` shows that the script works: there copies
do not overlap.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from megatron_runs import GIB, KEY, Run, Variant, add_arguments, make_worker, on_device, random_batch, run_children
from residency_overlap import NLL
from step_trace import probe_beside_copies, traced

GB = 1e9
OPTIMIZER = f"{KEY}.optimizer"
BF16_MOMENTS = (f"{OPTIMIZER}.exp_avg_dtype=bfloat16", f"{OPTIMIZER}.exp_avg_sq_dtype=bfloat16")
WAYS = ("one after the other", "refit after each", "nothing ahead", "two parts")
DRAINED = ("nothing ahead", "two parts")


def streamed(chunk_mib: int) -> tuple[str, ...]:
    """Overrides: states stream in parts of this size."""
    return (f"{OPTIMIZER}.offload_optimizer_states=true", f"{OPTIMIZER}.offload_optimizer_states_chunk_mib={chunk_mib}")


# The ones that matter most come first, for runs with little time.
VARIANTS = (
    Variant("bf16 moments, 1024 MiB", (*BF16_MOMENTS, *streamed(1024))),
    Variant("fp32 moments, 1024 MiB", streamed(1024)),
    Variant("bf16 moments, resident", BF16_MOMENTS),
    Variant("bf16 moments, 2048 MiB", (*BF16_MOMENTS, *streamed(2048))),
    Variant("bf16 moments, 512 MiB", (*BF16_MOMENTS, *streamed(512))),
    Variant("bf16 moments, 256 MiB", (*BF16_MOMENTS, *streamed(256))),
)


def probe(device: str, num_bytes: int = 1 << 30, times: int = 8) -> dict[str, float]:
    """GB/s of pinned copies, one way and both ways at once."""
    if device == "cpu":
        return {}
    on_gpu = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    on_host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    pairs = {"out": (on_host[0], on_gpu[0]), "in": (on_gpu[1], on_host[1])}

    def rates(ways: tuple[str, ...]) -> dict[str, float]:
        torch.cuda.synchronize()
        events = {}
        for way, stream in zip(ways, streams, strict=False):
            target, source = pairs[way]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                begin.record(stream)
                for _ in range(times):
                    target.copy_(source, non_blocking=True)
                end.record(stream)
            events[way] = begin, end
        torch.cuda.synchronize()
        return {way: times * num_bytes / GB / (b.elapsed_time(e) / 1e3) for way, (b, e) in events.items()}

    rates(("out", "in"))  # warms up
    both = rates(("out", "in"))
    return {**rates(("out",)), **rates(("in",)), "out_beside_in": both["out"], "in_beside_out": both["in"]}


def run_variant(run: Run, variant: Variant, *, with_trace: bool = False) -> dict[str, Any]:
    """The link, and the variant's steps in each way."""
    link = probe(run.device)
    traces: dict[str, list[str]] = {}
    beside_ms = probe_beside_copies() if with_trace and run.device == "cuda" else {}
    with on_device(run.device):
        worker = make_worker(run, variant)
        worker.prepare_for_training()
        batch = random_batch(run, run.lengths[0], torch.Generator().manual_seed(0))
        for _ in range(run.warmup_steps):
            worker.train(batch, NLL())
        is_streamed = any("offload_optimizer_states=true" in override for override in variant.overrides)
        ways = {}
        for way in WAYS if is_streamed else WAYS[:2]:
            ways[way] = steps_of(worker, batch, run, way)
            if with_trace and way not in DRAINED:
                trace_step(worker, batch, way, traces)
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.shutdown()
    return {"link": link, "ways": ways, "beside_copies_ms": beside_ms, "traces": traces}


def trace_step(worker: Any, batch: Any, way: str, traces: dict[str, list[str]]) -> None:
    """Profile an optimizer step and what follows it, which its copies may hold up."""
    is_refit = way == "refit after each"
    worker.forward_backward(batch, NLL())
    with traced(way, traces):
        worker.optim_step(before_refit=is_refit)
        if is_refit:
            gather(worker)
            worker.offload_after_refit()
        else:
            worker.forward_backward(batch, NLL())
    if is_refit:
        worker.prepare_for_training()
    else:
        worker.zero_grad()


def gather(worker: Any) -> None:
    """What a refit does to the worker, without an engine."""
    worker.offload_before_refit()
    worker.start_refit()
    while worker.next_bucket() is not None:
        worker.release_memory()
    worker.abandon_refit()  # no engine has opened the buffers, so they would stay allocated


def steps_of(worker: Any, batch: Any, run: Run, way: str) -> dict[str, Any]:
    """Some steps in one way. The first is not counted: what it finds on the device is of the way before."""
    residency = worker.residency
    prefetcher, prefetch = residency._prefetcher, residency.prefetch
    comes_ahead = prefetcher._parts_come_ahead
    if way == "nothing ahead":
        prefetcher._parts_come_ahead = False
    if way == "two parts":
        residency.prefetch = lambda phase: None
    try:
        steps = [one_step(worker, batch, run.device, way) for _ in range(1 + run.steps)]
    finally:
        prefetcher._parts_come_ahead, residency.prefetch = comes_ahead, prefetch
    kept = steps[1:]
    medians = {name: statistics.median(step[name] for step in kept) for name in kept[0] if name != "exposed_s"}
    exposed = {name: statistics.median(s["exposed_s"].get(name, 0.0) for s in kept) for name in kept[-1]["exposed_s"]}
    return {**medians, "exposed_s": exposed, "steps": steps}


def one_step(worker: Any, batch: Any, device: str, way: str) -> dict[str, Any]:
    """Passes, optimizer step and what follows it in this way."""

    def now_s() -> float:
        if device == "cuda":
            # Copies on other streams go on.
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    if way in DRAINED:
        worker.residency.settle()
    worker.residency_reports()
    calls, retries = driver_calls(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin_s = now_s()
    worker.forward_backward(batch, NLL())
    passed_s = now_s()
    worker.optim_step(before_refit=way == "refit after each")
    stepped_s = now_s()
    if way == "refit after each":
        gather(worker)
        gathered_s = now_s()
        worker.offload_after_refit()
        ended_s = now_s()
        worker.prepare_for_training()
    else:
        gathered_s = stepped_s
        if way in DRAINED:
            worker.residency.settle()
        ended_s = now_s()
    reports = worker.residency_reports()
    exposed_s: dict[str, float] = {}
    for report in reports:
        name = f"{report.source.value if report.source else 'start'} -> {report.target.value}"
        exposed_s[name] = exposed_s.get(name, 0.0) + report.exposed_s
    parts = [(r, move) for r in reports for name, move in r.groups.items() if name.startswith("optimizer/part")]
    peak_bytes = max([r.peak_bytes for r in reports] + [torch.cuda.max_memory_allocated() if device == "cuda" else 0])
    calls_after, retries_after = driver_calls(device)
    return {
        "passes_s": passed_s - begin_s,
        "optim_step_s": stepped_s - passed_s,
        "refit_s": gathered_s - stepped_s,
        "drain_s": ended_s - gathered_s,
        "gb_in_ahead": sum(move.bytes_in for r, move in parts if r.source != r.target) / GB,
        "gb_in_step": sum(move.bytes_in for r, move in parts if r.source == r.target) / GB,
        "gb_out": sum(move.bytes_out for _, move in parts) / GB,
        "exposed_s": exposed_s,
        "give_back_s": sum(r.give_back_s for r in reports if r.source == r.target),
        "peak_gib": peak_bytes / GIB,
        "driver_calls": calls_after - calls,
        "alloc_retries": retries_after - retries,
    }


def driver_calls(device: str) -> tuple[int, int]:
    """Calls of cudaMalloc and cudaFree so far, and how often all cached memory was released to find room."""
    if device == "cpu":
        return 0, 0
    stats = torch.cuda.memory_stats()
    return stats["num_device_alloc"] + stats["num_device_free"], stats["num_alloc_retries"]


def unaccounted_s(found: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Seconds of a step beyond what reports have of it and the update's own time; None where that was not measured."""
    resident = [row for row in rows if row["variant"].endswith("resident") and "ways" in row]
    if not resident:
        return None
    exposed_s = sum(value for name, value in found["exposed_s"].items() if "optim_step" in name)
    exposed_s -= found["give_back_s"]  # most of it after the step
    return found["optim_step_s"] - exposed_s - resident[0]["ways"][WAYS[0]]["optim_step_s"]


def table(results: dict[str, Any]) -> str:
    """A line for each variant and way, below the link."""
    lines = [f"{results['machine']['gpu']}, {results['shape']}"]
    header = f"{'variant':24}{'way':22}{'passes':>8}{'step':>8}{'drain':>8}{'ahead':>8}{'in':>7}{'out':>7}"
    lines.append(f"{header}{'GB/s in':>9}{'out':>7}{'share':>7}{'peak':>8}{'calls':>7}  exposed s")
    for row in results["rows"]:
        if "error" in row:
            lines.append(f"{row['variant']:24}{row['error'][:90]}")
            continue
        link = row["link"]
        if link:
            lines.insert(1, f"GB/s, {row['variant']}: " + ", ".join(f"{k} {v:.1f}" for k, v in link.items()))
        for way, found in row["ways"].items():
            took_s = found["optim_step_s"] + found["drain_s"]
            cells = f"{found['passes_s']:8.3f}{found['optim_step_s']:8.3f}{found['drain_s']:8.3f}"
            cells += f"{found['gb_in_ahead']:8.1f}{found['gb_in_step']:7.1f}{found['gb_out']:7.1f}"
            if way in DRAINED:
                rate_in, rate_out = found["gb_in_step"] / took_s, found["gb_out"] / took_s
                both = link["in_beside_out"] + link["out_beside_in"] if link else 0.0
                share = f"{100 * (rate_in + rate_out) / both:.0f} %" if both else "-"
                cells += f"{rate_in:9.1f}{rate_out:7.1f}{share:>7}"
            else:
                cells += f"{'-':>9}{'-':>7}{'-':>7}"
            cells += f"{found['peak_gib']:8.1f}{found['driver_calls']:7.0f}  "
            exposed = ", ".join(f"{name} {value:.3f}" for name, value in found["exposed_s"].items() if value >= 5e-4)
            hidden_s = unaccounted_s(found, results["rows"])
            if hidden_s is not None:
                exposed += f"; unaccounted {hidden_s:.3f}"
            lines.append(f"{row['variant']:24}{way:22}{cells}{exposed or '-'}")
        if row["beside_copies_ms"]:
            lines.append("ms beside copies: " + ", ".join(f"{k} {v:.1f}" for k, v in row["beside_copies_ms"].items()))
        for way, trace in row["traces"].items():
            lines += [f"{row['variant']}, {way}, traced:", *trace]
    return "\n".join(lines)


def main() -> None:
    """Run every variant and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "4096", shape="8B", rows=4)
    parser.add_argument("--trace", action="store_true", help="profile a step, and probe what stands behind copies")
    args = parser.parse_args()
    args.overrides = [f"{KEY}.activation_checkpointing=true", *args.overrides]
    variants = VARIANTS
    if args.device == "cpu":  # the optimizer of a CPU has no other moments
        variants = tuple(Variant(v.name, tuple(o for o in v.overrides if o not in BF16_MOMENTS)) for v in VARIANTS)
    target = partial(run_variant, with_trace=args.trace)
    print(table(run_children(args, variants, target, may_share_process=True, ties_embeddings=False)))


if __name__ == "__main__":
    main()
