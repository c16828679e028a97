"""Activations of the DTensor backend kept, recomputed, or on the host: peak GPU memory and tokens a second.

    python benchmarks/dtensor_activations.py --shape 1.7B --out benchmarks/results/dtensor_activations.json

A step is forward, backward and optimizer step of the policy worker on a Qwen3 shape (random weights and tokens, bf16,
AdamW), with micro-batches of one row of the given length. Peaks are the allocator's over whole steps, all state
included. Losses of all variants are in the results: with `policy.deterministic=true` those that differ in offloading
alone have to be equal.

Needs a GPU; `--device cpu --shape tiny --lengths 32,64 --overrides
policy.dtensor_cfg.activation_offload_host_limit_gib=1` shows that the script works.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from megatron_runs import Run, Variant, measure_lengths, memory_table, parse_arguments, run_children, worker_of

KEY = "policy.dtensor_cfg"
OFFLOAD, RECOMPUTE = f"{KEY}.activation_offload=true", f"{KEY}.activation_checkpointing=true"
HALF, EAGER = f"{KEY}.activation_offload_fraction=0.5", f"{KEY}.torch_compile=false"
VARIANTS = (
    Variant("resident"),
    Variant("recompute layers", (RECOMPUTE,)),
    Variant("offload", (OFFLOAD,)),
    Variant("recompute layers, offload inputs", (RECOMPUTE, OFFLOAD)),
    Variant("offload half of the layers", (OFFLOAD, HALF)),
    Variant("resident, not compiled", (EAGER,)),
    Variant("offload, not compiled", (OFFLOAD, EAGER)),
)


def run_variant(run: Run, variant: Variant) -> dict[str, Any]:
    """One worker, and some steps at every length."""
    return measure_lengths(worker_of(run, variant, "grpo_math_1B.yaml"), run)


def main() -> None:
    """Run every variant and print the table."""
    args = parse_arguments(__doc__ or "", "8192,32768,65536")
    print(memory_table(run_children(args, VARIANTS, run_variant, may_share_process=True, needs_megatron=False)))


if __name__ == "__main__":
    main()
