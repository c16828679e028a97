"""Plans of measured runs next to what they took, as a table for docs/measurements/plans.md.

    python benchmarks/plan_table.py

Every run is a file of benchmarks/results that `large_model.py` or `grpo_vs_trl.py` wrote, with its configuration. Plans
are for the mean length of the run's sequences; measured seconds are medians of the steps after the first, and GiB are
those of the last step: the most of a GPU, and of the host. Needs no GPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import GIB, ROOT
from qwen3_shapes import write_config

from nemo_offload_rl.memory.gpus import KNOWN
from nemo_offload_rl.plan import Plan, Target, plan_run

PROMPT_TOKENS = 8
OWNERS = ("policy", "engine", "other")
# Phases of a plan, and the prefix of the metrics of what a GPU held in them.
PHASES = {"TRAINING": "training", "LP_INFERENCE": "logprobs", "GENERATION": "generation"}


@dataclass(frozen=True)
class Case:
    """A measured run: its shape, configuration, GPU, and overrides."""

    shape: str
    config: str
    gpu: str = "H200"
    overrides: tuple[str, ...] = ()


_STREAM = "policy.megatron_cfg.optimizer.offload_optimizer_states_fraction=0.7"
CASES = {
    "grpo_vs_trl_same_gpu_dtensor": Case("0.6B", "grpo_gpu.yaml"),
    "grpo_vs_trl_one_machine_dtensor": Case("0.6B", "grpo_gpu.yaml"),
    "grpo_slow_host": Case("0.6B", "grpo_gpu.yaml"),
    "megatrain_7b": Case("7B", "megatrain_7b.yaml"),
    "large_model_8b": Case("8B", "large_model_8b.yaml"),
    "large_model_8b_24gb": Case("8B", "large_model_8b_24gb.yaml"),
    "large_model_8b_48gb": Case("8B", "large_model_8b_48gb.yaml"),
    "large_model_8b_megatron": Case(
        "8B", "host_memory.yaml", overrides=("++policy.residency_overrides.params=device",)
    ),
    "large_model_8b_paced": Case("8B", "host_memory.yaml"),
    "reference_8b_four_gpus": Case("8B", "reference_8b.yaml"),
    "large_model_14b": Case("14B", "large_model_14b.yaml"),
    "large_model_14b_fraction": Case(
        "14B", "large_model_14b.yaml", overrides=(_STREAM, "++policy.residency_overrides.optimizer=device")
    ),
    "large_model_moe_30b": Case("30B-A3B", "large_model_moe_30b.yaml"),
    "large_model_moe_30b_h100": Case("30B-A3B", "large_model_moe_30b.yaml", "H100"),
    "large_model_32b": Case("32B", "large_model_32b.yaml"),
}


def steps_of(name: str) -> list[Mapping[str, float]]:
    """The records of a run's steps after the first."""
    read = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    steps = read["steps"] if "steps" in read else read["sides"]["nemo_offload_rl"]["records"]
    return steps[1:]


def taken_of_host(name: str) -> int:
    """Bytes of main memory that all processes of a run took at the moment when they took most; 0 if not measured."""
    peak = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()).get("peak_bytes", {})
    return sum(sum(kinds.values()) for kinds in peak.values())


def plan_case(case: Case, length: int, folder: Path) -> Plan:
    """Plan a run for sequences of this mean length; `folder` gets the model's config.json."""
    write_config(folder, case.shape)
    overrides = [*case.overrides, f"policy.model_name={folder}"]
    plan, _ = plan_run(ROOT / "benchmarks" / case.config, overrides, Target(KNOWN[case.gpu], length=length))
    return plan


def row(name: str, case: Case, folder: Path) -> list[str]:
    """Cells of a run: planned and measured."""
    steps = steps_of(name)
    length = round(statistics.median(step["train/mean_response_tokens"] for step in steps)) + PROMPT_TOKENS
    plan, last = plan_case(case, length, folder), steps[-1]
    gpus = plan.account.cfg.cluster.world_size
    cells = [f"`{name}`", f"{case.shape}, {gpus} {case.gpu}"]
    uses = {use.phase.name: use.peak_bytes / GIB for use in plan.phases}
    for phase, prefix in PHASES.items():
        cells.append(pair(uses[phase], sum(last.get(f"memory/{prefix}_{owner}_gib", 0.0) for owner in OWNERS)))
    cells.append(pair(sum(plan.owners.values()) / GIB, taken_of_host(name) / GIB))
    moved = gpus * sum(copies.in_bytes for copies in plan.copies.values())
    cells.append(pair(moved / 1e9, last["residency/bytes_in"] / 1e9))
    taken_s = statistics.median(step["timing/total_s"] for step in steps)
    assert plan.step_s is not None
    return [*cells, pair(plan.step_s, taken_s), f"{100 * (plan.step_s / taken_s - 1):+.0f} %"]


def pair(planned: float, measured: float) -> str:
    """`planned / measured`; a dash for what was not measured."""
    return f"{planned:.1f} / {measured:.1f}" if measured else f"{planned:.1f} / -"


def table(rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    titles = ["run", "model", "training, GiB", "logprobs, GiB", "generation, GiB", "host, GiB", "GB in", "step, s", ""]
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        print(table([row(name, case, Path(folder) / case.shape) for name, case in CASES.items()]))


if __name__ == "__main__":
    main()
