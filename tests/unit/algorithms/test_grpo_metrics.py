"""What a step reports, compared with numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.algorithms.metrics import (
    dynamic_sampling_metrics,
    residency_metrics,
    train_metrics,
    validation_metrics,
)
from nemo_offload_rl.algorithms.rollout_log import sample_lines
from nemo_offload_rl.algorithms.rollout_loop import shown_figures
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.interfaces import Unscored
from nemo_offload_rl.experience.types import Rollout, RolloutBatch, Segment
from nemo_offload_rl.protocols.loss import TrainResult
from nemo_offload_rl.residency import Phase, TransitionReport
from nemo_offload_rl.residency.table.ledger import Leftover


def make_rollout(question: str, answer: str, *, correct: bool, truncated: bool = False) -> Rollout:
    prompt = Prompt(token_ids=(1, 2, 3), text=question, reference_answer="4", env_name="arithmetic")
    segment = Segment(token_ids=tuple(range(len(answer))), logprobs=(-0.5,) * len(answer))
    return Rollout(
        prompt=prompt,
        segments=(segment,),
        response_text=answer,
        reward=float(correct),
        correct=correct,
        truncated=truncated,
    )


ROLLOUTS = RolloutBatch(
    rollouts=(
        make_rollout("2+2=", "4", correct=True),
        make_rollout("2+2=", "555", correct=False, truncated=True),
        make_rollout("1+3=", "31", correct=False),
        make_rollout("1+3=", "13", correct=False),
    ),
    group_size=2,
)


def test_metrics_of_several_optimizer_steps_are_means_and_extremes_stay_extremes():
    result = TrainResult(
        loss=[1.0, 3.0],
        grad_norm=[2.0, 4.0],
        learning_rate=[0.1, 0.2],
        metrics={"kl": [0.0, 0.5], "probs_ratio_min": [0.9, 0.7], "probs_ratio_max": [1.1, 1.5], "loss": [1.0, 3.0]},
    )
    metrics = train_metrics(
        SampledGroups.all_of(ROLLOUTS),
        torch.tensor([0.5, -0.5, 0.0, 0.0]),
        torch.tensor([2.0, -1.0, 0.0, 0.0]),
        result,
        {"generation": 2.0, "logprobs": 1.0, "training": 4.0},
    )
    assert metrics["loss"] == 2.0
    assert metrics["grad_norm"] == 3.0
    assert metrics["learning_rate"] == 0.2
    assert metrics["kl"] == 0.25
    assert (metrics["probs_ratio_min"], metrics["probs_ratio_max"]) == (0.7, 1.5)
    assert metrics["reward_mean"] == metrics["accuracy"] == 0.25
    assert metrics["reward_std"] == 0.5
    assert (metrics["shaped_reward_mean"], metrics["shaped_reward_min"], metrics["shaped_reward_max"]) == (0, -0.5, 0.5)
    assert (metrics["advantage_mean"], metrics["advantage_min"], metrics["advantage_max"]) == (0.25, -1.0, 2.0)
    assert metrics["pass_rate"] == metrics["constant_group_rate"] == 0.5
    assert metrics["mean_prompt_tokens"] == metrics["max_prompt_tokens"] == 3
    assert metrics["num_tokens"] == 8 + 4 * 3
    assert metrics["generation_tokens_per_s"] == (1 + 3 + 2 + 2) / 2.0
    assert metrics["training_tokens_per_s"] == (8 + 4 * 3) / 4.0


def test_rates_of_generation_count_what_dynamic_sampling_does_not_train_on():
    groups = SampledGroups(trained=ROLLOUTS.select_groups([0]), sampled=ROLLOUTS, num_batches=2)
    result = TrainResult(loss=[1.0], grad_norm=[1.0], learning_rate=[0.1])
    seconds = {"generation": 2.0, "logprobs": 1.0, "training": 4.0}
    metrics = train_metrics(groups, torch.zeros(2), torch.zeros(2), result, seconds)
    assert metrics["generation_tokens_per_s"] == (1 + 3 + 2 + 2) / 2.0
    assert metrics["training_tokens_per_s"] == (4 + 2 * 3) / 4.0
    assert metrics["reward_mean"] == 0.25
    assert dynamic_sampling_metrics(groups) == {
        "dynamic_sampling_batches": 2.0,
        "dynamic_sampling_constant_groups": 1.0,
        "filtered_reward_mean": 0.5,
        "filtered_accuracy": 0.5,
    }


def test_a_validation_reports_accuracy_reward_length_and_truncation():
    expected = {"accuracy": 0.25, "reward": 0.25, "mean_response_tokens": 2.0, "truncation_rate": 0.25}
    none = {"failed_rate": 0.0, "timed_out_rate": 0.0, "no_reward_rate": 0.0}
    assert validation_metrics(ROLLOUTS) == pytest.approx(expected | {"pass_at_2": 0.5} | none)


def test_a_response_without_a_score_is_counted_apart_and_a_batch_of_such_has_no_accuracy():
    first, *others = ROLLOUTS.rollouts
    unscored = replace(first, reward=math.nan, correct=False, unscored=Unscored("timed_out"))
    metrics = validation_metrics(RolloutBatch(rollouts=(unscored, *others), group_size=2))
    # The first group has one score, which makes no pass@2.
    assert (metrics["accuracy"], metrics["reward"], metrics["pass_at_2"]) == (0.0, 0.0, 0.0)
    assert (metrics["timed_out_rate"], metrics["failed_rate"]) == (0.25, 0.0)
    assert shown_figures(metrics, ["accuracy"]) == {"accuracy": "0.0%", "no score": "25.0%"}
    nothing = validation_metrics(RolloutBatch(rollouts=(unscored,), group_size=1))
    assert nothing == {
        "mean_response_tokens": 1.0, "truncation_rate": 0.0, "failed_rate": 0.0, "timed_out_rate": 1.0,
        "no_reward_rate": 0.0,
    }  # fmt: skip


def test_samples_are_one_line_for_each_prompt_with_the_verdict():
    assert sample_lines(ROLLOUTS, 5) == [
        "  right  '2+2=' -> '4', expected '4'",
        "  wrong  '1+3=' -> '31', expected '4'",
    ]
    assert sample_lines(ROLLOUTS, 0) == []
    cut = RolloutBatch(rollouts=ROLLOUTS.rollouts[1:2], group_size=1)
    assert sample_lines(cut, 1) == ["  wrong  '2+2=' -> '555' (cut off), expected '4'"]
    (one,) = cut.rollouts
    unanswered = replace(one, prompt=replace(one.prompt, reference_answer=""))
    assert sample_lines(replace(cut, rollouts=(unanswered,)), 1) == ["  wrong  '2+2=' -> '555' (cut off)"]


def test_bytes_are_summed_over_ranks_and_seconds_are_the_slowest_ranks():
    def report(num_bytes: int, seconds: float) -> TransitionReport:
        made = TransitionReport(source=None, target=Phase.TRAINING, exposed_s=seconds)
        made.group("params").bytes_out = num_bytes
        return made

    reports = [[report(100, 0.1), report(10, 0.2)], [report(1, 0.25)]]
    reports[0][1].without_room.append("optimizer")
    reports[1][0].without_room.append("optimizer")
    reports[0][1].cache_flushes, reports[1][0].cache_flushes = 2, 1
    metrics = residency_metrics(reports)
    assert metrics["bytes_out"] == 111
    assert metrics["exposed_s"] == metrics["training/exposed_s"] == pytest.approx(0.3)
    assert metrics["bytes_in"] == 0
    assert (metrics["late_groups"], metrics["cache_flushes"]) == (2, 3)


def test_what_stayed_on_a_device_is_told_with_the_worker_and_the_phase(caplog):
    report = TransitionReport(source=None, target=Phase.GENERATION)
    report.leftovers.append(Leftover("tensor [3] uint8", 48 << 20))
    with caplog.at_level("WARNING", logger="nemo_offload_rl"):
        metrics = residency_metrics([[], [report]])
    assert metrics["generation/exposed_s"] == 0
    assert caplog.messages == ["policy worker 1, generation: still on the device: tensor [3] uint8: 48 MiB"]
