"""Rollouts of async GRPO: separate engines draw them during training, with weights that are a few steps old.

Taking the rollouts of a step means:
1. Refit: the policy's weights go to the engines. Rollouts under way end first, or are paused and go on with the new
   weights (`grpo.async_grpo.in_flight_weight_updates`).
2. Begin the rollouts that are due with these weights (`rollout_collector.py`).
3. Wait for the step's rollouts.
Validation does the refit itself and begins no rollouts for training.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.algorithms.rollout_collector import LostRollouts, RolloutCollector
from nemo_offload_rl.algorithms.rollout_loop import RolloutLoop
from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
from nemo_offload_rl.algorithms.rollout_sampler import AwakeEngine
from nemo_offload_rl.data.loader import LookaheadLoader
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.keys.grpo import GrpoSectionConfig
from nemo_offload_rl.utils.timer import TOTAL, PhaseTimer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Drawn:
    rollouts: RolloutBatch
    seconds: Mapping[str, float]


class RolloutsAhead:
    """Draws rollouts in its own threads, and hands them out step by step.

    Args:
        settings: The keys `grpo.*`; `async_grpo` is on.
        parts: The run's parts, with a `LookaheadLoader`; the engines have their own devices.
        loop: Draws rollouts, and holds the engines.
    """

    def __init__(self, settings: GrpoSectionConfig, parts: RolloutParts, loop: RolloutLoop) -> None:
        assert settings.async_grpo is not None and isinstance(parts.loader, LookaheadLoader)
        self._cfg = cfg = settings.async_grpo
        self._num_prompts = settings.num_prompts_per_step
        self._parts = parts
        self._loop = loop
        self._loader = parts.loader
        self._collector: RolloutCollector[Prompt, _Drawn] | None = None
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
        self._collector = RolloutCollector(
            self._draw_in_thread,
            self._loader,
            max_age=self._cfg.max_trajectory_age_steps,
            first_step=first_step,
            last_step=last_step,
        )
        try:
            yield
        finally:
            self._collector.close()

    def take(self, step: int) -> SampledGroups:
        """Wait for the rollouts of a step and return them."""
        engine = self._loop.engine
        while True:
            engine.bring_weights()
            self._running.begin_due(step - 1, engine.num_restarts)
            try:
                with self._loop.timer.phase("exposed_generation"):
                    taken = self._running.take(step)
            except LostRollouts as lost:
                if lost.engine == engine.num_restarts:  # else it was restarted already
                    engine.restart(lost.error)
                continue
            rollouts = taken.drawn.rollouts
            return SampledGroups(trained=rollouts, sampled=rollouts, age=taken.age, seconds=taken.drawn.seconds)

    def metrics(self, groups: SampledGroups) -> dict[str, float]:
        """Return the age of a step's rollouts, and the number of prompts whose rollouts wait to be trained on."""
        waiting = self._running.num_waiting * self._num_prompts
        return {"avg_trajectory_age": float(groups.age), "buffer_size": float(waiting)}

    def _draw_in_thread(self, step: int, prompts: Sequence[Prompt], number: int) -> _Drawn:
        timer = PhaseTimer()
        # `number` is from when the rollouts began: the engine may be restarted before this thread runs.
        engine = AwakeEngine(self._parts.engine, timer, lambda: self._loop.engine.num_restarts == number)
        rollouts = self._loop.draw(step, 0, prompts, sampler=self._loop.sampler.for_thread(engine, timer))
        return _Drawn(rollouts, {phase: taken_s for phase, taken_s in timer.seconds().items() if phase != TOTAL})

    @property
    def _running(self) -> RolloutCollector[Prompt, _Drawn]:
        assert self._collector is not None, "no run is under way"
        return self._collector

    @contextmanager
    def _drained(self) -> Generator[None]:
        """Wait until no rollout is under way, then let the refit begin."""
        with self._loop.timer.phase("exposed_generation"):
            self._running.wait_until_idle()
        yield

    @contextmanager
    def _held(self) -> Generator[None]:
        """Pause rollouts during the refit; they go on with the new weights."""
        engine = self._parts.pausing
        assert engine is not None, "a rule asks for the asynchronous engine"
        engine.pause_generation(self._cfg.recompute_kv_cache_after_weight_updates)
        yield
        engine.resume_generation()
