"""SFT and DPO of nemo_offload_rl and of TRL's trainers: seconds a step, tokens/s, pairs/s, peak memory.

    python benchmarks/sft_vs_trl.py --shapes 0.6B 1.7B --steps 12 --json sft_vs_trl.json
    python benchmarks/sft_vs_trl.py --shapes tiny --steps 3 --cpu

Every side runs in a process of its own, on the same random Qwen3 model and the same rows: float32 parameters, bfloat16
compute, fused AdamW, no recomputation of activations.

SFT: rows of 2048, 1024, 512 and 512 tokens, which fill 4096 exactly, 65,536 tokens an optimizer step, 16,384 a
micro-batch. Ours packs rows end to end. TRL packs them into rows of 4096: `bfd` keeps sequences apart, `wrapped` lets
attention reach across them, which no user wants but which is TRL's fastest way where flash-attn is not installed.
`--trl-attention flash_attention_2` (or any other that transformers knows) adds `bfd` with that.
DPO: pairs of two sequences of 1024 tokens, 32 pairs a step, 8 a micro-batch, the reference's logprobs in each step.

A step's seconds are from the end of the one before to its own end: data, transfers and logging are in. The first steps,
which compile, are left out of the medians. Ours runs in one process without Ray, as `examples/run_sft.py` does except
for where the worker lives.

Besides torch it needs transformers 5.12.1, trl, accelerate, datasets (dill, multiprocess), pydantic (pydantic_core,
annotated_types, typing_inspection), omegaconf (antlr4-python3-runtime), hydra-core and rich; neither Ray nor vLLM.
It prints a line for each side. Docs: docs/measurements/sft-dpo.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import ROOT, make_model, measured_with, write_result

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Sizes:
    """Size of a step; lengths in tokens."""

    sequence_lengths: tuple[int, ...]  # of SFT; together one packed row
    packed_rows: int  # packed rows of an optimizer step
    micro_rows: int  # packed rows of a micro-batch
    pair_length: int
    pairs: int
    micro_pairs: int

    @property
    def packed_length(self) -> int:
        return sum(self.sequence_lengths)

    @property
    def tokens_per_step(self) -> int:
        return self.packed_length * self.packed_rows


GPU_SIZES = Sizes((2048, 1024, 512, 512), packed_rows=16, micro_rows=4, pair_length=1024, pairs=32, micro_pairs=8)
CPU_SIZES = Sizes((64, 32, 16, 16), packed_rows=4, micro_rows=2, pair_length=32, pairs=4, micro_pairs=2)


# -- data: one character is one token, and so are the two speakers and the end


def write_data(folder: Path, sizes: Sizes, steps: int) -> None:
    """Rows for both algorithms, enough for every step."""
    draw = random.Random(0)

    def text(length: int) -> str:
        return "".join(draw.choices("0123456789+-*=, ", k=length))

    rows = []
    for _ in range(steps * sizes.packed_rows):
        for length in sizes.sequence_lengths:
            prompt = length // 4
            rows.append({"prompt": text(prompt - 2), "completion": text(length - prompt - 1)})
    pairs = []
    for _ in range(steps * sizes.pairs):
        prompt = sizes.pair_length // 4
        responses = {name: text(sizes.pair_length - prompt - 1) for name in ("chosen", "rejected")}
        pairs.append({"prompt": text(prompt - 2), **responses})
    for name, data in (("sft", rows), ("dpo", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))


def read_data(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def as_messages(row: dict[str, str]) -> dict[str, Any]:
    """A conversation in the form that TRL takes."""
    user = [{"role": "user", "content": row["prompt"]}]
    return {"prompt": user, **{k: [{"role": "assistant", "content": v}] for k, v in row.items() if k != "prompt"}}


# -- ours


def run_ours(
    algorithm: str, folder: Path, sizes: Sizes, steps: int, on_cpu: bool, overrides: list[str]
) -> list[tuple[float, float]]:
    """Seconds and tokens of each step, from the run's own records: rows are shuffled, so tokens differ by step."""
    from rich.console import Console

    from nemo_offload_rl.runs.loading import load_dpo_config, load_sft_config
    from nemo_offload_rl.runs.supervised import local_policy, run_dpo, run_sft

    micro_tokens = sizes.packed_length * sizes.micro_rows
    longest = sizes.packed_length
    keys = [
        f"{algorithm}.max_num_steps={steps}",
        f"{algorithm}.val_period=0",
        f"{algorithm}.val_at_start=false",
        f"{algorithm}.val_at_end=false",
        f"policy.model_name={folder / 'model'}",
        f"policy.max_total_sequence_length={longest}",
        "policy.optimizer.kwargs.lr=1e-6",
        "policy.logprob_chunk_size=null",
        f"policy.sequence_packing.train_mb_tokens={micro_tokens}",
        "checkpointing.enabled=false",
        "logger.tensorboard_enabled=false",
        f"logger.log_dir={folder / 'ours' / algorithm}",
        f"data.train.path={folder / algorithm}.jsonl",
        "data.train.split_validation_size=0",
    ]
    if on_cpu:
        keys += [
            "cluster.gpus_per_node=0",
            "policy.use_pinned_optimizer_offload=false",
        ]
    if algorithm == "sft":
        keys += [
            f"policy.train_global_batch_size={sizes.packed_rows * len(sizes.sequence_lengths)}",
            "~data.train",
            f"+data.train={{dataset_name: ResponseDataset, path: {folder}/sft.jsonl, input_key: prompt, "
            "output_key: completion, split_validation_size: 0, seed: 0}",
        ]
        keys = [key for key in keys if not key.startswith("data.train.")]
        config = load_sft_config(ROOT / "examples/configs/sft.yaml", [*keys, *overrides])
        run_sft(config, local_policy, Console(quiet=True))
    else:
        keys.append(f"policy.train_global_batch_size={sizes.pairs}")
        config = load_dpo_config(ROOT / "examples/configs/dpo.yaml", [*keys, *overrides])
        run_dpo(config, local_policy, Console(quiet=True))
    lines = (folder / "ours" / algorithm / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records[-1:]:
        print(json.dumps({name: value for name, value in record.items() if name.startswith(("timing", "train"))}))
        passes_s = record["timing/training_s"] + record.get("timing/reference_logprobs_s", 0.0)
        share = 1 - passes_s / record["timing/total_s"]
        print(f"{share:.2%} of the last step is outside of training and reference: data, metrics, logging", flush=True)
    return [(record["timing/total_s"], record["train/num_tokens"]) for record in records if record["step"] > 0]


# -- TRL


def run_trl(
    algorithm: str, folder: Path, sizes: Sizes, steps: int, on_cpu: bool, strategy: str, attention: str
) -> list[tuple[float, float]]:
    """Seconds of each step, from the end of the one before, and its tokens: rows fill 4096 exactly."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    ends: list[float] = []

    class Steps(TrainerCallback):
        """Notes when each optimizer step has ended on the device."""

        def _note(self) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self._note()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self._note()

    common: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "max_steps": steps,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "use_cpu": on_cpu,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": attention},
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }
    rest: dict[str, Any] = {
        "model": str(folder / "model"),
        "train_dataset": Dataset.from_list([as_messages(row) for row in read_data(folder, algorithm)]),
        "processing_class": AutoTokenizer.from_pretrained(folder / "model"),
        "callbacks": [Steps()],
    }
    if algorithm == "sft":
        from trl.trainer.sft_config import SFTConfig
        from trl.trainer.sft_trainer import SFTTrainer

        arguments: Any = SFTConfig(
            **common,
            packing=True,
            packing_strategy=strategy,
            max_length=sizes.packed_length,
            per_device_train_batch_size=sizes.micro_rows,
            gradient_accumulation_steps=sizes.packed_rows // sizes.micro_rows,
        )
        SFTTrainer(args=arguments, **rest).train()
    else:
        from trl.trainer.dpo_config import DPOConfig
        from trl.trainer.dpo_trainer import DPOTrainer

        arguments = DPOConfig(
            **common,
            max_length=sizes.pair_length,
            per_device_train_batch_size=sizes.micro_pairs,
            gradient_accumulation_steps=sizes.pairs // sizes.micro_pairs,
        )
        DPOTrainer(args=arguments, **rest).train()
    return [(end - begin, sizes.tokens_per_step) for begin, end in pairwise(ends)]


# -- one side in a process of its own, and all of them


def run_one(arguments: argparse.Namespace) -> None:
    """Measure `arguments.one` and write its JSON next to the model."""
    sizes = CPU_SIZES if arguments.cpu else GPU_SIZES
    algorithm, side, *how = arguments.one.split(":")
    if side == "ours":
        timed = run_ours(algorithm, arguments.folder, sizes, arguments.steps, arguments.cpu, arguments.overrides)
    else:
        timed = run_trl(algorithm, arguments.folder, sizes, arguments.steps, arguments.cpu, how[0], how[1])
    steady = timed[WARM_UP_STEPS:] or timed[-1:]
    is_sft = algorithm == "sft"
    result = {
        "seconds": [seconds for seconds, _ in timed],
        "median_step_s": statistics.median(seconds for seconds, _ in steady),
        "tokens_per_s": statistics.median(tokens / seconds for seconds, tokens in steady) if is_sft else None,
        "pairs_per_s": None if is_sft else statistics.median(sizes.pairs / seconds for seconds, _ in steady),
    }
    (arguments.folder / "result.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "1.7B"])
    parser.add_argument("--algorithms", nargs="+", default=["sft", "dpo"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--trl-attention", nargs="*", default=[], help="more attentions for TRL's bfd")
    parser.add_argument("--sides", nargs="+", help="of those in the table, only these, as `ours` or `trl:bfd:sdpa`")
    parser.add_argument("--cpu", action="store_true", help="short rows on the CPU, to try the script")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for each side")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for our side")
    arguments = parser.parse_args()
    if arguments.one:
        run_one(arguments)
        return
    sizes = CPU_SIZES if arguments.cpu else GPU_SIZES
    sft_sides = ["ours", "trl:wrapped:sdpa", *(f"trl:bfd:{name}" for name in ("sdpa", *arguments.trl_attention))]
    sides = {"sft": sft_sides, "dpo": ["ours", "trl:-:sdpa"]}
    results: dict[str, Any] = {**measured_with(), "runs": {}}
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            device = "cpu" if arguments.cpu else "cuda"
            make_model(folder / "model", shape, device, ties_embeddings=True)
            write_data(folder, sizes, arguments.steps)
            for algorithm in arguments.algorithms:
                for side in sides[algorithm]:
                    if arguments.sides and side not in arguments.sides:
                        continue
                    key = f"{shape} {algorithm} {side}"
                    results["runs"][key] = _measure(arguments, folder, f"{algorithm}:{side}")
                    write_result(arguments.json, results)
    _print(results["runs"])


def _measure(arguments: argparse.Namespace, folder: Path, one: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", one, "--folder", str(folder), "--steps", str(arguments.steps)]
    command += (["--cpu"] if arguments.cpu else []) + arguments.overrides
    from grpo_vs_peers import PeakMemory

    (folder / "result.json").unlink(missing_ok=True)
    peak = PeakMemory()
    peak.start()
    try:
        done = subprocess.run(command, env=os.environ, timeout=arguments.timeout_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"longer than {arguments.timeout_s:.0f} s"}
    finally:
        peak_gib = peak.stop()
    if done.returncode:
        return {"failed": f"status {done.returncode}"}
    return json.loads((folder / "result.json").read_text()) | {"gpu_peak_gib": peak_gib}


def _print(runs: dict[str, Any]) -> None:
    print(f"{'':32s}{'s/step':>10s}{'tokens/s':>12s}{'pairs/s':>10s}{'peak GiB':>10s}")
    for key, run in runs.items():
        if "failed" in run:
            print(f"{key:32s}{run['failed']:>10s}")
            continue
        tokens = f"{run['tokens_per_s']:.0f}" if run["tokens_per_s"] else ""
        pairs = f"{run['pairs_per_s']:.2f}" if run["pairs_per_s"] else ""
        print(f"{key:32s}{run['median_step_s']:10.3f}{tokens:>12s}{pairs:>10s}{run['gpu_peak_gib']:10.1f}")


if __name__ == "__main__":
    main()
