"""Rules on the Megatron backend's devices and layers."""

from nemo_offload_rl.backends.alternatives import advice
from nemo_offload_rl.backends.hf.model_folder import local_model_config
from nemo_offload_rl.backends.megatron.rules.base import megatron_rules
from nemo_offload_rl.backends.megatron.supported import (
    KEY,
    fusion_problem,
    sizes_problem,
    states_problem,
    tensor_parallel_problem,
    unsupported,
)
from nemo_offload_rl.errors import division_problem
from nemo_offload_rl.keys.master import RunConfig
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.models.families import MEGATRON, has_expert_bias
from nemo_offload_rl.models.rope import attention_factor, rope_settings, rope_type
from nemo_offload_rl.models.shape import ModelShape

_DIVISOR = "use a divisor of that number"


def megatron_sizes_divide_the_world(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """The product of Megatron's tensor, pipeline and context parallel sizes divides the number of policy workers."""
    return sizes_problem(megatron, cfg.cluster.world_size)


def megatron_expert_sizes_divide_the_world(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """The product of Megatron's two expert sizes and pipeline size divides the number of policy workers."""
    sizes = {
        f"{KEY}.expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
    }
    what = "policy workers of `cluster`, which share the experts equally"
    return division_problem(sizes, cfg.cluster.world_size, what, "change one of them")


def megatron_experts_can_be_dealt_out(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's expert parallelism needs a mixture-of-experts model, and a size that divides its experts."""
    if (model := local_model_config(cfg)) is None:
        return None
    size, experts = megatron.expert_model_parallel_size, ModelShape.of(model).num_experts
    if size > 1 and experts == 0:
        return (
            f"{KEY}.expert_model_parallel_size is {size}, but config.json of {cfg.policy.model_name} has no "
            "experts; set it to 1"
        )
    what = "experts of the model, and each device takes the same number"
    return division_problem({f"{KEY}.expert_model_parallel_size": size}, experts, what, _DIVISOR)


def megatron_tensor_parallel_experts_need_sequence_parallel(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """On Megatron, tensor parallelism of a mixture-of-experts model needs sequence parallelism."""
    model, size = local_model_config(cfg), megatron.tensor_model_parallel_size
    if megatron.sequence_parallel or size == 1:
        return None
    if megatron.expert_model_parallel_size > 1 or (model is not None and ModelShape.of(model).num_experts):
        return (
            f"{KEY}.tensor_model_parallel_size is {size}, but Megatron splits a mixture-of-experts model only together "
            "with sequence parallelism; set sequence_parallel to true, or the size to 1"
        )
    return None


def megatron_experts_are_not_gathered_over_devices(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`moe_token_dispatcher_type: allgather` excludes expert parallelism, as devices have unequal numbers of tokens."""
    if megatron.moe_token_dispatcher_type == "allgather" and megatron.expert_model_parallel_size > 1:
        return (
            f"{KEY}.moe_token_dispatcher_type is allgather and expert_model_parallel_size above 1, but allgather needs "
            "the same number of tokens on each device, and responses differ in length; set it to alltoall"
        )
    return None


def flexible_dispatch_needs_several_devices(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`moe_token_dispatcher_type: flex` needs experts on several devices."""
    model = local_model_config(cfg)
    if megatron.moe_token_dispatcher_type != "flex":
        return None
    if model is not None and not ModelShape.of(model).num_experts:
        return None  # nothing is dispatched
    if megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size == 1:
        return (
            f"{KEY}.moe_token_dispatcher_type is flex, but expert_model_parallel_size and expert_tensor_parallel_size "
            "are 1, and that dispatcher only sends tokens to other devices; set it to alltoall"
        )
    return None


def router_losses_need_experts(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """An auxiliary loss of routers needs a model with experts, and a coefficient above 0."""
    model, kind = local_model_config(cfg), megatron.moe_router_load_balancing_type
    if kind == "none":
        return None
    if megatron.moe_aux_loss_coeff == 0:
        return (
            f"{KEY}.moe_router_load_balancing_type is {kind}, but moe_aux_loss_coeff is 0, so the loss has no effect; "
            "set the coefficient, for instance to 0.001, or the type to none"
        )
    if model is not None and not ModelShape.of(model).num_experts:
        return (
            f"{KEY}.moe_router_load_balancing_type is {kind}, but config.json of {cfg.policy.model_name} has no "
            "experts; set it to none"
        )
    return None


def losses_of_sequences_need_padded_batches(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`moe_router_load_balancing_type: seq_aux_loss` needs padded rows."""
    if megatron.moe_router_load_balancing_type != "seq_aux_loss" or not cfg.policy.sequence_packing.enabled:
        return None
    return (
        f"{KEY}.moe_router_load_balancing_type is seq_aux_loss, but policy.sequence_packing.enabled is true, and "
        "routers take a packed row for one sequence; set the type to aux_loss, or packing to false"
    )


def updated_expert_biases_exist(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`moe_router_bias_update_rate` above 0 needs a model with expert biases, and excludes adapters."""
    model = local_model_config(cfg)
    if (rate := megatron.moe_router_bias_update_rate) == 0:
        return None
    if megatron.peft.enabled:
        return (
            f"{KEY}.moe_router_bias_update_rate is {rate}, but peft.enabled is true, and adapters leave the model's "
            "own weights and expert biases unchanged; set it to 0"
        )
    if model is not None and not has_expert_bias(model):
        return (
            f"{KEY}.moe_router_bias_update_rate is {rate}, but models of type {model.get('model_type')} have no expert "
            "bias, so neither the engine nor an export could use it; set it to 0"
        )
    return None


def megatron_layers_divide_over_devices(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's tensor-parallel size fits the model's attention heads, MLPs and vocabulary."""
    if (model := local_model_config(cfg)) is None:
        return None
    size, shape = megatron.tensor_model_parallel_size, ModelShape.of(model)
    sizes = {
        "num_attention_heads": (shape.num_heads, "attention heads"),
        "intermediate_size": (None if shape.num_experts else shape.intermediate_size, "channels of MLPs"),
        "linear_num_key_heads": (model.get("linear_num_key_heads"), "key heads of linear attention"),
        "mamba_num_heads": (model.get("mamba_num_heads"), "heads of Mamba layers"),
        "n_groups": (model.get("n_groups"), "groups of heads of Mamba layers"),
        "vocab_size": (shape.vocab_size, "tokens of the vocabulary"),
    }
    for key, (length, what) in sizes.items():
        if model.get(key) is not None and length is not None:
            each = f"{what} of the model, and each device takes the same number"
            problem = division_problem({f"{KEY}.tensor_model_parallel_size": size}, length, each, _DIVISOR)
            if problem is not None:
                return problem
    groups = shape.num_kv_heads
    if groups is not None and groups % size and size % groups:
        return (
            f"{KEY}.tensor_model_parallel_size is {size}, but the model has {groups} key-value heads, which are split "
            "or copied equally; use a divisor or a multiple of that number"
        )
    return None


def megatron_splits_the_layers_of_the_family(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's tensor parallelism excludes some families; layers with states exclude context parallelism."""
    if (model := local_model_config(cfg)) is None:
        return None
    is_local, size = megatron.transformer_impl == "local", megatron.tensor_model_parallel_size
    return tensor_parallel_problem(model, size, is_local=is_local) or states_problem(model, megatron)


def megatron_layers_divide_over_stages(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Pipeline stages share the layers evenly, except a first and a last stage whose size is set."""
    model = local_model_config(cfg)
    stages = megatron.pipeline_model_parallel_size
    ends = [megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage]
    set_ends = [layers for layers in ends if layers is not None]
    if stages == 1 and set_ends:
        return (
            f"{KEY}.num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage is set, but "
            "pipeline_model_parallel_size is 1, so there is one stage with all layers; set both to null"
        )
    if model is None or stages == 1 or (num_layers := ModelShape.of(model).num_layers) is None:
        return None
    layers, middle = num_layers - sum(set_ends), stages - len(set_ends)
    if layers != 0 if middle == 0 else layers <= 0 or layers % middle != 0:
        return (
            f"{KEY}.pipeline_model_parallel_size is {stages}, which leaves {layers} of the model's {num_layers} layers "
            f"for {middle} stages without a set size, and these must share them evenly; change it, or "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        )
    return None


def megatron_takes_the_whole_model(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """The Megatron backend refuses models that it does not implement completely."""
    model = local_model_config(cfg)
    if model is None or (reason := unsupported(model)) is None:
        return None
    return f"{KEY}.enabled is true, but config.json of {cfg.policy.model_name} has {reason}; {advice(model, MEGATRON)}"


def fused_rotary_embeddings_have_no_factor(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`apply_rope_fusion` excludes rotary embeddings with an attention factor, which the fused kernel ignores."""
    model = local_model_config(cfg)
    if model is None or megatron.transformer_impl == "local" or not megatron.apply_rope_fusion or unsupported(model):
        return None
    return fusion_problem(rope_type(model), attention_factor(model, rope_settings(model)))


def megatron_sequence_parallel_needs_tensor_parallel(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's `sequence_parallel` needs tensor parallelism."""
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        return (
            f"{KEY}.sequence_parallel is true, but it splits rows among tensor-parallel devices and "
            "tensor_model_parallel_size is 1; set sequence_parallel to false, or the size above 1"
        )
    return None


def megatron_lengths_can_be_split(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`make_sequence_length_divisible_by` is a multiple of the pieces that Megatron cuts a row into."""
    multiple, context = cfg.policy.make_sequence_length_divisible_by, megatron.context_parallel_size
    # Each context-parallel rank takes an early and a late piece, so that all have equal work in causal attention.
    pieces = (2 * context if context > 1 else 1) * (
        megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
    )
    if multiple % pieces:
        cutting = [f"context_parallel_size {context}"] if context > 1 else []
        if megatron.sequence_parallel:
            cutting.append(f"sequence_parallel over tensor_model_parallel_size {megatron.tensor_model_parallel_size}")
        return (
            f"policy.make_sequence_length_divisible_by is {multiple}, but rows are cut into {pieces} equal pieces, for "
            f"{' and '.join(cutting)}; set it to {pieces}"
        )
    return None


def local_layers_take_padded_batches(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's `transformer_impl: local` excludes packed rows."""
    if megatron.transformer_impl != "local" or not cfg.policy.sequence_packing.enabled:
        return None
    return (
        f"policy.sequence_packing.enabled is true, but attention of {KEY}.transformer_impl=local would mix the "
        "sequences of a packed row; set it to false, or transformer_impl to transformer_engine"
    )


def local_layers_keep_sequences_whole(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's `transformer_impl: local` excludes context parallelism."""
    if megatron.transformer_impl != "local" or megatron.context_parallel_size == 1:
        return None
    return (
        f"{KEY}.context_parallel_size is {megatron.context_parallel_size}, but attention of transformer_impl=local "
        "sees only one device's part of a row; set it to 1, or transformer_impl to transformer_engine"
    )


def local_layers_have_no_precision_aware_optimizer(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """Megatron's `transformer_impl: local` excludes the precision-aware optimizer, except on the CPU."""
    optimizer = megatron.optimizer
    if megatron.transformer_impl != "local" or optimizer.optimizer_cpu_offload:
        return None
    if optimizer.use_precision_aware_optimizer:
        return (
            f"{KEY}.optimizer.use_precision_aware_optimizer is true, but that optimizer is Transformer Engine's and "
            "transformer_impl is local; set it to false, or transformer_impl to transformer_engine"
        )
    return None


def eight_bit_layers_are_transformer_engines(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """8-bit layers need `transformer_impl: transformer_engine`."""
    if not megatron.fp8_cfg.enabled or megatron.transformer_impl != "local":
        return None
    return (
        f"{KEY}.fp8_cfg.enabled is true, but 8-bit layers are Transformer Engine's and transformer_impl is local; set "
        "it to false, or transformer_impl to transformer_engine"
    )


def eight_bit_products_have_whole_blocks(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """With 8-bit layers, the model's sizes on each device are multiples of 16."""
    model = local_model_config(cfg)
    if model is None or not megatron.fp8_cfg.enabled:
        return None
    shape, devices = ModelShape.of(model), megatron.tensor_model_parallel_size
    heads = None if shape.num_heads is None or shape.head_dim is None else shape.num_heads * shape.head_dim
    sizes = {"hidden_size": (shape.hidden_size, 1), "intermediate_size": (shape.intermediate_size, devices)}
    sizes["num_attention_heads x head_dim"] = (heads, devices)
    sizes["moe_intermediate_size"] = (model.get("moe_intermediate_size"), megatron.expert_tensor_parallel_size)
    for name, (size, parts) in sizes.items():
        if size is not None and (size % parts or size // parts % 16):
            return (
                f"{KEY}.fp8_cfg.enabled is true, but the model's {name} is {size}, {size / parts:g} on each device, "
                "and 8-bit products need multiples of 16; set it to false, or use fewer devices for a layer"
            )
    return None


def cleared_fp8_caches_exist(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`fp8_cfg.force_clear_fp8_caches` needs 8-bit layers."""
    if megatron.fp8_cfg.enabled or not megatron.fp8_cfg.force_clear_fp8_caches:
        return None
    return (
        f"{KEY}.fp8_cfg.force_clear_fp8_caches is true, but fp8_cfg.enabled is false, so there are no such caches; set "
        "force_clear_fp8_caches to false"
    )


def deferred_logits_need_chunks(cfg: RunConfig, megatron: MegatronConfig) -> str | None:
    """`defer_fp32_logits` needs `policy.logprob_chunk_size`."""
    if not megatron.defer_fp32_logits or cfg.policy.logprob_chunk_size is not None:
        return None
    return (
        f"{KEY}.defer_fp32_logits is true, but it converts logits chunk by chunk and policy.logprob_chunk_size is "
        "null; set that, for instance to 1024, or defer_fp32_logits to false"
    )


RULES = megatron_rules(__name__)
