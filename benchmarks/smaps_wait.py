"""How long a process waits to map memory while somebody reads how much it has.

    python benchmarks/smaps_wait.py --gib 4 --json benchmarks/results/smaps_wait.json

For /proc/PID/smaps_rollup (psutil's `memory_full_info`, many monitoring agents) the kernel goes through all pages of a
process, whose own changes to its memory wait meanwhile. For `statm` (`memory_info`) it reads counters. This process
holds `--gib` of memory, in blocks of 1 GiB, and maps and unmaps 1 MiB again and again, while another one reads.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30
READ = "while True:\n    with open({!r}) as file:\n        file.read()"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=4, help="memory of this process")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    blocks = [filled(GIB) for _ in range(arguments.gib)]
    rows = {"nobody": map_seconds(arguments.seconds)}
    readings: dict[str, float] = {}
    for name in ("statm", "smaps_rollup"):
        path = f"/proc/{os.getpid()}/{name}"
        begin_s = time.perf_counter()
        Path(path).read_text()
        readings[name] = time.perf_counter() - begin_s
        with subprocess.Popen([sys.executable, "-c", READ.format(path)]) as reader:
            time.sleep(0.5)  # until it has started
            rows[name] = map_seconds(arguments.seconds)
            reader.kill()
    del blocks
    print(f"{'who reads':>14s}{'one reading, ms':>17s}{'mapping 1 MiB, ms: median':>27s}{'longest':>10s}")
    for name, seconds in rows.items():
        reading = f"{1e3 * readings[name]:.2f}" if name in readings else ""
        print(f"{name:>14s}{reading:>17s}{1e3 * seconds['median_s']:27.2f}{1e3 * seconds['longest_s']:10.2f}")
    if arguments.json:
        about = {
            "date": date.today().isoformat(),
            "command": f"python {shlex.join(sys.argv)}",
            "kernel": platform.release().split("-")[0],
            "gib": arguments.gib,
        }
        arguments.json.write_text(json.dumps({**about, "reading_s": readings, "mapping_s": rows}, indent=1) + "\n")


def filled(num_bytes: int) -> mmap.mmap:
    """Memory with all of its pages there."""
    block = mmap.mmap(-1, num_bytes)
    for offset in range(0, num_bytes, mmap.PAGESIZE):
        block[offset] = 1
    return block


def map_seconds(seconds: float) -> dict[str, float]:
    """What mapping and unmapping 1 MiB takes: in the middle, and at most."""
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        begin_s = time.perf_counter()
        with mmap.mmap(-1, MIB) as block:
            block[0] = 1
        found.append(time.perf_counter() - begin_s)
        time.sleep(0.001)
    return {"median_s": statistics.median(found), "longest_s": max(found)}


if __name__ == "__main__":
    main()
