"""A loss and what goes with it: REINFORCE with advantages of one's own, on responses that ended by themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from nemo_offload_rl import LossNorm, Observation, PolicyGradientBatch, Response, Rollout, token_mean_share


def reinforce(logprobs: Tensor, batch: PolicyGradientBatch, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus advantage times logprob, a mean over all tokens of the global batch; and a metric beside it."""
    loss = token_mean_share(-batch.advantages * logprobs, batch.loss_mask, norm)
    return loss, {"mean_logprob": token_mean_share(logprobs, batch.loss_mask, norm)}


def above_the_group(rewards: Tensor) -> Tensor:
    """[P, G]: the reward less the mean of its group."""
    return rewards - rewards.mean(dim=1, keepdim=True)


def ended(rollouts: Sequence[Rollout]) -> list[bool]:
    """Whether each response of a group ended before the token limit."""
    return [not rollout.truncated for rollout in rollouts]


def gives_up(response: Response, observation: Observation, words: Sequence[str] = ("I give up",)) -> bool:
    """Whether a rollout ends, although another turn could follow: after a response that says one of these words."""
    return any(word in response.text for word in words)


class RewardFile:
    """A metric sink: one line with the mean reward of each step."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "reward": metrics.get("train/reward_mean")}) + "\n")


def as_sum(prompt: str, level: int = 1) -> str:
    """A processor: what the policy is shown of a row, which here may have the column `level`."""
    return f"{prompt}" if level == 1 else f"{prompt} "
