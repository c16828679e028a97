"""What the first things that a pass does cost beside copies to the device: kernels, allocations, inputs, results.

    python benchmarks/beside_copies.py --json benchmarks/results/beside_copies.json

Copies of the residency manager's device (page-locked memory, its own stream) are started, then one thing is done on the
present stream and waited for. Seconds are medians of `--repeats`, alone and beside the copies; what takes as long as
the copies waits for all of them. Needs a GPU; `--device cpu --gib 0.01` shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.residency import CpuDevice, Device, HostAllowance
from nemo_offload_rl.residency.cuda import CudaDevice
from nemo_offload_rl.residency.device import Copy

MIB = 1 << 20
PIECE_BYTES = 64 * MIB
INPUT_BYTES = (16 << 10, 64 << 10, 72 << 10, MIB)


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=16, help="copies that are under way")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    place = torch.device(arguments.device)
    device: Device = CudaDevice(place) if place.type == "cuda" else CpuDevice()
    num_pieces = max(1, round(arguments.gib * 1024 * MIB / PIECE_BYTES))
    arena = device.new_arena(True, HostAllowance())
    arena.reserve(num_pieces * PIECE_BYTES)
    blocks = [arena.alloc(PIECE_BYTES, "state") for _ in range(num_pieces)]
    copies = [Copy(torch.empty(PIECE_BYTES, dtype=torch.uint8, device=place), block.buffer) for block in blocks]

    def median_s(body: Callable[[], Any], beside: bool) -> float:
        seconds: list[float] = []
        for _ in range(arguments.repeats + 1):
            device.release_cache()
            synchronize(place)
            transfer = device.copy_in(copies if beside else [])
            start = time.perf_counter()
            body()
            wait_for_stream(place)
            seconds.append(time.perf_counter() - start)
            transfer.wait_host()
        return statistics.median(seconds[1:])

    copies_s = statistics.median(device.copy_in(copies).wait_host() for _ in range(arguments.repeats))
    rows = [
        {"what": what, "alone_s": median_s(body, False), "beside_s": median_s(body, True)}
        for what, body in things(place).items()
    ]
    for block in blocks:
        arena.free(block)
    arena.close()
    print(f"{num_pieces * PIECE_BYTES / 2**30:.2f} GiB to the device: {copies_s:.4f} s")
    print(f"{'':40s}{'alone, ms':>12s}{'beside, ms':>12s}")
    for row in rows:
        print(f"{row['what']:40s}{1e3 * row['alone_s']:12.3f}{1e3 * row['beside_s']:12.3f}")
    if arguments.json is not None:
        found = {
            "date": date.today().isoformat(),
            "command": shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]),
            "machine": torch.cuda.get_device_name() if place.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "copies": {"bytes": num_pieces * PIECE_BYTES, "seconds": copies_s},
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def things(place: torch.device) -> dict[str, Callable[[], Any]]:
    """What is done, by name; each leaves nothing allocated."""
    small, square = torch.ones(1, device=place), torch.ones(4096, 4096, dtype=torch.bfloat16, device=place)

    def product_with_new_workspace() -> Tensor:
        if place.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
        return square @ square

    def input_of(num_bytes: int, *, pinned: bool) -> Callable[[], Tensor]:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned and place.type == "cuda")
        target = torch.empty(num_bytes, dtype=torch.uint8, device=place)
        return lambda: target.copy_(tensor, non_blocking=True)

    found: dict[str, Callable[[], Any]] = {
        "a kernel": lambda: small.add_(1),
        "a hundred kernels": lambda: [small.add_(1) for _ in range(100)],
        "a product, new cuBLAS workspace": product_with_new_workspace,
        "64 MiB from the driver": lambda: torch.empty(64 * MIB, dtype=torch.uint8, device=place),
        "1 GiB from the driver": lambda: torch.empty(1024 * MIB, dtype=torch.uint8, device=place),
        "a number to the host": small.item,
    }
    for num_bytes in INPUT_BYTES:
        for pinned in (False, True):
            kind = "page-locked" if pinned else "pageable"
            found[f"{num_bytes >> 10} KiB of {kind} input"] = input_of(num_bytes, pinned=pinned)
    return found


def synchronize(place: torch.device) -> None:
    """Wait for everything."""
    if place.type == "cuda":
        torch.cuda.synchronize()


def wait_for_stream(place: torch.device) -> None:
    """Wait for the present stream, not for the copies."""
    if place.type == "cuda":
        torch.cuda.current_stream().synchronize()


if __name__ == "__main__":
    main()
