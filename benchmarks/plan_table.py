"""Plans of measured runs next to what they took, as four tables for docs/measurements/plans.md, and plans of others.

    python benchmarks/plan_table.py
    python benchmarks/plan_table.py --micro-batches         # the fourth table alone
    python benchmarks/plan_table.py --ahead                 # the last table alone

The first has the runs of `plan_runs.py`, with the policy's peaks in each phase as torch counts them. Every run of the
second is a file of benchmarks/results that `large_model.py` or an earlier form of `grpo_vs_peers.py` wrote, whose GiB
are those of all owners as the GPU driver counts them. Plans are for the mean length of the run's sequences; measured
seconds are medians of the steps after the first, and GiB are those of the last step. The third has the seconds that
`--fit` plans for its own choice. The fourth has passes of `training_pace.py` with micro-batches of several
sizes. A last table, for docs/measurements/eight-gpus.md, has plans that were made before the runs; a run that was made
has a file of benchmarks/results of its name. Needs no GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import GIB, ROOT
from grpo_sides import MEGATRON
from plan_runs import CASES as SHORT_RUNS
from qwen3_shapes import write_config

from nemo_offload_rl.memory.gpus import KNOWN
from nemo_offload_rl.plan import Plan, Target, plan_of, plan_run, search_of, usable_host_bytes
from nemo_offload_rl.residency import Phase

PROMPT_TOKENS = 8
IDLE_BYTES = 46 << 20  # of a process that waits for work of Ray: a fit of the driver's bytes to 16, 32 and 64 cores
HOST_GIB_PER_GPU = 125.9  # of the hosts of these runs
OWNERS = ("policy", "engine", "other")
# Phases of a plan, and the prefix of the metrics of what a GPU held in them.
PHASES = {"TRAINING": "training", "LP_INFERENCE": "logprobs", "GENERATION": "generation"}


@dataclass(frozen=True)
class Case:
    """A run: its shape, configuration, GPU, and overrides; if it is not measured yet, mean tokens of a sequence."""

    shape: str
    config: str
    gpu: str = "H200"
    overrides: tuple[str, ...] = ()
    length: int = 0


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


_HOST_GIB = {1: 128, 2: 256, 4: 512, 8: 560}  # by GPUs
_KEPT = ("++policy.residency_overrides.params=device", "++policy.residency_overrides.optimizer=device")


_NOT_RECOMPUTED = {
    backend: f"policy.{backend}_cfg.activation_checkpointing=false" for backend in ("dtensor", "megatron")
}
_ENGINE = "policy.generation.vllm_cfg.tensor_parallel_size"
_EXPERTS = "policy.megatron_cfg.expert_model_parallel_size"
_HALF_TENSORS = ("policy.megatron_cfg.tensor_model_parallel_size=2", "policy.megatron_cfg.sequence_parallel=true")
_FIT_OF_EXPERTS = (
    _KEPT[1],
    "policy.megatron_cfg.optimizer.offload_optimizer_states_fraction=0.25",
    "policy.train_micro_batch_size=16",
    _NOT_RECOMPUTED["megatron"],
)


def _reference(name: str, backend: str, gpus: int, *overrides: str, prompts: int | None = None) -> Case:
    """One of the steps that others posted, on so many GPUs; eight responses to each prompt."""
    sizes = [f"cluster.gpus_per_node={gpus}"]
    if prompts is not None:
        sizes += [f"grpo.num_prompts_per_step={prompts}", f"policy.train_global_batch_size={8 * prompts}"]
    shape, length = ("27B", 4593) if name == "27b" else ("llama-8B", 803)
    config = f"reference_{name}{'_megatron' if backend == 'megatron' else ''}.yaml"
    return Case(shape, config, overrides=(*sizes, *overrides), length=length)


def _experts(gpus: int, *overrides: str) -> Case:
    sizes = (f"cluster.gpus_per_node={gpus}", f"{_ENGINE}=4")
    return Case("30B-A3B", "large_model_moe_30b.yaml", overrides=(*sizes, *overrides), length=520)


_BACKENDS = ("dtensor", "megatron")
_FIT_8B = (*_KEPT, "policy.train_micro_batch_size=16")
AHEAD = {
    **{
        f"reference_8b_{backend}_{gpus}_gpus_{8 * prompts}": _reference("8b", backend, gpus, prompts=prompts)
        for backend in _BACKENDS
        for gpus, prompts in ((1, 64), (2, 64), (4, 64), (8, 64), (1, 8), (2, 16), (4, 32))
    },
    **{
        f"reference_8b_{backend}_{gpus}_gpus_fit": _reference(
            "8b", backend, gpus, *_FIT_8B, _NOT_RECOMPUTED[backend], f"{_ENGINE}={engine}", *more
        )
        for backend, gpus, engine, more in (
            ("dtensor", 4, 2, ("policy.logprob_batch_size=128",)),
            ("dtensor", 8, 4, ("policy.logprob_batch_size=64",)),
            ("megatron", 4, 2, ("policy.logprob_batch_size=128",)),
            ("megatron", 8, 4, ()),
        )
    },
    **{
        f"reference_8b_long_tail_{gpus}_gpus": _reference("8b_long_tail", "dtensor", gpus, *_KEPT, f"{_ENGINE}=4")
        for gpus in (4, 8)
    },
    **{
        f"reference_27b_{backend}_{gpus}_gpus": _reference("27b", backend, gpus)
        for backend in _BACKENDS
        for gpus in (4, 8)
    },
    "reference_27b_dtensor_8_gpus_fit": _reference(
        "27b", "dtensor", 8, _NOT_RECOMPUTED["dtensor"], "policy.logprob_batch_size=32", f"{_ENGINE}=8"
    ),
    "reference_27b_megatron_8_gpus_fit": _reference(
        "27b", "megatron", 8, _NOT_RECOMPUTED["megatron"], _KEPT[1], f"{_ENGINE}=8"
    ),
    "moe_30b_4_gpus_ep4": _experts(4, f"{_EXPERTS}=4"),
    "moe_30b_4_gpus_tp2_ep2": _experts(4, f"{_EXPERTS}=2", *_HALF_TENSORS),
    "moe_30b_4_gpus_ep4_fit": _experts(4, f"{_EXPERTS}=4", *_FIT_OF_EXPERTS),
    "moe_30b_8_gpus_ep4": _experts(8, f"{_EXPERTS}=4"),
    "moe_30b_8_gpus_tp2_ep2": _experts(8, f"{_EXPERTS}=2", *_HALF_TENSORS),
}
"""Runs that are planned before they are made, by the name of their result."""


def read_result(name: str) -> dict[str, Any]:
    """The result of a run."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


