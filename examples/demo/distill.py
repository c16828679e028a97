"""The demo of distillation: a student that forgets to carry learns it from a larger teacher. Needs no GPU.

1. The student is the one that `make demo` warmed up; it is made here where there is none.
2. The teacher is wider and deeper, and has only seen careful demonstrations.
3. The student answers, and learns to give the teacher's distribution at each of its own tokens.
4. Held-out accuracy of all three, and how far the student was from the teacher at the first and the last step.

    python examples/demo/distill.py --run-dir runs/demo distillation.max_num_steps=60
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
from pathlib import Path

from nemo_offload_rl.utils.cli import ending_process, set_up_logging

sys.path.insert(0, str(Path(__file__).parent))

CONFIG = Path(__file__).parents[1] / "configs" / "distillation_arithmetic_cpu.yaml"


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the configuration")
    arguments = parser.parse_args()
    set_up_logging(logging.WARNING)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in run.py

    from grade import accuracy
    from make_model import SIZES, write_model_folder
    from rich.console import Console
    from run import imitate, warm_up
    from transformers.utils.logging import disable_progress_bar

    from nemo_offload_rl.runs.loading import load_distillation_config

    disable_progress_bar()
    console, run_dir, seed = Console(soft_wrap=True), arguments.run_dir, arguments.seed
    student, teacher = run_dir / "warmed_up", run_dir / "teacher"
    if not student.is_dir():
        console.print(
            "1/4  making the student: three of four demonstrations forget to carry (about a minute on two idle cores)"
        )
        write_model_folder(run_dir / "random", seed)
        warm_up(run_dir, seed, console)
    if not teacher.is_dir():
        console.print("2/4  making the teacher: wider and deeper, careful demonstrations only (a few minutes)")
        sizes = {**SIZES, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4}
        write_model_folder(run_dir / "large", seed, sizes)
        imitate(run_dir, seed, console, start="large", name="teaching", forgetful_share=0.0)
        (trained,) = (run_dir / "teaching" / "checkpoints").glob("step_*/hf")
        trained.rename(teacher)

    console.print("3/4  distillation: the student answers, the teacher says what it would have said at each token")
    from nemo_offload_rl.runs.distillation import run_distillation

    log_dir, checkpoints = run_dir / "distillation", run_dir / "distillation_checkpoints"
    for folder in (log_dir, checkpoints):
        shutil.rmtree(folder, ignore_errors=True)
    overrides = [
        f"distillation.seed={seed}",
        f"policy.model_name={student}",
        f"teacher.model_name={teacher}",
        f"logger.log_dir={log_dir}",
        f"checkpointing.checkpoint_dir={checkpoints}",
        *arguments.overrides,
    ]
    run_distillation(load_distillation_config(CONFIG, overrides))

    console.print("4/4  what came of it")
    records = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    accuracies = [record["validation/accuracy"] for record in records if "validation/accuracy" in record]
    console.print(f"held-out accuracy, greedy: teacher {accuracy(teacher, seed):.1%}")
    console.print(f"                           student {accuracies[0]:.1%} before, {accuracies[-1]:.1%} after")
    console.print(f"divergence in nats per token: {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last")


if __name__ == "__main__":
    with ending_process():
        main()
