"""GRPO end to end with a mixture of experts: does it train, do refits reach every expert, do engine and policy agree?

    python benchmarks/grpo_moe.py --shape 12-layers --steps 3 --out results/grpo_moe
    python benchmarks/grpo_moe.py --backend dtensor --shape 12-layers --steps 3 --out results/grpo_moe_dtensor

The model has Qwen3-30B-A3B's widths and random weights, made on the GPU. Rewards fall with the length of a response,
and some of the vocabulary ends one, so that responses differ in reward and every weight is trained, the routers' by
the DTensor backend only.
Engine and policy agree where `token_mult_prob_error` is under 1.02; the exit status is 1 where a step is above it.
Overrides of `grpo_moe.yaml`, or `grpo_moe_dtensor.yaml`, follow the options, as KEY=VALUE.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

from qwen3_shapes import MOE_SHAPES, write_model

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples" / "demo")]

CONFIGS = {"megatron": "grpo_moe.yaml", "dtensor": "grpo_moe_dtensor.yaml"}
LIMIT = 1.02
# So many of the vocabulary end a response: with near-uniform sampling two in three end before 512 tokens.
STOP_SHARE = 0.002

COLUMNS = {
    "total": "timing/total_s",
    "refit": "timing/refit_s",
    "stream": "timing/refit/stream_s",
    "generate": "timing/generation_s",
    "logprobs": "timing/logprobs_s",
    "reference": "timing/reference_logprobs_s",
    "train": "timing/training_s",
    "prob error": "train/token_mult_prob_error",
    "KL": "train/kl",
    "grad norm": "train/grad_norm",
    "entropy": "train/approx_entropy",
    "tokens": "train/mean_response_tokens",
    "GPU peak": "memory/peak_gib",
    "GPU train": "memory/training_policy_gib",
    "host": "memory/host_policy_gib",
}


def table(steps: list[dict[str, Any]]) -> str:
    """Seconds, GiB and agreement of every step."""
    lines = [" ".join(f"{name:>10s}" for name in ("step", *COLUMNS))]
    for step in steps:
        values = [step.get(key) for key in COLUMNS.values()]
        cells = ["-" if value is None else f"{value:.4g}" for value in values]
        lines.append(" ".join(f"{cell:>10s}" for cell in (str(step["step"]), *cells)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="megatron", choices=list(CONFIGS))
    parser.add_argument("--shape", default="12-layers", choices=list(MOE_SHAPES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="where the weights are made")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, the run and grpo_moe.json")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    shape, out = MOE_SHAPES[arguments.shape], arguments.out
    begin_s = time.perf_counter()
    # A process of its own, which leaves nothing on the GPU.
    writer = multiprocessing.get_context("spawn").Process(
        target=write_model, args=(out / "model", shape, arguments.device)
    )
    writer.start()
    writer.join()
    if writer.exitcode:
        sys.exit("the model could not be made")

    from grpo_gpu import machine, summary

    from nemo_offload_rl.runs.loading import load_grpo_config
    from nemo_offload_rl.runs.rollouts import run_grpo
    from nemo_offload_rl.utils.cli import set_up_logging

    set_up_logging()
    stops = range(shape.vocab // 2, shape.vocab // 2 + max(int(STOP_SHARE * shape.vocab), 1))
    overrides = [
        f"policy.model_name={out / 'model'}",
        f"logger.log_dir={out / 'run'}",
        f"grpo.max_num_steps={arguments.steps}",
        f"policy.generation.stop_token_ids={list(stops)}",
        *arguments.overrides,
    ]
    ready_s = time.perf_counter()
    run_grpo(load_grpo_config(ROOT / "benchmarks" / CONFIGS[arguments.backend], overrides))
    steps = summary(out / "run")["steps"]
    times = {"model_s": ready_s - begin_s, "whole_s": time.perf_counter() - begin_s}
    result = {"steps": steps, "machine": machine(), "command": " ".join(["python", *sys.argv]), **times}
    (out / "grpo_moe.json").write_text(json.dumps(result, indent=1) + "\n")
    worst = max(step["train/token_mult_prob_error"] for step in steps)
    print(f"model made in {times['model_s']:.0f} s, everything in {times['whole_s']:.0f} s")
    print(table(steps))
    print(f"token_mult_prob_error at most {worst:.4f}: {'agrees' if worst < LIMIT else 'DOES NOT AGREE'}")
    if worst >= LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    main()
