"""The stages of a training step: those of a run, the worker's phase of each, and the state that is there then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from nemo_offload_rl.keys.grpo import needs_prev_logprobs
from nemo_offload_rl.keys.master import DistillationMasterConfig, GrpoMasterConfig, RolloutMasterConfig, RunConfig
from nemo_offload_rl.residency import Phase, Placement, ResidencyPlan


class Stage(StrEnum):
    """Part of a step, in the order of a step; the reference's pass is inside the phase of logprobs."""

    REFIT = "refit"
    GENERATION = "generation"
    LOGPROBS = "logprobs"
    REFERENCE = "reference"
    TEACHER = "teacher"
    TRAINING = "training"
    UPDATE = "update"

    @property
    def phase(self) -> Phase:
        """Phase of the worker in this stage."""
        return _PHASES[self]


_PHASES = {
    Stage.REFIT: Phase.REFIT,
    Stage.GENERATION: Phase.GENERATION,
    Stage.LOGPROBS: Phase.LP_INFERENCE,
    Stage.REFERENCE: Phase.LP_INFERENCE,
    Stage.TEACHER: Phase.TEACHER_INFERENCE,
    Stage.TRAINING: Phase.TRAINING,
    Stage.UPDATE: Phase.OPTIM_STEP,
}


def stages_of(cfg: RunConfig, *, keeps_reference: bool) -> tuple[Stage, ...]:
    """List the stages of a step of a run, in order."""
    stages = {Stage.TRAINING, Stage.UPDATE}
    if isinstance(cfg, RolloutMasterConfig):
        stages |= {Stage.REFIT, Stage.GENERATION}
    if isinstance(cfg, GrpoMasterConfig) and needs_prev_logprobs(cfg.grpo, cfg.loss_fn):
        stages.add(Stage.LOGPROBS)
    if isinstance(cfg, DistillationMasterConfig):
        stages.add(Stage.TEACHER)
    if keeps_reference:
        stages.add(Stage.REFERENCE)
    return tuple(stage for stage in Stage if stage in stages)


def held_rows(plan: ResidencyPlan, stages: Sequence[Stage]) -> Mapping[Phase, frozenset[str]]:
    """Return the rows of a plan whose groups are on the device from the start of each phase, after the first step.

    A group that a phase leaves as it was is there if the phase before left it there.
    """
    is_here = dict.fromkeys(plan.table, True)
    held: dict[Phase, frozenset[str]] = {}
    for stage in (*stages, *stages):  # the second round begins where the first one ended
        for row in plan.table:
            place = plan.placement(row, stage.phase)
            is_here[row] = is_here[row] if place is Placement.UNCHANGED else place is Placement.DEVICE
        held[stage.phase] = frozenset(row for row, here in is_here.items() if here)
    return held
