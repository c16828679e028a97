"""GRPO (arXiv 2402.03300) with colocated generation: `GrpoTrainer.step` is a step from top to bottom.

1. Refit, if the policy was trained since the last one: its weights go to the engine.
   Generation and reward: the engine responds to each prompt; the environments score the response, or answer it, which
   begins another turn. While the last turn is scored, the engine goes to sleep and the policy returns to the device.
   In async GRPO the rollouts are already drawn or under way.
2. Logprobs of the policy before the update, and of the frozen reference, if the loss needs them.
3. Advantages, within each group.
4. Training: one optimizer step for each global batch.
5. Validation, when due: refit, answers to held-out prompts; a checkpoint, when due.
"""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
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
from nemo_offload_rl.algorithms.async_grpo import RolloutsAhead, with_lookahead
from nemo_offload_rl.algorithms.checkpoints import Checkpoint
from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups, sample_until_full
from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.algorithms.metrics import IdleSteps, dynamic_sampling_metrics, train_metrics
from nemo_offload_rl.algorithms.rollout_log import rollout_records
from nemo_offload_rl.algorithms.rollout_loop import RolloutLoop
from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
from nemo_offload_rl.algorithms.user_code import GrpoCode
from nemo_offload_rl.data.batch import SampledBatch
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.experience.types import RolloutBatch
from nemo_offload_rl.keys.generation import GenerationConfig
from nemo_offload_rl.keys.grpo import ClippedPGLossConfig, GrpoSectionConfig, needs_prev_logprobs
from nemo_offload_rl.utils.timer import timing_metrics

logger = logging.getLogger(__name__)


