"""Rules on the Megatron backend's optimizer. Each returns None if another backend is enabled."""

from __future__ import annotations

from nemo_offload_rl.backends.megatron.optimizer_spec import OPTIMIZERS, names_of
from nemo_offload_rl.backends.megatron.rules.section import megatron_section
from nemo_offload_rl.keys.master import PolicyRun, Rule

KEY = "policy.megatron_cfg"
OPTIMIZER = f"{KEY}.optimizer"
SCHEDULER = f"{KEY}.scheduler"


def megatron_precision_is_said_once(cfg: PolicyRun) -> str | None:
    """The optimizer's bf16 and fp16 agree with `policy.precision`."""
    megatron, precision = megatron_section(cfg), cfg.policy.precision
    if megatron is None:
        return None
    optimizer = megatron.optimizer
    if (optimizer.bf16, optimizer.fp16) != (precision == "bfloat16", precision == "float16"):
        wanted = f"bf16={str(precision == 'bfloat16').lower()} fp16={str(precision == 'float16').lower()}"
        return (
            f"{OPTIMIZER}.bf16 and fp16 are {str(optimizer.bf16).lower()} and {str(optimizer.fp16).lower()}, but "
            f"policy.precision is {precision} and the optimizer updates that model; set {wanted} or change the "
            "precision"
        )
    return None


def megatron_optimizer_lives_in_one_place(cfg: PolicyRun) -> str | None:
    """Megatron's optimizer is offloaded in one way."""
    megatron = megatron_section(cfg)
    if megatron is None:
        return None
    if megatron.optimizer.optimizer_cpu_offload and megatron.optimizer.offload_optimizer_states:
        return (
            f"{OPTIMIZER}.optimizer_cpu_offload and offload_optimizer_states are both true, but the "
            "first updates on the CPU and the second on the GPU; set one of them to false"
        )
    return None


def megatron_offload_fraction_is_positive(cfg: PolicyRun) -> str | None:
    """The share of Megatron's optimizer that leaves the GPU is above 0."""
    megatron = megatron_section(cfg)
    if megatron is None:
        return None
    optimizer = megatron.optimizer
    if optimizer.optimizer_cpu_offload and optimizer.optimizer_offload_fraction == 0:
        return (
            f"{OPTIMIZER}.optimizer_offload_fraction is 0, but optimizer_cpu_offload is true and "
            "would move nothing; set a share above 0, at most 1"
        )
    if optimizer.offload_optimizer_states and optimizer.offload_optimizer_states_fraction == 0:
        return (
            f"{OPTIMIZER}.offload_optimizer_states_fraction is 0, but offload_optimizer_states is true and "
            "would move nothing; set a share above 0, at most 1"
        )
    return None


def megatron_overlap_needs_cpu_offload(cfg: PolicyRun) -> str | None:
    """Overlapping copies need Megatron's CPU optimizer."""
    megatron = megatron_section(cfg)
    if megatron is None or megatron.optimizer.optimizer_cpu_offload:
        return None
    if megatron.optimizer.overlap_cpu_optimizer_d2h_h2d:
        return (
            f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d is true, but it hides the copies of "
            "optimizer_cpu_offload, which is false; set that to true or this to false"
        )
    return None


def megatron_offload_needs_the_distributed_optimizer(cfg: PolicyRun) -> str | None:
    """Only Megatron's distributed optimizer is offloaded inside the step."""
    megatron = megatron_section(cfg)
    if megatron is None or megatron.optimizer.use_distributed_optimizer:
        return None
    keys = {
        "optimizer_cpu_offload": megatron.optimizer.optimizer_cpu_offload,
        "offload_optimizer_states": megatron.optimizer.offload_optimizer_states,
    }
    for key, is_on in keys.items():
        if is_on:
            return (
                f"{OPTIMIZER}.{key} is true, but it moves the shards of a distributed optimizer and "
                "use_distributed_optimizer is false; set that to true or this to false"
            )
    return None


def megatron_offloaded_states_are_shards(cfg: PolicyRun) -> str | None:
    """Offloading states around the step is for optimizers that can be sharded."""
    megatron = megatron_section(cfg)
    if megatron is None or OPTIMIZERS[megatron.optimizer.optimizer].can_be_sharded:
        return None
    if megatron.optimizer.offload_optimizer_states:
        return (
            f"{OPTIMIZER}.offload_optimizer_states is true, but it moves shards and optimizer is "
            f"{megatron.optimizer.optimizer}, of which megatron-core makes none; set optimizer to "
            f"{names_of(lambda found: found.can_be_sharded)} or this to false"
        )
    return None


def megatron_precision_aware_optimizer_is_available(cfg: PolicyRun) -> str | None:
    """The optimizer can be precision-aware, and is distributed."""
    megatron = megatron_section(cfg)
    if megatron is None or not megatron.optimizer.use_precision_aware_optimizer:
        return None
    optimizer = megatron.optimizer
    if OPTIMIZERS[optimizer.optimizer].can_be_precision_aware and optimizer.use_distributed_optimizer:
        return None
    return (
        f"{OPTIMIZER}.use_precision_aware_optimizer is true, but there it is for a distributed "
        f"{names_of(lambda found: found.can_be_precision_aware)} only and "
        f"optimizer is {optimizer.optimizer} with use_distributed_optimizer "
        f"{str(optimizer.use_distributed_optimizer).lower()}; set it to false or change those"
    )


