"""Draws rollouts: the engine generates, the environments score or answer, until every rollout has ended."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.agents import AgentEnvironment
from nemo_offload_rl.errors import WorkerDiedError
from nemo_offload_rl.experience.agent_rollouts import agent_rollouts
from nemo_offload_rl.experience.rollouts import Rollouts
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion, Generates
from nemo_offload_rl.utils.timer import PhaseTimer


class ServingEngine(Protocol):
    """The engine that rollouts are drawn from; the time of a call counts as `phase`."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int, *, phase: str
    ) -> list[list[Completion]]:
        """Return `num_samples` completions of each prompt."""
        ...

    def serve[Result](self, work: Callable[[], Result], *, phase: str) -> Result:
        """Run `work`, which talks to the engine itself, and return its result."""
        ...


class AwakeEngine:
    """A `ServingEngine` that is already awake with the right weights; the caller restarts an engine that dies.

    Args:
        engine: A group of engines, or a single engine of a group.
        timer: Gets the phases.
        is_the_same: Tells whether the engine has not been restarted since.
    """

    def __init__(self, engine: Generates, timer: PhaseTimer, is_the_same: Callable[[], bool]) -> None:
        self._engine = engine
        self._timer = timer
        self._is_the_same = is_the_same

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int, *, phase: str
    ) -> list[list[Completion]]:
        return self.serve(lambda: self._engine.generate(prompts, sampling, num_samples), phase=phase)

    def serve[Result](self, work: Callable[[], Result], *, phase: str) -> Result:
        """See `ServingEngine`.

        Raises:
            WorkerDiedError: The engine was restarted, or will be; the new one has no earlier turns.
        """
        try:
            if self._is_the_same():
                with self._timer.phase(phase):
                    return work()
        except RuntimeError:  # the engine is shutting down, or has no weights yet
            if self._is_the_same():
                raise
        raise WorkerDiedError("the engine was started again in the middle of rollouts")


class RolloutSampler:
    """Draws rollouts. Each thread needs its own sampler; `for_thread` makes one.

    Args:
        parts: Environments, turns and the agents' endpoint.
        engine: Generates the responses.
        timer: Gets the phase `reward`.
        seed: The run's seed.
    """

    def __init__(self, parts: RolloutParts, engine: ServingEngine, timer: PhaseTimer, seed: int) -> None:
        self._parts = parts
        self._engine = engine
        self._timer = timer
        self._seed = seed

    def for_thread(self, engine: ServingEngine, timer: PhaseTimer) -> RolloutSampler:
        """Return a sampler for another thread, with the same environments."""
        return RolloutSampler(self._parts, engine, timer, self._seed)

    def draw(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: SamplingSettings,
        call: str,
        phase: str,
        generated: Callable[[], object] | None = None,
        *,
        trained_steps: int = 0,
        first: int = 0,
    ) -> RolloutBatch:
        """Draw rollouts, seeded by `call`; their time counts as `phase` and `reward`.

        `generated` is called after the last generation, before its scoring. It is not called if the last turn is not
        known in advance. Agents' rollouts are drawn first. `trained_steps` is for environments, see `Response`. If the
        prompts are a part of a larger call, `first` is the number of the first, so that each has the same seed in both.
        """
        parts, skipped = self._parts, first * group_size
        agents = {name: each for name, each in parts.environments.items() if isinstance(each, AgentEnvironment)}
        driven = [prompt.env_name in agents for prompt in prompts]
        if any(driven):
            others = [prompt for prompt, is_driven in zip(prompts, driven, strict=True) if not is_driven]
            own = [prompt for prompt, is_driven in zip(prompts, driven, strict=True) if is_driven]
            batch = self._agent_rollouts(
                own, agents, group_size, self._seeded(sampling, f"{call}:agents", skipped), phase
            )
            if not others:
                return batch
            rest = self.draw(
                others, group_size, sampling, call, phase, generated, trained_steps=trained_steps, first=first
            )
            return RolloutBatch.interleave(batch, rest, driven)
        rollouts = Rollouts(
            prompts,
            group_size=group_size,
            environments={
                name: each for name, each in parts.environments.items() if not isinstance(each, AgentEnvironment)
            },
            decode=parts.decode,
            turns=parts.turns,
            trained_steps=trained_steps,
        )

        while rollouts.under_way:
            token_ids, num_samples = rollouts.prompts()
            turn = f":turn {rollouts.num_turns}" if rollouts.num_turns else ""
            seeded = self._seeded(sampling, call + turn, skipped)
            completions = self._engine.generate(token_ids, seeded, num_samples, phase=phase)
            if generated is not None and rollouts.in_last_turn:
                generated()
            with self._timer.phase("reward"):
                rollouts.step(completions)
        return rollouts.batch()

    def _agent_rollouts(
        self,
        prompts: Sequence[Prompt],
        agents: Mapping[str, AgentEnvironment],
        group_size: int,
        sampling: SamplingSettings,
        phase: str,
    ) -> RolloutBatch:
        """Draw rollouts of agents' prompts; all time, reward included, counts as `phase`."""
        parts = self._parts
        endpoint = parts.endpoint
        assert endpoint is not None, "checked when the environments are made"
        asked = {prompt.env_name for prompt in prompts}

        def ask() -> RolloutBatch:
            return agent_rollouts(
                prompts,
                group_size=group_size,
                environments={name: agent for name, agent in agents.items() if name in asked},
                endpoint=endpoint.engine,
                sampling=sampling,
                decode=parts.decode,
                model=endpoint.model,
                api_key=endpoint.api_key,
            )

        return self._engine.serve(ask, phase=phase)

    def _seeded(self, sampling: SamplingSettings, call: str, skipped: int) -> SamplingSettings:
        """Derive a call's seed from the run's seed and the call's name alone, so that a resumed run draws the same."""
        digest = hashlib.blake2b(f"{self._seed}:{call}".encode(), digest_size=8).digest()
        return replace(sampling, seed=(int.from_bytes(digest, "big") >> 1) + skipped)
