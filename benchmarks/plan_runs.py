"""Short runs to compare with their plans: all algorithms, both backends, one or two GPUs, adapters, parallel ranks.

    python benchmarks/plan_runs.py --out results/plan_runs --cases sft dpo  # names that contain one of these
    python benchmarks/plan_runs.py --out results/plan_runs --cases sft_packed --cpu --dir /tmp/models

Each case is a run of its own in a process of its own: random Qwen3 model, random text whose rows are as long as the
configuration allows, or responses that seldom end before. It prints the policy's peak in each phase as torch counts it,
what the GPU driver counts, and seconds of a step; `plan_runs.json` has the metrics of all steps, the overrides, and the
most main memory of all processes of a run, Ray's daemons included. `launch_s` are the seconds of a kernel's launch.
`plan_table.py` compares them with plans. Docs: docs/measurements/plans.md.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from common import ROOT, make_model, measured_with, steps_in, write_result
from distillation import ARITHMETIC
from large_model import process_bytes
from qwen3_shapes import TIED

EXAMPLES, BENCHMARKS = ROOT / "examples" / "configs", ROOT / "benchmarks"
DTENSOR, MEGATRON, ADAM = "policy.dtensor_cfg", "policy.megatron_cfg", "policy.megatron_cfg.optimizer"
PERIOD_S = 5.0  # between readings of main memory, for which a process waits 20 ms a GiB when it maps memory
_LAUNCH = "launch"  # in the place of a case: print the seconds of a launch
NUM_ROWS = 32  # of an optimizer step of SFT, and twice the pairs of one of DPO
KEPT = (
    "step",
    "memory/",
    "residency/",
    "timing/",
    "plan/",
    "train/num_tokens",
    "train/mean_response_tokens",
    "train/oom",
)


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        algorithm: sft, dpo, grpo or distillation.
        shape: Of the model.
        overrides: In addition to the sizes of `keys_of`.
        gpus: Number of GPUs.
        teacher: Shape of the teacher.
    """

    algorithm: str
    shape: str
    overrides: tuple[str, ...] = ()
    gpus: int = 1
    teacher: str | None = None

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        named = [key.split("=")[1] for key in self.overrides if key.startswith("policy.max_total_sequence_length=")]
        return int(named[-1]) if named else {"grpo": 1040, "distillation": 1088}.get(self.algorithm, 2048)

    @property
    def is_rollout(self) -> bool:
        """Tell whether an engine samples."""
        return self.algorithm in ("grpo", "distillation")

    @property
    def file(self) -> Path:
        """The configuration that it begins with."""
        if self.algorithm == "grpo":
            return BENCHMARKS / "grpo_gpu.yaml"
        if self.algorithm == "distillation":
            return EXAMPLES / f"distillation_math{'_megatron' if ON_MEGATRON[1] in self.overrides else ''}.yaml"
        return EXAMPLES / f"{self.algorithm}.yaml"


ON_MEGATRON = ("policy.optimizer=null", f"{DTENSOR}.enabled=false", f"{MEGATRON}.enabled=true")
IN_ROWS = ("policy.sequence_packing.enabled=false",)
RECOMPUTED = {backend: (f"{backend}.activation_checkpointing=true",) for backend in (DTENSOR, MEGATRON)}
PACKED_8K = ("policy.sequence_packing.train_mb_tokens=8192",)
LORA = {
    DTENSOR: (f"{DTENSOR}.lora_cfg.enabled=true", f"{DTENSOR}.lora_cfg.dim=16"),
    MEGATRON: (f"{MEGATRON}.peft.enabled=true", f"{MEGATRON}.peft.dim=16"),
}
OF_64_PROMPTS = (
    "distillation.num_prompts_per_step=64",
    "policy.train_global_batch_size=64",
    "policy.logprob_batch_size=16",
    "policy.train_micro_batch_size=16",
)

