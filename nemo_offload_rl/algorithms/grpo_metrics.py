"""What a GRPO step reports, under the names of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_offload_rl.algorithms.step_metrics import update_metrics
from nemo_offload_rl.experience.metrics import rollout_metrics
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.policy.interfaces import TrainResult
from nemo_offload_rl.utils.flops import ModelSpeed


def train_metrics(
    rollouts: RolloutBatch, result: TrainResult, seconds: Mapping[str, float], speed: ModelSpeed | None = None
) -> dict[str, float]:
    """Rollouts, loss (mean over the step's optimizer steps) and rates in tokens per second.

    Args:
        rollouts: Before scaling and shaping of rewards.
        result: Of the step's training.
        seconds: By phase, from the step's timer.
        speed: For `training_mfu`; None leaves it out.
    """
    num_sampled = float(rollouts.response_lengths().sum())
    lengths = [rollout.num_tokens for rollout in rollouts.rollouts]
    num_trained = sum(lengths)
    about_rollouts = rollout_metrics(rollouts)
    mfu = {} if speed is None else {"training_mfu": speed.training_mfu(lengths, seconds["training"])}
    scored = {"logprob_tokens_per_s": num_trained / seconds["logprobs"]} if "logprobs" in seconds else {}
    return {
        "reward_mean": about_rollouts.pop("reward"),
        **about_rollouts,
        **update_metrics(result),
        "generation_tokens_per_s": num_sampled / seconds["generation"],
        **scored,
        "training_tokens_per_s": num_trained / seconds["training"],
        **mfu,
    }


def validation_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Accuracy, reward and lengths on held-out prompts."""
    metrics = rollout_metrics(rollouts)
    return {name: metrics[name] for name in ("accuracy", "reward", "mean_response_tokens", "truncation_rate")}


def sample_lines(rollouts: RolloutBatch, num_samples: int) -> list[str]:
    """The first responses to the first prompts as text, one a line, for a person to read."""
    return [
        f"  {'right' if rollout.correct else 'wrong'}  {rollout.prompt.text!r} -> {rollout.response_text!r}"
        f"{' (cut off)' if rollout.truncated else ''}, expected {rollout.prompt.reference_answer!r}"
        for rollout in rollouts.rollouts[:: rollouts.group_size][:num_samples]
    ]
