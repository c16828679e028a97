"""The loop of every algorithm that trains on what the policy itself answers, with colocated generation.

One step, in order (docs/design/step.md has the memory side of it):
1. refit: where the policy was trained since the last one, its weights go to the engine;
2. generation and reward: responses to each prompt, which the environments score, or answer, so that another turn
   follows; while the last is scored the engine goes to sleep and the policy comes back;
3. training, which is the algorithm's own;
4. validation, when due: refit, answers to held-out prompts; a checkpoint, when due.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from nemo_offload_rl.algorithms.agreement import disagreement
from nemo_offload_rl.algorithms.checkpoints import Checkpoint
from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.algorithms.metrics import overlong_metrics, residency_metrics, validation_metrics
from nemo_offload_rl.algorithms.rollout_engine import RolloutEngine
from nemo_offload_rl.algorithms.rollout_log import sample_lines
from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
from nemo_offload_rl.algorithms.rollout_sampler import RolloutSampler
from nemo_offload_rl.algorithms.run_end import RunEnd
from nemo_offload_rl.data.batch import TrainBatch
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.errors import AgreementError, DataError
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.keys.generation import GenerationConfig
from nemo_offload_rl.keys.grpo import RolloutSectionConfig
from nemo_offload_rl.protocols.loss import LossFn, TrainResult
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.progress import RunProgress
from nemo_offload_rl.utils.timer import PhaseTimer, timing_metrics

logger = logging.getLogger(__name__)

_REASONS = {
    "failed": "scoring failed",
    "timed_out": "the time limit was over; raise env.NAME.timeout_s",
    "no_reward": "no reward applies to it (all are None); correct the rewards of env.NAME, or the data",
}

_ROLLOUT_PHASES = ("generation", "exposed_generation", "reward", "validation")


class RolloutTrainer[Settings: RolloutSectionConfig](ABC):
    """Runs the steps; an algorithm says what is sampled and how that is trained on.

    Args:
        settings: The keys of the algorithm's section.
        generation: The keys `policy.generation.*`.
        parts: Policy, engine, data and environments.
        run_logger: Gets every metric.
        progress: Shows steps to a person.

    Attributes:
        section: Of the class: the algorithm's section of the configuration.
        shown: Of the class: metrics of a step that a person is shown, by the name that they are shown under.
        trains_on_rewards: Of the class: rollouts without a score are not trained on.
    """

    section: ClassVar[str] = "grpo"
    shown: ClassVar[Mapping[str, str]] = {"reward": "reward_mean"}
    trains_on_rewards: ClassVar[bool] = True

    def __init__(
        self,
        settings: Settings,
        generation: GenerationConfig,
        parts: RolloutParts,
        run_logger: RunLogger,
        progress: RunProgress,
    ) -> None:
        self._settings = settings
        self._generation = generation
        self._parts = parts
        self._logger = run_logger
        self._progress = progress
        self._timer = PhaseTimer()
        self._engine = RolloutEngine(
            parts.policy,
            parts.engine,
            colocated=generation.colocated.enabled,
            restart=lambda error: parts.memory.set_owners(parts.restart_engine(error)),
            timer=self._timer,
            bring=self._bring_policy,
        )
        self._sampler = RolloutSampler(parts, self._engine, self._timer, settings.seed)
        self._total_tokens = 0.0
        self._about_last_step: dict[str, Mapping[str, float]] = {}  # metrics under `train` and `val`
        self._about_data = overlong_metrics(parts.overlong_rows)  # until a step has been logged
        parts.memory.follow(self._timer.current)
        self._end = RunEnd(
            parts.checkpoints,
            parts.policy,
            run_logger.run_dir,
            say=progress.note,
            waits_for_rollouts=lambda: self._timer.current() in _ROLLOUT_PHASES,
            make_room=self._engine.make_room,
        )

    def _bring_policy(self) -> object:
        """Have the policy enter the phase of what `_train` computes first."""
        return self._parts.policy.prepare_for_lp_inference()

    @abstractmethod
    def _train(self, step: int, groups: SampledGroups) -> dict[str, float]:
        """Train on what was sampled, once the engine sleeps; the step's metrics, `num_tokens` among them."""

    def _sample(self, step: int) -> SampledGroups | None:
        """Rollouts to train on, the handover to the policy started; None if the data ended before a step was full."""
        groups = SampledGroups.all_of(self._draw(step, 0, next(iter(self._parts.loader)), is_last=True))
        self._engine.start_handover()
        return groups

    def run(self, last_step: int, resume_from: Checkpoint | None) -> None:
        """Train until `last_step`.

        Args:
            last_step: Number of the last step, from 1.
            resume_from: Where to go on; None starts with the first step.
        """
        step = 0 if resume_from is None else resume_from.step
        with self._end.watching(step, last_step):
            self._run(step, last_step, resume_from)

    def _run(self, step: int, last_step: int, resume_from: Checkpoint | None) -> None:
        self._parts.checkpoints.warn_of_unranked(self._settings.val_period)
        if resume_from is not None:
            self._parts.checkpoints.load(resume_from, self._parts.policy, self._parts.loader)
            self._total_tokens = resume_from.total_tokens
        elif self._settings.val_at_start:
            self.validate(0)
            self._logger.log(0, timing_metrics(self._timer.drain()), "timing")
            self._logger.commit()
        while step < last_step and self._parts.loader.num_batches_left:
            if not self.step(step + 1, last_step):
                self._end_early(step)
                break
            step += 1
            if self._end.step_done(step, last_step):
                break

    def step(self, step: int, last_step: int) -> bool:
        """One step of the file header; False, and nothing is trained, where the data ended before the step was full."""
        parts, timer, where = self._parts, self._timer, self._parts.loader.state_dict()
        groups = self._sample(step)
        if groups is None:
            parts.loader.load_state_dict(where)  # a longer run begins this step anew
            return False
        is_last = step == last_step or not parts.loader.num_batches_left
        about_step = self._train(step, groups)
        self._total_tokens += about_step["num_tokens"]
        about_step["total_tokens"] = self._total_tokens
        self._end.trained(step, parts.loader.state_dict(), about_step)
        self._logger.log(step, about_step, "train")
        self._logger.log(step, self._about_data, "data")
        self._about_data = {}
        self._check_agreement(step, about_step)
        validation = self.validate(step) if self._validation_is_due(step, is_last) else {}
        self._about_last_step = {"train": about_step, "val": validation}
        try:
            if self._end.save_is_due(step, is_last):
                self._save()
        finally:  # the metrics of the step are there to find the cause of a save that fails
            seconds = timer.drain()
            self._logger.log(step, timing_metrics(seconds), "timing")
            self._logger.log(step, parts.memory.drain(step + 1), "memory")
        self._logger.log(step, residency_metrics(parts.policy.residency_reports()), "residency")
        self._logger.commit()
        figures = {shown: f"{about_step[name]:.3f}" for shown, name in self.shown.items() if name in about_step}
        self._progress.step_done(step, figures | _accuracy(about_step), seconds)
        return True

    def validate(self, step: int) -> dict[str, float]:
        """Answer held-out prompts with the present weights; logs the metrics, shows samples, returns the metrics."""
        settings = self._settings
        prompts = self._parts.validation_prompts[: settings.max_val_samples]
        batches = []
        for start in range(0, len(prompts), settings.val_batch_size):
            call, chunk = f"validation:{step}:{start}", prompts[start : start + settings.val_batch_size]
            size, sampling = settings.val_num_generations_per_prompt, self._generation.val_sampling
            batches.append(self._sampler.draw(chunk, size, sampling, call, "validation"))
        rollouts = RolloutBatch.concatenate(batches)
        metrics = validation_metrics(rollouts)
        self._logger.log(step, metrics, "validation")
        self._progress.validated(step, _accuracy(metrics))
        samples = sample_lines(rollouts, self._parts.num_samples_to_print)
        self._logger.log_samples(step, samples)
        for line in samples:
            self._progress.note(line)
        return metrics

    # -- parts of a step -------------------------------------------------------------------------------------------

    def _update(self, rollouts: RolloutBatch, batch: TrainBatch, loss: LossFn) -> TrainResult:
        """Train on all rows of `rollouts.collate`; each update has the conversations of as many rollouts."""
        policy, owners = self._parts.policy, rollouts.row_owners()
        if len(owners) == len(rollouts):
            with self._end.updating():
                return policy.train(batch, loss)
        update_of_row = owners // policy.rows_per_update
        updates = [(update_of_row == number).nonzero()[:, 0] for number in range(int(update_of_row.max()) + 1)]
        with self._end.updating():
            return policy.train(batch, loss, updates)

    def _draw(self, step: int, draw: int, prompts: Sequence[Prompt], *, is_last: bool) -> RolloutBatch:
        """Rollouts of one generation batch of a step; after the last the handover to the policy starts."""
        generated = self._engine.start_handover if is_last else None
        return self._drawn_by(self._sampler, step, draw, prompts, generated)

    def _drawn_by(
        self,
        sampler: RolloutSampler,
        step: int,
        draw: int,
        prompts: Sequence[Prompt],
        generated: Callable[[], object] | None = None,
    ) -> RolloutBatch:
        size, sampling = self._settings.num_generations_per_prompt, self._generation.sampling
        batch = sampler.draw(prompts, size, sampling, f"{step}:{draw}", "generation", generated)
        if not (batch.scored() if self.trains_on_rewards else batch.response_lengths()).any():
            lacking = "a score" if self.trains_on_rewards else "a token of the policy"
            reasons = [rollout.unscored for rollout in batch.rollouts if rollout.unscored is not None]
            why = f"; the first: {reasons[0].reason or _REASONS[reasons[0].why]}" if reasons else ""
            raise DataError(
                f"step {step}: not one of {len(batch)} rollouts has {lacking}, so there is nothing to train on{why}"
            )
        return batch

    def _end_early(self, step: int) -> None:
        """The data ended within the step after `step`: what belongs to a run's last step is done for `step`."""
        if not self._about_last_step:
            return  # a resumed run that trained nothing
        checkpoints = self._parts.checkpoints
        is_ranked_anew = False
        if self._validation_is_due(step, True) and not self._validation_is_due(step, False):
            is_ranked_anew = checkpoints.ranks_by_validation
            self._about_last_step = {**self._about_last_step, "val": self.validate(step)}
            self._logger.commit()
        if checkpoints.is_due(step, True) and (is_ranked_anew or not checkpoints.is_due(step, False)):
            self._save()

    def _check_agreement(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a run whose engine and policy are two different models."""
        message = disagreement(
            step,
            metrics["token_mult_prob_error"],
            metrics["outside_nucleus_rate"],
            self._settings.max_token_mult_prob_error,
            self.section,
        )
        if message is not None:
            raise AgreementError(message)

    def _save(self) -> None:
        with self._timer.phase("checkpoint"):
            if self._parts.checkpoints.exports_weights:
                self._engine.sleep()
            self._end.save(self._about_last_step["val"])

    def _validation_is_due(self, step: int, is_last: bool) -> bool:
        settings = self._settings
        periodic = settings.val_period > 0 and step % settings.val_period == 0
        return bool(self._parts.validation_prompts) and (periodic or (is_last and settings.val_at_end))


def _accuracy(metrics: Mapping[str, float]) -> dict[str, str]:
    """For a person; nothing where no rollout has a score."""
    return {"accuracy": f"{metrics['accuracy']:.1%}"} if "accuracy" in metrics else {}