CASES = {
    "sft_packed": Case("sft", "0.6B"),
    "sft_rows_recomputed": Case("sft", "1.7B", (*IN_ROWS, *RECOMPUTED[DTENSOR], "policy.train_micro_batch_size=4")),
    "sft_streamed_states": Case("sft", "4B", (*PACKED_8K, f"{DTENSOR}.offload_optimizer_states=true")),
    "sft_activations_on_host": Case("sft", "0.6B", (*RECOMPUTED[DTENSOR], f"{DTENSOR}.activation_offload=true")),
    "sft_adapters": Case("sft", "8B", (*PACKED_8K, *LORA[DTENSOR], *RECOMPUTED[DTENSOR])),
    "sft_megatron_packed": Case("sft", "1.7B", ON_MEGATRON),
    "sft_megatron_rows_recomputed": Case(
        "sft", "4B", (*ON_MEGATRON, *IN_ROWS, *RECOMPUTED[MEGATRON], "policy.train_micro_batch_size=2")
    ),
    "sft_megatron_adapters": Case("sft", "8B", (*ON_MEGATRON, *PACKED_8K, *LORA[MEGATRON])),
    "sft_megatron_experts": Case("sft", "12-layers", (*ON_MEGATRON, *PACKED_8K)),
    "dpo_packed": Case("dpo", "0.6B"),
    "dpo_megatron_rows": Case("dpo", "1.7B", (*ON_MEGATRON, *IN_ROWS, "policy.train_micro_batch_size=2")),
    "grpo_reference": Case("grpo", "1.7B", (*ON_MEGATRON, "loss_fn.reference_policy_kl_penalty=0.01")),
    "grpo_sizes_chosen": Case("grpo", "0.6B", ("policy.train_micro_batch_size=auto", "policy.logprob_batch_size=auto")),
    "distillation": Case("distillation", "0.6B", OF_64_PROMPTS, teacher="4B"),
    "distillation_megatron": Case("distillation", "0.6B", (*ON_MEGATRON, *OF_64_PROMPTS), teacher="4B"),
    "two_sft_sharded": Case("sft", "4B", PACKED_8K, gpus=2),
    "two_sft_tensor_parallel": Case(
        "sft", "1.7B", (f"{DTENSOR}.tensor_parallel_size=2", f"{DTENSOR}.torch_compile=false"), gpus=2
    ),
    "two_sft_megatron_tensor_parallel": Case(
        "sft",
        "4B",
        (
            *ON_MEGATRON,
            f"{MEGATRON}.tensor_model_parallel_size=2",
            f"{MEGATRON}.sequence_parallel=true",
            "policy.make_sequence_length_divisible_by=2",
        ),
        gpus=2,
    ),
    "two_sft_megatron_pipeline": Case(
        "sft", "1.7B", (*ON_MEGATRON, f"{MEGATRON}.pipeline_model_parallel_size=2"), gpus=2
    ),
    "two_sft_megatron_experts": Case(
        "sft", "12-layers", (*ON_MEGATRON, *PACKED_8K, f"{MEGATRON}.expert_model_parallel_size=2"), gpus=2
    ),
    "two_dpo_sharded": Case("dpo", "1.7B", gpus=2),
    "two_grpo_sharded": Case("grpo", "1.7B", gpus=2),
}


def keys_of(case: Case, *, on_cpu: bool = False) -> list[str]:
    """Overrides of a case, except for its model, data and folders."""
    supervised = [
        f"{case.algorithm}.val_period=0",
        f"{case.algorithm}.val_at_start=false",
        f"{case.algorithm}.val_at_end=false",
        f"policy.max_total_sequence_length={case.length}",
        f"policy.train_global_batch_size={NUM_ROWS // (2 if case.algorithm == 'dpo' else 1)}",
    ]
    return [
        *(_rollout_keys(case) if case.is_rollout else supervised),
        f"cluster.gpus_per_node={case.gpus}",
        "policy.host_memory_budget_gib=100",
        "checkpointing.enabled=false",
        "logger.tensorboard_enabled=false",
        *case.overrides,
        *(_cpu_keys(case) if on_cpu else ()),
    ]


def _rollout_keys(case: Case) -> list[str]:
    if case.algorithm == "grpo":
        return ["policy.generation.vllm_cfg.gpu_memory_utilization=0.5"]
    return [
        "distillation.max_num_epochs=1000",
        "distillation.val_period=0",
        f"policy.max_total_sequence_length={case.length}",
        "policy.generation.max_new_tokens=1024",
        *ARITHMETIC,
    ]


