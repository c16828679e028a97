"""What the first things that a pass does cost beside copies to the device: kernels, allocations, inputs, results.

    python benchmarks/beside_copies.py --json benchmarks/results/beside_copies.json

Copies of the residency manager's device (page-locked memory, its own stream) are started, in pieces of 64 MiB or as a
whole, then one thing is done on the present stream and waited for. Seconds are medians of `--repeats`, alone and beside
the copies; what takes as long as the copies waits for all of them. Needs a GPU; `--device cpu --gib 0.1` shows that the
script works.
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

from nemo_offload_rl.data.inputs import copy_in_pieces
from nemo_offload_rl.residency import CpuDevice, Device, HostAllowance
from nemo_offload_rl.residency.device.cuda import CudaDevice
from nemo_offload_rl.residency.device.pieces import Copy

MIB = 1 << 20
PIECE_BYTES = 64 * MIB
INPUT_BYTES = (16 << 10, 64 << 10, 72 << 10, MIB, 4 * MIB)
PAGEABLE, PIECES, URGENT = "pageable", "pageable, in pieces", "page-locked, urgent stream"
COLUMNS = ("alone_s", "beside_pieces_s", "beside_whole_s")


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4, help="copies that are under way")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    place = torch.device(arguments.device)
    device: Device = CudaDevice(place) if place.type == "cuda" else CpuDevice()
    num_pieces = max(1, round(arguments.gib * 1024 * MIB / PIECE_BYTES))
    arena = device.new_arena(True, HostAllowance())
    arena.reserve(num_pieces * PIECE_BYTES)
    block = arena.alloc(num_pieces * PIECE_BYTES, "state")
    target = torch.empty(block.buffer.numel(), dtype=torch.uint8, device=place)
    whole = [Copy(target, block.buffer)]
    pieces = [Copy(*pair) for pair in zip(target.split(PIECE_BYTES), block.buffer.split(PIECE_BYTES), strict=True)]
    copies_s = statistics.median(device.copy_in(pieces).wait_host() for _ in range(arguments.repeats))

    def median_s(body: Callable[[], Any], copies: list[Copy]) -> float:
        seconds: list[float] = []
        for _ in range(arguments.repeats + 1):
            device.release_cache()
            if place.type == "cuda":
                torch.cuda.synchronize()
            transfer = device.copy_in(copies)
            start = time.perf_counter()
            body()
            if place.type == "cuda":
                torch.cuda.current_stream().synchronize()
            seconds.append(time.perf_counter() - start)
            transfer.wait_host()
        return statistics.median(seconds[1:])

    rows: dict[str, dict[str, float]] = {}
    for what, body in things(place).items():
        rows[what] = {name: median_s(body, copies) for name, copies in zip(COLUMNS, ([], pieces, whole), strict=True)}
    arena.free(block)
    arena.close()
    print(f"{target.numel() / 2**30:.2f} GiB to the device: {copies_s:.4f} s. Milliseconds:")
    print("".join(f"{title:>18s}" for title in ("", "", *COLUMNS)))
    for what, row in rows.items():
        print(f"{what:36s}" + "".join(f"{1e3 * row[name]:18.3f}" for name in COLUMNS))
    if arguments.json is not None:
        found = {
            "date": date.today().isoformat(),
            "command": shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]),
            "machine": torch.cuda.get_device_name() if place.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "copies": {"bytes": target.numel(), "seconds": copies_s},
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

    urgent = torch.cuda.Stream(place, priority=-3) if place.type == "cuda" else None

    def input_of(num_bytes: int, kind: str) -> Callable[[], Any]:
        tensor = torch.zeros(
            num_bytes, dtype=torch.uint8, pin_memory=kind not in (PAGEABLE, PIECES) and place.type == "cuda"
        )
        target = torch.empty(num_bytes, dtype=torch.uint8, device=place)

        def move() -> None:
            if kind == PIECES:
                copy_in_pieces(tensor, target)
                return
            if urgent is None or kind != URGENT:
                target.copy_(tensor, non_blocking=True)
                return
            with torch.cuda.stream(urgent):
                target.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream().wait_stream(urgent)

        return move

    found: dict[str, Callable[[], Any]] = {
        "a kernel": lambda: small.add_(1),
        "a hundred kernels": lambda: [small.add_(1) for _ in range(100)],
        "a product, new cuBLAS workspace": product_with_new_workspace,
        "64 MiB from the driver": lambda: torch.empty(64 * MIB, dtype=torch.uint8, device=place),
        "1 GiB from the driver": lambda: torch.empty(1024 * MIB, dtype=torch.uint8, device=place),
        "a number to the host": small.item,
    }
    for num_bytes in INPUT_BYTES:
        for kind in (PAGEABLE, PIECES, "page-locked", URGENT):
            found[f"{num_bytes >> 10} KiB, {kind}"] = input_of(num_bytes, kind)
    return found


if __name__ == "__main__":
    main()
