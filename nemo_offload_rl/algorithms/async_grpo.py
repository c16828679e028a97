"""Rollouts of async GRPO: they are drawn across steps, so that their weights may be a few steps old.

Taking the rollouts of a step means:
1. Refit: the policy's weights go to the engines. Rollouts under way end first, or are paused and go on with the new
   weights (`grpo.async_grpo.in_flight_weight_updates`).
2. Begin the rollouts that are due with these weights (`rollout_pool.py`).
3. Wait for the step's rollouts.
4. Engines that take turns with the policy on its devices give back or put away what they generate, and sleep
   (`paused_rollouts.py`). Others go on, on the policy's devices too (`vllm_cfg.enable_sleep_mode` false).
Validation does the refit itself and begins no rollouts for training.
"""

import logging
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean

from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.algorithms.paused_rollouts import ContinuingEngine, Gate
from nemo_offload_rl.algorithms.rollout_loop import RolloutLoop
from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
from nemo_offload_rl.algorithms.rollout_pool import ENGINE_ERRORS, Filling, LostRollouts, RolloutPool, Taken
from nemo_offload_rl.algorithms.rollout_sampler import AwakeEngine, ServingEngine
from nemo_offload_rl.data.loader import LookaheadLoader
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.agents import AgentEnvironment
from nemo_offload_rl.environments.interfaces import for_threads
from nemo_offload_rl.errors import DeviceMemoryError, WorkerDiedError
from nemo_offload_rl.experience.types import Rollout, RolloutBatch
from nemo_offload_rl.keys.grpo import GrpoSectionConfig
from nemo_offload_rl.protocols.engine import PausingEngine
from nemo_offload_rl.utils.timer import TOTAL, PhaseTimer

logger = logging.getLogger(__name__)


def with_lookahead(parts: RolloutParts) -> RolloutParts:
    """Return the parts for several threads, with a loader that reads ahead and environments that threads share."""
    environments = {
        name: each if isinstance(each, AgentEnvironment) else for_threads(each)
        for name, each in parts.environments.items()
    }
    return replace(parts, loader=LookaheadLoader(parts.loader), environments=environments)


def token_ages(step: int, rollouts: RolloutBatch) -> dict[str, float]:
    """Return mean and maximum of the steps between the weights that sampled a token and `step`; none if unknown."""
    ages: Counter[int] = Counter()
    for rollout in rollouts.rollouts:
        for version, count in rollout.versions:
            ages[step - 1 - version] += count
    if not ages:
        return {}
    mean = sum(age * count for age, count in ages.items()) / ages.total()
    return {"avg_token_age": mean, "max_token_age": float(max(ages))}


def _age(step: int, rollout: Rollout, begun: int) -> int:
    """Return the steps between a rollout's first token and `step`, or `begun` if its versions are unknown.

    A rollout that waited in the engine, or for it, is younger than its part.
    """
    return step - 1 - rollout.versions[0][0] if rollout.versions else begun


@dataclass(frozen=True)
class _Drawn:
    rollouts: RolloutBatch
    seconds: Mapping[str, float]


