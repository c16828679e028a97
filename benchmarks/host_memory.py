"""Host memory of a GRPO run with a reference: what the plan says beside what the processes take, by owner.

    python benchmarks/host_memory.py --shape 8B --steps 2 --out results
    python benchmarks/host_memory.py --shape tiny --steps 2 --cpu --out results

The model is random, made on the GPU, and written to `--dir` (a temporary folder without it), which should be on a disk:
in a tmpfs it takes host memory itself. Every few seconds the processes of the run are read (`Pss` of
/proc/PID/smaps_rollup, which counts a page shared by n processes as an n-th in each; resident sizes where there is no
such file). That file is read again only where the resident size has changed by 0.4 % or 64 MiB: the kernel goes through
all pages for it, and whatever in that process maps or unmaps memory waits, 20 ms a GiB (`smaps_wait.py`). The table is
of the moment when the processes took most together. Overrides of `host_memory.yaml`, on CPU of
`grpo_gpu.yaml`, follow the options, as KEY=VALUE.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from qwen3_shapes import SHAPES, is_written, shape_of, write_model

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples" / "demo")]

KINDS = ("Pss_Anon", "Pss_File", "Pss_Shmem")
OWNERS = ("policy", "engine", "driver")
PERIOD_S = 3.0
REREAD_BYTES = 64 << 20
REREAD_PART = 1 / 256
GIB = 2**30
CPU_STREAMING = [
    "policy.dtensor_cfg.offload_optimizer_states=true",
    "policy.dtensor_cfg.offload_optimizer_states_chunk_mib=1",
    "policy.dtensor_cfg.torch_compile=false",
]


def process_bytes(pid: int) -> dict[str, int]:
    """Memory of one process by kind; under `Rss` where the kernel does not say how it is shared."""
    try:
        rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
        table = {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows if len(row) == 3 and row[2] == "kB"}
        if "Pss" in table:
            return {kind: table[kind] for kind in KINDS} if KINDS[0] in table else {"Pss": table["Pss"]}
    except OSError:
        pass
    try:
        return {"Rss": psutil.Process(pid).memory_info().rss}
    except psutil.Error:
        return {}


class Watch:
    """Reads all processes of this run in a thread of its own; `peak` is the sample with the largest sum.

    Processes that are nobody's, such as the daemons of Ray, count as the driver's.

    Args:
        after_each: Called in that thread after each reading.
    """

    def __init__(self, after_each: Callable[[], None] = lambda: None) -> None:
        self._after_each = after_each
        self.owners: dict[int, str] = {}
        self.plan = ""
        self.peak: dict[str, dict[str, int]] = {}
        self.peak_s = 0.0
        self.history: list[tuple[float, dict[str, float]]] = []
        self._begin_s = time.perf_counter()
        self._read: dict[int, tuple[int, dict[str, int]]] = {}  # resident bytes, and what was read then
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to read, and listen to who the processes are and what the plan says."""
        from nemo_offload_rl.policy.policy import Policy
        from nemo_offload_rl.utils.memory_sampler import HostMemory

        watch, init, told = self, HostMemory.__init__, Policy.residency_plan

        def listening(self: HostMemory, owners: Mapping[int, str]) -> None:
            watch.owners = dict(owners)
            init(self, owners)

        def telling(self: Policy) -> str:
            watch.plan = told(self)
            return watch.plan

        HostMemory.__init__, Policy.residency_plan = listening, telling
        self._thread.start()

    def stop(self) -> None:
        """Read no more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            sample = self._sample()
            sums = {owner: sum(kinds.values()) / GIB for owner, kinds in sample.items()}
            now_s = time.perf_counter() - self._begin_s
            self.history.append((round(now_s, 1), {owner: round(gib, 3) for owner, gib in sums.items()}))
            if self.owners and sum(sums.values()) > sum(sum(kinds.values()) for kinds in self.peak.values()) / GIB:
                self.peak, self.peak_s = sample, now_s
            self._after_each()

    def _sample(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        root = psutil.Process()
        for process in [root, *root.children(recursive=True)]:
            owner = self._owner_of(process)
            for kind, size in self._bytes_of(process).items():
                held = found.setdefault(owner, {})
                held[kind] = held.get(kind, 0) + size
        return found

    def _bytes_of(self, process: psutil.Process) -> dict[str, int]:
        """`process_bytes`, as it was while the resident size stays about the same."""
        with suppress(psutil.Error):
            resident = process.memory_info().rss
            read = self._read.get(process.pid)
            if read is None or abs(resident - read[0]) > max(REREAD_BYTES, REREAD_PART * resident):
                read = self._read[process.pid] = resident, process_bytes(process.pid)
            return read[1]
        return {}

    def _owner_of(self, process: psutil.Process) -> str:
        with suppress(psutil.Error):
            for ancestor in [process, *process.parents()]:
                if ancestor.pid in self.owners:
                    return self.owners[ancestor.pid]
        return "driver"


def planned_gib(plan: str) -> dict[str, float]:
    """GiB by owner from the plan's line on host memory."""
    line = next(line for line in plan.splitlines() if line.startswith("host memory: "))
    return {owner: float(gib) for owner, gib in re.findall(r"(\w+) ([\d.]+)(?= [+=])", line)}


