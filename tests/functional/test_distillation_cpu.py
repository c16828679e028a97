"""A student learns from a teacher on CPU: real vLLM, real policy worker, in one process, and once as workers of Ray."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documented_metrics import documented, without_match
from forked import Finished

from nemo_offload_rl.algorithms.metric_names import names_of
from nemo_offload_rl.runs.loading import load_distillation_config

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/configs/distillation_arithmetic_cpu.yaml"
SAVED_STEP, LAST_STEP = 9, 12
SMALL = (
    "distillation.num_prompts_per_step=8",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "policy.optimizer.kwargs.lr=3e-3",
    "distillation.max_val_samples=8",
    "distillation.val_batch_size=8",
    "distillation.val_period=0",
    "data.train.size=64",
    "data.train.holdout=8",
    "distillation.topk_logits_k=8",
    "distillation.log_rollouts=true",
    "checkpointing.metric_name=null",
    "checkpointing.enabled=true",
    f"checkpointing.save_period={SAVED_STEP}",
)
# What all of its embeddings have in common outweighs the token, so that most of what it says is the same everywhere.
TEACHER = """
import sys
sys.path.insert(0, "examples/demo")
import torch
from make_model import SIZES, make_model, make_tokenizer
model = make_model(7, {**SIZES, "hidden_size": 160, "num_hidden_layers": 4})
with torch.no_grad():
    common = torch.randn(160, generator=torch.Generator().manual_seed(0))
    model.get_input_embeddings().weight.add_(0.5 * common)
    model.model.norm.weight.mul_(10)
model.save_pretrained(sys.argv[1])
make_tokenizer().save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distillation")


@pytest.fixture(scope="module")
def distill(folder: Path, model_folder: Path, run_script: Callable[..., Finished]) -> Callable[..., Finished]:
    (folder / "make_teacher.py").write_text(TEACHER)
    made = run_script(str(folder / "make_teacher.py"), str(folder / "teacher"))
    assert made.status == 0, made.stderr

    def run(name: str, *overrides: str, env: dict[str, str] | None = None) -> Finished:
        places = (
            f"policy.model_name={model_folder}",
            f"teacher.model_name={folder / 'teacher'}",
            f"logger.log_dir={folder / name}",
            f"checkpointing.checkpoint_dir={folder / name / 'checkpoints'}",
        )
        script = "tests/support/one_process_distillation.py" if env is None else "examples/run_distillation.py"
        return run_script(script, "--config", str(CONFIG), *SMALL, *places, *overrides, env=env)

    return run


@pytest.fixture(scope="module")
def run(distill: Callable[..., Finished]) -> Finished:
    done = distill("run", f"distillation.max_num_steps={LAST_STEP}")
    assert done.status == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def metrics(run: Finished, folder: Path, read_metrics: Callable[[Path], Any]) -> dict[int, dict[str, float]]:
    return read_metrics(folder / "run")


def test_the_student_comes_nearer_to_the_teacher(metrics: dict[int, dict[str, float]]) -> None:
    losses = [metrics[step]["train/loss"] for step in range(1, LAST_STEP + 1)]
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3]), losses
    for step in range(1, LAST_STEP + 1):
        record = metrics[step]
        assert all(value is not None and math.isfinite(value) for value in record.values())
        assert 1 - 1e-6 < record["train/token_mult_prob_error"] < 1.001  # a mean in float32
        assert 0 < record["train/teacher_topk_mass"] < 1


def test_a_run_measures_exactly_what_the_documentation_says(folder: Path, metrics: dict[int, dict[str, float]]) -> None:
    training = documented("In every step of distillation")
    validation = documented("In every validation")
    assert not without_match(validation, metrics[0])
    assert without_match(metrics[3], training) == set()
    of_other_processes = {"memory/host_policy_gib", "memory/host_engine_gib"}
    assert without_match(training, metrics[3]) == of_other_processes
    names = names_of(load_distillation_config(folder / "run/config.yaml"))
    known = {f"train/{name}" for name in names["train"]} | {f"validation/{name}" for name in names["val"]}
    ranked = {name for record in metrics.values() for name in record if name.startswith(("train/", "validation/"))}
    assert {name for name in ranked if name not in known} == set()


def test_the_teacher_is_on_the_device_for_its_pass_only(run: Finished, metrics: dict[int, dict[str, float]]) -> None:
    text = run.stdout + run.stderr
    (row,) = [line for line in text.splitlines() if line.startswith("teacher ")]
    assert row.split()[-6:] == ["HOST", "HOST", "HOST", "HOST", "HOST", "DEVICE"]
    assert metrics[2]["residency/teacher_inference/exposed_s"] > 0


def test_rollouts_are_written_with_what_the_loss_counts(run: Finished, folder: Path) -> None:
    files = sorted((folder / "run" / "rollouts").iterdir())
    assert len(files) == LAST_STEP
    records = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len(records) == 16
    assert all(record["advantage"] is None and record["generation_logprobs"] for record in records)


def test_a_resumed_run_goes_on_bit_by_bit(
    distill: Callable[..., Finished], metrics: dict[int, dict[str, float]], folder: Path, read_metrics: Any
) -> None:
    (folder / "run" / "checkpoints" / f"step_{LAST_STEP}").rename(folder / "last")
    done = distill("run", f"distillation.max_num_steps={LAST_STEP}", f"logger.log_dir={folder / 'resumed'}")
    assert done.status == 0, done.stderr
    again = read_metrics(folder / "resumed")
    assert min(again) == SAVED_STEP + 1
    for step in range(SAVED_STEP + 1, LAST_STEP + 1):
        for name in ("train/loss", "train/grad_norm", "train/reward_mean", "train/total_tokens"):
            assert again[step][name] == metrics[step][name], (step, name)


def test_whole_distributions_in_chunks_are_learned_too_by_workers_of_ray(
    distill: Callable[..., Finished], folder: Path, read_metrics: Any, joined: Callable[[], dict[str, str]]
) -> None:
    changes = ("distillation.topk_logits_k=null", "policy.logprob_chunk_size=50", "loss_fn.kl_type=reverse")
    done = distill("whole", *changes, "distillation.max_num_steps=8", "distillation.val_at_start=false", env=joined())
    assert done.status == 0, done.stderr
    records = read_metrics(folder / "whole")
    assert records[8]["train/loss"] < 0.9 * records[1]["train/loss"]
    assert records[1]["train/teacher_topk_mass"] == pytest.approx(1)
    assert records[2]["memory/host_policy_gib"] > 0 and records[2]["memory/host_engine_gib"] > 0
