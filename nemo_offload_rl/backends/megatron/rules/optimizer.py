"""Rules on what Megatron trains and how: the optimizer, its schedule, and low-rank adapters."""

from fnmatch import fnmatchcase

from nemo_offload_rl.backends.hf.model_folder import local_model_config
from nemo_offload_rl.backends.megatron.optimizer_spec import OPTIMIZERS, names_of
from nemo_offload_rl.backends.megatron.rules.base import megatron_rules
from nemo_offload_rl.backends.megatron.supported import KEY, PEFT, adapters_problem
from nemo_offload_rl.keys.master import RunConfig
from nemo_offload_rl.keys.megatron import MEGATRON_ADAPTED_LAYERS, MegatronConfig
from nemo_offload_rl.models.shape import ModelShape

OPTIMIZER = f"{KEY}.optimizer"
SCHEDULER = f"{KEY}.scheduler"


def _yaml(value: bool) -> str:
    return str(value).lower()


def megatron_precision_is_said_once(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's `optimizer.bf16` and `optimizer.fp16` agree with `policy.precision`."""
    optimizer, precision = megatron.optimizer, cfg.policy.precision
    bf16, fp16 = precision == "bfloat16", precision == "float16"
    if (optimizer.bf16, optimizer.fp16) == (bf16, fp16):
        return None
    return (
        f"{OPTIMIZER}.bf16 is {_yaml(optimizer.bf16)} and fp16 is {_yaml(optimizer.fp16)}, but policy.precision is "
        f"{precision}, the type of the model that the optimizer updates; set bf16={_yaml(bf16)} fp16={_yaml(fp16)}, or "
        "change the precision"
    )


def megatron_optimizer_lives_in_one_place(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's `optimizer_cpu_offload` excludes `offload_optimizer_states`."""
    if megatron.optimizer.optimizer_cpu_offload and megatron.optimizer.offload_optimizer_states:
        return (
            f"{OPTIMIZER}.optimizer_cpu_offload and offload_optimizer_states are both true, but the first updates on "
            "the CPU and the second on the GPU; set one of them to false"
        )
    return None


def megatron_offload_fraction_is_positive(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """The share of Megatron's optimizer that is offloaded is above 0."""
    optimizer = megatron.optimizer
    fractions = {
        "optimizer_offload_fraction": (optimizer.optimizer_offload_fraction, "optimizer_cpu_offload"),
        "offload_optimizer_states_fraction": (optimizer.offload_optimizer_states_fraction, "offload_optimizer_states"),
    }
    for name, (fraction, switch) in fractions.items():
        if getattr(optimizer, switch) and fraction == 0:
            return (
                f"{OPTIMIZER}.{name} is 0, but {switch} is true and would move nothing; set a share above 0, at most 1"
            )
    return None


def megatron_overlap_needs_cpu_offload(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`overlap_cpu_optimizer_d2h_h2d` needs `optimizer_cpu_offload`."""
    if megatron.optimizer.overlap_cpu_optimizer_d2h_h2d and not megatron.optimizer.optimizer_cpu_offload:
        return (
            f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d is true, but it hides the copies of optimizer_cpu_offload, "
            "which is false; set optimizer_cpu_offload to true, or overlap_cpu_optimizer_d2h_h2d to false"
        )
    return None


def megatron_offload_needs_the_distributed_optimizer(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Offloading Megatron's optimizer needs `use_distributed_optimizer`."""
    for key in ("optimizer_cpu_offload", "offload_optimizer_states"):
        if getattr(megatron.optimizer, key) and not megatron.optimizer.use_distributed_optimizer:
            return (
                f"{OPTIMIZER}.{key} is true, but it moves the shards of a distributed optimizer and "
                f"use_distributed_optimizer is false; set use_distributed_optimizer to true, or {key} to false"
            )
    return None


def megatron_offloaded_states_are_shards(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's `offload_optimizer_states` needs an optimizer that megatron-core can shard."""
    name = megatron.optimizer.optimizer
    if megatron.optimizer.offload_optimizer_states and not OPTIMIZERS[name].can_be_sharded:
        return (
            f"{OPTIMIZER}.offload_optimizer_states is true, but it moves shards, and megatron-core does not shard "
            f"{name}; set optimizer to {names_of(lambda found: found.can_be_sharded)}, or offload_optimizer_states to "
            "false"
        )
    return None


def megatron_precision_aware_optimizer_is_available(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`use_precision_aware_optimizer` needs a distributed optimizer that can be precision-aware."""
    optimizer = megatron.optimizer
    if not optimizer.use_precision_aware_optimizer:
        return None
    if OPTIMIZERS[optimizer.optimizer].can_be_precision_aware and optimizer.use_distributed_optimizer:
        return None
    return (
        f"{OPTIMIZER}.use_precision_aware_optimizer is true, but megatron-core has it only for a distributed "
        f"{names_of(lambda found: found.can_be_precision_aware)}, and optimizer is {optimizer.optimizer} with "
        f"use_distributed_optimizer {_yaml(optimizer.use_distributed_optimizer)}; set it to false or change those"
    )


def megatron_distributed_optimizer_can_be_sharded(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`use_distributed_optimizer` needs an optimizer that megatron-core can shard, or `optimizer_cpu_offload`."""
    name = megatron.optimizer.optimizer
    if megatron.optimizer.optimizer_cpu_offload or OPTIMIZERS[name].can_be_sharded:
        return None
    if megatron.optimizer.use_distributed_optimizer:
        return (
            f"{OPTIMIZER}.optimizer is {name}, but megatron-core does not shard its states; set "
            "use_distributed_optimizer to false"
        )
    return None


def megatron_cpu_offload_is_precision_aware(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`optimizer_cpu_offload` needs `use_precision_aware_optimizer`, if the optimizer can be precision-aware."""
    optimizer = megatron.optimizer
    can_be = OPTIMIZERS[optimizer.optimizer].can_be_precision_aware
    if optimizer.optimizer_cpu_offload and can_be and not optimizer.use_precision_aware_optimizer:
        return (
            f"{OPTIMIZER}.optimizer_cpu_offload is true, but without use_precision_aware_optimizer it updates fp32 "
            "masters that stay on the GPU; set use_precision_aware_optimizer to true"
        )
    return None


def megatron_cpu_offload_needs_half_precision(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`optimizer_cpu_offload` excludes `policy.precision: float32`."""
    if megatron.optimizer.optimizer_cpu_offload and cfg.policy.precision == "float32":
        return (
            f"{OPTIMIZER}.optimizer_cpu_offload is true, but policy.precision is float32, and megatron-core cannot "
            "build that optimizer over float32 parameters; set precision to bfloat16, or optimizer_cpu_offload to false"
        )
    return None


def megatron_16_bit_moments_are_transformer_engines(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """16-bit moments need the precision-aware optimizer on the GPU, and the same type for both moments."""
    optimizer = megatron.optimizer
    types = {optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype}
    if types == {"float32"}:
        return None
    chosen = (
        f"{OPTIMIZER}.exp_avg_dtype is {optimizer.exp_avg_dtype} and exp_avg_sq_dtype is {optimizer.exp_avg_sq_dtype}"
    )
    if not optimizer.use_precision_aware_optimizer:
        return f"{chosen}, but use_precision_aware_optimizer is false; set it to true, or both types to float32"
    if optimizer.optimizer_cpu_offload:
        return f"{chosen}, but moments of optimizer_cpu_offload are float32; set both types to float32"
    if len(types) > 1:
        return (
            f"{chosen}, but Transformer Engine updates moments of different types through float32 copies of all of "
            "them; set both types to bfloat16 or to float32"
        )
    return None


def megatron_learning_rates_are_in_order(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's `optimizer.lr` is the highest rate of its schedule, and the warm-up ends before the decay."""
    rate, schedule = megatron.optimizer.lr, megatron.scheduler
    others = {
        f"{OPTIMIZER}.min_lr": megatron.optimizer.min_lr,
        f"{SCHEDULER}.lr_warmup_init": schedule.lr_warmup_init,
    }
    for key, other in others.items():
        if other > rate:
            return f"{key} is {other}, above {OPTIMIZER}.lr {rate}, the highest rate of the schedule; lower it"
    if schedule.lr_warmup_iters >= schedule.lr_decay_iters:
        return (
            f"{SCHEDULER}.lr_warmup_iters is {schedule.lr_warmup_iters}, not below lr_decay_iters "
            f"{schedule.lr_decay_iters}, which counts from the first step too; change one of them"
        )
    return None


def megatron_weight_decay_does_not_fall(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's weight decay stays, or rises if its style says so."""
    schedule = megatron.scheduler
    start, end, style = schedule.start_weight_decay, schedule.end_weight_decay, schedule.weight_decay_incr_style
    if end < start or (style == "constant" and end != start):
        needs = "equal values" if style == "constant" else "an end that is not below the start"
        return (
            f"{SCHEDULER}.start_weight_decay is {start} and end_weight_decay is {end}, but weight_decay_incr_style "
            f"{style} needs {needs}; change one of the three"
        )
    return None


def megatron_parameter_gather_overlaps_only_shards(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`overlap_param_gather` needs `use_distributed_optimizer`."""
    ddp = megatron.distributed_data_parallel_config
    if ddp.overlap_param_gather and not megatron.optimizer.use_distributed_optimizer:
        return (
            f"{KEY}.distributed_data_parallel_config.overlap_param_gather is true, but without "
            "use_distributed_optimizer no parameters are gathered; set overlap_param_gather to false, or "
            "use_distributed_optimizer to true"
        )
    return None


# -- adapters


def megatron_adapters_need_whole_dense_models(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's adapters exclude mixture-of-experts models, and tensor, pipeline and context parallelism."""
    model = local_model_config(cfg)
    return adapters_problem(megatron, has_experts=model is not None and bool(ModelShape.of(model).num_experts))


def megatron_adapters_stand_alone(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's adapters exclude 8-bit layers and activation offloading."""
    others = {
        "fp8_cfg.enabled": megatron.fp8_cfg.enabled,
        "fine_grained_activation_offloading": megatron.fine_grained_activation_offloading,
    }
    for name, is_on in others.items():
        if megatron.peft.enabled and is_on:
            return f"{PEFT}.enabled and {KEY}.{name} are both true, but do not work together; set one of them to false"
    return None


def megatron_adapters_have_their_layers(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's adapters have `target_modules` or `exclude_modules`, not both, and leave at least one layer."""
    excluded = megatron.peft.exclude_modules
    if not megatron.peft.enabled or not excluded:
        return None
    if megatron.peft.target_modules:
        return (
            f"{PEFT}.target_modules and exclude_modules are both set, but exclude_modules chooses from all four "
            "layers; empty one of them"
        )
    unknown = [name for name in excluded if name not in MEGATRON_ADAPTED_LAYERS]
    if unknown:
        return (
            f"{PEFT}.exclude_modules has {unknown[0]}, which is none of {', '.join(MEGATRON_ADAPTED_LAYERS)}; use "
            "those names, or list the layers that get adapters in target_modules"
        )
    if set(excluded) == set(MEGATRON_ADAPTED_LAYERS):
        return f"{PEFT}.exclude_modules has every layer, so none would be trained; remove one"
    return None


def megatron_adapters_name_their_layers(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Each of `peft.target_modules` is one of the four adapted layers, or a pattern that fits only such layers."""
    model = local_model_config(cfg)
    if not megatron.peft.enabled:
        return None
    num_layers = None if model is None else ModelShape.of(model).num_layers
    for target in megatron.peft.target_modules:
        if target in MEGATRON_ADAPTED_LAYERS or ("*" in target and num_layers is None):
            continue
        if "*" in target and _fits_layers_only(target, num_layers or 0):
            continue
        return (
            f"{PEFT}.target_modules has {target}, which is neither one of {', '.join(MEGATRON_ADAPTED_LAYERS)} nor a "
            "pattern that fits full names of such layers only; use such a name, or a pattern such as "
            "'*.layers.0.*.linear_qkv'"
        )
    return None


def _fits_layers_only(pattern: str, num_layers: int) -> bool:
    """Return whether a pattern matches adaptable layers only. Megatron-Bridge has no adapters for other modules."""
    others, layers = ["embedding", "decoder", "decoder.layers", "output_layer"], []
    for index in range(num_layers):
        place = f"decoder.layers.{index}"
        others += [place, f"{place}.self_attention", f"{place}.self_attention.core_attention", f"{place}.mlp"]
        layers += [f"{place}.self_attention.{name}" for name in ("linear_qkv", "linear_proj")]
        layers += [f"{place}.mlp.{name}" for name in ("linear_fc1", "linear_fc2")]
    return any(fnmatchcase(name, pattern) for name in layers) and not any(fnmatchcase(name, pattern) for name in others)


RULES = megatron_rules(__name__)
