"""Training steps of a policy worker by variants of the configuration: speed, peak GPU memory, copies, losses.

    python benchmarks/training_steps.py activations --out results/activations.json
    python benchmarks/training_steps.py cpu-offload --overrides policy.deterministic=true
    python benchmarks/training_steps.py optimizer --device cpu --shape tiny --lengths 32 --steps 1

A step is forward, backward and update on a Qwen3 shape with random weights and tokens, in micro-batches of one row. The
tables:

- `activations`: Megatron, activations kept, recomputed or offloaded; with `--shape 12-layers` those of experts;
- `dtensor-activations`: the same of the DTensor backend;
- `optimizer`: Megatron, where the optimizer's states live during training;
- `cpu-offload`: DTensor, everything on the host against parameters and gradients on the GPU;
- `fp8`: Megatron, 8-bit products against bfloat16;
- `widths`: Megatron, what the first micro-batch of a new width costs: rows of nearly the same length go through all
  `--lengths` twice, and only in the first round are they new.

It prints a line for each variant and length: tokens/s and the allocator's peak over whole steps, all state included,
each with its change from the first variant; seconds of a step; seconds in which the GPU had nothing to run because of
copies; GiB that crossed the link; and whether losses and gradient norms equal those of the first variant in every bit,
as they have to with `policy.deterministic=true` unless the arithmetic differs. Numbers are medians of the timed steps.

Needs a GPU, for Megatron with Transformer Engine. `--device cpu --shape tiny` shows that the script works.
Docs: docs/measurements/{training,activations,optimizer-states}.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import GIB, NLL
from qwen3_shapes import MOE_SHAPES, SHAPES, TIED, shape_of
from workers import DTENSOR, MEGATRON, Run, Variant, on_device, random_batch, run_variants, worker_of

type Measure = Callable[[Run, Variant], dict[str, Any]]

OPTIMIZER, FP8 = f"{MEGATRON}.optimizer", f"{MEGATRON}.fp8_cfg"
ATTENTION, EXPERTS = ("qkv_linear", "core_attn", "attn_proj"), ("mlp_norm", "expert_fc1", "moe_act")
SMALL_MOMENTS = (f"{OPTIMIZER}.exp_avg_dtype=bfloat16", f"{OPTIMIZER}.exp_avg_sq_dtype=bfloat16")
SMALL_GRADIENTS = f"{MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32=false"
RECOMPUTE, OFFLOAD = f"{DTENSOR}.activation_checkpointing=true", f"{DTENSOR}.activation_offload=true"
ON_HOST = (f"{DTENSOR}.cpu_offload=true", RECOMPUTE)
ADAM_16_BIT = "policy.optimizer.name=nemo_offload_rl.optim.AdamW"
NUM_ROWS_OF_WIDTHS = 4


def offload(*modules: str) -> tuple[str, ...]:
    """Overrides that offload the inputs of these modules of Megatron's."""
    return (f"{MEGATRON}.fine_grained_activation_offloading=true", f"{MEGATRON}.offload_modules=[{','.join(modules)}]")


def recompute(*modules: str) -> tuple[str, ...]:
    """Overrides that recompute these modules of Megatron's, or whole layers."""
    whole = f"{MEGATRON}.activation_checkpointing=true"
    if not modules:
        return (whole,)
    names = f"{MEGATRON}.recompute_modules=[{','.join(modules)}]"
    return (whole, f"{MEGATRON}.recompute_granularity=selective", names)


def streamed(section: str, chunk_mib: int | None) -> tuple[str, ...]:
    """Overrides: states stream in parts of this size, without one as a whole."""
    keys = ("offload_optimizer_states=true", f"offload_optimizer_states_chunk_mib={chunk_mib or 'null'}")
    return tuple(f"{section}.{key}" for key in keys)


def on_cpu(fraction: float, overlap: bool) -> tuple[str, ...]:
    """Overrides of megatron-core's CPU optimizer."""
    return (
        f"{OPTIMIZER}.optimizer_cpu_offload=true",
        f"{OPTIMIZER}.optimizer_offload_fraction={fraction}",
        f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d={str(overlap).lower()}",
    )


def fp8(recipe: str, fmt: str) -> tuple[str, ...]:
    """Overrides of training in 8 bits."""
    return (f"{FP8}.enabled=true", f"{FP8}.fp8={fmt}", f"{FP8}.fp8_recipe={recipe}")


def run_steps(run: Run, variant: Variant) -> dict[str, Any]:
    """Steps of one worker at every length, until memory runs out."""
    with on_device(run.device):
        worker = worker_of(run, variant.overrides)
        worker.prepare_for_training()
        found: dict[str, Any] = {}
        for length in run.lengths:
            try:
                found[str(length)] = steps_at(worker, run, length)
            except RuntimeError as error:  # out of memory, of torch or of a transition
                found[str(length)] = {"error": str(error).split(". ")[0]}
                break
        worker.shutdown()
    return {"lengths": found}


