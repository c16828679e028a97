"""On-policy distillation (GKD, arXiv 2306.13649), with a teacher in the policy's workers.

The student answers the prompts. The teacher, on the device, then gives its distribution at each sampled token: its
top-k, or its last hidden states, from which training computes the distribution. Then the student is trained towards
it, with one optimizer step for each global batch. Rewards are measured but not trained on.

The loss is the mean divergence between student and teacher over the sampled tokens (GKD; MiniLLM's reverse KL, arXiv
2306.08543). Keys and values match NeMo-RL's `DistillationLossFn`; `backends/scoring/divergence.py` has the formulas.
Shape suffixes: B samples, S positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nemo_offload_rl.algorithms.checkpoints import Checkpoint
from nemo_offload_rl.algorithms.dynamic_sampling import SampledGroups
from nemo_offload_rl.algorithms.losses import bounded, is_inside, token_mean_share, zero_where_masked
from nemo_offload_rl.algorithms.metrics import step_metrics
from nemo_offload_rl.algorithms.rollout_log import rollout_records
from nemo_offload_rl.algorithms.rollout_loop import RolloutLoop
from nemo_offload_rl.algorithms.rollout_parts import RolloutParts
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


class DistillationTrainer:
    """Runs the steps, with the arguments of `GrpoTrainer`. The policy's workers hold both student and teacher."""

    def __init__(
        self,
        settings: DistillationSectionConfig,
        loss: DistillationLossConfig,
        generation: GenerationConfig,
        parts: RolloutParts,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._logger = parts.logger
        self._loss = DistillationLoss(loss)
        self._loop = RolloutLoop(
            settings,
            generation,
            parts,
            section="distillation",
            bring=parts.policy.prepare_for_teacher,
            shown=("loss", "reward", "accuracy", "length", "cut off"),
            trains_on_rewards=False,
        )

    def run(self, last_step: int, resume_from: Checkpoint | None) -> None:
        """Train until `last_step`; see `GrpoTrainer`."""
        with self._loop.watching(last_step, resume_from):
            for step in self._loop.steps(last_step, resume_from):
                self.step(step, last_step)

    def step(self, step: int, last_step: int) -> None:
        """Run one step: rollouts, the teacher's distributions, training, validation, saving."""
        loop, parts, policy, timer = self._loop, self._parts, self._parts.policy, self._loop.timer

        groups = SampledGroups.all_of(loop.draw(step, 0, next(iter(parts.loader)), loop.engine.start_handover))
        loop.engine.start_handover()
        is_last = step == last_step or not parts.loader.num_batches_left
        rollouts = groups.trained
        mask = rollouts.loss_multipliers()
        batch = rollouts.collate(pad_id=parts.pad_id, multiple=parts.width_multiple, sample_mask=mask)
        loop.engine.wait_for_sleep()

        with timer.phase("teacher"):
            with timer.phase("enter"):
                loop.engine.wait_for_policy()
            training_batch = with_teacher(batch, policy.read_teacher(batch))
        if self._settings.log_rollouts:
            self._logger.log_rollouts(step, rollout_records(groups, rollouts.rewards(), None, training_batch))

        with timer.phase("training"):
            with timer.phase("enter"):
                policy.prepare_for_training()
            with loop.end.updating():
                result = policy.train(training_batch, self._loss, loop.rows_of_updates(rollouts))
        del training_batch  # it may hold the teacher's hidden states of every token
        about_step = step_metrics(groups, result, timer.seconds(), parts.speed, {"teacher": "teacher"})
        loop.trained(step, about_step)

        validation = loop.validate_if_due(step, is_last=is_last)
        with loop.ending_step(step, about_step):
            loop.save_if_due(step, validation, is_last=is_last)


def with_teacher(batch: SampledBatch, known: tuple[Tensor, ...]) -> SampledBatch:
    """Add the tensors that `Policy.read_teacher` returned to the batch."""
    if len(known) == 2:
        return batch.as_kind(TopKBatch, teacher_logprobs=known[0], teacher_ids=known[1])
    return batch.as_kind(HiddenStatesBatch, teacher_hidden=known[0])


@dataclass(frozen=True)
class DistillationLoss(DivergenceLoss):
    """Mean divergence over the counted tokens of the global batch."""

    settings: DistillationLossConfig

    @property
    def divergence(self) -> Divergence:
        settings = self.settings
        weights = {"forward": 1.0, "reverse": 0.0, "mixed": settings.mixed_kl_weight}
        return Divergence(weights[settings.kl_type], settings.zero_outside_topk)

    def __call__(self, divergence_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss = token_mean_share(divergence_BS, batch.loss_mask, norm)
        return loss, {"loss": loss.detach()}

    def measure(self, scores_BS: DivergenceScores, batch: TrainBatch, norm: LossNorm) -> Mapping[str, Tensor]:
        """Return the teacher's mass in its top-k, and how well engine and student agree in the student's nucleus."""
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
