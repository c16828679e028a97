"""Does residency change a bit of what a mixture of experts learns? Steps with every phase, offloaded and not.

    python benchmarks/moe_residency.py --backend dtensor --out benchmarks/results/moe_residency_dtensor.json
    python benchmarks/moe_residency.py --backend megatron --out benchmarks/results/moe_residency_megatron.json

Each step is a logprob pass, a training step and a refit's reading of all weights, with `policy.deterministic=true`.
The first variant leaves everything on the device; the others offload it after each refit. Losses, gradient norms, sums
of logprobs and checksums of all weights have to be those of the first variant, bit by bit; the exit status is 1 where
they are not.

Needs a GPU; `--device cpu --shape moe-tiny --lengths 32 --rows 4` shows that the script works.
"""

from __future__ import annotations

import argparse
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
    random_batch,
    run_children,
    worker_of,
)
from residency_overlap import NLL

DETERMINISTIC = "policy.deterministic=true"
STAYS = ("policy.residency_overrides={params: device, optimizer: device}",)
IN_PARTS = {
    "megatron": (
        f"{KEY}.optimizer.offload_optimizer_states=true",
        f"{KEY}.optimizer.offload_optimizer_states_chunk_mib=1024",
    ),
    "dtensor": (
        "policy.dtensor_cfg.offload_optimizer_states=true",
        "policy.dtensor_cfg.offload_optimizer_states_chunk_mib=1024",
    ),
}


def variants_of(backend: str) -> tuple[Variant, ...]:
    """The rows of the table."""
    return (
        Variant("resident", STAYS),
        Variant("offloaded"),
        Variant("offloaded, states streamed in parts", IN_PARTS[backend]),
    )


def checksum(tensor: torch.Tensor) -> int:
    """A sum of the bits, each element weighted by its place."""
    bits = tensor.detach().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).flatten()
    total = 0
    for number, piece in enumerate(bits.split(1 << 24)):
        places = torch.arange(1, piece.numel() + 1, device=piece.device, dtype=torch.int64) % 65521
        total += (number + 1) * int((piece.to(torch.int64) * places).sum())
    return total


def run_steps(run: Run, variant: Variant, backend: str) -> dict[str, Any]:
    """What every phase of some steps gave, and what was moved."""
    deterministic = Variant(variant.name, (DETERMINISTIC, *variant.overrides))
    with on_device(run.device):
        if backend == "megatron":
            worker = make_worker(run, deterministic)
        else:
            worker = worker_of(run, deterministic, "grpo_math_1B.yaml")
        generator = torch.Generator().manual_seed(0)
        seen: list[Any] = []
        moved_bytes = 0
        for _ in range(run.steps):
            batch = random_batch(run, max(run.lengths), generator)
            worker.prepare_for_lp_inference()
            seen.append(float(worker.get_logprobs(batch).double().sum()))
            worker.prepare_for_training()
            result = worker.train(batch, NLL())
            seen += [*result.loss, *result.grad_norm]
            worker.offload_before_refit()
            seen.append(sum(checksum(tensor) for _, tensor in worker.named_weights()))
            worker.offload_after_refit()
            for report in worker.residency_reports():
                moved_bytes += sum(group.bytes_in + group.bytes_out for group in report.groups.values())
        on_device_bytes = sum(worker.residency.device_bytes().values())
        worker.shutdown()
        return {"seen": seen, "moved_gb": moved_bytes / 1e9, "device_gib": on_device_bytes / 2**30}


def table(results: dict[str, Any]) -> str:
    """A line for each variant."""
    rows = results["rows"]
    lines = [f"{results['machine']['gpu']}, {results['shape']}, {results['backend']}"]
    lines.append(f"{'variant':38}{'GB moved':>10}{'GiB left':>10}  {'losses':32}same bits")
    for row in rows:
        if "error" in row:
            lines.append(f"{row['variant']:38}{row['error'][:80]}")
            continue
        losses = " ".join(f"{loss:.6f}" for loss in row["seen"][1::4])
        same = "-" if row is rows[0] else str(row["seen"] == rows[0]["seen"])
        lines.append(f"{row['variant']:38}{row['moved_gb']:>10.1f}{row['device_gib']:>10.2f}  {losses:32}{same}")
    return "\n".join(lines)


def main() -> None:
    """Run every variant and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, lengths="1024", shape="12-layers", rows=8)
    parser.add_argument("--backend", default="megatron", choices=list(IN_PARTS))
    args = parser.parse_args()

    def run_backend(run: Run, variant: Variant) -> dict[str, Any]:
        return run_steps(run, variant, args.backend)

    is_megatron = args.backend == "megatron"
    results = run_children(
        args, variants_of(args.backend), run_backend, may_share_process=True, needs_megatron=is_megatron
    )
    results["backend"] = args.backend
    print(table(results))
    first, *others = results["rows"]
    if any(row.get("seen") != first.get("seen", []) for row in others):
        sys.exit(1)


if __name__ == "__main__":
    main()
