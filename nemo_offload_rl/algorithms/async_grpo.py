"""GRPO whose rollouts come from engines of their own beside training, from weights of a few steps before.

One step, in order:
1. refit: the policy's weights go to the engines; before it the rollouts under way end, or they are held in the middle
   and go on with the new weights (`grpo.async_grpo.in_flight_weight_updates`);
2. the rollouts that are due with these weights begin (`rollout_collector.py`);
3. those of this step are waited for, and trained on as in `grpo.py`.
Validation takes the refit upon itself, and nothing begins meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nemo_offload_rl.algorithms.checkpoints import Checkpoint
from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.algorithms.grpo import GrpoTrainer
from nemo_offload_rl.algorithms.rollout_collector import Collected, LostRollouts, RolloutCollector
from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
from nemo_offload_rl.algorithms.rollout_sampler import AwakeEngine
from nemo_offload_rl.algorithms.user_code import GrpoCode
from nemo_offload_rl.data.loader import LookaheadLoader
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.keys.generation import GenerationConfig
from nemo_offload_rl.keys.grpo import AsyncGrpoConfig, ClippedPGLossConfig, GrpoSectionConfig
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.progress import RunProgress
from nemo_offload_rl.utils.timer import TOTAL, PhaseTimer, timing_metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Drawn:
    rollouts: RolloutBatch
    seconds: Mapping[str, float]


class AsyncGrpoTrainer(GrpoTrainer):
    """Runs the steps.

    Args:
        settings: The keys `grpo.*`; `async_grpo` is on.
        loss: See `GrpoTrainer`.
        generation: See `GrpoTrainer`; the engines have devices of their own.
        parts: See `GrpoTrainer`.
        run_logger: See `GrpoTrainer`.
        progress: See `GrpoTrainer`.
        code: See `GrpoTrainer`.
    """

    def __init__(
        self,
        settings: GrpoSectionConfig,
        loss: ClippedPGLossConfig,
        generation: GenerationConfig,
        parts: RolloutParts,
        run_logger: RunLogger,
        progress: RunProgress,
        code: GrpoCode | None = None,
    ) -> None:
        self._loader = LookaheadLoader(parts.loader)
        super().__init__(settings, loss, generation, replace(parts, loader=self._loader), run_logger, progress, code)
        assert settings.async_grpo is not None
        self._ahead: AsyncGrpoConfig = settings.async_grpo
        self._engine.around_refit = self._held if self._ahead.in_flight_weight_updates else self._drained
        self._collector: RolloutCollector[Prompt, _Drawn] | None = None
        self._taken: Collected[_Drawn] | None = None
        if self._ahead.max_trajectory_age_steps > 1 and not self._ahead.in_flight_weight_updates:
            logger.warning(
                "grpo.async_grpo.max_trajectory_age_steps=%d makes rollouts older and nothing faster, because each "
                "update of the engine waits for all rollouts under way; set in_flight_weight_updates to true, or the "
                "age to 1",
                self._ahead.max_trajectory_age_steps,
            )

    def run(self, last_step: int, resume_from: Checkpoint | None) -> None:
        """See `RolloutTrainer`; what was collected and not trained on is generated again by a run that goes on."""
        self._collector = RolloutCollector(
            self._draw_in_thread,
            self._loader,
            max_age=self._ahead.max_trajectory_age_steps,
            first_step=resume_from.step + 1 if resume_from is not None else 1,
            last_step=last_step,
        )
        try:
            super().run(last_step, resume_from)
        finally:
            self._collector.close()

    def _sample(self, step: int) -> SampledGroups:
        self._taken = self._take(step)
        self._engine.start_handover()
        return SampledGroups.all_of(self._taken.drawn.rollouts)

    def _take(self, step: int) -> Collected[_Drawn]:
        collector = self._running
        while True:
            self._engine.bring_weights()
            collector.begin_due(step - 1, self._engine.num_restarts)
            try:
                with self._timer.phase("exposed_generation"):
                    return collector.take(step)
            except LostRollouts as lost:
                if lost.engine == self._engine.num_restarts:  # else it has been started again already
                    self._engine.restart(lost.error)

    def _train(self, step: int, groups: SampledGroups) -> dict[str, float]:
        taken = self._taken
        assert taken is not None
        metrics = super()._train(step, groups)
        self._logger.log(step, timing_metrics(taken.drawn.seconds), "timing/collector")
        return {
            **metrics,
            "avg_trajectory_age": float(taken.age),
            "buffer_size": float(self._running.num_waiting * self._settings.num_prompts_per_step),
        }

    def _seconds(self) -> Mapping[str, float]:
        """Those of the step, and of its rollouts those that they took beside training."""
        assert self._taken is not None
        return {**super()._seconds(), "generation": self._taken.drawn.seconds["generation"]}

    def _check_agreement(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `RolloutTrainer`; rollouts of older weights are expected to differ, and are not checked."""
        if self._taken is not None and self._taken.age == 0:
            super()._check_agreement(step, metrics)

    # -- beside the trainer's thread -------------------------------------------------------------------------------

    def _draw_in_thread(self, step: int, prompts: Sequence[Prompt], number: int) -> _Drawn:
        timer = PhaseTimer()
        # The number as the rollouts were begun: the engine may be another one before this thread runs.
        engine = AwakeEngine(self._parts.engine, timer, lambda: self._engine.num_restarts == number)
        sampler = self._sampler.beside(engine, timer)
        rollouts = self._drawn_by(sampler, step, 0, prompts)
        return _Drawn(rollouts, {phase: taken_s for phase, taken_s in timer.seconds().items() if phase != TOTAL})

    # -- around a refit --------------------------------------------------------------------------------------------

    @property
    def _running(self) -> RolloutCollector[Prompt, _Drawn]:
        assert self._collector is not None, "no run is under way"
        return self._collector

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """Begin the refit once no rollout is under way."""
        with self._timer.phase("exposed_generation"):
            self._running.wait_until_idle()
        yield

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold rollouts in the middle; they go on with the new weights."""
        engine = self._parts.pausing
        assert engine is not None, "a rule asks for the asynchronous engine"
        engine.pause_generation(self._ahead.recompute_kv_cache_after_weight_updates)
        yield
        engine.resume_generation()
