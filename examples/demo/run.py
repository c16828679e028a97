"""The demo: a small model learns to carry. Everything happens on this machine, without a GPU.

1. Make a small Qwen3-shaped model with random weights, and its tokenizer.
2. Warm it up by imitating demonstrations of additions, most of them by somebody who forgets to carry.
3. Train it with GRPO: a policy worker and a vLLM engine as colocated Ray actors, reward 1 for a right answer.
4. Print what it learned, where the time went and what was moved; draw it.

    make demo
    SEED=43 make demo
    python examples/demo/run.py --seed 42 --run-dir runs/demo grpo.max_num_steps=80
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_offload_rl.utils.cli import ending_process, set_up_logging

sys.path.insert(0, str(Path(__file__).parent))

CONFIG = Path(__file__).parents[1] / "configs" / "grpo_arithmetic_cpu.yaml"
SFT_CONFIG = CONFIG.with_name("sft_arithmetic_cpu.yaml")


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the GRPO configuration")
    arguments = parser.parse_args()
    set_up_logging(logging.WARNING)
    # Read as torch is loaded. The warm-up runs in this process, where threads that spin while waiting slow every step
    # down as soon as another process needs a core. Policy workers have the same.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    begin = time.perf_counter()

    from make_model import write_model_folder
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from nemo_offload_rl.runs.loading import load_grpo_config

    disable_progress_bar()
    console = Console(soft_wrap=True)
    run_dir = arguments.run_dir
    shutil.rmtree(run_dir, ignore_errors=True)
    console.print(f"1/4  making a Qwen3-shaped model of 0.6 million random weights and its tokenizer in {run_dir}")
    write_model_folder(run_dir / "random", arguments.seed)
    overrides = [
        f"grpo.seed={arguments.seed}",
        f"policy.model_name={run_dir / 'warmed_up'}",
        f"logger.log_dir={run_dir / 'grpo'}",
        f"checkpointing.checkpoint_dir={run_dir / 'checkpoints'}",
        *arguments.overrides,
    ]

    console.print(
        "2/4  warm-up by imitation: three of four demonstrations forget to carry\n"
        "     350 steps, about a minute on two idle cores"
    )
    warm_up(run_dir, arguments.seed, console)
    warmed_up_s = time.perf_counter() - begin

    console.print(
        "3/4  GRPO: a policy worker and a vLLM engine as colocated Ray actors; a right answer is worth 1\n"
        "     starting Ray, vLLM and the worker takes 20 to 60 seconds, the 80 steps then 2 to 5 minutes"
    )
    from nemo_offload_rl.runs.rollouts import run_grpo

    run_grpo(load_grpo_config(CONFIG, overrides))

    from nemo_offload_rl.report import write_report

    page = write_report(run_dir / "grpo")
    console.print("4/4  what came of it")
    console.print(summary_table(run_dir / "grpo", warmed_up_s, time.perf_counter() - begin))
    console.print(f"charts: {page.absolute()}")
    console.print(f"every number of every step: {(run_dir / 'grpo' / 'metrics.jsonl').absolute()}")


def warm_up(run_dir: Path, seed: int, console: Any) -> None:
    """Supervised fine-tuning of `run_dir`/random into `run_dir`/warmed_up, in this process."""
    from demonstrations import FORGETFUL_SHARE

    imitate(run_dir, seed, console, start="random", name="warm_up", forgetful_share=FORGETFUL_SHARE)
    (trained,) = (run_dir / "warm_up" / "checkpoints").glob("step_*/hf")
    trained.rename(run_dir / "warmed_up")


def imitate(run_dir: Path, seed: int, console: Any, *, start: str, name: str, forgetful_share: float) -> None:
    """Supervised fine-tuning of `run_dir`/`start` on demonstrations; everything of it is in `run_dir`/`name`."""
    from demonstrations import write_files
    from rich.console import Console

    from nemo_offload_rl.runs.loading import load_sft_config
    from nemo_offload_rl.runs.supervised import local_policy, run_sft

    folder = run_dir / name
    write_files(folder / "data", seed, forgetful_share)
    overrides = [
        f"sft.seed={seed}",
        f"policy.model_name={run_dir / start}",
        f"data.train.path={folder / 'data' / 'sft_train.jsonl'}",
        f"data.validation.path={folder / 'data' / 'sft_validation.jsonl'}",
        f"logger.log_dir={folder}",
        "logger.num_val_samples_to_print=0",
        f"checkpointing.checkpoint_dir={folder / 'checkpoints'}",
        "checkpointing.save_optimizer=false",  # a demo that was interrupted begins anew
    ]

    def tell(step: int, metrics: Mapping[str, float]) -> None:
        if step % 50 == 0 and step > 0:
            console.print(f"     step {step}: loss per token {metrics['train/loss']:.3f}")

    run_sft(load_sft_config(SFT_CONFIG, overrides), local_policy, Console(quiet=True), callbacks=[tell])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["validation/loss"] for record in records if "validation/loss" in record]
    console.print(
        f"     held-out loss per token {losses[0]:.3f} before, {losses[-1]:.3f} after {len(records) - 1} steps"
    )


def summary_table(log_dir: Path, warmed_up_s: float, whole_s: float) -> Any:
    """Accuracy before and after, reward and KL along the way, seconds by phase, bytes moved."""
    from rich.table import Table

    records = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["step"] > 0]
    accuracies = [record["validation/accuracy"] for record in records if "validation/accuracy" in record]
    table = Table(show_header=False, title="demo", title_justify="left")
    table.add_row("held-out accuracy, greedy, before GRPO", f"{accuracies[0]:.1%}")
    table.add_row("held-out accuracy, greedy, after GRPO", f"{accuracies[-1]:.1%}", style="bold")
    marks = sorted({0, len(steps) // 4, len(steps) // 2, 3 * len(steps) // 4, len(steps) - 1})
    for key, label in (("train/reward_mean", "mean reward"), ("train/kl", "KL to the start")):
        table.add_row(f"{label}, steps {', '.join(str(i + 1) for i in marks)}", _series(steps, key, marks))
    mult_prob_error = sum(step["train/token_mult_prob_error"] for step in steps) / len(steps)
    table.add_row("token_mult_prob_error", f"{mult_prob_error:.6f}")
    phases = {key for step in steps for key in step if key.startswith("timing/") and key.count("/") == 1}
    total_s = _mean(steps, "timing/total_s")
    for phase in sorted(phases, key=lambda key: -_mean(steps, key)):
        mean_s = _mean(steps, phase)
        table.add_row(f"seconds per step, {phase[7:-2]}", f"{mean_s:.3f}  ({mean_s / total_s:.0%})")
    mib = 2**20
    for key, label in (
        ("bytes_out", "to the host"),
        ("bytes_in", "to the device"),
        ("bytes_clean", "without a copy"),
    ):
        table.add_row(f"residency, MiB per step {label}", f"{_mean(steps, 'residency/' + key) / mib:.2f}")
    table.add_row("residency, seconds per step", f"{_mean(steps, 'residency/exposed_s'):.3f}")
    table.add_row("seconds, warm-up / whole demo", f"{warmed_up_s:.0f} / {whole_s:.0f}")
    return table


def _series(steps: list[dict[str, float]], key: str, marks: list[int]) -> str:
    return ", ".join(f"{steps[i][key]:.3f}" for i in marks)


def _mean(steps: list[dict[str, float]], key: str) -> float:
    values = [step[key] for step in steps if key in step]
    return sum(values) / len(steps)


if __name__ == "__main__":
    with ending_process():
        main()
