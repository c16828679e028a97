"""Megatron's real distributed optimizer leaving the GPU and coming back: this project beside megatron-core's own way.

    python benchmarks/residency_megatron.py --shape 1.5B --out benchmarks/results/residency_megatron.json

After a training step of a Qwen3 shape (bf16), each cycle moves what a generation phase needs out of the way (masters,
Adam's states, parameters, gradient buffers) and back. megatron-core's way is what its RL code calls: `offload_to_cpu`
and `restore_from_cpu` of the optimizer and of the parameter and gradient buffers. An offload ends when the driver has
the memory, a coming back when everything can be used; losses of the steps after the cycles are compared.

Needs a GPU with Transformer Engine; `--device cpu --shape tiny --lengths 32` shows that the script works.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from megatron_runs import (
    GIB,
    KEY,
    Run,
    Variant,
    make_worker,
    measure,
    on_device,
    parse_arguments,
    run_children,
)

OURS, CORE = "nemo_offload_rl", "megatron-core"
AWARE = f"{KEY}.optimizer.use_precision_aware_optimizer"
VARIANTS = (
    Variant(f"{OURS}, fp32 masters", (f"{AWARE}=false",)),
    Variant(f"{CORE}, fp32 masters", (f"{AWARE}=false",)),
    Variant(f"{OURS}, precision-aware", (f"{AWARE}=true",)),
    Variant(f"{CORE}, precision-aware", (f"{AWARE}=true",)),
)
CYCLES = 3


def cycles_of(run: Run, variant: Variant) -> dict[str, Any]:
    """A step, cycles, and a step again."""
    with on_device(run.device):
        worker = make_worker(run, variant)
        worker.prepare_for_training()
        length = run.lengths[0]
        before = measure(worker, run, length)["losses"]
        away, back = ours(worker) if variant.name.startswith(OURS) else megatron_cores(worker)
        if not variant.name.startswith(OURS):
            worker.residency.settle()
        rows = [cycle(run.device, away, back) for _ in range(CYCLES)]
        after = measure(worker, run, length)["losses"]
        worker.shutdown()
        return {"cycles": rows, "losses_before": before, "losses_after": after}


def ours(worker: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The verbs of a step, each waited for."""

    def away() -> None:
        worker.residency.mark_written("params", "optimizer")  # as a training step between two cycles does
        worker.offload_before_refit()
        worker.offload_after_refit()

    def back() -> None:
        from nemo_offload_rl.residency import Phase

        worker.prepare_for_training()
        worker.residency.enter(Phase.OPTIM_STEP)
        worker.residency.settle()
        worker.prepare_for_training()

    return away, back


def megatron_cores(worker: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What megatron/rl/rl_utils.py calls around its rollouts."""
    backend = worker._backend
    chunks = backend._chunks
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def away() -> None:
        backend._optimizer.offload_to_cpu()
        for buffer in buffers:
            buffer.offload_to_cpu(move_params=True, move_grads=True)
        torch.cuda.empty_cache()

    def back() -> None:
        for buffer in buffers:
            buffer.reload_from_cpu(move_params=True, move_grads=True)
        backend._optimizer.restore_from_cpu()

    return away, back


def cycle(device: str, away: Callable[[], Any], back: Callable[[], Any]) -> dict[str, float]:
    """Seconds of both ways, and what the driver got back."""
    free = free_bytes(device)
    offload_s = timed(device, away)
    freed = free_bytes(device) - free
    return {"offload_s": offload_s, "freed_gib": freed / GIB, "reload_s": timed(device, back)}


def timed(device: str, work: Callable[[], Any]) -> float:
    """Seconds until everything that `work` started has finished."""
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def free_bytes(device: str) -> int:
    """Free memory as the driver sees it."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def table(results: dict[str, Any]) -> str:
    """First and last cycle."""
    link = "link {d2h:.1f} out, {h2d:.1f} in (GB/s)".format(**results["link_gb_per_s"])
    lines = [f"{results['machine']['gpu']}, {results['shape']}, {link}"]
    lines.append(f"{'':36}{'first out, s':>14}{'out, s':>10}{'in, s':>10}{'freed GiB':>12}  losses go on")
    expected: dict[str, list[float]] = {}
    for row in results["rows"]:
        if "error" in row:
            lines.append(f"{row['variant']:36} {row['error'][:90]}")
            continue
        first, last = row["cycles"][0], row["cycles"][-1]
        same = expected.setdefault(row["variant"].partition(", ")[2], row["losses_after"]) == row["losses_after"]
        numbers = f"{first['offload_s']:14.3f}{last['offload_s']:10.3f}{last['reload_s']:10.3f}"
        lines.append(f"{row['variant']:36}{numbers}{last['freed_gib']:12.2f}  {'equal' if same else 'DIFFERENT'}")
    return "\n".join(lines)


def main() -> None:
    """Run every variant and print the table."""
    args = parse_arguments(__doc__ or "", "1024")
    variants = VARIANTS
    if args.device == "cpu":
        # On a CPU megatron-core's buffers would lose their contents: their copy is an alias.
        variants = tuple(v for v in VARIANTS if "fp32" in v.name and OURS in v.name)
    results = run_children(args, variants, cycles_of, may_share_process=True)
    print(table(results))


if __name__ == "__main__":
    main()
