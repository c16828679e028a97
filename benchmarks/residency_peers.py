"""The same optimizer state through this project and through its peers' algorithms, one process each.

    python benchmarks/residency_peers.py --sizes 1.5B 4B --cycles 3 --out benchmarks/results/residency_peers.json

State: float32 masters, exp_avg and exp_avg_sq of a Qwen3 shape. Each cycle offloads everything, checks that the driver
got the memory, reloads everything and checks the values. The first cycle is what a user's first step pays. The link is
probed in the same run. torch_memory_saver is measured where it is installed.

Needs a GPU; with --device cpu it runs at size tiny to show that it works.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.util
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from peer_algorithms import ALGORITHMS, NemoOffloadRl, TorchMemorySaver
from qwen3_shapes import SHAPES

KINDS = ("master", "exp_avg", "exp_avg_sq")
GB = 1e9


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


def grow_host_memory(num_bytes: int) -> float:
    """Touch as much host memory as the runs need: a virtual machine may grow on first touch, which is not measured."""
    start = time.perf_counter()
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = (ctypes.c_char * num_bytes).from_buffer(memory)
        base = ctypes.addressof(view)
        piece = 256 << 20
        with ThreadPoolExecutor(8) as pool:
            spans = [(base + o, min(piece, num_bytes - o)) for o in range(0, num_bytes, piece)]
            list(pool.map(lambda span: ctypes.memset(span[0], 1, span[1]), spans))
        del view
    return time.perf_counter() - start


def probe_link(device: torch.device, num_bytes: int = 4 << 30) -> dict[str, float]:
    """GB/s of plain pinned copies, best of three."""
    rates = {"d2h": 0.0, "h2d": 0.0}
    if device.type != "cuda":
        return rates
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    for direction, (target, source) in {"d2h": (host, on_device), "h2d": (on_device, host)}.items():
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates[direction] = max(rates[direction], num_bytes / (time.perf_counter() - start) / GB)
    return rates


def used_bytes(device: torch.device) -> int:
    """Memory in use on the device, as the driver sees it."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def pinned_bytes(algorithm: Any) -> int:
    """Host memory that is page-locked for the algorithm."""
    if isinstance(algorithm, NemoOffloadRl):
        arena = algorithm.manager._arenas.arena(pinned=True)
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
    grow_s = grow_host_memory(int(1.3 * biggest) + (6 << 30)) if device.type == "cuda" else 0.0
    link = probe_link(device)
    print(f"host memory touched in {grow_s:.1f} s; link D2H {link['d2h']:.1f} H2D {link['h2d']:.1f} GB/s", flush=True)
    rows, failures = [], []
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
            if args.out:
                write(args.out, rows, failures, link, device)
    print(HEADER)
    for row in rows:
        print(summary(row))
    for failure in failures:
        print("not measured:", failure)


def write(path: Path, rows: list[dict], failures: list[str], link: dict[str, float], device: torch.device) -> None:
    """Everything that the document's table is made from."""
    machine = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "cpu_cores": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    command = " ".join(["python", "benchmarks/residency_peers.py", *sys.argv[1:]])
    date = datetime.date.today().isoformat()
    result = {"date": date, "command": command, "machine": machine, "link_gb_per_s": link, "rows": rows}
    path.write_text(json.dumps(result | {"not_measured": failures}, indent=1))


if __name__ == "__main__":
    main()