def steps_at(worker: Any, run: Run, length: int) -> dict[str, Any]:
    """Steps of `run.rows` micro-batches of one row; medians without the first ones, which warm up."""
    generator = torch.Generator().manual_seed(length)
    on_gpu = run.device == "cuda"
    steps: list[dict[str, float]] = []
    for _ in range(run.warmup_steps + run.steps):
        batch = random_batch(run, length, generator)
        worker.residency_reports()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        result = worker.train(batch, NLL())
        if on_gpu:
            # Copies on other streams continue during the next step, as they do in a run.
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
                "driver_allocations": torch.cuda.memory_stats()["num_device_alloc"] if on_gpu else 0,
            }
        )
    timed = steps[run.warmup_steps :]
    medians = {key: statistics.median(step[key] for step in timed) for key in timed[0]}
    return {**medians, "peak_gib": max(step["peak_gib"] for step in steps), "steps": steps}


def run_widths(run: Run, variant: Variant) -> dict[str, Any]:
    """Seconds of each length's step, by round; before them, steps of another length."""
    with on_device(run.device):
        worker = worker_of(run, variant.overrides)
        worker.prepare_for_training()
        for _ in range(run.warmup_steps):
            width_s(worker, run, max(run.lengths) // 2)
        first, again = ([width_s(worker, run, length) for length in run.lengths] for _ in range(2))
        worker.shutdown()
    return {"first_s": first, "again_s": again}


def width_s(worker: Any, run: Run, longest: int) -> float:
    """Seconds of a step of one micro-batch whose rows have `longest` tokens and fewer."""
    from nemo_offload_rl.data.batch import TrainBatch

    generator = torch.Generator().manual_seed(longest)
    lengths = torch.tensor([longest - row for row in range(run.rows)])
    is_real = torch.arange(longest) < lengths.unsqueeze(1)
    batch = TrainBatch(
        input_ids=torch.randint(1, shape_of(run.shape).vocab, (run.rows, longest), generator=generator) * is_real,
        input_lengths=lengths,
        token_mask=is_real.float().index_fill_(1, torch.tensor([0]), 0.0),
        sample_mask=torch.ones(run.rows),
    )
    begin = time.perf_counter()
    worker.train(batch, NLL())
    if run.device == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Table:
    """One table: its variants, the most important first, and the sizes of its steps.

    Attributes:
        overrides: Of every variant.
        measure: Makes a variant's row.
    """

    backend: str
    shape: str
    lengths: str
    rows: int
    variants: tuple[Variant, ...]
    overrides: tuple[str, ...] = ()
    measure: Measure = run_steps


OF_EXPERTS = (
    Variant("resident"),
    Variant("offload experts", offload(*EXPERTS)),
    Variant("offload moe_act", offload("moe_act")),
    Variant("recompute experts", recompute("moe")),
    Variant("recompute moe_act", recompute("moe_act")),
    Variant("recompute all", recompute()),
    Variant("offload experts and attention", offload(*ATTENTION, *EXPERTS)),
    Variant("offload attention, recompute experts", (*offload(*ATTENTION), *recompute("moe"))),
)
TABLES = {
    "activations": Table(
        "megatron",
        "1.7B",
        "8192,32768",
        2,
        (
            Variant("resident"),
            Variant("offload all attention", offload(*ATTENTION)),
            Variant("recompute mlp", recompute("mlp")),
            Variant("recompute all", recompute()),
            Variant("offload attention, recompute mlp", (*offload(*ATTENTION), *recompute("mlp"))),
            Variant("offload core_attn, attn_proj", offload("core_attn", "attn_proj")),
            Variant("recompute core_attn", recompute("core_attn")),
            Variant("offload half of attention", (*offload(*ATTENTION), f"{MEGATRON}.activation_offload_fraction=0.5")),
        ),
    ),
    "dtensor-activations": Table(
        "dtensor",
        "8B",
        "8192,32768",
        2,
        (
            Variant("resident"),
            Variant("recompute layers", (RECOMPUTE,)),
            Variant("recompute layers, offload inputs", (RECOMPUTE, OFFLOAD)),
        ),
        (*streamed(DTENSOR, 1024), ADAM_16_BIT),
    ),
    "optimizer": Table(
        "megatron",
        "1.7B",
        "8192",
        4,
        (
            Variant("resident"),
            Variant("states streamed, whole", streamed(OPTIMIZER, None)),
            Variant("states streamed, 1 GiB", streamed(OPTIMIZER, 1024)),
            Variant("states streamed, 256 MiB", streamed(OPTIMIZER, 256)),
            Variant(
                "half of the states, 1 GiB",
                (*streamed(OPTIMIZER, 1024), f"{OPTIMIZER}.offload_optimizer_states_fraction=0.5"),
            ),
            Variant("CPU optimizer, 1.0, overlap", on_cpu(1.0, True)),
            Variant("CPU optimizer, 0.5, overlap", on_cpu(0.5, True)),
            Variant("CPU optimizer, 1.0", on_cpu(1.0, False)),
            Variant("CPU optimizer, 0.5", on_cpu(0.5, False)),
        ),
    ),
    "cpu-offload": Table(
        "dtensor",
        "8B",
        "4096",
        8,
        (
            Variant("resident", (*streamed(DTENSOR, 1024), RECOMPUTE)),
            Variant("cpu_offload, 24 GiB", (*ON_HOST, "policy.gpu_memory_limit_gib=24")),
            Variant("cpu_offload", ON_HOST),
        ),
        (ADAM_16_BIT,),
    ),
    "fp8": Table(
        "megatron",
        "8B",
        "4096",
        8,
        (
            Variant("bfloat16"),
            Variant("blockwise", fp8("blockwise", "e4m3")),
            Variant("tensorwise", fp8("tensorwise", "hybrid")),
        ),
        (*SMALL_MOMENTS, SMALL_GRADIENTS),
    ),
    "widths": Table(
        "megatron",
        "0.6B",
        "1021,1003,986,970,955,941,928,916,905,895",
        NUM_ROWS_OF_WIDTHS,
        (
            Variant("padded"),
            Variant("padded to 64", ("policy.make_sequence_length_divisible_by=64",)),
            Variant("packed", ("policy.sequence_packing.enabled=true",)),
        ),
        (f"policy.train_micro_batch_size={NUM_ROWS_OF_WIDTHS}",),
        run_widths,
    ),
}
NEEDS_GPU = (
    f"{MEGATRON}.fine_grained",
    f"{OPTIMIZER}.optimizer_cpu_offload",
    "policy.gpu_memory_limit",
    FP8,
    "policy.sequence_packing",
)


def print_steps(rows: list[dict[str, Any]]) -> None:
    """A line for each variant and length."""
    titles = ("tokens/s", "", "peak GiB", "", "step s", "exposed s", "in GiB", "out GiB")
    print(f"{'variant':38}{'tokens':>8}" + "".join(f"{title:>10}" for title in titles) + "   numbers")
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        found_by_length = row.get("lengths", {"-": row})
        for length, found in found_by_length.items():
            line = f"{row['variant']:38}{length:>8}"
            if "error" in found:
                print(f"{line}  {found['error'][:90]}")
                continue
            base = first.setdefault(length, found)
            cells = ""
            for key in ("tokens_per_s", "peak_gib"):
                change = f"{100 * (found[key] / base[key] - 1):+.1f} %" if base[key] else "-"
                cells += f"{found[key]:>10.4g}{change:>10}"
            cells += "".join(f"{found[key]:>10.3f}" for key in ("step_s", "exposed_s", "in_gib", "out_gib"))
            is_same = all(numbers_of(found, key) == numbers_of(base, key) for key in ("loss", "grad_norm"))
            print(f"{line}{cells}   {'equal' if is_same else 'differ'}")


def numbers_of(found: dict[str, Any], key: str) -> list[float]:
    """A number of every step."""
    return [step[key] for step in found["steps"]]


def print_widths(rows: list[dict[str, Any]]) -> None:
    """Medians, and the slowest step."""
    print(f"{'seconds of a step':24}{'new length, median':>20}{'most':>8}{'length seen before, median':>30}")
    for row in rows:
        if "error" in row:
            print(f"{row['variant']:24} {row['error'][:90]}")
            continue
        first, again = statistics.median(row["first_s"]), statistics.median(row["again_s"])
        print(f"{row['variant']:24}{first:20.3f}{max(row['first_s']):8.3f}{again:30.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--shape", choices=[*SHAPES, *MOE_SHAPES])
    parser.add_argument("--lengths", help="tokens of a row; several by commas")
    parser.add_argument("--rows", type=int, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="run these variants, by their whole names")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--host-gib", type=int, default=64, help="host memory to touch before anything is measured")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--overrides", nargs="*", default=(), metavar="KEY=VALUE", help="of every variant")
    args = parser.parse_args()
    table = TABLES[args.table]
    shape, rows = args.shape or table.shape, args.rows or table.rows
    variants = OF_EXPERTS if args.table == "activations" and shape in MOE_SHAPES else table.variants
    overrides = table.overrides
    if args.device == "cpu":
        variants = tuple(v for v in variants if not any(o.startswith(NEEDS_GPU) for o in v.overrides))
        overrides = tuple(o for o in overrides if o not in SMALL_MOMENTS)  # the CPU's optimizer has no other moments
    if unknown := set(args.only or ()) - {variant.name for variant in variants}:
        sys.exit(f"--only: no variant is called {sorted(unknown)}; there are {[v.name for v in variants]}")
    lengths = tuple(int(length) for length in (args.lengths or table.lengths).split(","))
    run = Run(
        shape=shape,
        folder="",
        device=args.device,
        lengths=lengths,
        rows=rows,
        steps=args.steps,
        warmup_steps=args.warmup_steps,
        overrides=(*overrides, *args.overrides),
        backend=table.backend,
    )
    chosen = [v for v in variants if not args.only or v.name in args.only]
    results = run_variants(args, run, chosen, table.measure, ties_embeddings=shape in TIED)
    print(f"{results['machine']['gpu']}, {shape}, {results['date']}")
    (print_widths if table.measure is run_widths else print_steps)(results["rows"])


if __name__ == "__main__":
    main()
