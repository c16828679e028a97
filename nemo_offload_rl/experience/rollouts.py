"""From prompts to scored rollouts.

1. The engine samples a group of responses to each prompt.
2. Responses are decoded and each environment scores those that are its own.
3. The result keeps token ids and the sampler's logprobs: text is never tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.interfaces import Environment, Response, Score
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.experience.types import Rollout, RolloutBatch, Segment
from nemo_offload_rl.generation.interfaces import Completion, SamplingSettings

type Decode = Callable[[Sequence[int]], str]


class Sampler(Protocol):
    """The part of a generation engine that rollouts use."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        """`num_samples` completions for each prompt of token ids, in the prompts' order."""
        ...


def collect_rollouts(
    engine: Sampler,
    prompts: Sequence[Prompt],
    *,
    sampling: SamplingSettings,
    group_size: int,
    environments: Mapping[str, Environment],
    decode: Decode,
) -> RolloutBatch:
    """Sample `group_size` responses to each prompt and score them.

    Args:
        engine: Awake, and with the weights that the rollouts are to come from.
        prompts: What to ask.
        sampling: How tokens are drawn.
        group_size: Responses to each prompt.
        environments: By name; each prompt says which one scores it.
        decode: Token ids to text, without special tokens.

    Raises:
        ConfigError: A prompt names an environment that is not there.
    """
    groups = generate_groups(engine, prompts, sampling=sampling, group_size=group_size)
    return score_groups(prompts, groups, environments=environments, decode=decode)


def generate_groups(
    engine: Sampler, prompts: Sequence[Prompt], *, sampling: SamplingSettings, group_size: int
) -> list[list[Completion]]:
    """The engine's part of `collect_rollouts`, for drivers that time it and let the engine sleep right after it."""
    return engine.generate([prompt.token_ids for prompt in prompts], sampling, group_size)


def score_groups(
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Completion]],
    *,
    environments: Mapping[str, Environment],
    decode: Decode,
) -> RolloutBatch:
    """The environments' part of `collect_rollouts`.

    Raises:
        ConfigError: A prompt names an environment that is not there.
    """
    pairs = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    responses = [
        Response(
            prompt_text=prompt.text,
            text=decode(completion.token_ids),
            truncated=completion.finish_reason != "stop",
            reference_answer=prompt.reference_answer,
            metadata=prompt.metadata,
        )
        for prompt, completion in pairs
    ]
    scores = _score_by_environment([prompt.env_name for prompt, _ in pairs], responses, environments)
    rollouts = tuple(
        Rollout(
            prompt=prompt,
            segments=(Segment(token_ids=tuple(completion.token_ids), logprobs=tuple(completion.logprobs)),),
            response_text=response.text,
            reward=score.reward,
            correct=score.correct,
            truncated=response.truncated,
        )
        for (prompt, completion), response, score in zip(pairs, responses, scores, strict=True)
    )
    return RolloutBatch(rollouts=rollouts, group_size=len(groups[0]))


def _score_by_environment(
    names: Sequence[str], responses: Sequence[Response], environments: Mapping[str, Environment]
) -> list[Score]:
    scores: dict[int, Score] = {}
    for name in dict.fromkeys(names):
        if name not in environments:
            known = ", ".join(environments) or "none"
            raise ConfigError(f"environment {name!r} is named by data but not a key of env (known: {known}); add it")
        rows = [row for row, row_name in enumerate(names) if row_name == name]
        scored = environments[name].score([responses[row] for row in rows])
        scores.update(zip(rows, scored, strict=True))
    return [scores[row] for row in range(len(responses))]
