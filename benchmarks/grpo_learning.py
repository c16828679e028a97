"""Learning curves of GRPO: accuracy, agreement of the backends, effect of residency, growth of memory in a long run.

    python benchmarks/grpo_learning.py --steps 100 --json grpo_learning.json
    python benchmarks/grpo_learning.py --variants dtensor dtensor_resident --steps 6 --cpu

A small Qwen3 model (3.2 million parameters; with `--cpu` the demo's) is warmed up once by imitation, as in `make demo`.
Each variant then trains it in a run of its own with the same seed. `_resident` keeps parameters and optimizer states on
the device at all times; `_16_bit` has Adam's moments in bfloat16; `_finished` trains on the groups that finish first,
while the others go on after the update, up to an age of 1 step (`_finished_2`: 2). With `--experts` the model is a
mixture, and `_replay` trains each token with the experts that the engine chose for it. With `--at-once` all run at the
same time, and their seconds say less. Printed for each variant: held-out accuracy, how far engine and policy are apart,
how much memory grew from the 20 steps after the tenth to the last 20 (medians), the slowest step over the median, how
far rewards and losses are from those of the first variant over the first 20 steps, and how many steps of a `_resident`
variant are not bit for bit those of its twin.
Docs: docs/measurements/learning.md and docs/measurements/cpu.md; `plots.py` draws the curves.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import ROOT, json_lines, measured_with, write_result
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

GPU_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
WARM_UP_ON_GPU = ["cluster.gpus_per_node=1", "policy.precision=bfloat16", "policy.optimizer.kwargs.lr=1e-3"]
RESIDENT = ["policy.residency_overrides={params: device, optimizer: device}"]
MEGATRON = [
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.optimizer=null",
    "policy.make_sequence_length_divisible_by=16",  # each new width costs time once
]
FINISHED = [
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.order=finished",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "loss_fn.use_importance_sampling_correction=true",
]
REPLAY = ["policy.router_replay.enabled=true"]
EXPERTS = {
    "moe_intermediate_size": 192,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
VARIANTS = {
    "dtensor": [],
    "dtensor_resident": RESIDENT,
    "dtensor_finished": FINISHED,
    "dtensor_finished_2": [*FINISHED, "grpo.async_grpo.max_trajectory_age_steps=2"],
    "dtensor_16_bit": ["policy.optimizer.name=nemo_offload_rl.optim.AdamW"],
    "dtensor_replay": REPLAY,
    "megatron": MEGATRON,
    "megatron_replay": [*MEGATRON, *REPLAY],
    "megatron_resident": [*MEGATRON, *RESIDENT],
    "megatron_16_bit": [
        *MEGATRON,
        "policy.megatron_cfg.optimizer.exp_avg_dtype=bfloat16",
        "policy.megatron_cfg.optimizer.exp_avg_sq_dtype=bfloat16",
    ],
}
CURVES = ("train/reward_mean", "train/loss", "train/token_mult_prob_error", "timing/total_s")
COMPARED_STEPS = 20
SETTLED_STEP = 10
MEMORY_WINDOW = 20


def launch(script: str, config: Path, overrides: Sequence[str]) -> None:
    """Run an example script as users do; its failure ends the benchmark."""
    command = [sys.executable, str(ROOT / "examples" / script), "--config", str(config), *overrides]
    subprocess.run(command, cwd=ROOT, check=True)


def write_mixture(folder: Path, seed: int, sizes: Mapping[str, int]) -> None:
    """Replace a dense model in a folder by a mixture of experts with its sizes, vocabulary and tokens."""
    dense = AutoConfig.from_pretrained(folder).to_dict()
    kept = {key: dense[key] for key in ("vocab_size", "pad_token_id", "eos_token_id", "rope_parameters")}
    config = Qwen3MoeConfig(**{**sizes, **EXPERTS, **kept}, norm_topk_prob=True, tie_word_embeddings=True)
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def warm_up(folder: Path, seed: int, *, cpu: bool, has_experts: bool) -> Path:
    """The folder of a model that has imitated the demo's demonstrations."""
    from demonstrations import write_files  # pyright: ignore[reportMissingImports]
    from make_model import SIZES, write_model_folder  # pyright: ignore[reportMissingImports]

    sizes = SIZES if cpu else GPU_SIZES
    write_model_folder(folder / "random", seed, sizes)
    if has_experts:
        write_mixture(folder / "random", seed, sizes)
    write_files(folder / "data", seed)
    overrides = [
        f"sft.seed={seed}",
        f"policy.model_name={folder / 'random'}",
        f"data.train.path={folder / 'data' / 'sft_train.jsonl'}",
        f"data.validation.path={folder / 'data' / 'sft_validation.jsonl'}",
        f"logger.log_dir={folder / 'warm_up'}",
        f"checkpointing.checkpoint_dir={folder / 'warm_up' / 'checkpoints'}",
        *([] if cpu else WARM_UP_ON_GPU),
    ]
    launch("run_sft.py", ROOT / "examples" / "configs" / "sft_arithmetic_cpu.yaml", overrides)
    (trained,) = (folder / "warm_up" / "checkpoints").glob("step_*/hf")
    return trained


