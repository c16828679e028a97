"""Where the seconds of making a pinned arena and of one transition go; for whoever tunes residency/host/regions.py.

python benchmarks/arena_profile.py --gib 12
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import mmap
import pstats
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from peer_algorithms import NemoOffloadRl
from residency_peers import make_state

HUGE = 2 << 20
libc = ctypes.CDLL(None, use_errno=True)


def touch(address: int, size: int, threads: int, how: str) -> float:
    """Seconds to back a range with memory."""
    share = -(-size // threads // HUGE) * HUGE
    spans = [(address + o, min(share, size - o)) for o in range(0, size, share)]

    def populate(span: tuple[int, int]) -> None:
        if how == "populate":
            assert libc.madvise(ctypes.c_void_p(span[0]), ctypes.c_size_t(span[1]), 23) == 0, ctypes.get_errno()
        else:
            ctypes.memset(span[0], 0, span[1])

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(populate, spans))
    return time.perf_counter() - start


def main() -> None:
    """Print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=12)
    parser.add_argument("--size", default="1.5B")
    args = parser.parse_args()
    size = int(args.gib * 2**30) // HUGE * HUGE
    print("transparent huge pages:", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip())
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    runtime: Any = torch.cuda.cudart()
    for how, threads in (("memset", 8), ("populate", 8), ("memset", 8), ("populate", 16), ("memset", 16)):
        mapping = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        address = whole.data_ptr() + -whole.data_ptr() % HUGE
        mapping.madvise(mmap.MADV_HUGEPAGE)
        touch_s = touch(address, size, threads, how)
        start = time.perf_counter()
        error = int(runtime.cudaHostRegister(address, size, 1))
        register_s = time.perf_counter() - start
        start = time.perf_counter()
        runtime.cudaHostUnregister(address)
        del whole
        mapping.close()
        free_s = time.perf_counter() - start
        rate = size / (touch_s + register_s) / 1e9
        print(
            f"{how:9} {threads:2} threads: touch {touch_s:.2f} s, register {register_s:.2f} s (error {error}), "
            f"free {free_s:.2f} s, {rate:.1f} GB/s",
            flush=True,
        )
    device = torch.device("cuda")
    algorithm = NemoOffloadRl(make_state(args.size, device), device)
    algorithm.prepare()
    for cycle in range(3):
        for verb in ("offload", "reload"):
            torch.cuda.synchronize()
            profile = cProfile.Profile()
            start = time.perf_counter()
            if cycle == 1:
                profile.enable()
            getattr(algorithm, verb)()
            profile.disable()
            elapsed = time.perf_counter() - start
            print(f"cycle {cycle} {verb}: {elapsed:.3f} s")
            if cycle == 1:
                pstats.Stats(profile).sort_stats("tottime").print_stats(8)
    for report in algorithm.manager.reports.drain():
        print(report.line())


if __name__ == "__main__":
    main()
