"""A GRPO run of a random model that may be larger than the GPU: seconds, utilisation, and who holds which memory.

    python benchmarks/large_model.py --steps 3 --out results                                  # 14 B
    python benchmarks/large_model.py --shape 8B --config benchmarks/large_model_8b_24gb.yaml --out results
    python benchmarks/large_model.py --shape 8B --config benchmarks/host_memory.yaml --out results
    python benchmarks/large_model.py --shape llama-8B --config benchmarks/reference_8b.yaml --gpus 8 --out results
    python benchmarks/large_model.py --shape tiny --steps 2 --cpu --out results
    python benchmarks/large_model.py --shape tiny --config benchmarks/reference_8b.yaml --gpus 2 --cpu --out results

The model is made on the GPU and written to `--dir` (a temporary folder without it), which should be on a disk: in a
tmpfs it takes main memory itself. A reward is 1 for a response with any character of the tokenizer's, which a few
responses of a group have, so that gradients are not 0. Overrides of the configuration follow the options, as KEY=VALUE.

`--gpus` and `--prompts` are for runs of one configuration on machines of several sizes; on CPUs `--gpus` is the number
of policy workers, which gloo connects. The links of the GPUs to the host are probed before the run, of one GPU alone
and of all at the same time (`link_gb_per_s`).

A random model ends no answer, so responses have all tokens of `max_new_tokens`. With `--long-tail` their lengths are
log-normal, as in `grpo_long_tail.py`: at most `max_new_tokens`, and 18 % of it on average.

It prints a line for each step (seconds by phase, exposed and hidden copies and the share of the step that is exposed,
GiB moved, utilisation in training, how far the probabilities of engine and policy are apart), then GiB of the GPU by
phase and owner, and main memory: planned and taken, at the moment when the processes took most together. Every few
seconds the processes of the run are read (`Pss` of /proc/PID/smaps_rollup, which counts a page that n processes share
as an n-th in each; resident sizes where there is no such file). That file is read again only where the resident size
has changed by 0.4 % or 64 MiB: the kernel goes through all pages for it, 20 ms a GiB, and the process waits meanwhile
to map memory. `large_model.json` in `--out` is written all along.
Docs: docs/measurements/large-models.md, and small-gpus.md, two-gpus.md, posted.md and eight-gpus.md there.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hybrid_shapes
import psutil
from common import CPU_OVERRIDES, GIB, ROOT, make_model, measured_with, probe_links, steps_in, write_result
from grpo_long_tail import cut_responses
from hybrid_shapes import HYBRID_SHAPES
from qwen3_shapes import MOE_SHAPES, SHAPES, num_parameters, shape_of

KINDS = ("Pss_Anon", "Pss_File", "Pss_Shmem")
OWNERS = ("policy", "engine", "driver")
PERIOD_S = 3.0
REREAD_BYTES = 64 << 20
REREAD_PART = 1 / 256
CPU_STREAMING = [
    "policy.dtensor_cfg.offload_optimizer_states=true",
    "policy.dtensor_cfg.offload_optimizer_states_chunk_mib=1",
    "++policy.residency_overrides.params=device",
]


SECONDS = ("total", "refit", "generation", "logprobs", "reference_logprobs", "training")
PHASES = ("refit", "generation", "logprobs", "reference_logprobs", "training", "between")


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


def score(response: str) -> float:
    """The reward."""
    return float(bool(response.strip()))


def step_line(step: Mapping[str, float]) -> str:
    """Seconds of a step by phase, what of them was waited for residency, and the utilisation in training."""
    seconds = [f"{name} {step[f'timing/{name}_s']:.2f}" for name in SECONDS if f"timing/{name}_s" in step]
    exposed_s = step["residency/exposed_s"]
    exposed = f"residency exposed {exposed_s:.2f} ({exposed_s / step['timing/total_s']:.1%} of the step)"
    exposed += f", hidden {step['residency/hidden_s']:.2f}"
    moved = f"out {step['residency/bytes_out'] / GIB:.1f} GiB, in {step['residency/bytes_in'] / GIB:.1f} GiB"
    utilisation = f", MFU of training {100 * step['train/training_mfu']:.1f} %" if "train/training_mfu" in step else ""
    apart = f", token_mult_prob_error {step['train/token_mult_prob_error']:.4f}"
    if (mib := step.get("train/routed_experts_mib")) is not None:
        apart += f", routing {mib:.1f} MiB"
    return f"step {step['step']:.0f}, s: {', '.join(seconds)}; {exposed}; {moved}{utilisation}{apart}"


def gpu_table(step: Mapping[str, float]) -> str:
    """GiB of the GPU by phase and owner, the most in the step; without a GPU the titles alone."""
    owners = ("policy", "engine", "other")
    lines = ["".join(f"{name:>20s}" for name in ("GPU, GiB", *owners))]
    for phase in PHASES:
        values = [step.get(f"memory/{phase}_{owner}_gib") for owner in owners]
        if any(value is not None for value in values):
            cells = [f"{value:.2f}" if value is not None else "-" for value in values]
            lines.append("".join(f"{cell:>20s}" for cell in (phase, *cells)))
    return "\n".join(lines)


def bytes_line(peak: Mapping[str, Mapping[str, int]], plan: Mapping[str, float], count: int) -> str:
    """Bytes of main memory for each parameter, of all processes and of the policy alone."""
    taken = {owner: sum(peak.get(owner, {}).values()) for owner in OWNERS}
    shown = ", ".join(f"{owner} {size / count:.2f}" for owner, size in taken.items())
    planned = sum(plan.values()) * GIB / count
    return f"host bytes a parameter: {sum(taken.values()) / count:.2f} ({shown}); planned {planned:.2f}"


class Report:
    """Results of the run so far: written after each reading of memory, and printed step by step.

    Args:
        arguments: The command line.
        model_s: Seconds that the model took.
        num_gpus: GPUs of a host, whose links are probed.
    """

    def __init__(self, arguments: argparse.Namespace, model_s: float, num_gpus: int) -> None:
        self.watch = Watch(self.update)
        self._log_dir = arguments.out / "run"
        self._target = arguments.out / "large_model.json"
        shape, hybrid = arguments.shape, arguments.shape in HYBRID_SHAPES
        self._count = hybrid_shapes.num_parameters(shape) if hybrid else num_parameters(shape_of(shape))
        self._num_printed = 0
        self._known: dict[str, Any] = {
            **measured_with(),
            "num_parameters": self._count,
            "model_s": model_s,
            "link_gb_per_s": probe_links(num_gpus) if num_gpus else {},
        }
        self.begin_s = time.perf_counter()

    def update(self) -> None:
        """Print new steps, and write everything."""
        steps = steps_in(self._log_dir)
        for step in steps[self._num_printed :]:
            print(step_line(step), flush=True)
        self._num_printed = len(steps)
        self._write(steps)

    def _write(self, steps: Sequence[Mapping[str, float]]) -> None:
        watch = self.watch
        now = {
            "plan": watch.plan,
            "plan_gib": planned_gib(watch.plan) if watch.plan else {},
            "peak_bytes": watch.peak,
            "peak_s": watch.peak_s,
            "history_gib": watch.history,
            "run_s": time.perf_counter() - self.begin_s,
            "steps": steps,
        }
        write_result(self._target, {**self._known, **now})

    def conclude(self) -> None:
        """Print the tables."""
        self.update()
        plan = planned_gib(self.watch.plan) if self.watch.plan else {}
        steps = steps_in(self._log_dir)
        print(self.watch.plan)
        if steps:
            print(gpu_table(steps[-1]))
        print(table(plan, self.watch.peak))
        print(f"{bytes_line(self.watch.peak, plan, self._count)}; {self._count / 1e9:.2f} B parameters")
        print(f"run {time.perf_counter() - self.begin_s:.0f} s, model {self._known['model_s']:.0f} s before it")


def overrides_of(arguments: argparse.Namespace, model: Path) -> list[str]:
    """List the overrides that stand for the options of the command line."""
    overrides = [
        f"policy.model_name={model}",
        f"logger.log_dir={arguments.out / 'run'}",
        f"grpo.max_num_steps={arguments.steps}",
        "data.default.env_name=any_text",
        f"++env.any_text.target={Path(__file__).resolve()}:score",
        "++env.any_text.num_workers=0",
    ]
    if arguments.cpu:  # a configuration of the DTensor backend: Megatron's needs a GPU
        overrides += [*CPU_OVERRIDES, "policy.dtensor_cfg.torch_compile=false", "policy.gpu_memory_limit_gib=null"]
        overrides += CPU_STREAMING if arguments.config is None else []
    if arguments.gpus:
        overrides.append(f"cluster.{'cpu_workers_per_node' if arguments.cpu else 'gpus_per_node'}={arguments.gpus}")
    if arguments.prompts:
        batch = "${mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}}"
        overrides += [f"grpo.num_prompts_per_step={arguments.prompts}", f"policy.train_global_batch_size={batch}"]
    return overrides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="14B", choices=[*SHAPES, *MOE_SHAPES, *HYBRID_SHAPES])
    parser.add_argument("--config", type=Path, help="large_model_14b.yaml without it, on CPU grpo_gpu.yaml")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs, in place of the configuration's; with --cpu workers"
    )
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="prompts of a step, all of whose responses are one batch"
    )
    parser.add_argument("--long-tail", action="store_true", help="each response ends at a length of its own")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="the DTensor backend and a few short responses")
    parser.add_argument("--out", type=Path, required=True, help="folder for large_model.json and the run's own files")
    parser.add_argument("--dir", type=Path, help="folder of the model, made if it is not there; temporary without it")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    begin_s = time.perf_counter()
    model = (arguments.dir or Path(tempfile.mkdtemp(prefix="large_model_"))) / "model"
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_model(model, arguments.shape, "cpu" if arguments.cpu else "cuda")
    model_s = time.perf_counter() - begin_s

    from nemo_offload_rl.runs.loading import load_grpo_config
    from nemo_offload_rl.runs.rollouts import run_grpo
    from nemo_offload_rl.utils.cli import set_up_logging

    set_up_logging()
    file = arguments.config or ROOT / "benchmarks" / ("grpo_gpu.yaml" if arguments.cpu else "large_model_14b.yaml")
    config = load_grpo_config(file, [*overrides_of(arguments, model), *arguments.overrides])
    report = Report(arguments, model_s, config.cluster.gpus_per_node)
    if arguments.long_tail:
        cut_responses(config.policy.generation.vllm_cfg.async_engine)
    report.watch.start()
    try:
        run_grpo(config)
    finally:
        report.watch.stop()
        report.conclude()


if __name__ == "__main__":
    main()
