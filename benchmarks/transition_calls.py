"""Which calls the host spends each transition in: those to torch's allocator, copies, marks, listing of tensors.

    python benchmarks/transition_calls.py --json benchmarks/results/transition_calls.json

The loop of `residency_overlap.py`, its overlapped variant, in this process, with a clock around calls of the residency
code; a call inside another counts in both. The table is of the last step.

Needs a GPU; with --device cpu --shape tiny it runs to show that it works.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from residency_overlap import add_loop_arguments, run_variant, write_model
from residency_peers import grow_host_memory, probe_link

from nemo_offload_rl.residency import ResidencyManager
from nemo_offload_rl.residency.device.cuda import CudaDevice, CudaTransfer
from nemo_offload_rl.residency.state.group_state import GroupState
from nemo_offload_rl.residency.state.snapshot import Snapshot
from nemo_offload_rl.residency.state.transaction import GroupSet, Transaction
from nemo_offload_rl.residency.table.leftovers import LeftoverCheck
from nemo_offload_rl.residency.table.plan import Phase

CALLS: dict[type, tuple[str, ...]] = {
    CudaDevice: ("allocate", "release", "release_cache", "used_bytes", "leftovers", "_cross"),
    CudaTransfer: ("mark", "wait_device", "wait_host"),
    GroupSet: ("prepare", "records", "settle"),
    Transaction: ("run",),
    GroupState: ("arrive", "leave", "start_refresh"),
    Snapshot: ("stage", "release"),
    LeftoverCheck: ("check",),
}
SHOWN_FROM_S = 1e-3


def count_calls() -> list[dict[str, Any]]:
    """Put clocks around the calls; the list grows by one entry with each transition."""
    calls: dict[str, list[float]] = defaultdict(list)
    transitions: list[dict[str, Any]] = []

    def clocked(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                calls[name].append(time.perf_counter() - begin_s)

        return wrapped

    def of_transition(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: ResidencyManager, phase: Phase) -> Any:
            source = self.phase.value if self.phase else "start"
            calls.clear()
            num_before, begin_s = _num_driver_calls(), time.perf_counter()
            result = call(self, phase)
            seconds = time.perf_counter() - begin_s
            transitions.append(
                {
                    "what": f"{source} -> {phase.value}",
                    "s": seconds,
                    "driver_allocs": _num_driver_calls() - num_before,
                    "parts": {name: [len(took), sum(took), max(took)] for name, took in calls.items()},
                }
            )
            return result

        return wrapped

    for owner, names in CALLS.items():
        for name in names:
            setattr(owner, name, clocked(getattr(owner, name), f"{owner.__name__}.{name}"))
    ResidencyManager.enter = of_transition(ResidencyManager.enter)
    return transitions


def _num_driver_calls() -> int:
    return torch.cuda.memory_stats()["num_device_alloc"] if torch.cuda.is_available() else 0


def main() -> None:
    """Run the loop and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loop_arguments(parser)
    parser.set_defaults(steps=2, refit_s=0.4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    command = shlex.join(["python", "benchmarks/transition_calls.py", *sys.argv[1:]])
    link = {"d2h": 0.0, "h2d": 0.0}
    if args.device == "cuda":
        grow_host_memory(48 << 30)
        link = probe_link(torch.device(args.device))
    args.child = "overlapped"
    transitions = count_calls()
    with tempfile.TemporaryDirectory() as folder:
        write_model(args.shape, Path(folder), args.device)
        row = run_variant(Path(folder), args)
    last_step = transitions[-len(transitions) // (args.steps + 2) :]
    machine = {"gpu": torch.cuda.get_device_name() if args.device == "cuda" else "none", "torch": torch.__version__}
    result = {"date": datetime.date.today().isoformat(), "command": command, "machine": machine, "link_gb_per_s": link}
    if args.json:
        args.json.write_text(json.dumps(result | {"row": row, "transitions": last_step}, indent=1) + "\n")
    for entry in last_step:
        print(f"{entry['what']:32} {entry['s']:.4f} s, {entry['driver_allocs']} calls of the driver for memory")
        for name, (num, seconds, longest) in sorted(entry["parts"].items(), key=lambda part: -part[1][1]):
            if seconds >= SHOWN_FROM_S:
                print(f"    {name:32} {num:5}x {seconds * 1e3:8.1f} ms, the longest {longest * 1e3:6.1f}")


if __name__ == "__main__":
    main()
