"""Rollouts of a run: the engine asks the policy, the environments score or answer, until every rollout has ended."""

from __future__ import annotations

import hashlib
import threading
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
from nemo_offload_rl.protocols.engine import Completion, GenerationEngine
from nemo_offload_rl.utils.timer import PhaseTimer


class ServingEngine(Protocol):
    """Where responses come from; seconds count as `phase`."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int, *, phase: str
    ) -> list[list[Completion]]:
        """`num_samples` completions of each prompt."""
        ...

    def serve[Result](self, work: Callable[[], Result], *, phase: str) -> Result:
        """What `work` returns, which talks to the engine itself."""
        ...


class AwakeEngine:
    """An engine that is awake and has the weights that rollouts are to have; its deaths are the caller's.

    Args:
        engine: All engines.
        timer: Gets the phases.
        is_the_same: Whether it has not been started again meanwhile.
    """

    def __init__(self, engine: GenerationEngine, timer: PhaseTimer, is_the_same: Callable[[], bool]) -> None:
        self._engine = engine
        self._timer = timer
        self._is_the_same = is_the_same

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int, *, phase: str
    ) -> list[list[Completion]]:
        """See `ServingEngine`."""
        return self.serve(lambda: self._engine.generate(prompts, sampling, num_samples), phase=phase)

    def serve[Result](self, work: Callable[[], Result], *, phase: str) -> Result:
        """See `ServingEngine`.

        Raises:
            WorkerDiedError: Another engine is there, or will be; it knows nothing of earlier turns.
        """
        try:
            if self._is_the_same():
                with self._timer.phase(phase):
                    return work()
        except RuntimeError:  # of an engine that is being ended, or has no weights yet
            if self._is_the_same():
                raise
        raise WorkerDiedError("the engine was started again in the middle of rollouts")


class RolloutSampler:
    """Draws rollouts; several threads may, each with a sampler of its own (`beside`).

    Args:
        parts: Environments, turns and what agents talk to.
        engine: Where responses come from.
        timer: Gets the phase `reward`.
        seed: Of the run.
        scoring: Held while an environment works: environments are asked by one thread at a time.
    """

    def __init__(
        self,
        parts: RolloutParts,
        engine: ServingEngine,
        timer: PhaseTimer,
        seed: int,
        scoring: threading.Lock | None = None,
    ) -> None:
        self._parts = parts
        self._engine = engine
        self._timer = timer
        self._seed = seed
        self._scoring = scoring or threading.Lock()

    def beside(self, engine: ServingEngine, timer: PhaseTimer) -> RolloutSampler:
        """A sampler for another thread, of the same environments."""
        return RolloutSampler(self._parts, engine, timer, self._seed, self._scoring)

    def draw(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: SamplingSettings,
        call: str,
        phase: str,
        generated: Callable[[], object] | None = None,
    ) -> RolloutBatch:
        """Rollouts, seeded by `call`; their seconds count as `phase` and as reward.

        `generated` is called when the engine has said all, before the last turn is scored; where it is not known which
        turn is the last, it is not called. Agents drive theirs first.
        """
        parts = self._parts
        agents = {name: each for name, each in parts.environments.items() if isinstance(each, AgentEnvironment)}
        driven = [prompt.env_name in agents for prompt in prompts]
        if any(driven):
            others = [prompt for prompt, is_driven in zip(prompts, driven, strict=True) if not is_driven]
            own = [prompt for prompt, is_driven in zip(prompts, driven, strict=True) if is_driven]
            batch = self._agent_rollouts(own, agents, group_size, self._seeded(sampling, f"{call}:agents"), phase)
            rest = self.draw(others, group_size, sampling, call, phase, generated) if others else None
            return batch if rest is None else RolloutBatch.interleave(batch, rest, driven)
        rollouts = Rollouts(
            prompts,
            group_size=group_size,
            environments={
                name: each for name, each in parts.environments.items() if not isinstance(each, AgentEnvironment)
            },
            decode=parts.decode,
            turns=parts.turns,
        )

        while rollouts.under_way:
            token_ids, num_samples = rollouts.prompts()
            turn = f":turn {rollouts.num_turns}" if rollouts.num_turns else ""
            seeded = self._seeded(sampling, call + turn)
            completions = self._engine.generate(token_ids, seeded, num_samples, phase=phase)
            if generated is not None and rollouts.in_last_turn:
                generated()
            with self._timer.phase("reward"), self._scoring:
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
        """Rollouts of prompts that are all agents'; their seconds count as `phase`, reward included."""
        parts = self._parts
        endpoint = parts.endpoint
        assert endpoint is not None, "checked when the environments are made"
        asked = {prompt.env_name for prompt in prompts}

        def ask() -> RolloutBatch:
            with self._scoring:
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

    def _seeded(self, sampling: SamplingSettings, call: str) -> SamplingSettings:
        """Draws of one call of the engine depend on the run's seed and the call's name alone, also after a resume."""
        digest = hashlib.blake2b(f"{self._seed}:{call}".encode(), digest_size=8).digest()
        return replace(sampling, seed=int.from_bytes(digest, "big") >> 1)
