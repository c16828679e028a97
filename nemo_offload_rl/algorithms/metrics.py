"""Metrics of a step, under the names of docs/reference/metrics.md; `metric_names.py` lists them."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.data.batch import SampledSequence
from nemo_offload_rl.experience.pass_at_k import pass_at_k, powers_of_two
from nemo_offload_rl.experience.types import RolloutBatch, unscored_rates
from nemo_offload_rl.protocols.loss import TrainResult
from nemo_offload_rl.residency import TransitionReport, totals
from nemo_offload_rl.utils.flops import ModelSpeed

logger = logging.getLogger(__name__)

_OF_VALIDATION = (
    "accuracy", "mean_response_tokens", "truncation_rate", "failed_rate", "timed_out_rate", "no_reward_rate",
)  # fmt: skip
_OF_VALIDATION_GROUPS = ("accuracy/", "pass_at_", "reward_part/", "reward_extra/")

# -- every algorithm ---------------------------------------------------------------------------------------------------


def update_metrics(result: TrainResult) -> dict[str, float]:
    """Reduce loss, gradient norm, learning rate and the loss's metrics over the step's optimizer steps.

    Values are means, except extremes for names that end in `_min` or `_max`, and the last learning rate. Skipped
    updates are left out, unless the step skipped all of them.
    """
    num_steps = len(result.loss)
    applied = [step for step in range(num_steps) if not (result.is_skipped and result.is_skipped[step])]
    measured = {**result.metrics, "loss": result.loss, "grad_norm": result.grad_norm}
    metrics = {
        name: _reduce(name, [values[step] for step in applied or range(num_steps)]) for name, values in measured.items()
    }
    return metrics | {
        "learning_rate": result.learning_rate[-1],
        "skipped_updates": float(num_steps - len(applied)),
        "oom_splits": float(result.oom_splits),
    }


def overlong_metrics(overlong: Mapping[str, int]) -> dict[str, float]:
    """Count rows that are too long, in total, and by data set if there are several."""
    found = {"overlong_rows": float(sum(overlong.values()))}
    if len(overlong) > 1:
        found |= {f"overlong_rows/{name}": float(number) for name, number in overlong.items()}
    return found


def residency_metrics(reports_by_rank: Sequence[Sequence[TransitionReport]]) -> dict[str, float]:
    """Sum bytes over ranks, take the largest seconds and peaks, and warn of state that was left on a device."""
    for rank, reports in enumerate(reports_by_rank):
        for report in reports:
            for leftover in report.leftovers:
                logger.warning("policy worker %d, %s: still on the device: %s", rank, report.target.value, leftover)
    by_rank = [totals(list(reports)) for reports in reports_by_rank]
    return {
        name: (max if name.endswith(("_s", "_gib")) else sum)(rank.get(name, 0.0) for rank in by_rank)
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


# -- GRPO --------------------------------------------------------------------------------------------------------------


def train_metrics(
    groups: SampledGroups,
    rewards: Tensor,
    advantages: Tensor,
    result: TrainResult,
    seconds: Mapping[str, float],
    speed: ModelSpeed | None = None,
) -> dict[str, float]:
    """Return metrics of rollouts, loss (mean over the step's optimizer steps) and speed in tokens per second.

    Args:
        groups: The step's groups, with the environments' rewards.
        rewards: [B] of the trained rollouts, after scaling and shaping; unscored ones are left out.
        advantages: [B] of the trained rollouts.
        result: Result of the training.
        seconds: Seconds by phase, from the step's timer.
        speed: Gives `training_mfu`; None leaves it out.
    """
    scored = {"logprob": "logprobs"} if "logprobs" in seconds else {}
    has_score = groups.trained.scored()
    return {
        **spread("shaped_reward", rewards[has_score]),
        **spread("advantage", advantages[has_score]),
        **step_metrics(groups, result, seconds, speed, scored),
    }


def step_metrics(
    groups: SampledGroups,
    result: TrainResult,
    seconds: Mapping[str, float],
    speed: ModelSpeed | None,
    passes: Mapping[str, str],
) -> dict[str, float]:
    """Return the metrics that every algorithm with rollouts has.

    `passes` maps names to phases. Each entry gives a rate NAME_tokens_per_s: tokens of the trained rollouts by the
    phase's seconds.
    """
    num_sampled = float(groups.sampled.response_lengths().sum())
    sequences = [each for rollout in groups.trained.rollouts for each in rollout.sequences()]
    lengths = [len(each.token_ids) for each in sequences]
    num_trained = sum(lengths)
    mfu = {} if speed is None else {"training_mfu": speed.training_mfu(lengths, seconds["training"])}
    rates = {f"{name}_tokens_per_s": num_trained / seconds[phase] for name, phase in passes.items()}
    return {
        **rollout_metrics(groups.sampled),
        **update_metrics(result),
        "num_tokens": float(num_trained),
        **({"generation_tokens_per_s": num_sampled / seconds["generation"]} if "generation" in seconds else {}),
        **rates,
        "training_tokens_per_s": num_trained / seconds["training"],
        **mfu,
        **_routing_metrics(sequences, num_trained),
    }


def _routing_metrics(sequences: Sequence[SampledSequence], num_tokens: int) -> dict[str, float]:
    """Measure the routing that comes with sequences of `num_tokens` tokens; {} if none does."""
    routings = [each.routed_experts for each in sequences if each.routed_experts is not None]
    if not routings:
        return {}
    num_routed = sum(int((routing[..., 0] != routing[..., 1]).any(-1).sum()) for routing in routings)
    return {
        "routed_token_rate": num_routed / num_tokens,
        "routed_experts_mib": sum(routing.nbytes for routing in routings) / 2**20,
    }


def dynamic_sampling_metrics(groups: SampledGroups) -> dict[str, float]:
    """Count the batches and constant groups that dynamic sampling drew, and average the kept groups' rewards."""
    scored = groups.trained.scored()
    return {
        "dynamic_sampling_batches": float(groups.num_batches),
        "dynamic_sampling_constant_groups": float(groups.sampled.constant_groups().sum()),
        "filtered_reward_mean": groups.trained.rewards()[scored].mean().item(),
        "filtered_accuracy": groups.trained.correct()[scored].float().mean().item(),
    }


def validation_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Return accuracy, reward and lengths on held-out prompts; also by data set if there are several."""
    metrics = rollout_metrics(rollouts)
    found = {name: metrics[name] for name in _OF_VALIDATION if name in metrics}
    found |= {name: value for name, value in metrics.items() if name.startswith(_OF_VALIDATION_GROUPS)}
    rewards = {
        name: value for name, value in metrics.items() if name == "reward_mean" or name.startswith("reward_mean/")
    }
    return found | {name.replace("reward_mean", "reward"): value for name, value in rewards.items()}


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return metrics of a step's rollouts.

    A rollout's response is everything that the policy sampled in all turns. Reward metrics leave out rollouts without
    a score, and are absent if no rollout has one.
    """
    lengths = batch.response_lengths().float()
    prompt_lengths = batch.prompt_lengths().float()
    return {
        **_score_metrics(batch),
        **{f"{why}_rate": share for why, share in unscored_rates(batch.unscored()).items()},
        "overlong_prompt_rate": 1.0 - batch.loss_multipliers().mean().item(),
        "mean_prompt_tokens": prompt_lengths.mean().item(),
        "max_prompt_tokens": prompt_lengths.max().item(),
        "mean_response_tokens": lengths.mean().item(),
        "max_response_tokens": lengths.max().item(),
        "mean_turns": batch.num_turns().float().mean().item(),
        "truncation_rate": batch.truncated().float().mean().item(),
        **(
            {"mean_conversations": len(batch.row_owners()) / len(batch)} if len(batch.row_owners()) > len(batch) else {}
        ),
        **{
            f"reward_part/{name}": values.nanmean().item()
            for name, values in batch.reward_parts().items()
            if not values.isnan().all()
        },
        **{f"reward_extra/{name}": mean for name, mean in batch.reward_extra_means().items()},
        **by_data_set(batch),
    }


def _score_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return metrics of rewards and right answers over the scored rollouts."""
    scored, scored_PG = batch.scored(), batch.scored_PG()
    if not scored.any():
        return {}
    num_correct_P = batch.correct().reshape(scored_PG.shape).sum(dim=1)
    num_scored_P = scored_PG.sum(dim=1)
    has_score_P = num_scored_P > 0
    num_correct: list[int] = num_correct_P.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    num_scored: list[int] = num_scored_P.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    chances = {f"pass_at_{k}": pass_at_k(num_correct, num_scored, k) for k in powers_of_two(batch.group_size)}
    return {
        **spread("reward", batch.rewards()[scored]),
        "accuracy": batch.correct()[scored].float().mean().item(),
        "pass_rate": (num_correct_P > 0)[has_score_P].float().mean().item(),
        **{name: chance for name, chance in chances.items() if chance is not None},
        "constant_group_rate": batch.constant_groups()[has_score_P].float().mean().item(),
    }


def spread(name: str, values: Tensor) -> dict[str, float]:
    """Return mean, standard deviation (divisor n - 1; 0 for one value), minimum and maximum of `values` [B]."""
    return {
        f"{name}_mean": values.mean().item(),
        f"{name}_std": values.std().item() if values.numel() > 1 else 0.0,
        f"{name}_min": values.min().item(),
        f"{name}_max": values.max().item(),
    }


def by_data_set(batch: RolloutBatch) -> dict[str, float]:
    """Return mean reward and accuracy of each data set with a score; {} if there is only one data set."""
    names = [rollout.prompt.data_set for rollout in batch.rollouts]
    of_scored = [rollout.prompt.data_set for rollout in batch.rollouts if rollout.unscored is None]
    found: dict[str, float] = {}
    if len(set(names)) > 1:
        for name in sorted(set(of_scored)):
            rows = torch.tensor(
                [row for row, one in enumerate(batch.rollouts) if names[row] == name and one.unscored is None]
            )
            found[f"reward_mean/{name}"] = batch.rewards()[rows].mean().item()
            found[f"accuracy/{name}"] = batch.correct()[rows].float().mean().item()
    return found


WARNED_AFTER = 3


class IdleSteps:
    """Counts steps in a row without a learning signal: all advantages are 0, as when all rewards are equal.

    Warns after `WARNED_AFTER` such steps, and again whenever their number has doubled.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._warned_at = WARNED_AFTER

    def count(self, metrics: Mapping[str, float]) -> None:
        """Count a step by its `train` metrics."""
        if metrics["advantage_min"] != 0 or metrics["advantage_max"] != 0:
            self._in_a_row, self._warned_at = 0, WARNED_AFTER
            return
        self._in_a_row += 1
        if self._in_a_row == self._warned_at:
            self._warned_at *= 2
            logger.warning(
                "nothing to learn from in the last %d steps: all advantages are 0 (rewards from %g to %g, %.0f %% of "
                "responses cut off). %s",
                self._in_a_row,
                metrics["reward_min"],
                metrics["reward_max"],
                100 * metrics["truncation_rate"],
                _advice(metrics),
            )


def _advice(metrics: Mapping[str, float]) -> str:
    if metrics["truncation_rate"] > 0.5:
        return "Raise policy.generation.max_new_tokens, so that responses can end."
    if metrics["reward_min"] < metrics["reward_max"]:
        return (
            "All responses to a prompt got the same reward: raise grpo.num_generations_per_prompt, or set "
            "grpo.use_dynamic_sampling=true."
        )
    if metrics["accuracy"] == 1:
        return "Every response is correct, so the prompts are too easy: use harder ones."
    said = "No response is correct" if metrics["accuracy"] == 0 else "Every response got the same reward"
    return (
        f"{said}. Compare responses and expected answers (grpo.log_rollouts=true): if the reward is right, the prompts "
        "are too hard (use easier ones, or train with SFT first); if not, correct the answers, the format that the "
        "prompt asks for, or the reward function."
    )
