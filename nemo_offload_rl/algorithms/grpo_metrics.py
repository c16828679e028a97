"""What a GRPO step reports, under the names of docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.algorithms.step_metrics import update_metrics
from nemo_offload_rl.experience.metrics import rollout_metrics, spread
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.policy.interfaces import TrainResult
from nemo_offload_rl.utils.flops import ModelSpeed

_OF_VALIDATION = ("accuracy", "mean_response_tokens", "truncation_rate")
_OF_VALIDATION_GROUPS = ("accuracy/", "pass_at_")


def train_metrics(
    groups: SampledGroups,
    rewards: Tensor,
    advantages: Tensor,
    result: TrainResult,
    seconds: Mapping[str, float],
    speed: ModelSpeed | None = None,
) -> dict[str, float]:
    """Rollouts, loss (mean over the step's optimizer steps) and rates in tokens per second.

    Args:
        groups: Of the step, rewards as the environments gave them.
        rewards: [B] of the trained rollouts, after scaling and shaping.
        advantages: [B] of the trained rollouts.
        result: Of the step's training.
        seconds: By phase, from the step's timer.
        speed: For `training_mfu`; None leaves it out.
    """
    num_sampled = float(groups.sampled.response_lengths().sum())
    lengths = [rollout.num_tokens for rollout in groups.trained.rollouts]
    num_trained = sum(lengths)
    mfu = {} if speed is None else {"training_mfu": speed.training_mfu(lengths, seconds["training"])}
    scored = {"logprob_tokens_per_s": num_trained / seconds["logprobs"]} if "logprobs" in seconds else {}
    return {
        **rollout_metrics(groups.sampled),
        **spread("shaped_reward", rewards),
        **spread("advantage", advantages),
        **update_metrics(result),
        "num_tokens": float(num_trained),
        "generation_tokens_per_s": num_sampled / seconds["generation"],
        **scored,
        "training_tokens_per_s": num_trained / seconds["training"],
        **mfu,
    }


def dynamic_sampling_metrics(groups: SampledGroups) -> dict[str, float]:
    """What filling the step cost, and the rewards of what is left of it."""
    return {
        "dynamic_sampling_batches": float(groups.num_batches),
        "dynamic_sampling_constant_groups": float(groups.sampled.constant_groups().sum()),
        "filtered_reward_mean": groups.trained.rewards().mean().item(),
        "filtered_accuracy": groups.trained.correct().float().mean().item(),
    }


def validation_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Accuracy, reward and lengths on held-out prompts; with several data sets also of each."""
    metrics = rollout_metrics(rollouts)
    found = {name: metrics[name] for name in _OF_VALIDATION} | {"reward": metrics["reward_mean"]}
    found |= {name: value for name, value in metrics.items() if name.startswith(_OF_VALIDATION_GROUPS)}
    rewards = {name: value for name, value in metrics.items() if name.startswith("reward_mean/")}
    return found | {name.replace("reward_mean/", "reward/"): value for name, value in rewards.items()}


def sample_lines(rollouts: RolloutBatch, num_samples: int) -> list[str]:
    """The first responses to the first prompts as text, one a line, for a person to read."""
    return [
        f"  {'right' if rollout.correct else 'wrong'}  {rollout.prompt.text!r} -> {rollout.response_text!r}"
        f"{' (cut off)' if rollout.truncated else ''}, expected {rollout.prompt.reference_answer!r}"
        for rollout in rollouts.rollouts[:: rollouts.group_size][:num_samples]
    ]