class RolloutsAhead:
    """Draws rollouts in its own threads, and hands them out step by step.

    Args:
        settings: The keys `grpo.*`; `async_grpo` is on.
        parts: The run's parts, from `with_lookahead`.
        loop: Draws rollouts, and holds the engines.
        engines_stop: Whether the engines stop while the policy trains.
    """

    def __init__(
        self, settings: GrpoSectionConfig, parts: RolloutParts, loop: RolloutLoop, *, engines_stop: bool
    ) -> None:
        assert settings.async_grpo is not None and isinstance(parts.loader, LookaheadLoader)
        self._cfg = cfg = settings.async_grpo
        self._num_prompts, self._num_samples = settings.num_prompts_per_step, settings.num_generations_per_prompt
        self._by_group = cfg.order == "finished"
        self._parts = parts
        self._loop = loop
        self._loader = parts.loader
        self._pool: RolloutPool[Prompt, _Drawn] | None = None
        self._lengths: list[tuple[int, float]] = []  # batch and mean length of each group, as they finish
        self._stops = engines_stop
        # Calls of agents are conversations that engines hold, which cannot be continued elsewhere.
        has_gate = self._by_group and parts.endpoint is None
        self._gate = Gate(keeps=parts.keeps_paused) if has_gate else None
        if not engines_stop:
            loop.engine.around_refit = self._held if cfg.in_flight_weight_updates else self._drained
        if cfg.max_trajectory_age_steps > 1 and not cfg.in_flight_weight_updates:
            logger.warning(
                "grpo.async_grpo.max_trajectory_age_steps=%d makes rollouts older but nothing faster: each update of "
                "the engine waits for all rollouts under way; set in_flight_weight_updates to true, or the age to 1",
                cfg.max_trajectory_age_steps,
            )

    @contextmanager
    def collecting(self, first_step: int, last_step: int) -> Generator[None]:
        """Collect rollouts for a run's steps. A resumed run generates untrained rollouts again."""
        max_age = self._cfg.max_trajectory_age_steps
        self._pool = RolloutPool(
            self._draw_in_thread,
            self._loader,
            order=self._cfg.order,
            max_age=max_age,
            first_step=first_step,
            last_step=last_step,
            most_at_once=self._most_at_once(max_age),
            filling=self._filling(),
            engines_stop=self._stops,
        )
        try:
            yield
        finally:
            self._pool.close()
            if self._gate is not None:
                self._gate.end()

    def _most_at_once(self, max_age: int) -> int:
        """Return the number of parts that are drawn at a time: with order `finished` one step's; see `_filling`."""
        return min(self._parts.engine.most_callers, self._num_prompts) if self._by_group else max_age + 1

    def _filling(self) -> Filling | None:
        """Keep engines at one step's number of responses, with order `finished`.

        With more, groups would grow old while they wait in the engines. None for agents: the number of their calls says
        nothing about the number of their rollouts.
        """
        if self._gate is None:
            return None
        engine, per_group = self._parts.engine, self._num_samples
        return Filling(engine.num_in_progress, self._num_prompts * per_group, per_group, engine.most_callers)

    def take(self, step: int) -> SampledGroups:
        """Wait for the rollouts of a step and return them.

        Raises:
            DataError: They have nothing to train on.
        """
        engine = self._loop.engine
        while True:
            try:
                if self._stops and self._running.has_ready(step):
                    taken = self._running.take(step)  # the engines need not wake
                else:
                    engine.bring_weights()
                    self._running.begin_due(step - 1, engine.num_restarts)
                    taken = self._taken(step)
            except LostRollouts as lost:
                if lost.engine == engine.num_restarts:  # else it was restarted already
                    self._restart(lost.error)
                continue
            rollouts = RolloutBatch.concatenate([part.drawn.rollouts for part in taken])
            self._loop.check_useful(step, rollouts)
            phases = dict.fromkeys(phase for part in taken for phase in part.drawn.seconds)
            return SampledGroups(
                trained=rollouts,
                sampled=rollouts,
                age=fmean(_age(step, one, part.age) for part in taken for one in part.drawn.rollouts.rollouts),
                seconds={phase: max(part.drawn.seconds.get(phase, 0.0) for part in taken) for phase in phases},
            )

    def _taken(self, step: int) -> list[Taken[_Drawn]]:
        """Wait until a step has its rollouts, and then for engines that share devices to stop."""
        with self._loop.timer.phase("exposed_generation"):
            if not self._stops or self._gate is None:
                if self._gate is not None:
                    self._gate.open()
                return self._running.take(step)
            taken: list[Taken[_Drawn]] = []
            try:
                with self._gate.open_for(self._pausing):
                    taken = self._running.take(step)
            except ENGINE_ERRORS as error:  # an engine died as it stopped
                self._restart(error)
        return taken

    def _restart(self, error: WorkerDiedError | DeviceMemoryError) -> None:
        """Restart the engines after `error`; with order `finished`, responses of living engines are continued."""
        if self._gate is not None:
            self._gate.stop(self._pausing, error)
        self._loop.engine.restart(error)

    @property
    def _pausing(self) -> PausingEngine:
        engine = self._parts.pausing
        assert engine is not None, "a rule asks for the asynchronous engine"
        return engine

    def with_generation(self, seconds: Mapping[str, float], groups: SampledGroups) -> dict[str, float]:
        """Return a step's seconds, with the generation of its rollouts; order `finished` has no such figure.

        With that order, engines work on groups of several steps at the same time, so no seconds belong to one step.
        """
        others = {phase: taken_s for phase, taken_s in seconds.items() if phase != "generation"}
        return others if self._by_group else {**others, "generation": groups.seconds["generation"]}

    def metrics(self, step: int, groups: SampledGroups) -> dict[str, float]:
        """Return ages of a step's rollouts and tokens, how many prompts have rollouts that wait, and mean lengths."""
        found = {"avg_trajectory_age": float(groups.age), "buffer_size": float(self._running.num_waiting)}
        found |= token_ages(step, groups.trained)
        if self._by_group:
            found["trained_length_mean"] = groups.trained.response_lengths().float().mean().item()
            found["sampled_length_mean"] = self._sampled_length()
        return found

    def _sampled_length(self) -> float:
        """Return the mean length of responses in the newest batch that is complete, or in all groups if no batch is."""
        finished = self._lengths[:]
        sizes = Counter(batch for batch, _ in finished)
        whole = max((batch for batch, size in sizes.items() if size == self._num_prompts), default=None)
        if whole is None:
            return fmean(length for _, length in finished)
        mean = fmean(length for batch, length in finished if batch == whole)
        self._lengths[: len(finished)] = [(batch, length) for batch, length in finished if batch >= whole]
        return mean

    def _draw_in_thread(self, batch: int, first: int, prompts: Sequence[Prompt], number: int) -> _Drawn:
        timer = PhaseTimer() if self._gate is None else PhaseTimer(self._gate.clock)
        with self._serving(timer, number) as engine:
            rollouts = self._loop.draw_ahead(batch, first, prompts, engine, timer)
        self._lengths.append((batch, rollouts.response_lengths().float().mean().item()))
        return _Drawn(rollouts, {phase: taken_s for phase, taken_s in timer.seconds().items() if phase != TOTAL})

    @contextmanager
    def _serving(self, timer: PhaseTimer, number: int) -> Generator[ServingEngine]:
        """Yield the engine that draws a part: one of the group with order `finished`, else the whole group.

        Calls raise `WorkerDiedError` once the group was restarted more often than `number` times, unless responses are
        continued.
        """

        # `number` was read as the rollouts began, since a restart may come before this thread runs.
        def is_the_same() -> bool:
            return self._loop.engine.num_restarts == number

        engines = self._parts.engine
        if not self._by_group:
            yield AwakeEngine(engines, timer, is_the_same)
            return
        with engines.reserve() as engine:
            if self._gate is None:
                yield AwakeEngine(engine, timer, is_the_same)
            else:
                yield ContinuingEngine(engine, timer, lambda: self._loop.engine.num_restarts, self._gate)

    @property
    def _running(self) -> RolloutPool[Prompt, _Drawn]:
        assert self._pool is not None, "no run is under way"
        return self._pool

    @contextmanager
    def _drained(self) -> Generator[None]:
        """Wait until no rollout is under way, then let the refit begin."""
        with self._loop.timer.phase("exposed_generation"):
            self._running.wait_until_idle()
        yield

    @contextmanager
    def _held(self) -> Generator[None]:
        """Pause rollouts during the refit; they go on with the new weights."""
        engine = self._pausing
        engine.pause_generation(self._cfg.recompute_kv_cache_after_weight_updates)
        yield
        engine.resume_generation()
