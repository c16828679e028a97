"""Counts the bytes of a worker's state that cross the link to the host in each stage of a step, by its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_offload_rl.keys.master import DistillationMasterConfig
from nemo_offload_rl.memory.account import Account
from nemo_offload_rl.memory.stages import Stage
from nemo_offload_rl.residency import (
    BASE,
    GRADS_PART,
    OPTIMIZER,
    OPTIMIZER_PART,
    PARAMS,
    PARAMS_PART,
    REFERENCE,
    TEACHER_HEAD,
    TEACHER_LAYER,
    Placement,
)

# Groups that the update writes, whose copies on the host are old afterwards.
_UPDATED = frozenset({PARAMS, OPTIMIZER})
# Groups that come and go inside stages; they are counted one by one.
_IN_PARTS = frozenset({PARAMS_PART, GRADS_PART, OPTIMIZER_PART, REFERENCE, TEACHER_LAYER, TEACHER_HEAD})


@dataclass(frozen=True)
class Copies:
    """Bytes of one worker that cross the link in one stage.

    Attributes:
        in_bytes: From the host to the GPU.
        out_bytes: From the GPU to the host; a valid copy on the host is not made again.
        streamed_bytes: The part of both that comes and goes inside the stage, piece by piece.
    """

    in_bytes: int = 0
    out_bytes: int = 0
    streamed_bytes: int = 0

    def __add__(self, other: Copies) -> Copies:
        return Copies(
            self.in_bytes + other.in_bytes,
            self.out_bytes + other.out_bytes,
            self.streamed_bytes + other.streamed_bytes,
        )


def copies_of_step(account: Account) -> Mapping[Stage, Copies]:
    """Count what crosses the link in each stage of a step after the first, without activations."""
    stages, plan, sizes = account.stages, account.plan.plan, account.plan.sizes
    copies = dict.fromkeys(stages, Copies())
    for row, size in sizes.items():
        if row in _IN_PARTS:
            continue
        is_here, has_valid_copy = True, False
        for number, stage in enumerate((*stages, *stages)):  # the second round begins where the first one ended
            place = plan.placement(row, stage.phase)
            moved = Copies()
            if place is Placement.DEVICE and not is_here:
                moved = Copies(in_bytes=size)
                is_here = True
            elif place is Placement.HOST and is_here:
                moved = Copies(out_bytes=0 if has_valid_copy else size)
                is_here, has_valid_copy = False, True
            if stage is Stage.UPDATE and row in _UPDATED:
                has_valid_copy = False
            if number >= len(stages):
                copies[stage] += moved
    for stage in stages:
        copies[stage] += _copies_inside(stage, sizes, _teacher_passes(account))
    if Stage.REFIT in stages and account.refits_read_host:
        copies[Stage.REFIT] += Copies(in_bytes=sizes[BASE], streamed_bytes=sizes[BASE])
    return copies


def _teacher_passes(account: Account) -> int:
    """Count the micro-batches of one worker's teacher in a step, if every sequence is as long as the keys allow."""
    cfg, settings = account.cfg, account.teacher_settings
    if not isinstance(cfg, DistillationMasterConfig) or settings is None:
        return 0
    workers = max(1, cfg.cluster.world_size // cfg.policy.backend.model_parallel.ranks_per_copy)
    rows = cfg.distillation.num_prompts_per_step * cfg.distillation.num_generations_per_prompt // workers
    rows_at_once = max(1, settings.most_logprob_tokens // cfg.policy.max_total_sequence_length)
    return -(-rows // rows_at_once)


def _copies_inside(stage: Stage, sizes: Mapping[str, int], teacher_passes: int) -> Copies:
    """Bytes of groups that come and go inside a stage. A pass brings each part once, a backward pass again."""
    params, grads, optimizer = (sizes.get(row, 0) for row in (PARAMS_PART, GRADS_PART, OPTIMIZER_PART))
    if stage in (Stage.REFIT, Stage.LOGPROBS):
        moved = params, 0
    elif stage is Stage.REFERENCE:
        moved = sizes.get(REFERENCE, 0), 0
    elif stage is Stage.TEACHER:
        moved = teacher_passes * sizes.get(TEACHER_LAYER, 0), 0
    elif stage is Stage.TRAINING:
        moved = 2 * params, grads
    elif stage is Stage.UPDATE:
        moved = params + grads + optimizer, params + optimizer
    else:
        moved = 0, 0
    return Copies(*moved, streamed_bytes=sum(moved))
