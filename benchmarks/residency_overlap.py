"""Seconds that moving state costs a training loop, with copies overlapped with compute and without.

    python benchmarks/residency_overlap.py --refit-s 0.4 --out benchmarks/results/residency_overlap.json

A step is what the policy worker does in colocated RL: logprobs, reference logprobs, training (forward, backward, fused
AdamW), then its weights are gathered as for a refit, and all state leaves. Pauses stand for the engine's generation and
for its loading of the weights (`--refit-s`). Variants, each in a process of its own: state never moves; every copy is
waited for; copies are overlapped; states are streamed around the update, whole and in parts of 1 GiB; the optimizer is
on the host during logprobs too; its host copy is pageable.

It prints, for each variant, seconds by phase (medians without the first two steps), exposed and hidden seconds of
copies, GB moved, and the process's peak memory in logprob passes, training passes and the update of the last step.
Needs a GPU; `--device cpu --shape tiny` shows that the script works. Docs: docs/measurements/residency.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import NLL, grow_host_memory, make_model, measured_with, probe_link, write_result
from qwen3_shapes import SHAPES
from workers import DTENSOR, Run, worker_of

CHUNKED = f"{DTENSOR}.offload_optimizer_states_chunk_mib"
VARIANTS: dict[str, tuple[str, ...]] = {
    "resident": ("policy.generation.colocated.enabled=false",),
    "waited for": ("policy.residency_overlap=false",),
    "overlapped": (),
    "overlapped, states streamed": (f"{DTENSOR}.offload_optimizer_states=true", f"{CHUNKED}=null"),
    "the same in parts of 1 GiB": (f"{DTENSOR}.offload_optimizer_states=true", f"{CHUNKED}=1024"),
    "away for logprobs": ("policy.offload_optimizer_states_for_logprob=true",),
    "optimizer not pinned": ("policy.use_pinned_optimizer_offload=false",),
}
PHASES = ("logprobs", "reference", "training", "refit", "leaving")
AT_ONCE = 32  # tensors of a refit between two pauses


def make_worker(folder: Path, args: argparse.Namespace, overrides: tuple[str, ...]) -> Any:
    """A DTensor policy worker on one device, which leaves all of it to an engine that is not there."""
    common = (
        f"policy.train_micro_batch_size={args.micro_batch}",
        f"policy.logprob_batch_size={2 * args.micro_batch}",
        f"{DTENSOR}.activation_checkpointing=true",
        f"{DTENSOR}.torch_compile=false",
        f"policy.optimizer.kwargs={{lr: 1e-6, fused: {str(args.device == 'cuda').lower()}}}",
    )
    run = Run(args.shape, str(folder), args.device, (args.length,), args.rows, args.steps, 0, common, "dtensor")
    return worker_of(run, overrides, keep_reference=True, engine_memory_share=0.0, engine_kv_cache_gib=None)


def run_variant(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All steps of one variant in this process."""
    from nemo_offload_rl.data.batch import TrainBatch
    from nemo_offload_rl.residency import Phase

    worker = make_worker(folder, args, VARIANTS[args.child])
    vocab = SHAPES[args.shape].vocab
    num_weights = 11 * SHAPES[args.shape].layers + 2  # of a Qwen3 model with tied embeddings
    generator = torch.Generator().manual_seed(0)
    steps = []
    for _ in range(args.steps + 2):
        ids = torch.randint(0, vocab, (args.rows, args.length), generator=generator)
        batch = TrainBatch(
            input_ids=ids,
            input_lengths=torch.full((args.rows,), args.length),
            token_mask=torch.ones(args.rows, args.length).index_fill_(1, torch.tensor([0]), 0.0),
            sample_mask=torch.ones(args.rows),
        )
        seconds: dict[str, float] = {}

        def timed(name: str, work: Callable[[], Any], seconds: dict[str, float] = seconds) -> None:
            start = time.perf_counter()
            work()
            if args.device == "cuda":
                torch.cuda.current_stream().synchronize()
            seconds[name] = time.perf_counter() - start

        def logprobs(batch: Any = batch) -> None:
            worker.prepare_for_lp_inference()
            worker.get_logprobs(batch)

        def train(batch: Any = batch) -> None:
            worker.prepare_for_training()
            worker.train(batch, NLL())

        def refit() -> None:
            worker.offload_before_refit()
            for index, (_, tensor) in enumerate(worker.named_weights()):
                tensor.clone()
                if index % AT_ONCE == 0:
                    time.sleep(args.refit_s * AT_ONCE / num_weights)
            worker.release_memory()

        begin = time.perf_counter()
        timed("logprobs", logprobs)
        timed("reference", lambda batch=batch: worker.get_reference_logprobs(batch))
        timed("training", train)
        timed("refit", refit)
        timed("leaving", worker.offload_after_refit)
        seconds["step"] = time.perf_counter() - begin
        time.sleep(args.pause_s)
        reports = worker.residency_reports()
        seconds["exposed"] = sum(report.exposed_s for report in reports)
        seconds["hidden"] = sum(report.hidden_s for report in reports)
        seconds["gb"] = sum(report.bytes_moved for report in reports) / 1e9
        steps.append(seconds)
    lines = [report.line() for report in reports]
    peaks = {
        phase.value: max(report.peak_bytes for report in reports if report.source is phase) / 2**30
        for phase in (Phase.LP_INFERENCE, Phase.TRAINING, Phase.OPTIM_STEP)
    }
    worker.shutdown()
    kept = steps[2:]
    medians = {name: statistics.median(step[name] for step in kept) for name in kept[0]}
    return {
        "variant": args.child,
        "median_s": medians,
        "steps": steps,
        "peak_gib": peaks,
        "last_step": lines,
    }


def main() -> None:
    """Run every variant and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5B", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=0.2)
    parser.add_argument("--refit-s", type=float, default=0.0, help="what an engine would take to load the weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run_variant(args.model, args)))
        return
    if args.device == "cuda":
        grow_host_memory(48 << 30)
    link = probe_link(args.device)
    rows: list[dict[str, Any]] = []
    result = {**measured_with(), "link_gb_per_s": link, "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.shape, args.device, ties_embeddings=True)
        for variant in args.variants:
            child_command = [sys.executable, __file__, *sys.argv[1:], "--child", variant, "--model", folder]
            child = subprocess.run(child_command, capture_output=True, text=True)
            if child.returncode:
                print(f"{variant}: failed\n{child.stderr[-2000:]}", flush=True)
                continue
            rows.append(json.loads(child.stdout.strip().splitlines()[-1]))
            write_result(args.out, result)
            print(variant, "done", flush=True)
    print(f"link D2H {link['d2h']:.1f} H2D {link['h2d']:.1f} GB/s; seconds, medians")
    print(
        f"{'variant':28} {'step':>7} "
        + " ".join(f"{name:>9}" for name in PHASES)
        + "  exposed  hidden  GB moved  peak GiB: logprobs, training, step"
    )
    for row in rows:
        m = row["median_s"]
        phases = " ".join(f"{m[name]:9.3f}" for name in PHASES)
        tail = f"{m['exposed']:9.3f} {m['hidden']:7.3f} {m['gb']:9.2f}"
        peaks = " ".join(f"{size:8.2f}" for size in row["peak_gib"].values())
        print(f"{row['variant']:28} {m['step']:7.3f} {phases} {tail} {peaks}")


if __name__ == "__main__":
    main()
