"""Steps an hour of GRPO where lengths have a long tail, by how rollouts are collected.

    python benchmarks/grpo_long_tail.py --gpus 1 --json long_tail_1.json
    python benchmarks/grpo_long_tail.py --gpus 2 --json long_tail_2.json
    python benchmarks/grpo_long_tail.py --cpu --steps 3

A random model says nothing that ends, so each response has a length of its own, which is where it is cut: log-normal,
its 99th percentile 8 times its median, from a hash of the prompt, the seed and its number. All sides draw from the same
distribution. With one GPU policy and engine share it. With two, `data` and `finished` have one for each, and the others
use both for policy and engines. `colocated` computes the KV cache of unfinished responses again, and `kept` keeps it on
the host; the engines of `awake` never sleep and generate while the policy trains. Printed for each side: steps an hour,
without the first steps, which fill the pool, and the last, which empty it; tokens trained on per second of those steps;
the mean length trained on and sampled; the age of the rollouts; seconds of waiting for rollouts and of training.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from common import CPU_OVERRIDES, ROOT, make_model, measured_with, steps_in, write_result

SIGMA = math.log(8) / NormalDist().inv_cdf(0.99)
AHEAD = [
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "policy.generation.vllm_cfg.async_engine=true",
]
FINISHED = [*AHEAD, "grpo.async_grpo.order=finished"]
APART = [
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.generation.colocated.resources.num_nodes=1",
]
SIDES = {
    "synchronous": [],
    "colocated": FINISHED,
    "kept": [*FINISHED, "grpo.async_grpo.paused_kv=host"],
    "awake": [*FINISHED, "policy.generation.vllm_cfg.enable_sleep_mode=false"],
    "data": [*AHEAD, *APART, "grpo.async_grpo.order=data"],
    "finished": [*FINISHED, *APART],
}


def length_of(prompt: Sequence[int], seed: int | None, number: int, longest: int) -> int:
    """Tokens of a response: median `longest` / 8, 99th percentile `longest`, and none above that."""
    digest = hashlib.blake2b(f"{list(prompt)}:{seed}:{number}".encode(), digest_size=8).digest()
    share = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return max(1, min(longest, round(longest / 8 * math.exp(SIGMA * NormalDist().inv_cdf(share)))))


def cut_responses(async_engine: bool) -> None:
    """Have engines cut each response at its length; in the driver's process, before engines are made.

    Args:
        async_engine: Engines are asynchronous, so that several threads may call them.
    """
    from nemo_offload_rl.distributed.generation_engine import OneRayEngine, RayGenerationEngine
    from nemo_offload_rl.generation.vllm.async_engine import AsyncVllmEngine
    from nemo_offload_rl.protocols.engine import Completion

    plain_each = OneRayEngine.generate_each
    left: dict[tuple[int, ...], list[int]] = defaultdict(list)  # of aborted responses, by their tokens so far

    def limited_samplings(prompts: Any, sampling: Any, num_samples: int) -> list[list[Any]]:
        found = []
        for place, prompt in enumerate(prompts):
            seeds = [
                None if sampling.seed is None else sampling.seed + place * num_samples + n for n in range(num_samples)
            ]
            lengths = [length_of(prompt, seed, n, sampling.max_new_tokens) for n, seed in enumerate(seeds)]
            pairs = zip(seeds, lengths, strict=True)
            found.append([replace(sampling, seed=seed, max_new_tokens=length) for seed, length in pairs])
        return found

    def remember(prompts: Any, limits: Sequence[int], answers: Sequence[Completion]) -> list[Completion]:
        for prompt, limit, answer in zip(prompts, limits, answers, strict=True):
            if answer.finish_reason == "abort":
                left[*prompt, *answer.token_ids].append(limit - len(answer.token_ids))
        return list(answers)

    def of_one(self: Any, prompts: Any, sampling: Any, num_samples: int = 1) -> list[list[Completion]]:
        rows = [prompt for prompt in prompts for _ in range(num_samples)]
        each = [one for some in limited_samplings(prompts, sampling, num_samples) for one in some]
        answers = remember(rows, [one.max_new_tokens for one in each], plain_each(self, rows, each))
        return [answers[start : start + num_samples] for start in range(0, len(answers), num_samples)]

    def further(self: Any, prompts: Any, samplings: Any) -> list[Completion]:
        limits = [left[tuple(prompt)].pop() for prompt in prompts]
        pairs = zip(samplings, limits, strict=True)
        limited = [replace(one, max_new_tokens=max(1, limit)) for one, limit in pairs]
        return remember(prompts, limits, plain_each(self, prompts, limited))

    def of_all(self: Any, prompts: Any, sampling: Any, num_samples: int = 1) -> list[list[Completion]]:
        limited = limited_samplings(prompts, sampling, num_samples)
        if async_engine:
            size = self._group.world_size
            shares = [range(number, len(prompts), size) for number in range(size)]
            rows = [[prompts[place] for place in share for _ in range(num_samples)] for share in shares]
            each = [[one for place in share for one in limited[place]] for share in shares]
            answers = self._group.run_each(AsyncVllmEngine.generate_each, list(zip(rows, each, strict=True)))
            found: list[Any] = [None] * len(prompts)
            for number, share in enumerate(answers):
                for place in range(len(share) // num_samples):
                    found[number + place * size] = share[place * num_samples : (place + 1) * num_samples]
            return found
        groups: list[list[Any]] = [[None] * num_samples for _ in prompts]
        for finished in self.generate_as_finished(prompts, limited):
            for place, number, answer in finished:
                groups[place][number] = answer
        return groups

    OneRayEngine.generate, OneRayEngine.generate_each, RayGenerationEngine.generate = of_one, further, of_all


def run_side(overrides: Sequence[str]) -> None:
    """Run GRPO in this process, which ends."""
    cut_responses(async_engine="policy.generation.vllm_cfg.async_engine=true" in overrides)
    from nemo_offload_rl.runs.loading import load_grpo_config
    from nemo_offload_rl.runs.rollouts import run_grpo
    from nemo_offload_rl.utils.cli import ending_process

    with ending_process():
        run_grpo(load_grpo_config(str(ROOT / "benchmarks/grpo_gpu.yaml"), list(overrides)))


def overrides_of(side: str, args: argparse.Namespace, model: Path, log_dir: Path) -> list[str]:
    """All keys of a side."""
    longest = 32 if args.cpu else args.longest
    trainers = args.gpus - (side in ("data", "finished"))
    keys = [
        f"policy.model_name={model}",
        f"logger.log_dir={log_dir}",
        f"grpo.max_num_steps={args.steps}",
        f"grpo.async_grpo.max_trajectory_age_steps={args.age}",
        "loss_fn.use_importance_sampling_correction=true",
        "grpo.max_token_mult_prob_error=null",
    ]
    if args.cpu:
        keys += [*CPU_OVERRIDES, f"cluster.cpu_workers_per_node={max(1, trainers)}"]
    else:
        tokens = longest + 16
        keys += [f"cluster.gpus_per_node={trainers}", "policy.sequence_packing.enabled=true"]
        keys += [f"policy.sequence_packing.{name}_mb_tokens={4 * tokens}" for name in ("train", "logprob")]
    keys += [f"policy.generation.max_new_tokens={longest}", f"policy.max_total_sequence_length={longest + 16}"]
    return [*keys, *SIDES[side], *args.keys]


def measure(side: str, args: argparse.Namespace, model: Path, folder: Path) -> dict[str, float]:
    """Run a side in a process of its own."""
    log_dir = folder / side
    command = [sys.executable, __file__, "--side", *overrides_of(side, args, model, log_dir)]
    subprocess.run(command, check=True)
    everything = steps_in(log_dir)
    # The first steps fill the pool and compile, the last ones empty it.
    steps = everything[1 + args.age : len(everything) - args.age] or everything[1:]
    totals = [step["timing/total_s"] for step in steps]
    size = (4 * 2) if args.cpu else 512
    trained = [step["train/mean_response_tokens"] for step in steps]
    return {
        "steps_per_hour": 3600 / fmean(totals),
        "tokens_per_s": size * sum(trained) / sum(totals),
        "trained_length": fmean(trained),
        "sampled_length": fmean(
            step.get("train/sampled_length_mean", step["train/mean_response_tokens"]) for step in steps
        ),
        "age": fmean(step.get("train/avg_trajectory_age", 0.0) for step in steps),
        "waited_s": fmean(
            step.get("timing/exposed_generation_s", step.get("timing/generation_s", 0.0)) for step in steps
        ),
        "training_s": fmean(step["timing/training_s"] for step in steps),
        "token_mult_prob_error": fmean(step["train/token_mult_prob_error"] for step in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--longest", type=int, default=4096, help="tokens at the 99th percentile, 8 times the median")
    parser.add_argument("--age", type=int, default=2, help="grpo.async_grpo.max_trajectory_age_steps")
    parser.add_argument("--cpu", action="store_true", help="a tiny model and short responses, to try the script")
    parser.add_argument("--keys", nargs="*", default=[], help="overrides of all sides")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.sides or (
        ["synchronous", "colocated", "kept", "awake"] if args.gpus == 1 and not args.cpu else list(SIDES)
    )
    result: dict[str, Any] = {**measured_with(), "settings": {key: str(value) for key, value in vars(args).items()}}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, "tiny" if args.cpu else args.shape, "cpu" if args.cpu else "cuda")
        for name in names:
            result[name] = measure(name, args, model, Path(folder))
            write_result(args.json, result)
    first = names[0]
    print("| side | steps an hour | of the first | tokens/s | trained, sampled length | age | waited, training s |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        found = result[name]
        ratio = found["steps_per_hour"] / result[first]["steps_per_hour"]
        print(
            f"| {name} | {found['steps_per_hour']:.0f} | {ratio:.2f} | {found['tokens_per_s']:.0f} "
            f"| {found['trained_length']:.0f}, {found['sampled_length']:.0f} | {found['age']:.1f} "
            f"| {found['waited_s']:.1f}, {found['training_s']:.1f} |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        run_side(sys.argv[2:])
    else:
        main()
