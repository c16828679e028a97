"""Where Megatron's optimizer lives during training: step time and peak GPU memory of each way.

    python benchmarks/optimizer_residency.py --out benchmarks/results/optimizer_residency.json

A step is forward, backward and optimizer step of the policy worker's Megatron backend on a Qwen3 shape (random weights
and tokens, bf16, the precision-aware distributed optimizer), with `--rows` micro-batches of one row each.

Needs a GPU with Transformer Engine; `--device cpu --shape tiny --lengths 32` runs what a CPU can do, to show that the
script works.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from megatron_runs import KEY, Variant, parse_arguments, percent, run_variants

OPTIMIZER = f"{KEY}.optimizer"
STATES = f"{OPTIMIZER}.offload_optimizer_states=true"


def on_cpu(fraction: float, overlap: bool) -> tuple[str, ...]:
    """Overrides of megatron-core's CPU optimizer."""
    return (
        f"{OPTIMIZER}.optimizer_cpu_offload=true",
        f"{OPTIMIZER}.optimizer_offload_fraction={fraction}",
        f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d={str(overlap).lower()}",
    )


# The ones that matter most come first, for runs with little time.
VARIANTS = (
    Variant("resident"),
    Variant("states offloaded, whole", (STATES, f"{OPTIMIZER}.offload_optimizer_states_chunk_mib=null")),
    Variant("states offloaded, 1 GiB", (STATES, f"{OPTIMIZER}.offload_optimizer_states_chunk_mib=1024")),
    Variant("CPU optimizer, 1.0, overlap", on_cpu(1.0, True)),
    Variant("CPU optimizer, 0.5, overlap", on_cpu(0.5, True)),
    Variant("CPU optimizer, 1.0", on_cpu(1.0, False)),
    Variant("CPU optimizer, 0.5", on_cpu(0.5, False)),
    Variant("states offloaded, 256 MiB", (STATES, f"{OPTIMIZER}.offload_optimizer_states_chunk_mib=256")),
    Variant(
        "half of the states, 1 GiB",
        (
            STATES,
            f"{OPTIMIZER}.offload_optimizer_states_fraction=0.5",
            f"{OPTIMIZER}.offload_optimizer_states_chunk_mib=1024",
        ),
    ),
    Variant("resident, cache emptied each step", (f"{KEY}.empty_unused_memory_level=1",)),
)


def table(results: dict[str, Any]) -> str:
    """Seconds and peak by length, with the change from the resident variant."""
    by_name = {row["variant"]: row for row in results["rows"]}
    lines = [f"{results['machine']['gpu']}, {results['shape']}; change from resident in parentheses"]
    lines.append(f"{'variant':36}{'length':>8}{'step, s':>20}{'peak GiB':>22}")
    for name, row in by_name.items():
        if "error" in row:
            lines.append(f"{name:36} {row['error'][:80]}")
        for length, found in row.get("lengths", {}).items():
            if "error" in found:
                lines.append(f"{name:36}{length:>8} {found['error'][:80]}")
                continue
            base = by_name.get("resident", row).get("lengths", {}).get(length, found)
            step = f"{found['step_s']:.3f} ({percent(found['step_s'], base['step_s'])})"
            peak = f"{found['peak_gib']:.1f} ({percent(found['peak_gib'], base['peak_gib'])})"
            lines.append(f"{name:36}{length:>8}{step:>20}{peak:>22}")
    return "\n".join(lines)


def main() -> None:
    """Run every variant and print the table."""
    args = parse_arguments(__doc__ or "", "8192")
    variants = VARIANTS
    if args.device == "cpu":
        variants = tuple(v for v in VARIANTS if "CPU" not in v.name)
    results = run_variants(args, variants)
    print(table(results))


if __name__ == "__main__":
    main()
