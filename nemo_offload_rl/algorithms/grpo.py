"""GRPO (arXiv 2402.03300) with colocated generation: the loop of `rollout_trainer.py`.

Between its rollouts and its training come
- logprobs: of the policy before the update, and of the frozen reference, where the loss reads them;
- advantages: within each group.
There is one optimizer step for each global batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from nemo_offload_rl.algorithms.advantages import (
    overlong_sample_mask,
    response_means,
    scale_rewards,
    shape_rewards,
    token_advantages,
)
from nemo_offload_rl.algorithms.agreement import without_disagreement
from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups, sample_until_full
from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.algorithms.metrics import IdleSteps, dynamic_sampling_metrics, train_metrics
from nemo_offload_rl.algorithms.rollout_log import rollout_records
from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
from nemo_offload_rl.algorithms.rollout_trainer import RolloutTrainer
from nemo_offload_rl.algorithms.user_code import GrpoCode
from nemo_offload_rl.data.batch import TrainBatch
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.keys.generation import GenerationConfig
from nemo_offload_rl.keys.grpo import ClippedPGLossConfig, GrpoSectionConfig, needs_prev_logprobs
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.progress import RunProgress

logger = logging.getLogger(__name__)


class GrpoTrainer(RolloutTrainer[GrpoSectionConfig]):
    """Runs the steps.

    Args:
        settings: The keys `grpo.*`.
        loss: The keys `loss_fn.*`.
        generation: The keys `policy.generation.*`.
        parts: Policy, engine, data and environments.
        run_logger: Gets every metric.
        progress: Shows steps to a person.
        code: A user's own parts.
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
        self._code = code or GrpoCode()
        if self._code.rollout_stop is not None:
            parts = replace(parts, turns=replace(parts.turns, stopped=self._code.stopped))
        super().__init__(settings, generation, parts, run_logger, progress)
        self._clipped = ClippedPGLoss(loss)
        self._loss = self._code.loss or self._clipped
        self._idle_steps = IdleSteps()
        self._needs_prev = needs_prev_logprobs(settings, loss)
        self._needs_reference = loss.reference_policy_kl_penalty != 0

    def _sample(self, step: int) -> SampledGroups | None:
        settings = self._settings
        if not settings.use_dynamic_sampling:
            return super()._sample(step)

        def batches() -> Iterator[RolloutBatch]:
            for draw, prompts in enumerate(self._parts.loader):
                yield self._draw(step, draw, prompts, is_last=False)

        max_batches = settings.dynamic_sampling_max_gen_batches
        groups = sample_until_full(batches(), num_prompts=settings.num_prompts_per_step, max_batches=max_batches)
        if groups is not None:
            self._engine.start_handover()
        return groups

    def _train(self, step: int, groups: SampledGroups) -> dict[str, float]:
        parts, timer, rollouts = self._parts, self._timer, groups.trained
        rewards = self._training_rewards(rollouts)
        mask = overlong_sample_mask(rollouts.truncated(), filtering=self._settings.overlong_filtering)
        mask = mask * rollouts.loss_multipliers() * rollouts.scored()
        kept = self._code.kept(rollouts)
        if kept is not None:
            mask = mask * kept
        batch = rollouts.collate(pad_id=parts.pad_id, multiple=parts.width_multiple, sample_mask=mask)

        self._engine.wait_for_sleep()
        prev_logprobs = self._prev_logprobs(batch)
        about_agreement: Mapping[str, float] = {}
        if prev_logprobs is not None:
            limit = self._settings.seq_logprob_error_threshold
            batch, about_agreement = without_disagreement(batch, prev_logprobs, limit)
        with timer.phase("reference_logprobs"):
            reference_logprobs = self._reference_logprobs(batch)
        with timer.phase("advantages"):
            rewards_PG = rewards.reshape(rollouts.num_prompts, rollouts.group_size)
            advantages = self._code.advantages(rollouts, rewards_PG, batch.loss_mask)
            if advantages is None:
                kl_BS = self._clipped.kl_in_reward(prev_logprobs, reference_logprobs)
                parts_PG = {name: part.reshape(rewards_PG.shape) for name, part in rollouts.reward_parts().items()}
                owners = rollouts.row_owners()
                advantages = token_advantages(
                    self._settings, rewards_PG, batch.loss_mask, kl_BS, parts_PG, owners, rollouts.scored_PG()
                )
            training_batch = batch.with_policy_gradient_inputs(
                advantages=advantages,
                prev_logprobs=prev_logprobs,
                reference_logprobs=reference_logprobs,
                rewards=rewards.nan_to_num(nan=0.0)[rollouts.row_owners()],
            )
        by_response = response_means(advantages, batch.token_mask)[: len(rollouts)]
        if self._settings.log_rollouts:
            has = {"has_prev": prev_logprobs is not None, "has_reference": self._needs_reference}
            self._logger.log_rollouts(step, rollout_records(groups, rewards, by_response, training_batch, **has))
        with timer.phase("training"):
            with timer.phase("enter"):
                parts.policy.prepare_for_training()
            result = self._update(rollouts, training_batch, self._loss)
        metrics = train_metrics(groups, rewards, by_response, result, self._seconds(), parts.speed)
        self._idle_steps.count(metrics)
        metrics |= about_agreement
        if kept is not None:
            metrics["rollout_filter_rate"] = 1.0 - kept.mean().item()
        if self._code.rollout_stop is not None:
            metrics["rollout_stop_rate"] = groups.sampled.stopped().float().mean().item()
        if self._settings.use_dynamic_sampling:
            metrics |= dynamic_sampling_metrics(groups)
        return metrics

    def _end_early(self, step: int) -> None:
        if step == 0:
            raise DataError(
                "the training data ended before dynamic sampling had filled the first step; raise grpo.max_num_epochs, "
                "lower num_prompts_per_step, or change the data"
            )
        logger.warning(
            "grpo.max_num_epochs=%d passes over the data ended within step %d, which dynamic sampling could not fill: "
            "the run ends with step %d",
            self._settings.max_num_epochs,
            step + 1,
            step,
        )
        super()._end_early(step)

    def _seconds(self) -> Mapping[str, float]:
        """By phase, for rates."""
        return self._timer.seconds()

    def _training_rewards(self, rollouts: RolloutBatch) -> Tensor:
        """[B] rewards after scaling and shaping."""
        scaled = scale_rewards(rollouts.rewards(), self._settings.reward_scaling)
        lengths, truncated = rollouts.longest_responses(), rollouts.truncated()
        return shape_rewards(scaled, lengths, truncated, self._settings.reward_shaping)

    def _prev_logprobs(self, batch: TrainBatch) -> Tensor | None:
        """[B, S] of the policy, once it is there; None, without a pass, where nothing reads them."""
        with self._timer.phase("logprobs" if self._needs_prev else "training"):
            with self._timer.phase("enter"):
                self._engine.wait_for_policy()
            return self._parts.policy.get_logprobs(batch, counted_only=True) if self._needs_prev else None

    def _reference_logprobs(self, batch: TrainBatch) -> Tensor | None:
        if not self._needs_reference:
            return None
        return self._parts.policy.get_reference_logprobs(batch, counted_only=True)
