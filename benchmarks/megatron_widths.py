"""What the first micro-batch of a new width costs on the Megatron backend, where kernels are prepared for each shape.

    python benchmarks/megatron_widths.py --shape 0.6B --out benchmarks/results/megatron_widths.json

A training step of one micro-batch with `--rows` rows, the longest of `--lengths` tokens each in turn, goes through the
lengths twice: only in the first round are they new. Rows are padded to the longest, padded to a multiple of 64, or
packed.

Needs a GPU with Transformer Engine; `--device cpu --shape tiny --lengths 17,18,19` shows that the script works.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from megatron_runs import Run, Variant, make_worker, on_device, parse_arguments, run_children
from qwen3_shapes import SHAPES
from residency_overlap import NLL

PACKED = "packed"
VARIANTS = (
    Variant("padded", ("policy.make_sequence_length_divisible_by=1",)),
    Variant("padded to 64", ("policy.make_sequence_length_divisible_by=64",)),
    Variant(PACKED, ("policy.make_sequence_length_divisible_by=1", "policy.sequence_packing.enabled=true")),
)


def rounds(run: Run, variant: Variant) -> dict[str, Any]:
    """Seconds of each length's step, by round; before them, steps of another length."""
    with on_device(run.device):
        whole = Variant(variant.name, (f"policy.train_micro_batch_size={run.rows}", *variant.overrides))
        worker = make_worker(run, whole)
        worker.prepare_for_training()
        for _ in range(run.warmup_steps):
            step_s(worker, run, max(run.lengths) // 2)
        seconds = [[step_s(worker, run, length) for length in run.lengths] for _ in range(2)]
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.shutdown()
        return {"first_s": seconds[0], "again_s": seconds[1]}


def step_s(worker: Any, run: Run, longest: int) -> float:
    """Seconds of a step whose rows have `longest` tokens and fewer."""
    from nemo_offload_rl.data.batch import TrainBatch

    generator = torch.Generator().manual_seed(longest)
    lengths = torch.tensor([longest - row for row in range(run.rows)])
    is_real = torch.arange(longest) < lengths.unsqueeze(1)
    batch = TrainBatch(
        input_ids=torch.randint(1, SHAPES[run.shape].vocab, (run.rows, longest), generator=generator) * is_real,
        input_lengths=lengths,
        token_mask=is_real.float().index_fill_(1, torch.tensor([0]), 0.0),
        sample_mask=torch.ones(run.rows),
    )
    begin = time.perf_counter()
    worker.train(batch, NLL())
    if run.device == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - begin


def table(results: dict[str, Any]) -> str:
    """Medians, and the slowest step."""
    lines = [f"{results['machine']['gpu']}, {results['shape']}"]
    lines.append(f"{'seconds of a step':24}{'new length, median':>20}{'most':>8}{'length seen before, median':>30}")
    for row in results["rows"]:
        if "error" in row:
            lines.append(f"{row['variant']:24} {row['error'][:90]}")
            continue
        first, again = statistics.median(row["first_s"]), statistics.median(row["again_s"])
        lines.append(f"{row['variant']:24}{first:20.3f}{max(row['first_s']):8.3f}{again:30.3f}")
    return "\n".join(lines)


def main() -> None:
    """Run every variant and print the table."""
    args = parse_arguments(__doc__ or "", "1021,1003,986,970,955,941,928,916,905,895")
    variants = tuple(v for v in VARIANTS if args.device == "cuda" or v.name != PACKED)
    print(table(run_children(args, variants, rounds, may_share_process=True)))


if __name__ == "__main__":
    main()