def _cpu_keys(case: Case) -> list[str]:
    keys = [
        "cluster.gpus_per_node=0",
        f"cluster.cpu_workers_per_node={case.gpus}",
        "policy.precision=float32",
        "policy.host_memory_budget_gib=null",
        *(["policy.optimizer.kwargs.fused=false"] if case.algorithm != "distillation" else []),
        f"{DTENSOR}.torch_compile=false",
        "policy.max_total_sequence_length=64",
        "policy.train_global_batch_size=4",
    ]
    if not case.is_rollout:
        return keys
    is_grpo = case.algorithm == "grpo"
    size = "grpo.num_generations_per_prompt=2" if is_grpo else "distillation.topk_logits_k=8"
    return [
        *keys,
        "policy.generation.vllm_cfg.kv_cache_memory_gib=0.125",
        "policy.generation.vllm_cfg.enforce_eager=true",
        f"{case.algorithm}.num_prompts_per_step={2 if is_grpo else 4}",
        "policy.train_micro_batch_size=2",
        "policy.logprob_batch_size=2",
        "policy.generation.max_new_tokens=16",
        size,
    ]


def write_rows(path: Path, algorithm: str, length: int, count: int) -> None:
    """Rows of random text, one token a character, each as long as the configuration allows."""
    draw, prompt = random.Random(0), length // 4
    with path.open("w") as file:
        for _ in range(count):
            of_prompt, first, second = (
                "".join(draw.choices("0123456789+-*=, ", k=num)) for num in (prompt, *[length - prompt - 4] * 2)
            )
            responses = {"chosen": first, "rejected": second} if algorithm == "dpo" else {"completion": first}
            file.write(json.dumps({"prompt": of_prompt, **responses}) + "\n")


def run_case(name: str, folder: Path, models: Path, steps: int, overrides: Sequence[str], *, on_cpu: bool) -> None:
    """Run a case in this process; its metrics are in `folder`."""
    from nemo_offload_rl.runs import loading
    from nemo_offload_rl.utils.cli import set_up_logging

    set_up_logging()
    case = CASES[name]
    keys = keys_of(case, on_cpu=on_cpu)
    keys += [f"policy.model_name={models / case.shape}", f"logger.log_dir={folder}", *overrides]
    keys += [f"{case.algorithm}.max_num_steps={steps}"]
    if case.teacher is not None:
        keys += [f"teacher.model_name={models / case.teacher}"]
    if case.is_rollout:
        if case.algorithm == "grpo":
            from nemo_offload_rl.runs.rollouts import run_grpo

            run_grpo(loading.load_grpo_config(case.file, keys))
        else:
            from nemo_offload_rl.runs.distillation import run_distillation

            run_distillation(loading.load_distillation_config(case.file, keys))
        return
    from nemo_offload_rl.runs.supervised import run_dpo, run_sft

    data, length = folder / "rows.jsonl", 64 if on_cpu else case.length
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(data, case.algorithm, length, NUM_ROWS * (steps + 1))
    if case.algorithm == "dpo":
        keys += [f"data.train.path={data}", "data.train.split_validation_size=0"]
        run_dpo(loading.load_dpo_config(case.file, keys))
    else:
        source = f"dataset_name: ResponseDataset, path: {data}, input_key: prompt, output_key: completion"
        keys += ["~data.train", f"+data.train={{{source}, split_validation_size: 0, seed: 0}}"]
        run_sft(loading.load_sft_config(case.file, keys))


