"""On-policy distillation with random Qwen3 models: seconds of a step's phases, and memory.

    python benchmarks/distillation.py --steps 3 --variants topk,streamed,megatron --out results/distillation
    python benchmarks/distillation.py --student tiny --teacher tiny --cpu --steps 2 --out results/distillation

Each variant is a run of its own in a process of its own: the teacher's top-k, all of its vocabulary, its layers
streamed, and the Megatron backend. No response has an end. Student and teacher are random, so the loss says only that
the run is the same: variants that differ in memory alone print equal losses. It prints seconds, GiB and the loss of
every step. Docs: docs/measurements/distillation.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any

from common import ROOT, make_model, measured_with, steps_in, write_result
from qwen3_shapes import SHAPES

VARIANTS: dict[str, list[str]] = {
    "topk": [],
    "streamed": ["teacher.stream_layers=true"],
    "whole": ["distillation.topk_logits_k=null"],
    "megatron": [],
}
ARITHMETIC = [
    "data.max_input_seq_length=16",
    "~data.train",
    "+data.train={dataset_name: arithmetic, num_digits: 2, operators: ['+'], size: 4000, holdout: 64, seed: 42}",
    "data.default.prompt_file=null",
    "data.default.env_name=arithmetic",
    "~env",
    "+env={arithmetic: {num_workers: 0}}",
]
SHARED = [
    "distillation.num_prompts_per_step=64",
    "distillation.max_num_epochs=1000",
    "distillation.val_period=0",
    "policy.train_global_batch_size=64",
    "policy.max_total_sequence_length=576",
    "policy.host_memory_budget_gib=100",
    "policy.generation.max_new_tokens=512",
    "policy.logprob_batch_size=16",
    "policy.train_micro_batch_size=16",
    *ARITHMETIC,
    "checkpointing.enabled=false",
]
ON_CPU = [
    "cluster.gpus_per_node=0",
    "policy.precision=float32",
    "teacher.precision=float32",
    "policy.generation.vllm_cfg.kv_cache_memory_gib=0.125",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "distillation.num_prompts_per_step=4",
    "policy.train_global_batch_size=4",
    "policy.logprob_batch_size=2",
    "policy.train_micro_batch_size=2",
    "policy.generation.max_new_tokens=16",
    "policy.max_total_sequence_length=64",
    "policy.host_memory_budget_gib=null",
]
COLUMNS = {
    "total": "timing/total_s",
    "generate": "timing/generation_s",
    "teacher": "timing/teacher_s",
    "train": "timing/training_s",
    "refit": "timing/refit_s",
    "loss": "train/loss",
    "prob error": "train/token_mult_prob_error",
    "GPU peak": "memory/peak_gib",
    "host": "memory/host_policy_gib",
}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Seconds, GiB and the loss of every step of every variant."""
    lines = [f"{'variant':>10s} " + " ".join(f"{name:>10s}" for name in ("step", *COLUMNS))]
    for variant, steps in results.items():
        for step in steps:
            cells = ["-" if step.get(key) is None else f"{step[key]:.5g}" for key in COLUMNS.values()]
            lines.append(f"{variant:>10s} " + " ".join(f"{cell:>10s}" for cell in (str(step["step"]), *cells)))
    return "\n".join(lines)


def run_variant(config: Path, overrides: list[str], run: Path) -> None:
    """One run, whose metrics are in `run`."""
    from nemo_offload_rl.runs.distillation import run_distillation
    from nemo_offload_rl.runs.loading import load_distillation_config
    from nemo_offload_rl.utils.cli import set_up_logging

    set_up_logging()
    run_distillation(load_distillation_config(config, [*overrides, f"logger.log_dir={run}"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", default="0.6B", choices=list(SHAPES))
    parser.add_argument("--teacher", default="4B", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--cpu", action="store_true", help="short responses without a GPU, to try the script")
    parser.add_argument("--out", type=Path, required=True, help="folder for models, runs and distillation_gpu.json")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    out, spawn = arguments.out, multiprocessing.get_context("spawn")
    for name in ("student", "teacher"):
        make_model(out / name, getattr(arguments, name), "cpu" if arguments.cpu else "cuda")
    models = [f"policy.model_name={out / 'student'}", f"teacher.model_name={out / 'teacher'}"]
    shared = [*SHARED, *models, f"distillation.max_num_steps={arguments.steps}", *(ON_CPU if arguments.cpu else [])]
    known = measured_with()
    results: dict[str, list[dict[str, Any]]] = {}
    for variant in arguments.variants.split(","):
        name = "distillation_math_megatron.yaml" if variant == "megatron" else "distillation_math.yaml"
        overrides = [*shared, *VARIANTS[variant], *arguments.overrides]
        begin_s = time.perf_counter()
        process = spawn.Process(
            target=run_variant, args=(ROOT / "examples" / "configs" / name, overrides, out / variant)
        )
        process.start()
        process.join()
        if process.exitcode:
            print(f"{variant}: ended with status {process.exitcode}", flush=True)
            continue
        results[variant] = steps_in(out / variant)
        print(f"{variant}: {time.perf_counter() - begin_s:.0f} s with its start", flush=True)
        write_result(out / "distillation.json", {**known, "variants": results})
    print(table(results))


if __name__ == "__main__":
    main()
