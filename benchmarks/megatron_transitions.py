"""One Megatron worker by itself: how long each call of a step holds up its caller, from the first step on.

    python benchmarks/megatron_transitions.py --shape 0.6B --steps 5 --out megatron_transitions.json

Nothing waits for the engine here, so that `offload_after_refit` has all copies out before it. The second variant leaves
out what `CudaDevice` does when it is made against the first leaving of the optimizer being waited for.

Needs a GPU with Transformer Engine; `--device cpu --shape tiny --lengths 32` shows that the script works.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from megatron_runs import Run, Variant, make_worker, on_device, parse_arguments, random_batch, run_children
from residency_overlap import NLL

from nemo_offload_rl.residency.device.cuda import CudaDevice

LATE = "kernels loaded at first use"
VARIANTS = (Variant("as it is"), Variant(LATE))
CALLS = (
    "prepare_for_lp_inference",
    "prepare_for_training",
    "offload_before_refit",
    "start_refit",
    "next_bucket",
    "offload_after_refit",
)


def steps_of(run: Run, variant: Variant) -> dict[str, Any]:
    """Seconds of each call, summed over a step, for every step."""
    if variant.name == LATE:
        CudaDevice._load_kernels = lambda self: None
    steps: list[dict[str, float]] = []
    with on_device(run.device):
        worker = make_worker(run, variant)
        generator = torch.Generator().manual_seed(0)

        def timed(name: str) -> Any:
            begin_s = time.perf_counter()
            result = getattr(worker, name)()
            steps[-1][name] = steps[-1].get(name, 0.0) + time.perf_counter() - begin_s
            return result

        for _ in range(run.warmup_steps + run.steps):
            batch = random_batch(run, run.lengths[0], generator)
            steps.append({})
            timed("prepare_for_lp_inference")
            worker.get_logprobs(batch)
            timed("prepare_for_training")
            worker.train(batch, NLL())
            if run.device == "cuda":
                torch.cuda.synchronize()
            timed("offload_before_refit")
            timed("start_refit")
            while not timed("next_bucket").is_last:
                pass
            timed("offload_after_refit")
        worker.shutdown()
    return {"steps": steps}


def table(results: dict[str, Any]) -> str:
    """Milliseconds by call: of the first step, and the median of the others."""
    lines = [f"{'ms, first and later steps':28}" + "".join(f"{name:>26}" for name in CALLS)]
    for row in results["rows"]:
        if "error" in row:
            lines.append(f"{row['variant']:28} {row['error'][:90]}")
            continue
        first, *later = row["steps"]
        pairs = ((first[name], statistics.median(step[name] for step in later)) for name in CALLS)
        lines.append(f"{row['variant']:28}" + "".join(f"{1e3 * a:16.1f}{1e3 * b:10.1f}" for a, b in pairs))
    return "\n".join(lines)


def main() -> None:
    """Run both variants and print the table."""
    args = parse_arguments(__doc__ or "", "1024")
    print(table(run_children(args, VARIANTS, steps_of)))


if __name__ == "__main__":
    main()
