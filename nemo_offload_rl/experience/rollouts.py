"""Turns prompts into scored rollouts.

1. The engine samples a group of responses to each prompt.
2. Responses are decoded, and each environment scores or answers its own.
3. An answered rollout goes on: prompt, response and answer are the engine's next prompt, with one sample.
4. The result keeps token ids and the sampler's logprobs: responses are never tokenized again.

The caller runs engine and environments, so that it can time them, and restart an engine that died.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.interfaces import Environment, Observation, Response, Score, Turn, Unscored
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.experience.types import Rollout, RolloutBatch, Segment
from nemo_offload_rl.protocols.engine import Completion, joined_routing

type Decode = Callable[[Sequence[int]], str]
"""Token ids to text, without special tokens."""

type EncodeTurn = Callable[[str, Sequence[int]], Sequence[int]]
"""Turns an observation, and the tokens of the response before it, into the tokens between both responses."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Limits of rollouts of several turns.

    Attributes:
        max_turns: Turns of the policy.
        max_tokens: Tokens of prompt, responses and observations together.
        encode: Turns observations into tokens.
        stopped: Returns a score to end a rollout before its last turn, or None to go on.
    """

    max_turns: int
    max_tokens: int
    encode: EncodeTurn
    stopped: Callable[[Response, Observation], Score | Unscored | None] = lambda response, observation: None


@dataclass
class _Open:
    """A rollout that may still be under way."""

    prompt: Prompt
    segments: list[Segment] = field(default_factory=list)
    earlier: list[Turn] = field(default_factory=list)
    text: str = ""
    truncated: bool = False
    stopped: bool = False
    score: Score | Unscored | None = None
    routed_experts: np.ndarray | None = None

    def tokens_after_prompt(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]


class Rollouts:
    """Runs groups of rollouts turn by turn: while `under_way`, the engine's completions of `prompts` go to `step`.

    Args:
        prompts: The prompts of all groups.
        group_size: Rollouts of each prompt.
        environments: Environments by name; each prompt names its own.
        decode: See `Decode`.
        turns: Limits of the rollouts.
        trained_steps: See `Response`.

    Raises:
        ConfigError: A prompt names an unknown environment.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        environments: Mapping[str, Environment],
        decode: Decode,
        turns: Turns,
        trained_steps: int = 0,
    ) -> None:
        for name in dict.fromkeys(prompt.env_name for prompt in prompts):
            if name not in environments:
                known = ", ".join(environments) or "none"
                raise ConfigError(
                    f"data names environment {name!r}, which is no key of env (its keys: {known}); add it to env"
                )
        self._prompts = prompts
        self._group_size = group_size
        self._environments = environments
        self._decode = decode
        self._turns = turns
        self._trained_steps = trained_steps
        self._all = [_Open(prompt) for prompt in prompts for _ in range(group_size)]
        self._live = self._all
        self.num_turns = 0  # that have ended

    @property
    def under_way(self) -> bool:
        """Tell whether any rollout has a turn to come."""
        return bool(self._live)

    @property
    def in_last_turn(self) -> bool:
        """Tell whether no turn can follow the current one."""
        return self.num_turns + 1 >= self._turns.max_turns

    def prompts(self) -> tuple[list[Sequence[int]], int]:
        """Return token ids for the engine and the samples of each prompt: a group in the first turn, then one."""
        if self.num_turns == 0:
            return [prompt.token_ids for prompt in self._prompts], self._group_size
        return [[*rollout.prompt.token_ids, *rollout.tokens_after_prompt()] for rollout in self._live], 1

    def step(self, groups: Sequence[Sequence[Completion]]) -> None:
        """End a turn: the environments score or answer the engine's completions of `prompts`."""
        self.num_turns += 1
        completions = [completion for group in groups for completion in group]
        responses = [self._response(*pair) for pair in zip(self._live, completions, strict=True)]
        for rollout, response, outcome in zip(self._live, responses, self._ask(responses), strict=True):
            if not isinstance(outcome, Observation):
                rollout.score = outcome
            elif not response.may_go_on:
                rollout.score = outcome.otherwise
            elif (score := self._turns.stopped(response, outcome)) is not None:
                rollout.score, rollout.stopped = score, True
            elif not self._observed(rollout, response, outcome):
                rollout.score = outcome.otherwise
        self._live = [rollout for rollout in self._live if rollout.score is None]

    def batch(self) -> RolloutBatch:
        """Return all rollouts, group by group; all must have ended."""
        return RolloutBatch(rollouts=tuple(self._ended(rollout) for rollout in self._all), group_size=self._group_size)

    def _response(self, rollout: _Open, completion: Completion) -> Response:
        logprobs, versions = tuple(completion.logprobs), completion.versions
        rollout.segments.append(Segment(token_ids=tuple(completion.token_ids), logprobs=logprobs, versions=versions))
        rollout.routed_experts = joined_routing(rollout.routed_experts, completion.routed_experts)
        rollout.truncated = completion.finish_reason != "stop"
        text = self._decode(completion.token_ids)
        rollout.text += text
        return Response(
            prompt_text=rollout.prompt.text,
            text=text,
            truncated=rollout.truncated,
            reference_answer=rollout.prompt.reference_answer,
            metadata=rollout.prompt.metadata,
            earlier=tuple(rollout.earlier),
            may_go_on=not rollout.truncated and self.num_turns < self._turns.max_turns,
            question=rollout.prompt.question,
            messages=rollout.prompt.messages,
            token_ids=completion.token_ids,
            trained_steps=self._trained_steps,
        )

    def _ask(self, responses: Sequence[Response]) -> list[Score | Observation | Unscored]:
        outcomes: dict[int, Score | Observation | Unscored] = {}
        names = [rollout.prompt.env_name for rollout in self._live]
        for name in dict.fromkeys(names):
            rows = [row for row, row_name in enumerate(names) if row_name == name]
            answered = self._environments[name].step([responses[row] for row in rows])
            outcomes.update(zip(rows, answered, strict=True))
        return [outcomes[row] for row in range(len(responses))]

    def _observed(self, rollout: _Open, response: Response, observation: Observation) -> bool:
        """Add the observation if it and a token of the next response fit the limit; tell whether they do."""
        said = rollout.segments[-1].token_ids
        token_ids = tuple(self._turns.encode(observation.text, said))
        num_tokens = len(rollout.prompt.token_ids) + len(rollout.tokens_after_prompt()) + len(token_ids)
        if num_tokens >= self._turns.max_tokens:
            return False
        rollout.segments.append(Segment(token_ids=token_ids, logprobs=None))
        rollout.text += self._decode(token_ids)
        rollout.earlier.append(Turn(response.text, observation.text))
        return True

    def _ended(self, rollout: _Open) -> Rollout:
        assert rollout.score is not None, "a rollout is under way"
        return Rollout.ended(
            rollout.score,
            prompt=rollout.prompt,
            segments=tuple(rollout.segments),
            response_text=rollout.text,
            truncated=rollout.truncated,
            stopped=rollout.stopped,
            routed_experts=rollout.routed_experts,
        )
