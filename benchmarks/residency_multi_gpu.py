"""Several GPUs of one host offloading at once: each rank moves its own state, beside a link probed by as many ranks.

python benchmarks/residency_multi_gpu.py --gpus 2 --size 1.5B --cycles 3 --out benchmarks/results/residency_x2.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))
from peer_algorithms import NemoOffloadRl
from qwen3_shapes import SHAPES
from residency_peers import fingerprint, grow_host_memory, make_state

GB = 1e9


def rank_main(rank: int, args: argparse.Namespace, barrier: Any, results: Any) -> None:
    """One rank: probe together, then offload and reload together."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    state = make_state(args.size, device)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    before = fingerprint(state)
    algorithm = NemoOffloadRl(state, device)
    start = time.perf_counter()
    algorithm.prepare()
    prepare_s = time.perf_counter() - start
    link = {}
    probe_bytes = 4 << 30
    on_device = torch.empty(probe_bytes, dtype=torch.uint8, device=device)
    host = torch.empty(probe_bytes, dtype=torch.uint8, pin_memory=True)
    for name, (target, source) in {"d2h": (host, on_device), "h2d": (on_device, host)}.items():
        rates = []
        for _ in range(3):
            torch.cuda.synchronize()
            barrier.wait()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates.append(probe_bytes / (time.perf_counter() - start) / GB)
        link[name] = sorted(rates)[1]
    del on_device, host
    torch.cuda.empty_cache()
    cycles = []
    for _ in range(args.cycles):
        times = {}
        for verb in ("offload", "reload"):
            torch.cuda.synchronize()
            barrier.wait()
            start = time.perf_counter()
            getattr(algorithm, verb)()
            times[verb] = time.perf_counter() - start
        cycles.append(times)
    reports = [r for r in algorithm.manager.reports.drain() if r.bytes_moved]
    results.put(
        {
            "rank": rank,
            "state_bytes": num_bytes,
            "prepare_s": prepare_s,
            "link_gb_per_s": link,
            "cycles": cycles,
            "copy_gb_per_s": [r.link_gb_per_s for r in reports],
            "values_equal": fingerprint(algorithm.state) == before,
        }
    )


def main() -> None:
    """Start the ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--size", default="1.5B", choices=list(SHAPES))
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    grow_host_memory(args.gpus * (28 << 30))
    context = mp.get_context("spawn")
    barrier, results = context.Barrier(args.gpus), context.Queue()
    processes = [context.Process(target=rank_main, args=(r, args, barrier, results)) for r in range(args.gpus)]
    for process in processes:
        process.start()
    rows = sorted((results.get(timeout=400) for _ in processes), key=lambda row: row["rank"])
    for process in processes:
        process.join()
    print("rank  link D2H  H2D   out GB/s  in GB/s  (steady, memory given back and taken)   values")
    for row in rows:
        steady = row["cycles"][1:]
        out = row["state_bytes"] / min(c["offload"] for c in steady) / GB
        back = row["state_bytes"] / min(c["reload"] for c in steady) / GB
        link = row["link_gb_per_s"]
        equal = "equal" if row["values_equal"] else "WRONG"
        print(f"{row['rank']:4} {link['d2h']:9.1f} {link['h2d']:5.1f} {out:9.1f} {back:8.1f}   {equal}")
    if args.out:
        machine = {"gpu": torch.cuda.get_device_name(), "gpus": args.gpus, "torch": torch.__version__}
        command = " ".join(["python", "benchmarks/residency_multi_gpu.py", *sys.argv[1:]])
        date = datetime.date.today().isoformat()
        result = {"date": date, "command": command, "machine": machine, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
