"""The same optimizer state offloaded and reloaded by this project and by its peers' algorithms, one process each.

    python benchmarks/residency_peers.py --sizes 1.5B --cycles 3 --out benchmarks/results/residency_peers_1.5B.json

State: float32 masters, exp_avg and exp_avg_sq of a Qwen3 shape. Each cycle offloads everything, checks that the driver
got the memory, reloads everything and checks the values. The first cycle is what a user's first step pays. The link is
probed in the same run. torch_memory_saver is measured where it is installed.

It prints a line for each algorithm: seconds before the first step, of the first offload and of steady ones with GB/s,
the share of the memory that the driver got, pinned bytes over state, and whether the values are equal.
Needs a GPU; `--device cpu --sizes tiny` shows that the script works. Docs: docs/measurements/residency.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import GB, grow_host_memory, measured_with, probe_link, write_result
from peer_algorithms import ALGORITHMS, NemoOffloadRl, TorchMemorySaver
from qwen3_shapes import SHAPES
from torch import Tensor

KINDS = ("master", "exp_avg", "exp_avg_sq")


def make_state(size: str, device: torch.device) -> dict[str, Tensor]:
    """Random state; `master/<name>` and so on."""
    generator = torch.Generator(device=device).manual_seed(0)
    return {
        f"{kind}/{name}": torch.randn(shape, device=device, generator=generator)
        for name, shape in SHAPES[size].parameters()
        for kind in KINDS
    }


def fingerprint(state: dict[str, Tensor]) -> list[int]:
    """Two sums over the bits of each tensor, one of them weighted by position: any moved or changed word shows."""
    sums = []
    for tensor in state.values():
        words = tensor.detach().view(torch.int32).flatten()
        weights = torch.arange(words.numel(), device=words.device, dtype=torch.int32) | 1
        sums += [int(words.sum(dtype=torch.int64)), int((words * weights).sum(dtype=torch.int64))]
    return sums


def used_bytes(device: torch.device) -> int:
    """Memory in use on the device, as the driver sees it."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def pinned_bytes(algorithm: Any) -> int:
    """Host memory that is page-locked for the algorithm."""
    if isinstance(algorithm, NemoOffloadRl):
        arena = algorithm.manager._arena
        return arena.reserved_bytes if arena.pinned else 0
    if isinstance(algorithm, TorchMemorySaver):
        return -1
    stats = torch.cuda.host_memory_stats() if torch.cuda.is_available() else {}
    return int(stats["allocated_bytes.current"]) if "allocated_bytes.current" in stats else 0


def measure(name: str, size: str, cycles: int, device: torch.device) -> dict[str, Any]:
    """One algorithm in this process."""
    if name.startswith("torch_memory_saver"):
        from torch_memory_saver import torch_memory_saver  # type: ignore[import-not-found]

        with torch_memory_saver.region(enable_cpu_backup=True):
            state = make_state(size, device)
    else:
        state = make_state(size, device)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    before = fingerprint(state)
    algorithm = ALGORITHMS[name](state, device)
    start = time.perf_counter()
    algorithm.prepare()
    prepare_s = time.perf_counter() - start
    algorithm.give_back()
    rows = []
    for _ in range(cycles):
        algorithm.synchronize()
        used = used_bytes(device)
        start = time.perf_counter()
        algorithm.offload()
        offload_s = time.perf_counter() - start
        freed = used - used_bytes(device)
        start = time.perf_counter()
        algorithm.reload()
        reload_s = time.perf_counter() - start
        rows.append({"offload_s": offload_s, "reload_s": reload_s, "freed_bytes": freed})
    correct = fingerprint(algorithm.state) == before
    return {
        "algorithm": name,
        "source": algorithm.source,
        "size": size,
        "state_bytes": num_bytes,
        "num_tensors": len(state),
        "prepare_s": prepare_s,
        "cycles": rows,
        "pinned_bytes": pinned_bytes(algorithm),
        "values_equal": correct,
    }


def summary(row: dict[str, Any]) -> str:
    """One line of the table."""
    first, steady = row["cycles"][0], row["cycles"][1:] or row["cycles"]
    offload = statistics.median(c["offload_s"] for c in steady)
    reload = statistics.median(c["reload_s"] for c in steady)
    size = row["state_bytes"]
    return (
        f"{row['size']:>5} {row['algorithm']:28} {row['prepare_s']:8.2f} {first['offload_s']:8.2f} {offload:8.3f} "
        f"{size / offload / GB:7.1f} {reload:8.3f} {size / reload / GB:7.1f} "
        f"{row['cycles'][-1]['freed_bytes'] / size:6.1%} {row['pinned_bytes'] / size:7.2f} "
        f"{'equal' if row['values_equal'] else 'WRONG'}"
    )


HEADER = (
    f"{'size':>5} {'algorithm':28} {'prep s':>8} {'1st out':>8} {'out s':>8} {'GB/s':>7} {'in s':>8} {'GB/s':>7} "
    f"{'freed':>6} {'pinned':>7} values"
)


def environment_for(name: str) -> dict[str, str]:
    """Environment of the child process; torch_memory_saver wants its hook loaded first."""
    env = dict(os.environ)
    if name.startswith("torch_memory_saver"):
        from torch_memory_saver.utils import get_binary_path_from_package  # type: ignore[import-not-found]

        env["LD_PRELOAD"] = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    return env


def main() -> None:
    """Measure every algorithm in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1.5B"], choices=list(SHAPES))
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.child:
        print(json.dumps(measure(args.algorithms[0], args.sizes[0], args.cycles, device)))
        return
    biggest = max(3 * 4 * sum(torch.Size(s).numel() for _, s in SHAPES[size].parameters()) for size in args.sizes)
    if device.type == "cuda":
        grow_host_memory(int(1.3 * biggest) + (6 << 30))
    link = probe_link(device.type)
    print(f"link D2H {link['d2h']:.1f} H2D {link['h2d']:.1f} GB/s", flush=True)
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    result = {**measured_with(), "link_gb_per_s": link, "rows": rows, "not_measured": failures}
    for size in args.sizes:
        for name in args.algorithms:
            if name.startswith("torch_memory_saver") and importlib.util.find_spec("torch_memory_saver") is None:
                failures.append(f"{name}: not installed")
                continue
            command = [sys.executable, __file__, "--child", "--sizes", size, "--algorithms", name]
            command += ["--cycles", str(args.cycles), "--device", args.device]
            child = subprocess.run(command, capture_output=True, text=True, env=environment_for(name))
            if child.returncode:
                failures.append(f"{name} {size}: {child.stderr.strip().splitlines()[-1:]}")
                continue
            rows.append(json.loads(child.stdout.strip().splitlines()[-1]))
            print(summary(rows[-1]), flush=True)
            write_result(args.out, result)
    print(HEADER)
    for row in rows:
        print(summary(row))
    for failure in failures:
        print("not measured:", failure)


if __name__ == "__main__":
    main()
