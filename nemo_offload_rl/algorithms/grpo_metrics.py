"""What a GRPO step reports, under the names of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemo_offload_rl.experience.metrics import rollout_metrics
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.policy.interfaces import TrainResult
from nemo_offload_rl.residency import TransitionReport, totals


def train_metrics(rollouts: RolloutBatch, result: TrainResult, seconds: Mapping[str, float]) -> dict[str, float]:
    """Rollouts, loss (mean over the step's optimizer steps) and rates in tokens per second.

    Args:
        rollouts: Before scaling and shaping of rewards.
        result: Of the step's training.
        seconds: By phase, from the step's timer.
    """
    num_sampled = float(rollouts.response_lengths().sum())
    num_trained = num_sampled + sum(len(rollout.prompt.token_ids) for rollout in rollouts.rollouts)
    about_rollouts = rollout_metrics(rollouts)
    metrics = {
        "reward_mean": about_rollouts.pop("reward"),
        **about_rollouts,
        "loss": _mean(result.loss),
        "grad_norm": _mean(result.grad_norm),
        "learning_rate": result.learning_rate[-1],
        "generation_tokens_per_s": num_sampled / seconds["generation"],
        "training_tokens_per_s": num_trained / seconds["training"],
    }
    metrics.update({name: _reduce(name, values) for name, values in result.metrics.items() if name != "loss"})
    return metrics


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


def residency_metrics(reports_by_rank: Sequence[Sequence[TransitionReport]]) -> dict[str, float]:
    """Bytes summed over ranks; seconds of the slowest rank."""
    by_rank = [totals(list(reports)) for reports in reports_by_rank]
    return {
        name: max(rank[name] for rank in by_rank) if name.endswith("_s") else sum(rank[name] for rank in by_rank)
        for name in by_rank[0]
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _reduce(name: str, values: Sequence[float]) -> float:
    if name.endswith("_min"):
        return min(values)
    if name.endswith("_max"):
        return max(values)
    return _mean(values)
