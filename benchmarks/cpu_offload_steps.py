"""Training steps with everything on the GPU against `cpu_offload`, where parts of the model pass through it.

    python benchmarks/cpu_offload_steps.py --shape 8B --rows 8 --lengths 4096 --gpu-cap-gib 24 --out FILE

A step is forward, backward and update of a Qwen3 shape by the policy worker (random weights and tokens, bf16, AdamW
with moments of 16 bits), with `--rows` micro-batches of one row each. `resident` keeps the optimizer's states on the
host, but no more. The cap is for `cpu_offload`. Peaks are the allocator's over whole steps, all state included; exposed
seconds are those in which the GPU had nothing to run, since it waited for copies or the host was held up by them.
With `--deterministic` losses and gradient norms of all variants should be equal.

Needs a GPU; `--device cpu --shape tiny --lengths 64 --rows 4` shows that the script works.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from megatron_runs import GIB, Run, Variant, add_arguments, random_batch, run_children, worker_of
from residency_overlap import NLL

KEY = "policy.dtensor_cfg"
STATES = (f"{KEY}.offload_optimizer_states=true", f"{KEY}.offload_optimizer_states_chunk_mib=1024")
RECOMPUTE, HOST = f"{KEY}.activation_checkpointing=true", f"{KEY}.cpu_offload=true"
RESIDENT = "resident"
VARIANTS = (
    Variant(RESIDENT, (*STATES, RECOMPUTE)),
    Variant("cpu_offload", (HOST, RECOMPUTE)),
    Variant("cpu_offload, one micro-batch at a time", (HOST, f"{KEY}.activation_checkpointing=false")),
)


def run_variant(run: Run, variant: Variant, cap_gib: float | None) -> dict[str, Any]:
    """One worker, and some steps at every length."""
    overrides = ["policy.optimizer.name=nemo_offload_rl.optim.AdamW"]
    if run.device == "cuda":
        # Of a variant that ran before in this process.
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        if cap_gib is not None and variant.name != RESIDENT:
            overrides.append(f"policy.gpu_memory_limit_gib={cap_gib}")
    worker = worker_of(run, variant, "grpo_math_1B.yaml", overrides)
    worker.prepare_for_training()
    found: dict[str, Any] = {}
    for length in run.lengths:
        try:
            found[str(length)] = measure(worker, run, length)
        except RuntimeError as error:  # out of memory, of torch or of a transition
            found[str(length)] = {"error": str(error).split(". ")[0]}
            break
    worker.shutdown()
    return {"lengths": found}


def measure(worker: Any, run: Run, length: int) -> dict[str, Any]:
    """Steps of `rows` micro-batches of one row each; medians without the first ones, which warm up."""
    generator = torch.Generator().manual_seed(length)
    on_gpu = run.device == "cuda"
    steps: list[dict[str, float]] = []
    for _ in range(run.warmup_steps + run.steps):
        batch = random_batch(run, length, generator)
        worker.residency_reports()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        result = worker.train(batch, NLL())
        if on_gpu:
            # Copies on other streams go on beside the next step, as they do in a run.
            torch.cuda.current_stream().synchronize()
        seconds = time.perf_counter() - begin
        reports = worker.residency_reports()
        # The residency manager reads and resets the allocator's peak at every transition.
        peaks = [report.peak_bytes for report in reports]
        steps.append(
            {
                "step_s": seconds,
                "tokens_per_s": run.rows * length / seconds,
                "peak_gib": max([*peaks, torch.cuda.max_memory_allocated() if on_gpu else 0]) / GIB,
                "exposed_s": sum(report.exposed_s for report in reports),
                "in_gib": sum(report.bytes_in for report in reports) / GIB,
                "out_gib": sum(report.bytes_out for report in reports) / GIB,
                "loss": result.loss[0],
                "grad_norm": result.grad_norm[0],
            }
        )
    timed = steps[run.warmup_steps :]
    medians = {key: statistics.median(step[key] for step in timed) for key in timed[0]}
    return {**medians, "peak_gib": max(step["peak_gib"] for step in steps), "steps": steps}


def table(results: dict[str, Any]) -> str:
    """A line for each variant and length, and whether losses and norms are those of the first variant."""
    lines = [f"{results['machine']['gpu']}, {results['shape']}"]
    titles = ("tokens/s", "peak GiB", "exposed s", "step s", "in GiB", "out GiB", "loss", "norm")
    keys = ("tokens_per_s", "peak_gib", "exposed_s", "step_s", "in_gib", "out_gib", "loss", "grad_norm")
    lines.append(f"{'variant':42}{'tokens':>8}" + "".join(f"{title:>12}" for title in titles) + "   numbers")
    expected: dict[str, list[tuple[float, float]]] = {}
    for row in results["rows"]:
        if "error" in row:
            lines.append(f"{row['variant']:42} {row['error']}")
        for length, found in row.get("lengths", {}).items():
            if "error" in found:
                lines.append(f"{row['variant']:42}{length:>8} {found['error']}")
                continue
            numbers = [(step["loss"], step["grad_norm"]) for step in found["steps"]]
            is_same = expected.setdefault(length, numbers) == numbers
            cells = "".join(f"{found[key]:>12.4g}" for key in keys)
            lines.append(f"{row['variant']:42}{length:>8}{cells}   {'equal' if is_same else 'different'}")
    return "\n".join(lines)


def main() -> None:
    """Run every variant and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "4096", shape="4B", rows=8)
    parser.add_argument("--gpu-cap-gib", type=float, help="of the GPU's memory, what torch may take with cpu_offload")
    parser.add_argument("--tied", action="store_true", help="embedding and output layer share their matrix")
    parser.add_argument("--deterministic", action="store_true", help="policy.deterministic=true")
    args = parser.parse_args()
    if args.deterministic:
        args.overrides = (*args.overrides, "policy.deterministic=true")
    target = partial(run_variant, cap_gib=args.gpu_cap_gib)
    results = run_children(
        args, VARIANTS, target, may_share_process=True, needs_megatron=False, ties_embeddings=args.tied
    )
    print(table(results))


if __name__ == "__main__":
    main()
