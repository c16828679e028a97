"""What clearing the Megatron backend's caches before a refit frees: GiB, and whether the next step is the same.

    python benchmarks/megatron_caches.py --out benchmarks/results/megatron_caches.json

After training steps of a Qwen3 shape (bf16, and with 8-bit matrix products), everything leaves the GPU as before a
generation; what this process still has allocated is read without and with the caches cleared.

Needs a GPU with Transformer Engine; `--device cpu --shape tiny --lengths 32` shows that the script works.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from megatron_runs import GIB, KEY, Run, Variant, make_worker, measure, on_device, parse_arguments, run_children

CACHES = f"{KEY}.clear_memory_caches_before_refit=true"
EIGHT_BIT = f"{KEY}.fp8_cfg.enabled=true"
EIGHT_BIT_CACHES = f"{KEY}.fp8_cfg.force_clear_fp8_caches=true"
VARIANTS = (
    Variant("bf16"),
    Variant("bf16, caches cleared", (CACHES,)),
    Variant("8 bits", (EIGHT_BIT,)),
    Variant("8 bits, caches cleared", (EIGHT_BIT, CACHES)),
    Variant("8 bits, 8-bit copies cleared", (EIGHT_BIT, EIGHT_BIT_CACHES)),
)


def left_after(run: Run, variant: Variant) -> dict[str, Any]:
    """Steps, everything out, what is left, and a step again."""
    with on_device(run.device):
        worker = make_worker(run, variant)
        worker.prepare_for_training()
        before = measure(worker, run, run.lengths[0])["losses"]
        worker.offload_before_refit()
        worker.offload_after_refit()
        left_bytes = torch.cuda.memory_allocated() if run.device == "cuda" else 0
        worker.prepare_for_training()
        after = measure(worker, run, run.lengths[0])["losses"]
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.shutdown()
        return {"left_gib": left_bytes / GIB, "losses": [*before, *after]}


def table(results: dict[str, Any]) -> str:
    """GiB still allocated, and whether the losses are those of the variant that clears nothing."""
    lines = [f"{results['machine']['gpu']}, {results['shape']}", f"{'':32}{'left, GiB':>12}  losses"]
    expected: dict[str, list[float]] = {}
    for row in results["rows"]:
        if "error" in row:
            lines.append(f"{row['variant']:32} {row['error'][:90]}")
            continue
        same = expected.setdefault(row["variant"].partition(",")[0], row["losses"]) == row["losses"]
        lines.append(f"{row['variant']:32}{row['left_gib']:12.3f}  {'equal' if same else 'DIFFERENT'}")
    return "\n".join(lines)


def main() -> None:
    """Run every variant and print the table."""
    args = parse_arguments(__doc__ or "", "1024")
    variants = VARIANTS
    if args.device == "cpu":
        variants = tuple(v for v in VARIANTS if "8 bits" not in v.name)
    print(table(run_children(args, variants, left_after, may_share_process=True)))


if __name__ == "__main__":
    main()
