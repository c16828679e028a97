"""Runs rollouts that agents drive: the conversations at the engine's endpoint become the sample.

1. The engine opens a rollout for each sample, with a base URL of its own.
2. The agents converse there and return rewards; a rollout that is tried again gets a new URL.
3. Every conversation of a rollout keeps its exact tokens. Tokens that the policy sampled have logprobs and are trained
   on once, with the rollout's advantage; others are not.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.agents import AgentEnvironment, AgentTask
from nemo_offload_rl.environments.interfaces import Observation, Score, Unscored
from nemo_offload_rl.environments.outcomes import FAILURES, NUM_RETRIES, Outcome, without_failures
from nemo_offload_rl.experience.types import Rollout, RolloutBatch, Segment, SideConversation
from nemo_offload_rl.generation.served_rollouts import ServedCall, conversations
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import joined_routing

logger = logging.getLogger(__name__)


class Endpoint(Protocol):
    """Interface of the engines for agents' rollouts."""

    def open_rollouts(self, sampling: Sequence[SamplingSettings]) -> list[str]:
        """Open a rollout with each of these samplings; return their base URLs."""
        ...

    def take_rollouts(self, base_urls: Sequence[str]) -> list[list[ServedCall]]:
        """Close the rollouts, and return the calls of each."""
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
    """Run groups of rollouts of prompts whose environments are agents.

    Args:
        prompts: The tasks.
        group_size: Rollouts of each task.
        environments: Environments of all prompts, by name.
        endpoint: The engines, awake.
        sampling: Rollout i draws from the seed + i.
        decode: Token ids to text.
        model: The model's name in the engines' API.
        api_key: Key of the engines' API.

    Raises:
        UserCodeError: A rollout failed, and the agent's `on_error` does not skip that.
    """
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    seed = sampling.seed
    seeds = [None if seed is None else seed + row for row in range(len(rows))]
    outcomes: dict[int, Outcome] = {}
    calls: dict[int, Sequence[ServedCall]] = {}
    due = list(range(len(rows)))
    for _ in range(1 + NUM_RETRIES):
        urls = endpoint.open_rollouts([replace(sampling, seed=seeds[row]) for row in due])
        tasks = {row: _task(rows[row], url, model, api_key) for row, url in zip(due, urls, strict=True)}
        for name, environment in environments.items():
            own = [row for row in due if rows[row].env_name == name]
            if own:
                outcomes |= zip(own, environment.run([tasks[row] for row in own]), strict=True)
        # Raises if an engine has died, before the agents' failures that follow from it are reported.
        calls |= zip(due, endpoint.take_rollouts(urls), strict=True)
        due = [
            row
            for row in due
            if isinstance(outcomes[row], FAILURES) and environments[rows[row].env_name].on_error == "retry"
        ]
        if not due:
            break
    scores = _scores(rows, outcomes, environments)
    _warn(list(calls.values()))
    rollouts = [_rollout(prompt, calls[row], scores[row], decode) for row, prompt in enumerate(rows)]
    return RolloutBatch(rollouts=tuple(rollouts), group_size=group_size)


def _scores(
    rows: Sequence[Prompt], outcomes: Mapping[int, Outcome], environments: Mapping[str, AgentEnvironment]
) -> dict[int, Score | Unscored]:
    scores: dict[int, Score | Unscored] = {}
    for name, environment in environments.items():
        own = [row for row, prompt in enumerate(rows) if prompt.env_name == name]
        found = without_failures(
            [outcomes[row] for row in own],
            on_error=environment.on_error,
            name=environment.name,
            what="rollouts",
            timeout_s=environment.timeout_s,
        )
        scores |= {row: one for row, one in zip(own, found, strict=True) if not isinstance(one, Observation)}
    return scores


def _task(prompt: Prompt, base_url: str, model: str, api_key: str) -> AgentTask:
    return AgentTask(
        base_url=base_url,
        api_key=api_key,
        model=model,
        question=prompt.question,
        answer=prompt.reference_answer,
        metadata=prompt.metadata,
        messages=prompt.messages or ({"role": "user", "content": prompt.question},),
    )


def _rollout(
    prompt: Prompt, calls: Sequence[ServedCall], score: Score | Unscored, decode: Callable[[Sequence[int]], str]
) -> Rollout:
    """Make a sample; it is unscored without a call to the policy."""
    found = conversations(calls)
    if not found and isinstance(score, Score):
        score = Unscored("failed", "the agent sent no request to the policy")
    first, *others = [_conversation(each) for each in found] or [SideConversation(prompt.token_ids, ())]
    if found:
        prompt = replace(prompt, token_ids=first.prompt_token_ids, text=decode(first.prompt_token_ids))
    return Rollout.ended(
        score,
        prompt=prompt,
        segments=first.segments,
        others=tuple(others),
        routed_experts=first.routed_experts,
        response_text="".join(decode(segment.token_ids) for segment in first.segments),
        truncated=bool(found) and found[0][-1][0].completion.finish_reason != "stop",
    )


def _conversation(calls: Sequence[tuple[ServedCall, bool]]) -> SideConversation:
    """Join calls into a conversation; responses counted in another conversation have no logprobs here."""
    segments: list[Segment] = []
    routing: np.ndarray | None = None
    end: tuple[int, ...] = ()
    for call, is_counted in calls:
        if segments:
            segments.append(Segment(token_ids=call.prompt_token_ids[len(end) :], logprobs=None))
        said = call.completion
        logprobs = tuple(said.logprobs) if is_counted else None
        versions = said.versions if is_counted else ()
        segments.append(Segment(token_ids=tuple(said.token_ids), logprobs=logprobs, versions=versions))
        routing = joined_routing(routing, said.routed_experts)
        end = (*call.prompt_token_ids, *said.token_ids)
    return SideConversation(calls[0][0].prompt_token_ids, tuple(segments), routing)


def _warn(calls: Sequence[Sequence[ServedCall]]) -> None:
    silent = sum(not each for each in calls)
    if silent:
        logger.warning("%d of %d agents sent no request to the policy; their rollouts are left out", silent, len(calls))
