"""Device memory and seconds of passes by their number of tokens.

    python benchmarks/pass_memory.py dtensor --shape 0.6B --out results/pass_memory_dtensor_0.6B.json
    python benchmarks/pass_memory.py megatron --shape moonlight-12-layers --small-states
    python benchmarks/pass_memory.py megatron --shape tiny --device cpu --tokens 64,128 --row 32

A pass is one micro-batch of `--tokens` tokens in rows of `--row` tokens. For every variant of the configuration and
every number of tokens it measures forward and backward of training, the update, and a pass for logprobs: the memory
that was allocated before, the most that was allocated and reserved meanwhile, and the seconds of the second such pass.
A variant ends at the first number of tokens for which memory runs out.

Needs a GPU, for Megatron with Transformer Engine. `--device cpu --shape tiny` shows that the script works.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import GIB, NLL
from hybrid_shapes import HYBRID_SHAPES
from qwen3_shapes import MOE_SHAPES, SHAPES, TIED
from workers import DTENSOR, MEGATRON, Run, Variant, on_device, random_batch, run_variants, worker_of

PACKED = ("policy.sequence_packing.enabled=true",)
STREAMED = ("policy.optimizer.name=nemo_offload_rl.optim.AdamW", f"{DTENSOR}.offload_optimizer_states=true")
SMALL = (
    f"{MEGATRON}.optimizer.exp_avg_dtype=bfloat16",
    f"{MEGATRON}.optimizer.exp_avg_sq_dtype=bfloat16",
    f"{MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32=false",
)
RECOMPUTED = f"{MEGATRON}.activation_checkpointing=true"


def selective(*modules: str) -> tuple[str, ...]:
    """Overrides that recompute these modules of Megatron's."""
    cfg = MEGATRON
    return (RECOMPUTED, f"{cfg}.recompute_granularity=selective", f"{cfg}.recompute_modules=[{','.join(modules)}]")


VARIANTS = {
    "dtensor": (
        Variant("kept"),
        Variant("layers recomputed", (f"{DTENSOR}.activation_checkpointing=true",)),
        Variant("kept, packed", PACKED),
        Variant(
            "inputs on the host", (f"{DTENSOR}.activation_checkpointing=true", f"{DTENSOR}.activation_offload=true")
        ),
        Variant("kept, not compiled", (f"{DTENSOR}.torch_compile=false",)),
    ),
    "megatron": (
        Variant("kept"),
        Variant("layers recomputed", (RECOMPUTED,)),
        Variant("kept, packed", PACKED),
        Variant("mlp recomputed", selective("mlp")),
        Variant("core_attn recomputed", selective("core_attn")),
    ),
}
EXPERTS = (Variant("experts recomputed", selective("moe")), Variant("moe_act recomputed", selective("moe_act")))
LATENT = (*EXPERTS, Variant("mla_up_proj recomputed", selective("mla_up_proj")))


