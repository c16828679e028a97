"""Rollouts that agents drive: the conversation at the engine's endpoint becomes the sample.

1. The engine opens a rollout for each sample, with a base URL of its own.
2. The agents converse there, and return rewards.
3. Every conversation of a rollout is taken, as the tokens that it was: what the policy sampled has logprobs and is
   trained on, once, with the rollout's advantage; what stands between is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.agents import AgentEnvironment, AgentTask
from nemo_offload_rl.environments.interfaces import Score
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.experience.types import Rollout, RolloutBatch, Segment, SideConversation
from nemo_offload_rl.generation.interfaces import SamplingSettings
from nemo_offload_rl.generation.served_rollouts import ServedCall, conversations

logger = logging.getLogger(__name__)


class Endpoint(Protocol):
    """The engines, as agents' rollouts need them."""

    def open_rollouts(self, sampling: Sequence[SamplingSettings]) -> list[str]:
        """A base URL for each rollout, sampled as it says."""
        ...

    def take_rollouts(self, base_urls: Sequence[str]) -> list[list[ServedCall]]:
        """The calls of each, which are closed."""
        ...


def agent_rollouts(
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    environments: Mapping[str, AgentEnvironment],
    endpoint: Endpoint,
    sampling: SamplingSettings,
    decode: Callable[[Sequence[int]], str],
    model: str,
    api_key: str,
) -> RolloutBatch:
    """Groups of rollouts of prompts whose environments are agents.

    Args:
        prompts: What to do.
        group_size: Rollouts of each.
        environments: By name, those of all prompts.
        endpoint: The engines, awake.
        sampling: How tokens are drawn; rollout i draws from the seed + i.
        decode: Token ids to text.
        model: What the engines call the model.
        api_key: What they ask for.

    Raises:
        DataError: Not one rollout was scored.
    """
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    seed = sampling.seed
    seeds = [None if seed is None else seed + row for row in range(len(rows))]
    urls = endpoint.open_rollouts([replace(sampling, seed=each) for each in seeds])
    scores: list[Score | None] = [None] * len(rows)
    for name, environment in environments.items():
        own = [row for row, prompt in enumerate(rows) if prompt.env_name == name]
        tasks = [_task(rows[row], urls[row], model, api_key) for row in own]
        for row, score in zip(own, environment.run(tasks), strict=True):
            scores[row] = score
    calls = endpoint.take_rollouts(urls)  # says first that an engine has died, after which no agent can do well
    if all(score is None for score in scores):
        names = ", ".join(f"env.{name}" for name in environments)
        raise DataError(f"not one of {len(rows)} rollouts of {names} was scored; the warning above says why")
    _warn(calls)
    rollouts = [_rollout(*parts, decode) for parts in zip(rows, calls, scores, strict=True)]
    return RolloutBatch(rollouts=tuple(rollouts), group_size=group_size)


def _task(prompt: Prompt, base_url: str, model: str, api_key: str) -> AgentTask:
    return AgentTask(
        base_url=base_url,
        api_key=api_key,
        model=model,
        question=prompt.question,
        answer=prompt.reference_answer,
        metadata=prompt.metadata,
    )


def _rollout(
    prompt: Prompt, calls: Sequence[ServedCall], score: Score | None, decode: Callable[[Sequence[int]], str]
) -> Rollout:
    """One sample; without a score, or without a call, none that is trained on."""
    found = conversations(calls)
    if score is None or not found:
        prompt = replace(prompt, loss_multiplier=0.0)
    first, *others = [_conversation(each) for each in found] or [SideConversation(prompt.token_ids, ())]
    if found:
        prompt = replace(prompt, token_ids=first.prompt_token_ids, text=decode(first.prompt_token_ids))
    score, segments = score or Score(reward=0.0, correct=False), first.segments
    return Rollout(
        prompt=prompt,
        segments=segments,
        others=tuple(others),
        response_text="".join(decode(segment.token_ids) for segment in segments),
        reward=score.reward,
        correct=score.correct,
        truncated=bool(found) and found[0][-1][0].completion.finish_reason != "stop",
        reward_parts=score.parts,
    )


def _conversation(calls: Sequence[tuple[ServedCall, bool]]) -> SideConversation:
    """One conversation; what another one counts already has no logprobs here."""
    segments: list[Segment] = []
    end: tuple[int, ...] = ()
    for call, is_counted in calls:
        if segments:
            segments.append(Segment(token_ids=call.prompt_token_ids[len(end) :], logprobs=None))
        said = call.completion
        logprobs = tuple(said.logprobs) if is_counted else None
        segments.append(Segment(token_ids=tuple(said.token_ids), logprobs=logprobs))
        end = (*call.prompt_token_ids, *said.token_ids)
    return SideConversation(calls[0][0].prompt_token_ids, tuple(segments))


def _warn(calls: Sequence[Sequence[ServedCall]]) -> None:
    silent = sum(not each for each in calls)
    if silent:
        logger.warning("%d of %d rollouts asked the policy nothing and are not trained on", silent, len(calls))
