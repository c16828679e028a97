"""What entering a phase costs on a CPU: moving state between tensors and the host arena, or finding nothing to do.

    python benchmarks/enter_cpu.py --hidden 512 --layers 8 --cycles 5

Prints one row a transition: bytes, seconds (median), GB/s, and the same copy done tensor by tensor with `Tensor.clone`
as the yardstick of the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from nemo_offload_rl.residency import (
    CpuDevice,
    GradsGroup,
    Phase,
    ResidencyManager,
    ResidencySettings,
    TensorGroup,
    optimizer_tensors,
    resolve_plan,
)

CYCLE = (Phase.TRAINING, Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE)


def build(hidden: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer, ResidencyManager]:
    """A stack of linear layers with one step of Adam done, and a manager for its state."""
    model = nn.Sequential(*[nn.Linear(hidden, 4 * hidden) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    settings = ResidencySettings(
        colocated=True, use_pinned_optimizer_offload=True, offload_optimizer_states_for_logprob=True
    )
    groups = [
        TensorGroup("params", model.named_parameters),
        GradsGroup(model.named_parameters),
        TensorGroup("optimizer", lambda: optimizer_tensors(optimizer, model.named_parameters)),
    ]
    return model, optimizer, ResidencyManager(plan=resolve_plan(settings), groups=groups, device=CpuDevice())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()

    model, optimizer, manager = build(args.hidden, args.layers)
    seconds: dict[str, list[float]] = {}
    num_bytes: dict[str, int] = {}
    for cycle in range(args.cycles + 1):
        for phase in CYCLE:
            for label, is_again in ((f"enter {phase.value}", False), (f"enter {phase.value} again", True)):
                start = time.perf_counter()
                report = manager.enter(phase)
                elapsed = time.perf_counter() - start
                assert not (is_again and report.bytes_moved)
                if cycle:
                    seconds.setdefault(label, []).append(elapsed)
                    num_bytes[label] = report.bytes_moved
        with manager.during(Phase.OPTIM_STEP):
            manager.mark_written("params", "optimizer")
    manager.enter(Phase.TRAINING)
    tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    tensors += list(model.parameters())
    clone_s = []
    for _ in range(args.cycles):
        start = time.perf_counter()
        clones = [tensor.detach().clone() for tensor in tensors]
        clone_s.append(time.perf_counter() - start)
        del clones
    seconds["Tensor.clone of everything"] = clone_s
    num_bytes["Tensor.clone of everything"] = sum(tensor.nbytes for tensor in tensors)

    rows = [
        {"what": label, "bytes": num_bytes[label], "median_s": statistics.median(values)}
        for label, values in seconds.items()
    ]
    print(f"{'what':32} {'MiB':>9} {'median ms':>10} {'GB/s':>7}")
    for row in rows:
        rate = row["bytes"] / row["median_s"] / 1e9
        print(f"{row['what']:32} {row['bytes'] / 2**20:9.1f} {row['median_s'] * 1e3:10.3f} {rate:7.2f}")
    if args.out:
        machine = {"processor": platform.machine(), "torch": torch.__version__}
        result = {"machine": machine, "args": vars(args) | {"out": None}, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