def run_passes(run: Run, variant: Variant) -> dict[str, Any]:
    """Measure passes of one worker with every number of tokens, until memory runs out."""
    row_tokens, most = run.rows, max(run.lengths)
    overrides = (
        f"policy.train_micro_batch_size={most // row_tokens}",
        f"policy.train_global_batch_size={most // row_tokens}",
        f"policy.logprob_batch_size={most // row_tokens}",
        f"policy.max_total_sequence_length={row_tokens}",
        f"policy.sequence_packing.train_mb_tokens={most}",
        f"policy.sequence_packing.logprob_mb_tokens={most}",
    )
    with on_device(run.device):
        worker = worker_of(run, (*overrides, *variant.overrides))
        found: dict[str, Any] = {}
        for tokens in run.lengths:
            try:
                found[str(tokens)] = passes_of(worker, run, tokens // row_tokens, row_tokens)
            except Exception as error:  # out of memory, of torch or of a transition
                found[str(tokens)] = {"error": f"{type(error).__name__}: {str(error).split('. ')[0]}"[:300]}
                break
        worker.shutdown()
    return {"tokens": found}


def passes_of(worker: Any, run: Run, rows: int, row_tokens: int) -> dict[str, Any]:
    """Measure both kinds of passes over `rows` rows, and the update."""
    batch = random_batch(Run(**{**vars(run), "rows": rows}), row_tokens, torch.Generator().manual_seed(rows))
    worker.prepare_for_training()
    for _ in range(2):
        training = measured(run, lambda: worker.forward_backward(batch, NLL()))
        update = measured(run, worker.optim_step)
    worker.prepare_for_lp_inference()
    for _ in range(2):
        logprobs = measured(run, lambda: worker.get_logprobs(batch))
    return {"training": training, "update": update, "logprobs": logprobs}


def measured(run: Run, call: Callable[[], Any]) -> dict[str, float]:
    """Bytes before, at the peak and after a call, and its seconds."""
    if run.device == "cpu":
        begin = time.perf_counter()
        call()
        return {"seconds": time.perf_counter() - begin}
    cuda = torch.cuda
    cuda.synchronize()
    cuda.reset_peak_memory_stats()
    before, reserved = cuda.memory_allocated(), cuda.memory_reserved()
    begin = time.perf_counter()
    call()
    cuda.synchronize()
    return {
        "seconds": time.perf_counter() - begin,
        "before_bytes": before,
        "peak_bytes": cuda.max_memory_allocated(),
        "after_bytes": cuda.memory_allocated(),
        "reserved_before_bytes": reserved,
        "reserved_peak_bytes": cuda.max_memory_reserved(),
    }


def print_passes(rows: list[dict[str, Any]]) -> None:
    """Print a line for each variant and number of tokens."""
    print(f"{'variant':24}{'tokens':>8}{'training GiB':>14}{'s':>8}{'update GiB':>12}{'logprobs GiB':>14}{'s':>8}")
    for row in rows:
        for tokens, found in row.get("tokens", {"-": row}).items():
            line = f"{row['variant']:24}{tokens:>8}"
            if "error" in found:
                print(f"{line}  {found['error'][:80]}")
                continue
            for kind in ("training", "update", "logprobs"):
                one = found[kind]
                line += f"{(one.get('peak_bytes', 0) - one.get('before_bytes', 0)) / GIB:14.3f}"
                line += "" if kind == "update" else f"{one['seconds']:8.3f}"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=list(VARIANTS))
    parser.add_argument("--shape", default="0.6B", choices=[*SHAPES, *MOE_SHAPES, *HYBRID_SHAPES])
    parser.add_argument("--tokens", default="1024,4096,16384,32768,65536", help="tokens of a pass; several by commas")
    parser.add_argument("--row", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--only", nargs="+", help="run these variants, by their whole names")
    parser.add_argument("--small-states", action="store_true", help="moments of 16 bits; DTensor streams them")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--host-gib", type=int, default=16, help="host memory to touch before anything is measured")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--overrides", nargs="*", default=(), metavar="KEY=VALUE", help="of every variant")
    args = parser.parse_args()
    small = () if not args.small_states else STREAMED if args.backend == "dtensor" else SMALL
    run = Run(
        shape=args.shape,
        folder="",
        device=args.device,
        lengths=tuple(int(count) for count in args.tokens.split(",")),
        rows=args.row,
        steps=0,
        warmup_steps=0,
        overrides=(*small, *args.overrides),
        backend=args.backend,
    )
    variants = VARIANTS[args.backend]
    if args.backend == "megatron":
        is_latent = "kv_lora_rank" in HYBRID_SHAPES.get(args.shape, {})
        variants += LATENT if is_latent else EXPERTS if args.shape in MOE_SHAPES else ()
    if args.device == "cpu":
        variants = tuple(v for v in variants if v.overrides != PACKED)
    chosen = [v for v in variants if not args.only or v.name in args.only]
    results = run_variants(args, run, chosen, run_passes, ties_embeddings=args.shape in TIED)
    print(f"{results['machine']['gpu']}, {args.shape}, {args.backend}, {results['date']}")
    print_passes(results["rows"])


if __name__ == "__main__":
    main()
