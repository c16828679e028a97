"""On-policy distillation (GKD, arXiv 2306.13649): the loop of `rollout_trainer.py`, with a teacher in it.

The student answers the prompts. Then the teacher, on the device, gives its distribution before each token that the
student sampled: its top-k, or its last hidden states, from which training computes the rest. Then the student is
trained towards it: one optimizer step for each global batch. Rewards are measured but not trained on.

The loss is the mean divergence between student and teacher over the sampled tokens (GKD; MiniLLM's reverse KL, arXiv
2306.08543). Keys and values are those of NeMo-RL's `DistillationLossFn`; `backends/scoring/divergence.py` has the
formulas. Shape suffixes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.algorithms.losses import bounded, is_inside, token_mean_share, zero_where_masked
from nemo_offload_rl.algorithms.metrics import step_metrics
from nemo_offload_rl.algorithms.rollout_log import rollout_records
from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
from nemo_offload_rl.algorithms.rollout_trainer import RolloutTrainer
from nemo_offload_rl.data.batch import (
    HiddenStatesBatch,
    LossNorm,
    SampledBatch,
    TopKBatch,
    TrainBatch,
)
from nemo_offload_rl.keys.generation import GenerationConfig
from nemo_offload_rl.keys.grpo import DistillationLossConfig, DistillationSectionConfig
from nemo_offload_rl.protocols.loss import Divergence, DivergenceLoss, DivergenceScores
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


def with_teacher(batch: SampledBatch, known: tuple[Tensor, ...]) -> SampledBatch:
    """The batch that the loss takes, with the tensors that `Policy.read_teacher` returned."""
    if len(known) == 2:
        return batch.as_kind(TopKBatch, teacher_logprobs=known[0], teacher_ids=known[1])
    return batch.as_kind(HiddenStatesBatch, teacher_hidden=known[0])


@dataclass(frozen=True)
class DistillationLoss(DivergenceLoss):
    """Mean divergence over the counted tokens of the global batch."""

    settings: DistillationLossConfig

    @property
    def divergence(self) -> Divergence:
        """See `DivergenceLoss`."""
        settings = self.settings
        weights = {"forward": 1.0, "reverse": 0.0, "mixed": settings.mixed_kl_weight}
        return Divergence(weights[settings.kl_type], settings.zero_outside_topk)

    def __call__(self, divergence_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `DivergenceLoss`."""
        loss = token_mean_share(divergence_BS, batch.loss_mask, norm)
        return loss, {"loss": loss.detach()}

    def measure(self, scores_BS: DivergenceScores, batch: TrainBatch, norm: LossNorm) -> Mapping[str, Tensor]:
        """The known share of the teacher; agreement of engine and student on tokens in the student's nucleus."""
        assert isinstance(batch, SampledBatch), type(batch)
        mask_BS = batch.loss_mask
        is_inside_BS = is_inside(scores_BS.logprobs)
        gap_BS = zero_where_masked(scores_BS.logprobs - batch.generation_logprobs, mask_BS * is_inside_BS).abs()
        values_BS = {
            "teacher_topk_mass": scores_BS.teacher_mass,
            "token_mult_prob_error": bounded(gap_BS).exp(),
            "sampled_nll": -zero_where_masked(scores_BS.logprobs, is_inside_BS),
            "outside_nucleus_rate": (~is_inside_BS).float(),
        }
        return {name: token_mean_share(value_BS, mask_BS, norm) for name, value_BS in values_BS.items()}