def line_of(name: str, steps: Sequence[Mapping[str, Any]]) -> str:
    """Peaks of the last step and seconds of each, in one line."""
    last = steps[-1]
    peaks = {key.split("/")[1]: value for key, value in last.items() if key.endswith("/peak_gib") and "/" in key}
    of_driver = {key: last[key] for key in ("memory/peak_gib", "memory/host_policy_gib") if key in last}
    shown = ", ".join(f"{phase} {gib:.2f}" for phase, gib in (peaks | of_driver).items())
    seconds = ", ".join(f"{step['timing/total_s']:.2f}" for step in steps)
    return f"{name}: GiB {shown}; steps {seconds} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of names; those of two GPUs only on two")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cpu", action="store_true", help="tiny models and short rows, to try it; DTensor alone")
    parser.add_argument("--dir", type=Path, help="folder of models, made where they are missing; in --out without it")
    parser.add_argument("--out", type=Path, required=True, help="folder for plan_runs.json and logs")
    parser.add_argument("--limit-s", type=float, default=300, help="a case is ended after so many seconds")
    parser.add_argument("--until-s", type=float, default=3600, help="no case begins after so many seconds")
    parser.add_argument("--shared", action="store_true", help="other runs have the GPUs too: seconds do not count")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    out, models = arguments.out.resolve(), (arguments.dir or arguments.out / "models").resolve()
    if arguments.one == _LAUNCH:
        from nemo_offload_rl.memory.calibrate import calibrate

        rates = calibrate(torch.device("cpu" if arguments.cpu else "cuda"), seconds_each=0.3).rates
        assert rates is not None
        print(rates.launch_s)
        return
    if arguments.one:
        run_case(arguments.one, out / arguments.one, models, arguments.steps, arguments.overrides, on_cpu=arguments.cpu)
        return
    begin_s = time.monotonic()
    command = [sys.executable, __file__, "--one", _LAUNCH, "--out", out, *(["--cpu"] if arguments.cpu else [])]
    # In a process of its own, which leaves nothing on the GPU.
    launch_s = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    results: dict[str, Any] = {**measured_with(), "cases": {}}
    num_gpus = torch.cuda.device_count()
    for name, case in CASES.items():
        is_left_out = ON_MEGATRON[1] in case.overrides if arguments.cpu else case.gpus > num_gpus
        if is_left_out or not any(part in name for part in arguments.cases):
            continue
        if time.monotonic() - begin_s > arguments.until_s:
            print(f"{name}: not begun", flush=True)
            continue
        begun_s = time.monotonic()
        for shape in filter(None, (case.shape, case.teacher)):
            make_model(
                models / shape,
                ("moe-tiny" if shape == "12-layers" else "tiny") if arguments.cpu else shape,
                "cpu" if arguments.cpu else "cuda",
                ties_embeddings=shape in TIED,
            )
        found = _measure(arguments, name, out, models)
        found["overrides"] = [*keys_of(case), *arguments.overrides]
        found |= {"shares_gpus": arguments.shared, "launch_s": launch_s}
        results["cases"][name] = found
        write_result(out / "plan_runs.json", results)
        text = line_of(name, found["steps"]) if found["steps"] else f"{name}: {found['end']}"
        print(f"{text} ({time.monotonic() - begun_s:.0f} s with its start)", flush=True)


def _measure(arguments: argparse.Namespace, name: str, out: Path, models: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, "--out", out, "--dir", models, "--steps", arguments.steps]
    command += ["--cpu"] if arguments.cpu else []
    log = out / f"{name}.log"
    out.mkdir(parents=True, exist_ok=True)
    begun_s, host_bytes, end = time.monotonic(), 0, ""
    with (
        log.open("w") as file,
        subprocess.Popen([*map(str, command), *arguments.overrides], stdout=file, stderr=subprocess.STDOUT) as run,
    ):
        while run.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                run.wait(PERIOD_S)
            host_bytes = max(host_bytes, _host_bytes(run.pid))
            if run.poll() is None and time.monotonic() - begun_s > arguments.limit_s:
                end = f"ended after {arguments.limit_s:.0f} s"
                run.kill()
    end = end or f"status {run.returncode}"
    steps = [{key: value for key, value in step.items() if key.startswith(KEPT)} for step in steps_in(out / name)]
    if end != "status 0":
        lines = log.read_text(errors="replace").splitlines()
        print(f"{name}: {end}: {' | '.join(lines[-3:])[-400:]}", flush=True)
    return {"end": end, "host_peak_bytes": host_bytes, "steps": steps}


def _host_bytes(pid: int) -> int:
    """Main memory of a process and all that descend from it; a page that n of them share counts once."""
    with suppress(psutil.Error):
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return sum(sum(process_bytes(process.pid).values()) for process in processes)
    return 0


if __name__ == "__main__":
    main()
