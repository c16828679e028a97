"""Distillation and its teacher."""

from __future__ import annotations

from nemo_offload_rl.errors import division_problem
from nemo_offload_rl.keys.master import DistillationMasterConfig, Rule


def a_top_k_is_needed_for_what_is_outside_of_it(cfg: DistillationMasterConfig) -> str | None:
    """`zero_outside_topk` goes with a top-k."""
    if cfg.loss_fn.zero_outside_topk and cfg.distillation.topk_logits_k is None:
        return (
            "loss_fn.zero_outside_topk is true, but distillation.topk_logits_k is null and all of the teacher's "
            "distribution is known; set the first to false or the second to a number"
        )
    return None


def the_teachers_tensor_parallel_size_divides_the_workers(cfg: DistillationMasterConfig) -> str | None:
    """The tensor-parallel size of the teacher divides the workers, with the DTensor backend."""
    size, num_workers = cfg.teacher.dtensor_cfg.tensor_parallel_size, cfg.cluster.world_size
    if not cfg.policy.dtensor_cfg.enabled:
        return None
    what, fix = "policy workers, which the teacher is spread over", "change it or the number of devices"
    return division_problem({"teacher.dtensor_cfg.tensor_parallel_size": size}, num_workers, what, fix)


def a_megatron_teacher_is_spread_as_the_policy(cfg: DistillationMasterConfig) -> str | None:
    """With Megatron the teacher has no tensor-parallel size of its own."""
    size = cfg.teacher.dtensor_cfg.tensor_parallel_size
    if not cfg.policy.dtensor_cfg.enabled and size != 1:
        return (
            f"teacher.dtensor_cfg.tensor_parallel_size is {size}, but the Megatron backend is on and spreads the "
            "teacher as policy.megatron_cfg says; set it to 1"
        )
    return None


def a_megatron_teacher_has_no_streamed_layers(cfg: DistillationMasterConfig) -> str | None:
    """The layers of a teacher are streamed with the DTensor backend only."""
    if cfg.teacher.stream_layers and not cfg.policy.dtensor_cfg.enabled:
        return (
            "teacher.stream_layers is true, but the Megatron backend is on and keeps a model in few large buffers; set "
            "it to false"
        )
    return None


RULES: tuple[Rule[DistillationMasterConfig], ...] = (
    a_top_k_is_needed_for_what_is_outside_of_it,
    the_teachers_tensor_parallel_size_divides_the_workers,
    a_megatron_teacher_is_spread_as_the_policy,
    a_megatron_teacher_has_no_streamed_layers,
)
