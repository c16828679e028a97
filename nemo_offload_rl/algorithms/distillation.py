"""On-policy distillation (GKD, arXiv 2306.13649): the loop of `rollout_trainer.py`, with a teacher in it.

The student answers the prompts; then
- the teacher is on the device, and gives its distribution before each token that the student sampled: its top-k, or
  its last hidden states, from which training makes the rest;
- the student is trained to be nearer to it: one optimizer step for each global batch.
Rewards are measured and not trained on.
"""

from __future__ import annotations

from dataclasses import fields
from typing import ClassVar

from torch import Tensor

from nemo_offload_rl.algorithms.distillation_loss import DistillationLoss
from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.algorithms.metrics import step_metrics
from nemo_offload_rl.algorithms.rollout_log import rollout_records
from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
from nemo_offload_rl.algorithms.rollout_trainer import RolloutTrainer
from nemo_offload_rl.data.batch import DistillationBatch, HiddenStatesBatch, TopKBatch
from nemo_offload_rl.data.collate import SampledBatch
from nemo_offload_rl.keys.generation import GenerationConfig
from nemo_offload_rl.keys.grpo import DistillationLossConfig, DistillationSectionConfig
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.progress import RunProgress


class DistillationTrainer(RolloutTrainer[DistillationSectionConfig]):
    """Runs the steps.

    Args:
        settings: The keys `distillation.*`.
        loss: The keys `loss_fn.*`.
        generation: The keys `policy.generation.*`.
        parts: Student and teacher in `policy`, engine, data and environments.
        run_logger: Gets every metric.
        progress: Shows steps to a person.
    """

    section: ClassVar = "distillation"
    shown: ClassVar = {"loss": "loss", "reward": "reward_mean"}
    trains_on_rewards: ClassVar = False

    def __init__(
        self,
        settings: DistillationSectionConfig,
        loss: DistillationLossConfig,
        generation: GenerationConfig,
        parts: RolloutParts,
        run_logger: RunLogger,
        progress: RunProgress,
    ) -> None:
        super().__init__(settings, generation, parts, run_logger, progress)
        self._loss = DistillationLoss(loss)

    def _bring_policy(self) -> object:
        return self._parts.policy.prepare_for_teacher()

    def _train(self, step: int, groups: SampledGroups) -> dict[str, float]:
        parts, timer, rollouts = self._parts, self._timer, groups.trained
        mask = rollouts.loss_multipliers()
        batch = rollouts.collate(pad_id=parts.pad_id, multiple=parts.width_multiple, sample_mask=mask)
        self._engine.wait_for_sleep()
        with timer.phase("teacher"):
            with timer.phase("enter"):
                self._engine.wait_for_policy()
            training_batch = with_teacher(batch, parts.policy.read_teacher(batch))
        if self._settings.log_rollouts:
            self._logger.log_rollouts(step, rollout_records(groups, rollouts.rewards(), None, training_batch))
        with timer.phase("training"):
            with timer.phase("enter"):
                parts.policy.prepare_for_training()
            result = self._update(rollouts, training_batch, self._loss)
        return step_metrics(groups, result, timer.seconds(), parts.speed, {"teacher": "teacher"})


def with_teacher(batch: SampledBatch, known: tuple[Tensor, ...]) -> DistillationBatch:
    """The batch that the loss takes, from what `Policy.read_teacher` gave."""
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if len(known) == 2:
        logprobs_BSK, ids_BSK = known
        return TopKBatch(**tensors, teacher_logprobs=logprobs_BSK, teacher_ids=ids_BSK)
    (hidden_BSH,) = known
    return HiddenStatesBatch(**tensors, teacher_hidden=hidden_BSH)