FITTED = (
    "megatrain_7b",
    "large_model_8b",
    "large_model_8b_24gb",
    "large_model_8b_48gb",
    "reference_8b_four_gpus",
    "large_model_14b",
    "large_model_moe_30b",
    "large_model_moe_30b_h100",
    "large_model_32b",
)
"""Runs whose keys a person chose."""


def steps_of(name: str) -> list[Mapping[str, float]]:
    """The records of a run's steps after the first."""
    read = read_result(name)
    steps = read["steps"] if "steps" in read else read["sides"]["nemo_offload_rl"]["records"]
    return steps[1:]


def host_taken(read: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of main memory by owner at the moment when a run's processes took most, as they are counted now.

    Ray had started a process for each core, of which no run made use; they are not started any more.
    """
    taken = {owner: float(sum(kinds.values())) for owner, kinds in read.get("peak_bytes", {}).items()}
    if taken:
        taken["driver"] -= read["machine"]["cores"] * IDLE_BYTES
    return taken


def mean_length(steps: Sequence[Mapping[str, float]]) -> int:
    """Mean tokens of the sequences of a run."""
    return round(statistics.median(step["train/mean_response_tokens"] for step in steps)) + PROMPT_TOKENS


def plan_case(case: Case, length: int, folder: Path) -> Plan:
    """Plan a run for sequences of this mean length; `folder` gets the model's config.json."""
    write_config(folder, case.shape)
    overrides = [*case.overrides, f"policy.model_name={folder}"]
    plan, _ = plan_run(ROOT / "benchmarks" / case.config, overrides, Target(KNOWN[case.gpu], length=length))
    return plan


def fit_row(name: str, case: Case, folder: Path) -> list[str]:
    """Cells of a run: its seconds, measured and planned, and those of the choice of `--fit` for its machine."""
    steps = steps_of(name)
    write_config(folder, case.shape)
    path, overrides = ROOT / "benchmarks" / case.config, [*case.overrides, f"policy.model_name={folder}"]
    gpus = plan_case(case, 1, folder).account.cfg.cluster.world_size
    target = Target(KNOWN[case.gpu], usable_host_bytes(gpus * HOST_GIB_PER_GPU), length=mean_length(steps))
    plan, rules = plan_run(path, overrides, target)
    found = search_of(plan, rules).fastest()
    assert plan.step_s is not None
    assert found is not None
    fullest = max(plan_of(found.account, target, rules).phases, key=lambda use: use.total_bytes)
    taken_s = statistics.median(step["timing/total_s"] for step in steps)
    seconds = [f"{taken_s:.1f}", f"{plan.step_s:.1f}", f"{found.step_s:.1f}"]
    full = f"{fullest.total_bytes / GIB:.0f} of {fullest.gpu_bytes / GIB:.0f}"
    changes = " ".join(f"`{override.replace('policy.', '')}`" for override in found.overrides)
    return [f"`{name}`", f"{case.shape}, {gpus} {case.gpu}", *seconds, full, changes]


def row(name: str, case: Case, folder: Path) -> list[str]:
    """Cells of a run: planned and measured."""
    steps = steps_of(name)
    plan, last = plan_case(case, mean_length(steps), folder), steps[-1]
    gpus = plan.account.cfg.cluster.world_size
    cells = [f"`{name}`", f"{case.shape}, {gpus} {case.gpu}"]
    uses = {use.phase.name: use.peak_bytes / GIB for use in plan.phases}
    for phase, prefix in PHASES.items():
        cells.append(pair(uses[phase], sum(last.get(f"memory/{prefix}_{owner}_gib", 0.0) for owner in OWNERS)))
    cells.append(pair(sum(plan.owners.values()) / GIB, sum(host_taken(read_result(name)).values()) / GIB))
    moved = gpus * sum(copies.in_bytes for copies in plan.copies.values())
    cells.append(pair(moved / 1e9, last["residency/bytes_in"] / 1e9))
    taken_s = statistics.median(step["timing/total_s"] for step in steps)
    assert plan.step_s is not None
    return [*cells, pair(plan.step_s, taken_s), f"{100 * (plan.step_s / taken_s - 1):+.0f} %"]


def pair(planned: float, measured: float) -> str:
    """`planned / measured`; a dash for what was not measured."""
    return f"{planned:.1f} / {measured:.1f}" if measured else f"{planned:.1f} / -"


def short_rows(folder: Path) -> list[list[str]]:
    """Rows of the runs of `plan_runs.py`: the policy's own bytes in each phase, the host, and seconds."""
    rows: list[list[str]] = []
    for file in sorted((ROOT / "benchmarks" / "results").glob("plan_runs*.json")):
        read = json.loads(file.read_text())
        gpu = "H100" if "H100" in read["machine"]["gpu"] else "H200"
        rows += [short_row(name, ran, gpu, folder) for name, ran in read["cases"].items() if ran["steps"]]
    return rows


def short_plan(name: str, ran: Mapping[str, Any], gpu: str, folder: Path) -> tuple[Plan, dict[Phase, int]]:
    """Plan a run of `plan_runs.py`; return the plan, and the policy's own bytes at the peak of each phase."""
    case, steps = SHORT_RUNS[name], ran["steps"]
    overrides = [*ran["overrides"], f"policy.model_name={folder / case.shape}"]
    for shape, key in ((case.shape, None), (case.teacher, "teacher.model_name")):
        if shape is not None:
            write_config(folder / shape, shape)
            overrides += [f"{key}={folder / shape}"] if key else []
    lengths = [step["train/mean_response_tokens"] + PROMPT_TOKENS for step in steps if case.is_rollout]
    length = round(statistics.median(lengths)) if lengths else case.length
    target = Target(KNOWN[gpu], length=length)
    if (rates := KNOWN[gpu].rates) is not None and "launch_s" in ran:
        target = replace(target, gpu=replace(KNOWN[gpu], rates=replace(rates, launch_s=ran["launch_s"])))
    plan, _ = plan_run(case.file, overrides, target)
    return plan, {use.phase: use.peak_bytes - use.engine_bytes - use.other_bytes for use in plan.phases}


def short_row(name: str, ran: Mapping[str, Any], gpu: str, folder: Path) -> list[str]:
    """Cells of a run of `plan_runs.py`: planned and measured."""
    case, steps = SHORT_RUNS[name], ran["steps"]
    plan, own = short_plan(name, ran, gpu, folder)
    peaks = [{phase: step.get(f"residency/{phase.value}/peak_gib", 0.0) for phase in Phase} for step in steps]
    cells = [f"`{name}`", f"{case.shape}, {case.gpus} {gpu}"]
    for phase in (Phase.TRAINING, Phase.OPTIM_STEP, Phase.LP_INFERENCE, Phase.TEACHER_INFERENCE, Phase.REFIT):
        measured = max(peak[phase] for peak in peaks)
        cells.append(pair(own[phase] / GIB, measured) if phase in own else "")
    # Of runs that did not read all processes, pages that two share count twice, and Ray's daemons do not.
    host = sum(steps[-1].get(f"memory/host_{owner}_gib", 0.0) for owner in ("policy", "engine", "driver"))
    host = ran.get("host_peak_bytes", 0.0) / GIB or host
    # Runs without Ray, in one process, have less on the host than is planned, and do not log this.
    cells.append(pair(sum(plan.owners.values()) / GIB, host if "memory/host_policy_gib" in steps[-1] else 0.0))
    later = [step["timing/total_s"] for step in steps[1:]]
    assert plan.step_s is not None
    if not later or ran.get("shares_gpus"):
        return [*cells, f"{plan.step_s:.1f} / -", ""]
    taken_s = statistics.median(later)
    return [*cells, pair(plan.step_s, taken_s), f"{100 * (plan.step_s / taken_s - 1):+.0f} %"]


def row_ahead(name: str, case: Case, folder: Path) -> list[str]:
    """Cells of a run that is planned ahead: GPUs, seconds by stage, exposed copies, memory, and measured seconds."""
    write_config(folder, case.shape)
    gpus = next(int(key.partition("=")[2]) for key in case.overrides if key.startswith("cluster.gpus_per_node"))
    target = Target(KNOWN[case.gpu], usable_host_bytes(_HOST_GIB[gpus]), length=case.length)
    overrides = [*case.overrides, f"policy.model_name={folder}"]
    plan, _ = plan_run(ROOT / "benchmarks" / case.config, overrides, target)
    assert plan.seconds is not None
    assert plan.step_s is not None
    seconds = {str(stage): cost.total_s for stage, cost in plan.seconds.items()}
    exposed_s = sum(cost.exposed_s for cost in plan.seconds.values())
    fullest = max(plan.phases, key=lambda use: use.total_bytes)
    stages = ("refit", "generation", "logprobs", "reference", "training", "update")
    is_run = (ROOT / "benchmarks" / "results" / f"{name}.json").exists()
    taken = f"{statistics.median(step['timing/total_s'] for step in steps_of(name)):.1f}" if is_run else "not run"
    memory = [f"{fullest.total_bytes / GIB:.0f}, {fullest.phase.value}", f"{sum(plan.owners.values()) / GIB:.0f}"]
    return [
        f"`{name}`",
        *(f"{seconds[stage]:.1f}" if stage in seconds else "" for stage in stages),
        f"{exposed_s:.2f} ({exposed_s / plan.step_s:.1%})",
        *(memory if not plan.problems else [f"does not fit: {plan.problems[0][:90]}", ""]),
        f"{plan.step_s:.1f}",
        taken,
    ]


_MICRO_BATCHES = (("dtensor", (), 1024), ("dtensor, whole logits", (), "null"), ("megatron", MEGATRON, 1024))


def micro_batch_rows(folder: Path) -> list[list[str]]:
    """Cells of micro-batches of 0.6 B: ms of each, planned and measured, and the GPU's share of them."""
    rows = []
    for backend, kept, chunk_size in _MICRO_BATCHES:
        read = read_result(f"micro_batches_{backend.replace(', ', '_').replace(' ', '_')}")
        length = int(read["command"].split("--length ")[1].split()[0])
        for name, found in read["rows"][0]["passes"].items():
            kind, size = name.removesuffix(" rows").split(", ")
            sizes = [f"{key}={size}" for key in ("policy.train_micro_batch_size", "policy.logprob_batch_size")]
            kept = (*kept, f"policy.max_total_sequence_length={length}", f"policy.logprob_chunk_size={chunk_size}")
            plan = plan_case(Case("0.6B", "grpo_gpu.yaml", overrides=(*kept, *sizes)), length, folder)
            assert plan.seconds is not None
            seconds = {str(stage): cost.total_s for stage, cost in plan.seconds.items()}
            planned_ms = seconds[kind] / plan.account.cfg.policy.train_global_batch_size * int(size) * 1000
            taken_ms, median_ms = found["fastest_ms"], found["micro_batch_ms"]
            shares = (f"{found[key] * median_ms / taken_ms:.0%}" for key in ("busy", "mfu"))
            change = f"{100 * (planned_ms / taken_ms - 1):+.0f} %"
            rows.append([backend, kind, size, pair(planned_ms, taken_ms), change, *shares])
    return rows


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def print_ahead(folder: Path) -> None:
    """Print the table of runs that are planned ahead."""
    stages = ("refit", "generation", "logprobs", "reference", "training", "update")
    titles = ["run", *stages, "exposed", "fullest GPU, GiB", "host, GiB", "step, s", "measured, s"]
    print(table(titles, [row_ahead(name, case, folder / case.shape) for name, case in AHEAD.items()]))


def print_micro_batches(folder: Path) -> None:
    """Print the table of micro-batches."""
    titles = ["backend", "pass", "rows", "a micro-batch, ms", "", "GPU busy", "MFU"]
    print(table(titles, micro_batch_rows(folder)))


def main() -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as folder:
        if "--ahead" in sys.argv:
            print_ahead(Path(folder))
            return
        if "--micro-batches" in sys.argv:
            print_micro_batches(Path(folder))
            return
        titles = [
            "run",
            "model",
            "training, GiB",
            "update, GiB",
            "logprobs, GiB",
            "teacher, GiB",
            "refit, GiB",
            "host, GiB",
            "step, s",
            "",
        ]
        print(table(titles, short_rows(Path(folder))), end="\n\n")
        titles = ["run", "model", "training, GiB", "logprobs, GiB", "generation, GiB", "host, GiB", "GB in"]
        rows = [row(name, case, Path(folder) / case.shape) for name, case in CASES.items()]
        print(table([*titles, "step, s", ""], rows), end="\n\n")
        titles = ["run", "model", "measured, s", "planned, s", "of `--fit`, planned s", "fullest GPU, GiB", "changes"]
        rows = [fit_row(name, CASES[name], Path(folder) / CASES[name].shape) for name in FITTED]
        print(table(titles, rows), end="\n\n")
        print_micro_batches(Path(folder))
        print()
        print_ahead(Path(folder))


if __name__ == "__main__":
    main()