class GrpoTrainer:
    """Runs the steps.

    Args:
        settings: The keys `grpo.*`.
        loss: The keys `loss_fn.*`.
        generation: The keys `policy.generation.*`.
        parts: See `RolloutParts`.
        code: A user's own parts.
    """

    def __init__(
        self,
        settings: GrpoSectionConfig,
        loss: ClippedPGLossConfig,
        generation: GenerationConfig,
        parts: RolloutParts,
        code: GrpoCode | None = None,
    ) -> None:
        self._code = code or GrpoCode()
        if self._code.rollout_stop is not None:
            parts = replace(parts, turns=replace(parts.turns, stopped=self._code.stopped))
        if settings.is_async:
            parts = with_lookahead(parts)
        self._settings = settings
        self._parts = parts
        self._logger = parts.logger
        self._loop = RolloutLoop(
            settings,
            generation,
            parts,
            section="grpo",
            bring=parts.policy.prepare_for_lp_inference,
            shown=("reward", "accuracy", "length", "cut off", *(("KL",) if loss.reference_policy_kl_penalty else ())),
        )
        self._ahead = (
            RolloutsAhead(settings, parts, self._loop, engines_stop=generation.engines_sleep)
            if settings.is_async
            else None
        )
        self._clipped = ClippedPGLoss(loss)
        self._loss = self._code.loss or self._clipped
        self._idle_steps = IdleSteps()
        self._needs_prev = needs_prev_logprobs(settings, loss)
        self._needs_reference = loss.reference_policy_kl_penalty != 0

    def run(self, last_step: int, resume_from: Checkpoint | None) -> None:
        """Train until `last_step`, from a checkpoint or from the first step."""
        loop, ahead, first_step = self._loop, self._ahead, 1 if resume_from is None else resume_from.step + 1
        with (
            nullcontext() if ahead is None else ahead.collecting(first_step, last_step),
            loop.watching(last_step, resume_from),
        ):
            for step in loop.steps(last_step, resume_from):
                if not self.step(step, last_step):
                    self._end_early(step - 1)
                    break

    def step(self, step: int, last_step: int) -> bool:
        """Run one step; return False without training if the data ended before the step was full."""
        loop, parts, policy, timer = self._loop, self._parts, self._parts.policy, self._loop.timer

        where = parts.loader.state_dict()
        groups = self._fresh_rollouts(step) if self._ahead is None else self._ahead.take(step)
        if groups is None:
            parts.loader.load_state_dict(where)  # a longer run begins this step anew
            return False
        loop.engine.start_handover()
        is_last = step == last_step or not parts.loader.num_batches_left
        rollouts = groups.trained
        rewards, kept = self._training_rewards(rollouts), self._code.kept(rollouts)
        mask = self._sample_mask(rollouts, kept)
        batch = rollouts.collate(pad_id=parts.pad_id, multiple=parts.width_multiple, sample_mask=mask)
        loop.engine.wait_for_sleep()

        prev_logprobs = reference_logprobs = None
        about_agreement: Mapping[str, float] = {}
        with timer.phase("logprobs" if self._needs_prev else "training"):
            with timer.phase("enter"):
                loop.engine.wait_for_policy()
            if self._needs_prev:
                prev_logprobs = policy.get_logprobs(batch, counted_only=True)
        if prev_logprobs is not None:
            limit = self._settings.seq_logprob_error_threshold
            batch, about_agreement = without_disagreement(batch, prev_logprobs, limit)
        with timer.phase("reference_logprobs"):
            if self._needs_reference:
                reference_logprobs = policy.get_reference_logprobs(batch, counted_only=True)

        with timer.phase("advantages"):
            advantages = self._advantages(groups, rewards, batch, prev_logprobs, reference_logprobs)
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
                policy.prepare_for_training()
            with loop.end.updating():
                result = policy.train(training_batch, self._loss, loop.rows_of_updates(rollouts))
        seconds = timer.seconds()
        if self._ahead is not None:
            seconds = self._ahead.with_generation(seconds, groups)
            self._logger.log(step, timing_metrics(groups.seconds), "timing/collector")
        about_step = train_metrics(groups, rewards, by_response, result, seconds, parts.speed)
        self._idle_steps.count(about_step)
        about_step |= {**about_agreement, **self._about_sampling(step, groups, kept)}
        # Rollouts of older weights are expected to disagree with the policy.
        loop.trained(step, about_step, checks_agreement=groups.age == 0)

        validation = loop.validate_if_due(step, is_last=is_last)
        with loop.ending_step(step, about_step):
            loop.save_if_due(step, validation, is_last=is_last)
        return True

    # -- parts of a step

    def _fresh_rollouts(self, step: int) -> SampledGroups | None:
        """Draw rollouts with the present weights; None if the data ended before dynamic sampling filled the step."""
        settings, loop, loader = self._settings, self._loop, self._parts.loader
        if not settings.use_dynamic_sampling:
            return SampledGroups.all_of(loop.draw(step, 0, next(iter(loader)), loop.engine.start_handover))
        batches = (loop.draw(step, draw, prompts) for draw, prompts in enumerate(loader))
        max_batches = settings.dynamic_sampling_max_gen_batches
        num_prompts, drops = settings.num_prompts_per_step, settings.dynamic_sampling_drops
        return sample_until_full(batches, num_prompts=num_prompts, max_batches=max_batches, drops=drops)

    def _training_rewards(self, rollouts: RolloutBatch) -> Tensor:
        """Return [B] rewards after scaling and shaping."""
        scaled = scale_rewards(rollouts.rewards(), self._settings.reward_scaling)
        lengths, truncated = rollouts.longest_responses(), rollouts.truncated()
        return shape_rewards(scaled, lengths, truncated, self._settings.reward_shaping)

    def _sample_mask(self, rollouts: RolloutBatch, kept: Tensor | None) -> Tensor:
        """Return a mask [B], 0 for rollouts that are not trained on."""
        mask = overlong_sample_mask(rollouts.truncated(), filtering=self._settings.overlong_filtering)
        mask = mask * rollouts.loss_multipliers() * rollouts.scored()
        return mask if kept is None else mask * kept

    def _advantages(
        self,
        groups: SampledGroups,
        rewards: Tensor,
        batch: SampledBatch,
        prev_logprobs: Tensor | None,
        reference_logprobs: Tensor | None,
    ) -> Tensor:
        """Compute advantages [B, S]."""
        rollouts, rewards_PG = groups.trained, groups.in_groups(rewards)
        advantages = self._code.advantages(rollouts, rewards_PG, batch.loss_mask)
        if advantages is not None:
            return advantages
        kl_BS = self._clipped.kl_in_reward(prev_logprobs, reference_logprobs)
        parts_PG = {name: groups.in_groups(part) for name, part in rollouts.reward_parts().items()}
        owners, scored_PG = groups.row_places(), groups.in_groups(rollouts.scored())
        return token_advantages(self._settings, rewards_PG, batch.loss_mask, kl_BS, parts_PG, owners, scored_PG)

    def _about_sampling(self, step: int, groups: SampledGroups, kept: Tensor | None) -> dict[str, float]:
        """Return metrics on how the step's rollouts were chosen."""
        metrics: dict[str, float] = {}
        if kept is not None:
            metrics["rollout_filter_rate"] = 1.0 - kept.mean().item()
        if self._code.rollout_stop is not None:
            metrics["rollout_stop_rate"] = groups.sampled.stopped().float().mean().item()
        if self._settings.use_dynamic_sampling:
            metrics |= dynamic_sampling_metrics(groups)
        return metrics if self._ahead is None else {**metrics, **self._ahead.metrics(step, groups)}

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
        self._loop.end_early(step)
