"""GRPO of a model whose training state is larger than the GPU: seconds, utilisation, and who holds which memory.

    python benchmarks/large_model.py --steps 3 --out results
    python benchmarks/large_model.py --shape 8B --config benchmarks/large_model_8b_24gb.yaml --out results
    python benchmarks/large_model.py --shape tiny --steps 2 --cpu --out results

The model is random, made on the GPU, and written to `--dir` (a temporary folder without it), which should be on a disk.
A reward is 1 for a response with any character of the tokenizer's, which a few responses of a group have, so that
gradients are not 0. Each step is printed once it is done, and the folder `--out` is written all along: a run that is
stopped leaves what it has. Main memory is read as `host_memory.py` does. Overrides of the configuration follow the
options, as KEY=VALUE.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from host_memory import CPU_STREAMING, OWNERS, Watch, make_model, planned_gib, table
from qwen3_shapes import MOE_SHAPES, SHAPES, num_parameters, shape_of

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples" / "demo")]

GIB = 2**30
SECONDS = ("total", "refit", "generation", "logprobs", "reference_logprobs", "training")
PHASES = ("refit", "generation", "logprobs", "reference_logprobs", "training", "between")


def score(response: str) -> float:
    """The reward."""
    return float(bool(response.strip()))


def step_line(step: Mapping[str, float]) -> str:
    """Seconds of a step by phase, what of them was waited for residency, and the utilisation in training."""
    seconds = [f"{name} {step[f'timing/{name}_s']:.2f}" for name in SECONDS if f"timing/{name}_s" in step]
    exposed = f"residency exposed {step['residency/exposed_s']:.2f}, hidden {step['residency/hidden_s']:.2f}"
    moved = f"out {step['residency/bytes_out'] / GIB:.1f} GiB, in {step['residency/bytes_in'] / GIB:.1f} GiB"
    utilisation = f", MFU of training {100 * step['train/training_mfu']:.1f} %" if "train/training_mfu" in step else ""
    return f"step {step['step']:.0f}, s: {', '.join(seconds)}; {exposed}; {moved}{utilisation}"


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
    """What is known of the run so far: written after each reading of memory, and printed step by step.

    Args:
        arguments: The command line.
        model_s: Seconds that the model took.
    """

    def __init__(self, arguments: argparse.Namespace, model_s: float) -> None:
        from grpo_gpu import machine

        self.watch = Watch(self.update)
        self.begin_s = time.perf_counter()
        self._metrics = arguments.out / "run" / "metrics.jsonl"
        self._target = arguments.out / "large_model.json"
        self._count = num_parameters(shape_of(arguments.shape))
        self._num_printed = 0
        self._known: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "num_parameters": self._count,
            "model_s": model_s,
        }

    def steps(self) -> list[dict[str, float]]:
        """The metrics of the steps that are done."""
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        return [step for line in lines if (step := json.loads(line))["step"] > 0]

    def update(self) -> None:
        """Print new steps, and write everything."""
        steps = self.steps()
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
        self._target.write_text(json.dumps({**self._known, **now}, indent=1) + "\n")

    def conclude(self) -> None:
        """Print the tables."""
        self.update()
        plan = planned_gib(self.watch.plan) if self.watch.plan else {}
        steps = self.steps()
        print(self.watch.plan)
        if steps:
            print(gpu_table(steps[-1]))
        print(table(plan, self.watch.peak))
        print(f"{bytes_line(self.watch.peak, plan, self._count)}; {self._count / 1e9:.2f} B parameters")
        print(f"run {time.perf_counter() - self.begin_s:.0f} s, model {self._known['model_s']:.0f} s before it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="14B", choices=[*SHAPES, *MOE_SHAPES])
    parser.add_argument("--config", type=Path, help="large_model_14b.yaml without it, on CPU grpo_gpu.yaml")
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
    report = Report(arguments, time.perf_counter() - begin_s)

    from grpo_gpu import CPU_OVERRIDES

    from nemo_offload_rl.runs.loading import load_grpo_config
    from nemo_offload_rl.runs.rollouts import run_grpo
    from nemo_offload_rl.utils.cli import set_up_logging

    set_up_logging()
    overrides = [
        f"policy.model_name={model}",
        f"logger.log_dir={arguments.out / 'run'}",
        f"grpo.max_num_steps={arguments.steps}",
        "data.default.env_name=any_text",
        f"++env.any_text.target={Path(__file__).resolve()}:score",
        "++env.any_text.num_workers=0",
        *(CPU_OVERRIDES if arguments.cpu else []),
    ]
    if arguments.cpu and arguments.config is None:
        overrides += [*CPU_STREAMING, "++policy.residency_overrides.params=device"]
    elif arguments.cpu:  # of a file for the DTensor backend
        overrides += ["policy.dtensor_cfg.torch_compile=false", "policy.gpu_memory_limit_gib=null"]
    file = arguments.config or ROOT / "benchmarks" / ("grpo_gpu.yaml" if arguments.cpu else "large_model_14b.yaml")
    config = load_grpo_config(file, [*overrides, *arguments.overrides])
    report.watch.start()
    try:
        run_grpo(config)
    finally:
        report.watch.stop()
        report.conclude()


if __name__ == "__main__":
    main()
