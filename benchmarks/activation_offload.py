"""Megatron's activation offloading beside recomputation: peak GPU memory and tokens a second of training steps.

    python benchmarks/activation_offload.py --out benchmarks/results/activation_offload.json
    python benchmarks/activation_offload.py --shape 12-layers --out benchmarks/results/activation_offload_moe.json

A step is forward, backward and optimizer step of the policy worker's Megatron backend on a Qwen3 shape (random weights
and tokens, bf16, the precision-aware distributed optimizer), with micro-batches of one row of the given length. Peaks
are the allocator's over whole steps, all state included.

Needs a GPU with Transformer Engine; `--device cpu --shape tiny --lengths 32,64` runs what local layers can do, to show
that the script works.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from megatron_runs import KEY, MOE_SHAPES, Variant, memory_table, parse_arguments, run_variants


def offload(*modules: str) -> tuple[str, ...]:
    """Overrides that offload the inputs of these modules."""
    return (f"{KEY}.fine_grained_activation_offloading=true", f"{KEY}.offload_modules=[{','.join(modules)}]")


def recompute(*modules: str) -> tuple[str, ...]:
    """Overrides that recompute these modules, or whole layers."""
    if not modules:
        return (f"{KEY}.activation_checkpointing=true",)
    return (
        f"{KEY}.activation_checkpointing=true",
        f"{KEY}.recompute_granularity=selective",
        f"{KEY}.recompute_modules=[{','.join(modules)}]",
    )


ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
STATES = (
    f"{KEY}.optimizer.offload_optimizer_states=true",
    f"{KEY}.optimizer.offload_optimizer_states_chunk_mib=1024",
)
# The ones that matter most come first, for runs with little time.
VARIANTS = (
    Variant("resident"),
    Variant("offload all attention", offload(*ATTENTION)),
    Variant("recompute mlp", recompute("mlp")),
    Variant("recompute all", recompute()),
    Variant("offload attention, recompute mlp", (*offload(*ATTENTION), *recompute("mlp"))),
    Variant("states and attention offloaded", (*STATES, *offload(*ATTENTION))),
    Variant("offload core_attn, attn_proj", offload("core_attn", "attn_proj")),
    Variant("states offloaded", STATES),
    Variant("recompute core_attn", recompute("core_attn")),
    Variant("offload half of attention", (*offload(*ATTENTION), f"{KEY}.activation_offload_fraction=0.5")),
)

# Of mixtures of experts.
EXPERTS = ("mlp_norm", "expert_fc1", "moe_act")
MIXTURE_VARIANTS = (
    Variant("resident"),
    Variant("offload experts", offload(*EXPERTS)),
    Variant("recompute experts", recompute("moe")),
    Variant("recompute moe_act", recompute("moe_act")),
    Variant("recompute all", recompute()),
    Variant("offload experts and attention", offload(*ATTENTION, *EXPERTS)),
    Variant("offload attention, recompute experts", (*offload(*ATTENTION), *recompute("moe"))),
    Variant("offload moe_act", offload("moe_act")),
)


def main() -> None:
    """Run every variant and print the table."""
    args = parse_arguments(__doc__ or "", "8192,32768")
    variants = MIXTURE_VARIANTS if args.shape in MOE_SHAPES else VARIANTS
    if args.device == "cpu":
        variants = tuple(v for v in variants if "offload" not in v.name)
    results = run_variants(args, variants)
    print(memory_table(results))


if __name__ == "__main__":
    main()