def megatron_distributed_optimizer_can_be_sharded(cfg: PolicyRun) -> str | None:
    """Megatron's distributed optimizer is one that it can shard, unless it lives on the host."""
    megatron = megatron_section(cfg)
    if megatron is None or megatron.optimizer.optimizer_cpu_offload:
        return None
    name = megatron.optimizer.optimizer
    if megatron.optimizer.use_distributed_optimizer and not OPTIMIZERS[name].can_be_sharded:
        reason = "of which megatron-core shards no states; set use_distributed_optimizer to false"
        return f"{OPTIMIZER}.optimizer is {name}, {reason}"
    return None


def megatron_cpu_offload_is_precision_aware(cfg: PolicyRun) -> str | None:
    """Megatron's CPU optimizer is precision-aware where it can be, and then updates no masters on the GPU."""
    megatron = megatron_section(cfg)
    if megatron is None or not megatron.optimizer.optimizer_cpu_offload:
        return None
    optimizer = megatron.optimizer
    can_be = OPTIMIZERS[optimizer.optimizer].can_be_precision_aware
    if can_be and not optimizer.use_precision_aware_optimizer:
        return (
            f"{OPTIMIZER}.optimizer_cpu_offload is true, but without use_precision_aware_optimizer what it updates are "
            "fp32 masters that stay on the GPU; set use_precision_aware_optimizer to true"
        )
    return None


def megatron_cpu_offload_needs_half_precision(cfg: PolicyRun) -> str | None:
    """Megatron's CPU optimizer cannot update float32 parameters."""
    megatron = megatron_section(cfg)
    if megatron is None or not megatron.optimizer.optimizer_cpu_offload:
        return None
    if cfg.policy.precision == "float32":
        return (
            f"{OPTIMIZER}.optimizer_cpu_offload is true, but megatron-core cannot build it over float32 parameters "
            "and policy.precision is float32; set that to bfloat16 or this to false"
        )
    return None


def megatron_16_bit_moments_are_transformer_engines(cfg: PolicyRun) -> str | None:
    """Moments in 16 bits are for the precision-aware optimizer on the GPU, and for both of them at once."""
    megatron = megatron_section(cfg)
    if megatron is None:
        return None
    optimizer = megatron.optimizer
    types = {optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype}
    if types == {"float32"}:
        return None
    chosen = f"{OPTIMIZER}.exp_avg_dtype is {optimizer.exp_avg_dtype} and exp_avg_sq_dtype {optimizer.exp_avg_sq_dtype}"
    if not optimizer.use_precision_aware_optimizer:
        return f"{chosen}, but use_precision_aware_optimizer is false; set it to true, or both types to float32"
    if optimizer.optimizer_cpu_offload:
        return f"{chosen}, but optimizer_cpu_offload is true, whose moments are float32; set both types to that"
    if len(types) > 1:
        return (
            f"{chosen}, but Transformer Engine updates different types through float32 copies of all moments; set both "
            "types to bfloat16 or to float32"
        )
    return None


def megatron_learning_rates_are_in_order(cfg: PolicyRun) -> str | None:
    """Megatron's learning rate is the highest of its schedule, and the warm-up ends before the decay."""
    megatron = megatron_section(cfg)
    if megatron is None:
        return None
    rate, schedule = megatron.optimizer.lr, megatron.scheduler
    others = {
        f"{OPTIMIZER}.min_lr": megatron.optimizer.min_lr,
        f"{SCHEDULER}.lr_warmup_init": schedule.lr_warmup_init,
    }
    for key, other in others.items():
        if other > rate:
            return f"{key} {other} is above {OPTIMIZER}.lr {rate}, the highest rate of the schedule; lower it"
    if schedule.lr_warmup_iters >= schedule.lr_decay_iters:
        return (
            f"{SCHEDULER}.lr_warmup_iters {schedule.lr_warmup_iters} is not below lr_decay_iters "
            f"{schedule.lr_decay_iters}, which counts from the first step too; change one of them"
        )
    return None


def megatron_weight_decay_does_not_fall(cfg: PolicyRun) -> str | None:
    """Megatron's weight decay rises or stays, as its style says."""
    megatron = megatron_section(cfg)
    if megatron is None:
        return None
    schedule = megatron.scheduler
    start, end, style = schedule.start_weight_decay, schedule.end_weight_decay, schedule.weight_decay_incr_style
    if end < start or (style == "constant" and end != start):
        return (
            f"{SCHEDULER}.end_weight_decay {end} and start_weight_decay {start} differ, but weight_decay_incr_style "
            f"{style} does not take one to the other: constant needs the same, linear and cosine a higher end; change "
            "them"
        )
    return None


def megatron_parameter_gather_overlaps_only_shards(cfg: PolicyRun) -> str | None:
    """Parameters are gathered during the forward pass only where an optimizer shards them."""
    megatron = megatron_section(cfg)
    if megatron is None or megatron.optimizer.use_distributed_optimizer:
        return None
    if megatron.distributed_data_parallel_config.overlap_param_gather:
        return (
            f"{KEY}.distributed_data_parallel_config.overlap_param_gather is true, but without "
            "use_distributed_optimizer nothing is gathered; set one of them otherwise"
        )
    return None


RULES: tuple[Rule[PolicyRun], ...] = (
    megatron_precision_is_said_once,
    megatron_optimizer_lives_in_one_place,
    megatron_offload_fraction_is_positive,
    megatron_overlap_needs_cpu_offload,
    megatron_offload_needs_the_distributed_optimizer,
    megatron_offloaded_states_are_shards,
    megatron_precision_aware_optimizer_is_available,
    megatron_distributed_optimizer_can_be_sharded,
    megatron_cpu_offload_is_precision_aware,
    megatron_cpu_offload_needs_half_precision,
    megatron_16_bit_moments_are_transformer_engines,
    megatron_learning_rates_are_in_order,
    megatron_weight_decay_does_not_fall,
    megatron_parameter_gather_overlaps_only_shards,
)
