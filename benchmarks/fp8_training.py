"""Training in 8 bits beside bfloat16 on one GPU: tokens a second, peak memory, and losses on the same data.

    python benchmarks/fp8_training.py --out benchmarks/results/fp8_training.json

Speed and memory are of steps of `--shape`: forward, backward and optimizer step of the policy worker's Megatron backend
on random weights and tokens, micro-batches of one row of the given length, Adam with moments in bfloat16. Losses are of
`--curve-steps` steps of SFT on `--curve-shape`: packed rows of a synthetic corpus in which each token follows from the
one before it nine times in ten, the same rows for every variant. They go to a second file, `..._curves.json`.

Needs a GPU with Transformer Engine. Without one `--device cpu --shape tiny --curve-shape tiny --lengths 32` runs the
first variant in float32 with local layers, to show that the script works.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from megatron_runs import (
    KEY,
    Run,
    Variant,
    add_arguments,
    make_worker,
    on_device,
    percent,
    run_children,
    run_variants,
)
from residency_overlap import NLL

FP8 = f"{KEY}.fp8_cfg"
VARIANTS = (
    Variant("bfloat16"),
    Variant("blockwise", (f"{FP8}.enabled=true", f"{FP8}.fp8=e4m3", f"{FP8}.fp8_recipe=blockwise")),
    Variant("tensorwise", (f"{FP8}.enabled=true", f"{FP8}.fp8=hybrid", f"{FP8}.fp8_recipe=tensorwise")),
)
SMALL_STATES = (
    f"{KEY}.optimizer.exp_avg_dtype=bfloat16",
    f"{KEY}.optimizer.exp_avg_sq_dtype=bfloat16",
    f"{KEY}.distributed_data_parallel_config.grad_reduce_in_fp32=false",
)
NUM_SYMBOLS, NOISE = 1000, 0.1  # of the corpus
CURVE_LENGTH, CURVE_ROWS = 1024, 16
CURVE_OVERRIDES = (
    f"{KEY}.optimizer.lr=3e-4",
    f"{KEY}.optimizer.min_lr=3e-4",
    f"{KEY}.scheduler.lr_warmup_iters=5",
    f"{KEY}.scheduler.lr_warmup_init=3e-5",
)


def corpus_batch(step: int, num_rows: int, length: int) -> Any:
    """A `TrainBatch` of rows of half the length to all of it; the same one for the same step."""
    from nemo_offload_rl.data.batch import TrainBatch

    draw = torch.Generator().manual_seed(step)
    lengths_B = torch.randint(length // 2, length + 1, (num_rows,), generator=draw)
    ids_BS = torch.randint(0, NUM_SYMBOLS, (num_rows, length), generator=draw)
    is_noise_BS = torch.rand(num_rows, length, generator=draw) < NOISE
    for place in range(1, length):
        following_B = (ids_BS[:, place - 1] * 37 + 11) % NUM_SYMBOLS
        ids_BS[:, place] = torch.where(is_noise_BS[:, place], ids_BS[:, place], following_B)
    position_S = torch.arange(length)
    return TrainBatch(
        input_ids=ids_BS,
        input_lengths=lengths_B,
        token_mask=((position_S > 0) & (position_S < lengths_B.unsqueeze(1))).float(),
        sample_mask=torch.ones(num_rows),
    )


def run_curve(run: Run, variant: Variant) -> dict[str, Any]:
    """Losses and gradient norms of `run.steps` steps."""
    with on_device(run.device):
        worker = make_worker(run, variant)
        worker.prepare_for_training()
        losses, norms = [], []
        for step in range(run.steps):
            result = worker.train(corpus_batch(step, run.rows, max(run.lengths)), NLL())
            losses += result.loss
            norms += result.grad_norm
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.shutdown()
        return {"losses": losses, "grad_norms": norms}


def speed_table(results: dict[str, Any]) -> str:
    """Tokens a second and peak memory by length."""
    rows = [row for row in results["rows"] if "lengths" in row]
    lines = [f"{results['machine']['gpu']}, {results['shape']}; change from bfloat16 in parentheses"]
    lines.append(f"{'':12}{'tokens':>8}{'tokens/s':>18}{'peak GiB':>18}{'s a step':>10}")
    for row in rows:
        for length, found in row["lengths"].items():
            if "error" in found:
                lines.append(f"{row['variant']:12}{length:>8}  {found['error'][:60]}")
                continue
            base = rows[0]["lengths"].get(length, found)
            base = found if "error" in base else base
            speed = f"{found['tokens_per_s']:.0f} ({percent(found['tokens_per_s'], base['tokens_per_s'])})"
            peak = f"{found['peak_gib']:.1f} ({percent(found['peak_gib'], base['peak_gib'])})"
            lines.append(f"{row['variant']:12}{length:>8}{speed:>18}{peak:>18}{found['step_s']:>10.3f}")
    return "\n".join(lines)


def curve_table(results: dict[str, Any]) -> str:
    """Losses at every fifth part of the run, and how far they are from bfloat16's."""
    rows = [row for row in results["rows"] if "losses" in row]
    if not rows:
        return "no losses"
    steps = len(rows[0]["losses"])
    shown = sorted({1, *(steps * part // 5 for part in range(1, 6))} - {0})
    lines = [f"SFT loss, {results['shape']}; last column: mean distance from {rows[0]['variant']} over the last fifth"]
    lines.append(f"{'step':12}" + "".join(f"{step:>9}" for step in shown) + f"{'distance':>11}")
    for row in rows:
        pairs = list(zip(row["losses"], rows[0]["losses"], strict=True))[-max(1, steps // 5) :]
        distance = statistics.mean(abs(loss - other) for loss, other in pairs)
        losses = "".join(f"{row['losses'][step - 1]:>9.4f}" for step in shown)
        lines.append(f"{row['variant']:12}{losses}{distance:>11.5f}")
    return "\n".join(lines)


def curves(args: argparse.Namespace, variants: tuple[Variant, ...]) -> dict[str, Any]:
    """Losses of every variant."""
    own = copy.copy(args)
    own.shape, own.steps, own.warmup_steps = args.curve_shape, args.curve_steps, 0
    own.rows, own.lengths = CURVE_ROWS, str(CURVE_LENGTH)
    if args.out:
        own.out = args.out.with_name(f"{args.out.stem}_curves.json")
    packing = ()
    if args.device == "cuda":
        packing = (
            "policy.sequence_packing.enabled=true",
            f"policy.sequence_packing.train_mb_tokens={8 * CURVE_LENGTH}",
        )
    else:
        own.rows, own.lengths = 4, "64"
    own.overrides = (*args.overrides, *CURVE_OVERRIDES, *packing)
    return run_children(own, variants, run_curve, may_share_process=True)


def main() -> None:
    """Run every variant and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, lengths="4096", shape="8B", rows=8)
    parser.add_argument("--part", default="both", choices=["both", "speed", "curves"])
    parser.add_argument("--curve-shape", default="0.6B")
    parser.add_argument("--curve-steps", type=int, default=50)
    args = parser.parse_args()
    variants = VARIANTS[:1] if args.device == "cpu" else VARIANTS
    tables = []
    if args.part != "curves":
        speed_args = copy.copy(args)
        if args.device == "cuda":
            speed_args.overrides = (*SMALL_STATES, *args.overrides)
        tables.append(speed_table(run_variants(speed_args, variants)))
    if args.part != "speed":
        tables.append(curve_table(curves(args, variants)))
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