def table(plan: Mapping[str, float], peak: Mapping[str, Mapping[str, int]]) -> str:
    """A line for each owner and one for the sum: planned, taken, the ratio, and the taken by kind."""
    kinds = sorted({kind for by_kind in peak.values() for kind in by_kind})
    lines = ["".join(f"{name:>11s}" for name in ("owner", "plan GiB", "taken GiB", "ratio", *kinds))]
    rows = {owner: (plan.get(owner, 0.0), peak.get(owner, {})) for owner in OWNERS}
    total = {kind: sum(by_kind.get(kind, 0) for by_kind in peak.values()) for kind in kinds}
    rows["all"] = (sum(plan.values()), total)
    for owner, (planned, by_kind) in rows.items():
        taken = sum(by_kind.values()) / GIB
        cells = [f"{planned:.2f}", f"{taken:.2f}", f"{planned / taken:.3f}" if taken else "-"]
        cells += [f"{by_kind.get(kind, 0) / GIB:.2f}" for kind in kinds]
        lines.append("".join(f"{cell:>11s}" for cell in (owner, *cells)))
    return "\n".join(lines)


def make_model(folder: Path, shape: str, device: str) -> None:
    """Write the model to `folder`, unless it is there, in a process of its own, which leaves nothing on the GPU."""
    if is_written(folder, shape_of(shape)):
        return
    writer = multiprocessing.get_context("spawn").Process(target=write_model, args=(folder, shape_of(shape), device))
    writer.start()
    writer.join()
    if writer.exitcode:
        sys.exit("the model could not be made")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8B", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="the DTensor backend and a few short responses")
    parser.add_argument("--out", type=Path, required=True, help="folder for host_memory.json")
    parser.add_argument("--dir", type=Path, help="folder of the model and the run; a temporary one without it")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    begin_s = time.perf_counter()
    folder = arguments.dir or Path(tempfile.mkdtemp(prefix="host_memory_"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model", arguments.shape, "cpu" if arguments.cpu else "cuda")
    model_s = time.perf_counter() - begin_s

    from grpo_gpu import CPU_OVERRIDES, machine

    from nemo_offload_rl.runs.loading import load_grpo_config
    from nemo_offload_rl.runs.rollouts import run_grpo
    from nemo_offload_rl.utils.cli import set_up_logging

    set_up_logging()
    overrides = [
        f"policy.model_name={folder / 'model'}",
        f"logger.log_dir={folder / 'run'}",
        f"grpo.max_num_steps={arguments.steps}",
        *([*CPU_OVERRIDES, *CPU_STREAMING] if arguments.cpu else []),
        *arguments.overrides,
    ]
    config = load_grpo_config(
        ROOT / "benchmarks" / ("grpo_gpu.yaml" if arguments.cpu else "host_memory.yaml"), overrides
    )
    watch = Watch()
    watch.start()
    try:
        run_grpo(config)
    finally:
        watch.stop()
    plan = planned_gib(watch.plan) if watch.plan else {}
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "plan_gib": plan,
        "plan": watch.plan,
        "peak_bytes": watch.peak,
        "peak_s": watch.peak_s,
        "history_gib": watch.history,
        "model_s": model_s,
        "whole_s": time.perf_counter() - begin_s,
        "cores": os.cpu_count(),
        "metrics": [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()],
    }
    (arguments.out / "host_memory.json").write_text(json.dumps(result, indent=1) + "\n")
    print(watch.plan)
    print(f"{result['whole_s']:.0f} s in all, {model_s:.0f} s of them for the model; peak at {watch.peak_s:.0f} s")
    print(table(plan, watch.peak))


if __name__ == "__main__":
    main()