def train(folder: Path, model: Path, variant: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Metrics of a variant's run, one record a step, 0 being the validation before training."""
    demo = ROOT / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
    steps = options.resident_steps if variant.endswith("_resident") and options.resident_steps else options.steps
    overrides = [
        f"policy.model_name={model}",
        f"logger.log_dir={folder / variant}",
        f"grpo.max_num_steps={steps}",
        f"grpo.seed={options.seed}",
        *VARIANTS[variant],
        *options.overrides,
    ]
    launch("run_grpo.py", demo if options.cpu else ROOT / "benchmarks" / "grpo_learning.yaml", overrides)
    return json_lines(folder / variant / "metrics.jsonl")


def judge(
    records: list[dict[str, Any]], first: list[dict[str, Any]], twin: list[dict[str, Any]] | None
) -> dict[str, float]:
    """Compute the rows of one variant, against the first one and, if it is resident, its twin that is not."""
    accuracies = [record["validation/accuracy"] for record in records if "validation/accuracy" in record]
    steps, others = ([record for record in run if record["step"] > 0] for run in (records, first))
    seconds = [step["timing/total_s"] for step in steps[1:] or steps]
    settled = steps[min(SETTLED_STEP, len(steps)) - 1 :]
    window = max(1, min(MEMORY_WINDOW, len(settled) // 2))
    growth: dict[str, float] = {}
    for name in sorted({name for step in settled for name in step if name.startswith("memory/")} - {"memory/peak_gib"}):
        # A phase shorter than the sampler's period is without a sample in some steps.
        first_gib, last_gib = (
            [step[name] for step in part if name in step] for part in (settled[:window], settled[-window:])
        )
        if first_gib and last_gib:
            growth[name] = statistics.median(last_gib) - statistics.median(first_gib)
    compared = list(zip(steps, others, strict=False))[:COMPARED_STEPS]
    apart = {
        name: [abs(step[f"train/{name}"] - other[f"train/{name}"]) for step, other in compared]
        for name in ("reward_mean", "loss")
    }
    generation = [step["timing/generation_s"] for step in steps[1:] or steps if "timing/generation_s" in step]
    return {
        "accuracy before": accuracies[0],
        "accuracy after": accuracies[-1],
        "token_mult_prob_error, mean": statistics.mean(step["train/token_mult_prob_error"] for step in steps),
        "median step, s": statistics.median(seconds),
        **({"routing, MiB": steps[-1]["train/routed_experts_mib"]} if "train/routed_experts_mib" in steps[-1] else {}),
        **({"median generation, s": statistics.median(generation)} if generation else {}),
        "slowest step / median": max(seconds) / statistics.median(seconds),
        **{f"{name.removesuffix('_gib')} grew, GiB": size for name, size in growth.items()},
        "reward apart, mean": statistics.mean(apart["reward_mean"]),
        "reward apart, most": max(apart["reward_mean"]),
        "loss apart, most": max(apart["loss"]),
        **({} if twin is None else {"steps that residency changed": float(num_unlike(steps, twin))}),
    }


def num_unlike(steps: list[dict[str, Any]], twin: list[dict[str, Any]]) -> int:
    """Steps that both runs have and whose reward or loss is not the same bit for bit."""
    others = {record["step"]: record for record in twin}
    names = ("train/reward_mean", "train/loss")
    pairs = [(step, others[step["step"]]) for step in steps if step["step"] in others]
    return sum(any(step[name] != other[name] for name in names) for step, other in pairs)


def curves_of(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Curves of a run: a number for each step, and (step, accuracy) of each validation."""
    return {
        **{curve: [record[curve] for record in records if record["step"] > 0] for curve in CURVES},
        "validation": [
            [record["step"], record["validation/accuracy"]] for record in records if "validation/accuracy" in record
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="all that the model allows without it")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--resident-steps", type=int, help="steps of `_resident` variants, if not the same")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--at-once", action="store_true", help="all variants at the same time, on the same GPU")
    parser.add_argument("--cpu", action="store_true", help="the demo's model and precision; no Megatron")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts; only their variants")
    parser.add_argument("--model", type=Path, help="a model that is warmed up already")
    parser.add_argument("--dir", type=Path, help="folder of models and runs; a temporary one without it")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="of every variant")
    options = parser.parse_args()
    folder = options.dir or Path(tempfile.mkdtemp(prefix="grpo_learning_"))
    of_experts = [name for name in VARIANTS if name.removesuffix("_replay") in ("dtensor", "megatron")]
    others = [name for name in VARIANTS if not name.endswith("_replay")]
    options.variants = options.variants or (of_experts if options.experts else others)
    model = options.model or warm_up(folder, options.seed, cpu=options.cpu, has_experts=options.experts)

    known = measured_with()
    runs: dict[str, list[dict[str, Any]]] = {}
    table: dict[str, dict[str, float]] = {}
    with ThreadPoolExecutor(max_workers=len(options.variants) if options.at_once else 1) as pool:
        training = {variant: pool.submit(train, folder, model, variant, options) for variant in options.variants}
        for variant, ended in training.items():
            runs[variant] = ended.result()
            twin = runs.get(variant.removesuffix("_resident")) if variant.endswith("_resident") else None
            table[variant] = judge(runs[variant], runs[options.variants[0]], twin)
            if options.json:
                curves = {name: curves_of(steps) for name, steps in runs.items()}
                write_result(options.json, {**known, "table": table, "curves": curves})
    for row in dict.fromkeys(name for rows in table.values() for name in rows):
        print(f"{row:36s}" + "".join(f"{table[variant].get(row, float('nan')):>18.5f}" for variant in table))
    print(f"{'':36s}" + "".join(f"{variant:>18s}" for variant in table))


if __name__ == "__main__":
    main()
