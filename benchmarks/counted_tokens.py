"""SFT and DPO steps with logits for the counted tokens only, beside steps with logits for every token.

    python benchmarks/counted_tokens.py --shapes demo 0.6B --json counted_tokens.json

On a random Qwen3 model in float32 with SGD, in this process, on the CPU. The first half of each row of random tokens is
a prompt. `demo` has the demo's model and batch sizes, `0.6B` the sizes of Qwen3-0.6B and a few short rows. A DPO step
includes the reference's pass. Steps of both kinds take turns on one worker, and medians are compared: of seconds, and
of CPU seconds, which other work on the machine disturbs less. The first step of each kind is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "examples" / "demo")]

from nemo_offload_rl.algorithms.supervised_losses import (  # noqa: E402
    DpoLoss,
    NLLLoss,
    counted_sums,
)
from nemo_offload_rl.data.batch import PreferenceBatch, TokenBatch, TrainBatch  # noqa: E402
from nemo_offload_rl.distributed.local import start_local_policy  # noqa: E402
from nemo_offload_rl.runs.loading import load_dpo_config, load_sft_config  # noqa: E402


@dataclass(frozen=True)
class Sizes:
    """Rows of an SFT step, which is one micro-batch, pairs of a DPO step, and tokens of a row."""

    rows: int
    pairs: int
    length: int


SIZES = {"demo": Sizes(rows=128, pairs=32, length=16), "0.6B": Sizes(rows=2, pairs=1, length=64)}


class WholeRows(TrainBatch):
    """Rows whose every token is scored."""

    is_scored = TokenBatch.is_scored


class WholePairs(PreferenceBatch):
    """The same of pairs."""

    is_scored = TokenBatch.is_scored


def make_batch(sizes: Sizes, num_rows: int, vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (num_rows, sizes.length), generator=generator)
    mask = (torch.arange(sizes.length) >= sizes.length // 2).float().expand(num_rows, -1)
    lengths = torch.full((num_rows,), sizes.length)
    return {"input_ids": ids, "input_lengths": lengths, "token_mask": mask, "sample_mask": torch.ones(num_rows)}


def measure(algorithm: str, model: Path, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Medians of both kinds of step."""
    num_rows = sizes.rows if algorithm == "sft" else 2 * sizes.pairs
    keys = [
        f"policy.model_name={model}",
        f"policy.train_global_batch_size={sizes.rows if algorithm == 'sft' else sizes.pairs}",
        f"policy.train_micro_batch_size={sizes.rows if algorithm == 'sft' else sizes.pairs}",
        f"policy.logprob_batch_size={num_rows}",
        f"policy.max_total_sequence_length={sizes.length}",
        "~policy.optimizer",
        "+policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 1e-6}, decay_norm_and_bias: true}",
        "policy.scheduler=null",
    ]
    load: Callable[..., Any] = load_sft_config if algorithm == "sft" else load_dpo_config
    config = load(ROOT / f"examples/configs/{algorithm}_arithmetic_cpu.yaml", keys)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    tensors = make_batch(sizes, num_rows, vocabulary)
    policy = start_local_policy(config.worker, keep_reference=algorithm == "dpo")
    policy.prepare_for_training()

    def sft_step(whole: bool) -> float:
        return policy.train((WholeRows if whole else TrainBatch)(**tensors), NLLLoss()).loss[0]

    def dpo_step(whole: bool) -> float:
        kind = WholePairs if whole else PreferenceBatch
        batch = kind(**tensors, reference_sums=torch.zeros(num_rows, dtype=torch.float64))
        reference = policy.get_reference_logprobs(batch, counted_only=not whole)
        batch = replace(batch, reference_sums=counted_sums(reference, batch))
        return policy.train(batch, DpoLoss(config.dpo)).loss[0]

    step = sft_step if algorithm == "sft" else dpo_step
    seconds: dict[str, list[tuple[float, float]]] = {"whole": [], "counted": []}
    for _ in range(repeats + 1):
        for kind, found in seconds.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            step(kind == "whole")
            found.append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
    policy.shutdown()
    result = {}
    for index, name in enumerate(("wall_s", "cpu_s")):
        whole, counted = (statistics.median(pair[index] for pair in seconds[kind][1:]) for kind in seconds)
        result[name] = {"whole": whole, "counted": counted, "ratio": whole / counted}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["demo"], choices=SIZES)
    parser.add_argument("--algorithms", nargs="+", default=["sft", "dpo"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from grpo_gpu import machine, write_model
    from make_model import make_model, make_tokenizer  # pyright: ignore[reportMissingImports]

    results: dict[str, Any] = {"machine": machine(), "command": " ".join(["python", *sys.argv]), "runs": {}}
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as name:
            model = Path(name)
            if shape == "demo":
                make_model(0).save_pretrained(model)
                make_tokenizer().save_pretrained(model)
            else:
                write_model(model, shape, seed=0, max_positions=SIZES[shape].length)
            for algorithm in arguments.algorithms:
                result = measure(algorithm, model, SIZES[shape], arguments.repeats)
                results["runs"][f"{shape} {algorithm}"] = result
                for name, found in result.items():
                    figures = "  ".join(f"{kind} {value:.3f}" for kind, value in found.items())
                    print(f"{shape:6s}{algorithm:5s}{name:8s}{figures}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
