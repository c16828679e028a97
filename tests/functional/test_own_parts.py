"""What examples/custom and the guides about parts of one's own say, in whole runs on CPU."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from forked import Finished, Script

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests/support"
CONFIG = "examples/custom/grpo_own_reward_cpu.yaml"
# Any character of the demo's ends a response, so that an untrained model's have an end.
ENDS = "policy.generation.stop_token_ids=[4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19]"


@pytest.fixture(scope="module")
def clone(tmp_path_factory, model_folder) -> Path:
    """A working directory in which the model and the examples are where the guides have them."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "runs/own").mkdir(parents=True)
    (folder / "runs/own/model").symlink_to(model_folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture
def start(clone, tmp_path):
    def run(script: str, *arguments: str) -> Finished:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), "OMP_NUM_THREADS": "1"}
        return Script([str(TESTS / script), *arguments], tmp_path, cwd=clone, env=env).wait(1500)

    return run


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_examples_of_every_part_work_together_in_one_run(start, clone, read_metrics):
    problems = "path: examples/custom/problems.jsonl, input_key: problem, output_key: answer, seed: 1"
    source = f"dataset_name: ResponseDataset, {problems}, split_validation_size: 0.25"
    done = start(
        "one_process_grpo.py", "--config", CONFIG, "grpo.max_num_steps=2", "~data.train",
        f"+data.train={{dataset_name: mixture, weights: [1, 1], datasets: [{{{source}}}, "
        f"{{{source}, env_name: tool}}]}}",
        "+env.tool={target: calculator.py:Calculator, kwargs: {call: '([0-9].*)'}, num_workers: 2, timeout_s: 60}",
        "data.default.processor=loss.py:as_sum", "grpo.max_rollout_turns=2", "policy.max_total_sequence_length=64",
        "loss_fn.target=loss.py:reinforce", "grpo.adv_estimator.target=loss.py:above_the_group",
        "grpo.rollout_filter.target=loss.py:ended",
        "grpo.rollout_stop={target: loss.py:gives_up, kwargs: {words: ['0', '2', '4', '6', '8']}}",
        "grpo.log_rollouts=true", "grpo.val_at_start=false",
        "logger.sinks=[{target: loss.py:RewardFile, kwargs: {path: rewards.jsonl}}]",
        "policy.train_micro_batch_size=32", ENDS,
    )  # fmt: skip
    assert done.status == 0, done.stderr
    metrics = read_metrics(clone / "runs/own/grpo")
    rollouts = {
        step: [
            json.loads(line) for line in (clone / f"runs/own/grpo/rollouts/step_{step}.jsonl").read_text().splitlines()
        ]
        for step in (1, 2)
    }
    for step, records in rollouts.items():
        by_reward = [record for record in records if record["num_turns"] == 1 and record["data_set"].endswith("_1")]
        assert by_reward and any(record["num_turns"] == 2 for record in records)
        for record in by_reward:
            text = record["response"]
            even = sum(character in "02468" for character in text) / len(text) if text else 0.0
            assert record["reward"] == pytest.approx(even)
        for record in records:
            gives_up = any(digit in record["response"] for digit in "02468")
            assert not record["stopped"] or (gives_up and record["num_turns"] == 1 and not record["truncated"])
        stopped = sum(record["stopped"] for record in records) / len(records)
        assert 0 < metrics[step]["train/rollout_stop_rate"] == pytest.approx(stopped)
        # The filter, the advantages and the loss, computed again.
        assert all(record["trained"] == (not record["truncated"]) for record in records)
        filtered = sum(record["truncated"] for record in records) / len(records)
        assert metrics[step]["train/rollout_filter_rate"] == pytest.approx(filtered)
        groups: dict[int, list[float]] = {}
        for record in records:
            groups.setdefault(record["group"], []).append(record["reward"])
        num_tokens = loss = logprobs = 0.0
        for record in records:
            if not record["trained"]:
                continue
            group = groups[record["group"]]
            assert record["advantage"] == pytest.approx(record["reward"] - sum(group) / len(group), abs=1e-6)
            counted = [value for value, mask in zip(record["prev_logprobs"], record["token_mask"], strict=True) if mask]
            num_tokens, logprobs = num_tokens + len(counted), logprobs + sum(counted)
            loss -= record["advantage"] * sum(counted)
        assert metrics[step]["train/loss"] == pytest.approx(loss / num_tokens, abs=1e-4)
        assert metrics[step]["train/mean_logprob"] == pytest.approx(logprobs / num_tokens, rel=1e-3)
    assert lines_of(clone / "rewards.jsonl") == [
        {"step": step, "reward": metrics[step]["train/reward_mean"]} for step in (1, 2)
    ]


def test_the_script_of_the_guide_runs_as_it_is_written(start, clone, read_metrics):
    done = start("documented_script.py", "python.md")
    assert done.status == 0, done.stderr
    metrics = read_metrics(clone / "runs/own/python")
    *_, result, shown = done.stdout.splitlines()
    assert result == "2 runs/own/python"
    rewards = ast.literal_eval(shown)
    assert rewards == [metrics[step]["train/reward_mean"] for step in (1, 2)]
    assert rewards[0] > 0


def test_the_script_that_was_trls_runs_as_the_guide_has_it(start, clone, read_metrics):
    done = start(
        "documented_script.py", "from-trl.md",
        "policy.model_name=runs/own/model", "policy.precision=float32", "policy.max_total_sequence_length=32",
        "policy.train_micro_batch_size=64", "policy.generation.max_new_tokens=8", "data.max_input_seq_length=16",
        "policy.generation.vllm_cfg.kv_cache_memory_gib=0.125", "policy.generation.vllm_cfg.enforce_eager=true",
        "policy.refit_buffer_size_gib=0.0625", "policy.use_pinned_optimizer_offload=false", "cluster.gpus_per_node=0",
        "grpo.max_num_steps=2", "grpo.log_rollouts=true", "checkpointing.save_period=2",
    )  # fmt: skip
    assert done.status == 0, done.stderr
    metrics = read_metrics(clone / "runs/sums")
    for step in (1, 2):
        records = lines_of(clone / f"runs/sums/rollouts/step_{step}.jsonl")
        assert len(records) == 64
        for record in records:
            text, parts = record["response"], record["reward_parts"]
            total = sum(map(int, re.findall(r"\d", record["prompt"])))
            assert parts["right"] == (float(text.strip() == str(total)) if total < 10 else None)
            assert parts["even"] == sum(character in "02468" for character in text) / max(len(text), 1)
            assert record["reward"] == pytest.approx((parts["right"] or 0.0) + 0.5 * parts["even"])
        assert metrics[step]["train/reward_extra/longest"] == max(len(record["response"]) for record in records)
    hf = clone / "runs/sums/checkpoints/step_2/hf"
    assert json.loads((hf / "adapter/adapter_config.json").read_text())["r"] == 16
    assert (hf / "model.safetensors").is_file() and (hf / "adapter/adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["env.mine.target=nowhere.py:score"], "there is no file"),
        (["env.mine.target=reward.py:odd_digits"], "reward.py has no odd_digits; did you mean even_digits?"),
        (["loss_fn.target=loss.py:ended"], "loss.py:ended"),
    ],
)
def test_what_is_wrong_with_it_ends_the_run_in_one_line_before_anything_is_written(start, tmp_path, arguments, message):
    done = start("one_process_grpo.py", "--config", CONFIG, f"logger.log_dir={tmp_path / 'run'}", *arguments)
    assert done.status == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "run").exists()
