"""Rollouts and batches of them.

Shape suffixes: P prompts, G responses per prompt, B = P * G samples, prompt by prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from nemo_offload_rl.data.batch import SampledBatch, SampledSequence, collate_samples
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.interfaces import Score, Unscored
from nemo_offload_rl.protocols.engine import Versions, joined_versions


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of one author. Turns of a conversation are segments in their order.

    Attributes:
        token_ids: The tokens.
        logprobs: The sampler's, one per token, for tokens of the policy; None for tokens of an environment.
        versions: The version of weights that sampled each token, which is the number of steps that they were trained:
            (version, number of tokens) in the order of the tokens. Empty if it is unknown, and for an environment.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    versions: Versions = ()


@dataclass(frozen=True)
class SideConversation:
    """A further conversation of an agent's rollout, which is trained on with the rollout's advantage.

    Attributes:
        prompt_token_ids: Its first prompt.
        segments: All that follows; responses counted in another conversation have no logprobs here.
        routed_experts: See `Rollout`.
    """

    prompt_token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    routed_experts: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One prompt with one sampled response and its score, if it has one.

    Attributes:
        prompt: The prompt.
        segments: The policy's turns, and between them the environment's.
        response_text: The segments as text, special tokens left out.
        reward: Reward for training; NaN without a score.
        correct: The response counts as correct in accuracy; False without a score.
        truncated: The last response was cut at a token limit.
        reward_parts: Parts of the reward, by name.
        reward_extra: Further values that a reward logged, by name.
        stopped: A user's function ended it before its last turn.
        others: Further conversations of an agent.
        answer: The answer that the environment found in the last response.
        unscored: The reason why there is no score; None if there is one.
        routed_experts: Routing of the first tokens of prompt and segments (see `SampledSequence`); None if the engine
            returns none.
    """

    prompt: Prompt
    segments: tuple[Segment, ...]
    response_text: str
    reward: float
    correct: bool
    truncated: bool
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reward_extra: Mapping[str, Any] = field(default_factory=dict)
    stopped: bool = False
    others: tuple[SideConversation, ...] = ()
    answer: str | None = None
    unscored: Unscored | None = None
    routed_experts: np.ndarray | None = field(default=None, compare=False)

    @staticmethod
    def ended(outcome: Score | Unscored, **said: Any) -> Rollout:
        """Make a rollout from its outcome; `said` has all other fields."""
        if isinstance(outcome, Unscored):
            return Rollout(reward=math.nan, correct=False, unscored=outcome, **said)
        return Rollout(
            reward=outcome.reward,
            correct=outcome.correct,
            reward_parts=outcome.parts,
            reward_extra=outcome.extra,
            answer=outcome.answer,
            **said,
        )

    @property
    def response_sizes(self) -> list[int]:
        """Tokens of each response of the policy."""
        parts = (self.segments, *(other.segments for other in self.others))
        return [len(segment.token_ids) for part in parts for segment in part if segment.logprobs is not None]

    @property
    def versions(self) -> Versions:
        """Versions of weights that sampled the policy's tokens, see `Segment`."""
        parts = (self.segments, *(other.segments for other in self.others))
        return joined_versions(segment.versions for part in parts for segment in part)

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.response_sizes)

    @property
    def num_turns(self) -> int:
        """Responses of the policy."""
        return len(self.response_sizes)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and all that followed."""
        return len(self.prompt.token_ids) + sum(len(segment.token_ids) for segment in self.segments)

    def sequences(self, sample_mask: float = 1.0) -> list[SampledSequence]:
        """Each conversation as one token sequence; the loss counts only tokens that the policy sampled."""
        first = SideConversation(self.prompt.token_ids, self.segments, self.routed_experts)
        return [_sequence(conversation, sample_mask) for conversation in (first, *self.others)]


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Groups of `group_size` rollouts of the same prompt, one group after the other."""

    rollouts: tuple[Rollout, ...]
    group_size: int

    def __post_init__(self) -> None:
        """Refuse a batch with an incomplete group."""
        if len(self.rollouts) % self.group_size:
            raise ValueError(f"{len(self.rollouts)} rollouts are not whole groups of {self.group_size}")

    def __len__(self) -> int:
        """Number of samples, B."""
        return len(self.rollouts)

    @property
    def num_prompts(self) -> int:
        """Number of groups, P."""
        return len(self.rollouts) // self.group_size

    def unscored(self) -> list[str | None]:
        """Why each rollout has no score; None for those that have one."""
        return [None if rollout.unscored is None else rollout.unscored.why for rollout in self.rollouts]

    def scored(self) -> Tensor:
        """[B] bool: rollouts that have a score."""
        return torch.tensor([rollout.unscored is None for rollout in self.rollouts], dtype=torch.bool)

    def scored_PG(self) -> Tensor:
        """[P, G] bool."""
        return self.scored().reshape(self.num_prompts, self.group_size)

    def rewards(self) -> Tensor:
        """[B] float32; NaN for rollouts without a score."""
        return torch.tensor([rollout.reward for rollout in self.rollouts], dtype=torch.float32)

    def rewards_PG(self) -> Tensor:
        """[P, G] float32; NaN for rollouts without a score."""
        return self.rewards().reshape(self.num_prompts, self.group_size)

    def reward_parts(self) -> dict[str, Tensor]:
        """Parts of rewards by name, in alphabetical order, each [B] float32; NaN for a rollout without the part."""
        names = sorted({name for rollout in self.rollouts for name in rollout.reward_parts})
        return {
            name: torch.tensor([rollout.reward_parts.get(name, float("nan")) for rollout in self.rollouts])
            for name in names
        }

    def reward_extra_means(self) -> dict[str, float]:
        """Means of the numbers that rewards logged, by name in alphabetical order, over the rollouts that have them."""
        values: dict[str, list[float]] = {}
        for rollout in self.rollouts:
            for name, value in rollout.reward_extra.items():
                if isinstance(value, int | float):
                    values.setdefault(name, []).append(value)
        return {name: sum(values[name]) / len(values[name]) for name in sorted(values)}

    def constant_groups(self) -> Tensor:
        """[P] bool: groups whose rewards are all equal; true for fewer than two rewards."""
        rewards_PG = self.rewards_PG()
        highest_P = rewards_PG.nan_to_num(nan=float("-inf")).amax(dim=1)
        return highest_P <= rewards_PG.nan_to_num(nan=float("inf")).amin(dim=1)

    def correct(self) -> Tensor:
        """[B] bool."""
        return torch.tensor([rollout.correct for rollout in self.rollouts], dtype=torch.bool)

    def truncated(self) -> Tensor:
        """[B] bool."""
        return torch.tensor([rollout.truncated for rollout in self.rollouts], dtype=torch.bool)

    def stopped(self) -> Tensor:
        """[B] bool."""
        return torch.tensor([rollout.stopped for rollout in self.rollouts], dtype=torch.bool)

    def loss_multipliers(self) -> Tensor:
        """[B] float32: 0 for responses to prompts that were too long, else 1."""
        return torch.tensor([rollout.prompt.loss_multiplier for rollout in self.rollouts], dtype=torch.float32)

    def prompt_lengths(self) -> Tensor:
        """[B] int64: tokens of the prompts."""
        return torch.tensor([len(rollout.prompt.token_ids) for rollout in self.rollouts], dtype=torch.int64)

    def response_lengths(self) -> Tensor:
        """[B] int64: tokens that the policy sampled."""
        return torch.tensor([rollout.num_response_tokens for rollout in self.rollouts], dtype=torch.int64)

    def longest_responses(self) -> Tensor:
        """[B] int64: tokens of the longest response of each rollout."""
        return torch.tensor([max(rollout.response_sizes, default=0) for rollout in self.rollouts], dtype=torch.int64)

    def num_turns(self) -> Tensor:
        """[B] int64: responses of the policy in each rollout."""
        return torch.tensor([rollout.num_turns for rollout in self.rollouts], dtype=torch.int64)

    def row_owners(self) -> Tensor:
        """[R] int64, R >= B: rollout of each row of `collate`; first one conversation of each, then all others."""
        others = [row for row, rollout in enumerate(self.rollouts) for _ in rollout.others]
        return torch.tensor([*range(len(self)), *others], dtype=torch.int64)

    def select_groups(self, groups: Iterable[int]) -> Self:
        """Select groups by index, in the order given."""
        size = self.group_size
        chosen = [self.rollouts[group * size : (group + 1) * size] for group in groups]
        return replace(self, rollouts=tuple(rollout for group in chosen for rollout in group))

    @staticmethod
    def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Join the groups of all batches, which have the same group size."""
        (group_size,) = {batch.group_size for batch in batches}
        return RolloutBatch(
            rollouts=tuple(rollout for batch in batches for rollout in batch.rollouts), group_size=group_size
        )

    @staticmethod
    def interleave(first: RolloutBatch, second: RolloutBatch, is_first: Sequence[bool]) -> RolloutBatch:
        """Merge the groups of two batches, each in its own order; `is_first` chooses the batch for each place."""
        batch = RolloutBatch.concatenate([first, second])
        places = {True: iter(range(first.num_prompts)), False: iter(range(first.num_prompts, batch.num_prompts))}
        return batch.select_groups([next(places[each]) for each in is_first])

    def collate(self, *, pad_id: int, multiple: int = 1, sample_mask: Tensor | None = None) -> SampledBatch:
        """Make padded tensors for logprobs and training, with the rows of `row_owners`.

        Args:
            pad_id: Token that fills the rows.
            multiple: The width is rounded up to a multiple of it.
            sample_mask: [B], 0 leaves a sample out of the loss; None keeps all.
        """
        masks = [1.0] * len(self) if sample_mask is None else sample_mask.tolist()
        of_each = [rollout.sequences(mask) for rollout, mask in zip(self.rollouts, masks, strict=True)]
        first = [sequences[0] for sequences in of_each]
        others = [sequence for sequences in of_each for sequence in sequences[1:]]
        return collate_samples([*first, *others], pad_id=pad_id, multiple=multiple)


def unscored_rates(reasons: Sequence[str | None]) -> dict[str, float]:
    """The share of rollouts without a score, by `Unscored.why`; a reason is None for those that have one."""
    return {why: reasons.count(why) / len(reasons) for why in ("failed", "timed_out", "no_reward")}


def _sequence(conversation: SideConversation, sample_mask: float) -> SampledSequence:
    token_ids = list(conversation.prompt_token_ids)
    token_mask = [0] * len(token_ids)
    logprobs = [0.0] * len(token_ids)
    for segment in conversation.segments:
        sampled = segment.logprobs is not None
        token_ids.extend(segment.token_ids)
        token_mask.extend([int(sampled)] * len(segment.token_ids))
        logprobs.extend(segment.logprobs if segment.logprobs is not None else [0.0] * len(segment.token_ids))
    return SampledSequence(
        token_ids=token_ids,
        token_mask=token_mask,
        generation_logprobs=logprobs,
        sample_mask=sample_mask,
        routed_experts=conversation.routed_experts,
    )
