"""Rules on the Megatron backend's devices and layers. Each returns None if another backend is enabled."""

from __future__ import annotations

from nemo_offload_rl.backends.alternatives import advice
from nemo_offload_rl.backends.hf.local_config import local_model_config
from nemo_offload_rl.backends.megatron.rules.section import megatron_section
from nemo_offload_rl.backends.megatron.supported import sizes_problem, unsplit_layers, unsupported
from nemo_offload_rl.errors import division_problem
from nemo_offload_rl.keys.master import PolicyRun, Rule
from nemo_offload_rl.models.families import MEGATRON, has_expert_bias
from nemo_offload_rl.models.rope import attention_factor, rope_settings, rope_type
from nemo_offload_rl.models.shape import ModelShape

KEY = "policy.megatron_cfg"


def megatron_sizes_divide_the_world(cfg: PolicyRun) -> str | None:
    """Megatron's tensor, pipeline and context parallel sizes multiply to a divisor of the number of workers."""
    megatron, world = megatron_section(cfg), cfg.cluster.world_size
    return sizes_problem(megatron, world) if megatron is not None else None


def megatron_expert_sizes_divide_the_world(cfg: PolicyRun) -> str | None:
    """Megatron's expert sizes and pipeline size multiply to a divisor of the number of workers."""
    megatron, world = megatron_section(cfg), cfg.cluster.world_size
    if megatron is None:
        return None
    expert, tensor = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    pipeline = megatron.pipeline_model_parallel_size
    return division_problem(
        {
            f"{KEY}.expert_model_parallel_size": expert,
            "expert_tensor_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
        },
        world,
        "policy workers of `cluster`, over which experts are dealt out",
        "change one of them",
    )


def megatron_experts_can_be_dealt_out(cfg: PolicyRun) -> str | None:
    """Expert parallelism needs a mixture-of-experts model whose experts divide."""
    megatron, model = megatron_section(cfg), local_model_config(cfg)
    if megatron is None or model is None:
        return None
    size, experts = megatron.expert_model_parallel_size, ModelShape.of(model).num_experts
    if size > 1 and experts == 0:
        return (
            f"{KEY}.expert_model_parallel_size is {size}, but config.json of {cfg.policy.model_name} has no "
            "experts; set it to 1"
        )
    what = "experts of the model, of which each device takes the same number"
    return division_problem({f"{KEY}.expert_model_parallel_size": size}, experts, what, "change it")


def megatron_tensor_parallel_experts_need_sequence_parallel(cfg: PolicyRun) -> str | None:
    """Mixture-of-experts models train with tensor parallelism only together with sequence parallelism."""
    megatron, model = megatron_section(cfg), local_model_config(cfg)
    if megatron is None or megatron.sequence_parallel or megatron.tensor_model_parallel_size == 1:
        return None
    if megatron.expert_model_parallel_size > 1 or (model is not None and ModelShape.of(model).num_experts):
        return (
            f"{KEY}.tensor_model_parallel_size is {megatron.tensor_model_parallel_size} for a mixture-of-experts "
            "model, which Megatron trains only with sequence parallelism; set sequence_parallel to true or the "
            "size to 1"
        )
    return None


def megatron_experts_are_not_gathered_over_devices(cfg: PolicyRun) -> str | None:
    """Experts on several devices get their tokens by an all-to-all: devices have different numbers of tokens."""
    megatron = megatron_section(cfg)
    if megatron is None or megatron.moe_token_dispatcher_type != "allgather":
        return None
    if megatron.expert_model_parallel_size > 1:
        return (
            f"{KEY}.moe_token_dispatcher_type is allgather with expert_model_parallel_size above 1, but it needs "
            "equally many tokens on each device and responses differ in length; set it to alltoall"
        )
    return None


def flexible_dispatch_needs_several_devices(cfg: PolicyRun) -> str | None:
    """The flexible dispatcher is for experts on several devices."""
    megatron, model = megatron_section(cfg), local_model_config(cfg)
    if megatron is None or megatron.moe_token_dispatcher_type != "flex":
        return None
    if model is not None and not ModelShape.of(model).num_experts:
        return None  # nothing is dispatched
    if megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size == 1:
        return (
            f"{KEY}.moe_token_dispatcher_type is flex, but expert_model_parallel_size and expert_tensor_parallel_size "
            "are 1 and megatron-core's flexible dispatcher only sends tokens to other devices; set it to alltoall"
        )
    return None


def router_losses_need_experts(cfg: PolicyRun) -> str | None:
    """Auxiliary losses of routers need experts, and a coefficient."""
    megatron, model = megatron_section(cfg), local_model_config(cfg)
    if megatron is None or (kind := megatron.moe_router_load_balancing_type) == "none":
        return None
    if megatron.moe_aux_loss_coeff == 0:
        return (
            f"{KEY}.moe_router_load_balancing_type is {kind} and moe_aux_loss_coeff 0, which adds nothing; set the "
            "coefficient, for instance to 0.001, or the type to none"
        )
    if model is not None and not ModelShape.of(model).num_experts:
        return (
            f"{KEY}.moe_router_load_balancing_type is {kind}, but config.json of {cfg.policy.model_name} has no "
            "experts; set it to none"
        )
    return None


def losses_of_sequences_need_padded_batches(cfg: PolicyRun) -> str | None:
    """The auxiliary loss of each sequence needs padded batches."""
    megatron = megatron_section(cfg)
    if megatron is None or megatron.moe_router_load_balancing_type != "seq_aux_loss":
        return None
    if not cfg.policy.sequence_packing.enabled:
        return None
    return (
        f"{KEY}.moe_router_load_balancing_type is seq_aux_loss, but policy.sequence_packing.enabled is true and a "
        "packed row is one sequence to the routers; set it to aux_loss, or packing to false"
    )


def updated_expert_biases_exist(cfg: PolicyRun) -> str | None:
    """Only models with expert biases have them updated, and only where the model itself is trained."""
    megatron, model = megatron_section(cfg), local_model_config(cfg)
    if megatron is None or (rate := megatron.moe_router_bias_update_rate) == 0:
        return None
    if megatron.peft.enabled:
        return (
            f"{KEY}.moe_router_bias_update_rate is {rate}, but with peft.enabled the model stays as it is, biases of "
            "experts included; set it to 0"
        )
    if model is not None and not has_expert_bias(model):
        return (
            f"{KEY}.moe_router_bias_update_rate is {rate}, but models of type {model.get('model_type')} have no bias "
            "of experts, nor do engine and exports have a place for it; set it to 0"
        )
    return None


def megatron_layers_divide_over_devices(cfg: PolicyRun) -> str | None:
    """Megatron's tensor-parallel size divides the attention heads, MLPs and the vocabulary."""
    megatron, model = megatron_section(cfg), local_model_config(cfg)
    if megatron is None or model is None:
        return None
    size, shape = megatron.tensor_model_parallel_size, ModelShape.of(model)
    sizes = {
        "num_attention_heads": (shape.num_heads, "attention heads"),
        "intermediate_size": (None if shape.num_experts else shape.intermediate_size, "channels of MLPs"),
        "vocab_size": (shape.vocab_size, "tokens of the vocabulary"),
    }
    for key, (length, what) in sizes.items():
        if model.get(key) is not None and length is not None:
            each = f"{what} of the model, of which each device takes the same number"
            problem = division_problem({f"{KEY}.tensor_model_parallel_size": size}, length, each, "change it")
            if problem is not None:
                return problem
    groups = shape.num_kv_heads
    if groups is not None and groups % size and size % groups:
        return (
            f"{KEY}.tensor_model_parallel_size {size} neither divides the model's {groups} key-value heads nor is a "
            "multiple of them; change it"
        )
    return None


def megatron_splits_the_layers_of_the_family(cfg: PolicyRun) -> str | None:
    """Some families are not split by tensor parallelism."""
    megatron, model = megatron_section(cfg), local_model_config(cfg)
    if megatron is None or model is None:
        return None
    is_local = megatron.transformer_impl == "local"
    reason = unsplit_layers(model, megatron.tensor_model_parallel_size, is_local=is_local)
    return None if reason is None else f"{KEY}.{reason}"


def megatron_layers_divide_over_stages(cfg: PolicyRun) -> str | None:
    """The pipeline's stages share the layers evenly, but for a first and a last stage of set size."""
    megatron, model = megatron_section(cfg), local_model_config(cfg)
    if megatron is None:
        return None
    stages = megatron.pipeline_model_parallel_size
    ends = [megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage]
    set_ends = [layers for layers in ends if layers is not None]
    if stages == 1 and set_ends:
        return (
            f"{KEY}.num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage is set, but "
            "pipeline_model_parallel_size is 1; set them to null"
        )
    if model is None or stages == 1 or (num_layers := ModelShape.of(model).num_layers) is None:
        return None
    layers, middle = num_layers - sum(set_ends), stages - len(set_ends)
    if layers != 0 if middle == 0 else layers <= 0 or layers % middle != 0:
        return (
            f"{KEY}.pipeline_model_parallel_size {stages} leaves {layers} of the model's {num_layers} layers "
            f"for {middle} stages without a set size, which must share them evenly; change it or "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        )
    return None


def megatron_takes_the_whole_model(cfg: PolicyRun) -> str | None:
    """The Megatron backend trains only models that it implements completely."""
    model = local_model_config(cfg)
    if megatron_section(cfg) is None or model is None or (reason := unsupported(model)) is None:
        return None
    return f"{KEY}.enabled is true, but config.json of {cfg.policy.model_name} has {reason}; {advice(model, MEGATRON)}"


def fused_rotary_embeddings_have_no_factor(cfg: PolicyRun) -> str | None:
    """The fused kernel for rotary embeddings leaves an attention factor out."""
    megatron, model = megatron_section(cfg), local_model_config(cfg)
    if megatron is None or model is None or megatron.transformer_impl == "local":
        return None
    if not megatron.apply_rope_fusion or unsupported(model) is not None:
        return None
    if (factor := attention_factor(model, rope_settings(model))) != 1.0:
        return (
            f"{KEY}.apply_rope_fusion is true, but the model has rope_type {rope_type(model)} with an attention factor "
            f"of {factor:g}, which the fused kernel leaves out; set it to false"
        )
    return None


def megatron_sequence_parallel_needs_tensor_parallel(cfg: PolicyRun) -> str | None:
    """Megatron's sequence parallelism needs tensor parallelism."""
    megatron = megatron_section(cfg)
    if megatron is not None and megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        return (
            f"{KEY}.sequence_parallel is true, but it splits along the tensor-parallel devices and "
            "tensor_model_parallel_size is 1; set one of them otherwise"
        )
    return None


def megatron_lengths_can_be_split(cfg: PolicyRun) -> str | None:
    """Lengths are multiples of what Megatron's sequence and context parallelism cut them into."""
    megatron = megatron_section(cfg)
    if megatron is None:
        return None
    multiple, context = cfg.policy.make_sequence_length_divisible_by, megatron.context_parallel_size
    # Each context-parallel rank takes an early and a late piece, so that all have equal work in causal attention.
    pieces = (2 * context if context > 1 else 1) * (
        megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
    )
    if multiple % pieces:
        return (
            f"policy.make_sequence_length_divisible_by {multiple} is no multiple of {pieces}, the pieces that "
            f"context_parallel_size {context} (two a device) and sequence_parallel cut rows into; set it to {pieces}"
        )
    return None


def local_layers_take_padded_batches(cfg: PolicyRun) -> str | None:
    """Megatron's local layers do not take packed sequences."""
    megatron = megatron_section(cfg)
    if megatron is None or megatron.transformer_impl != "local" or not cfg.policy.sequence_packing.enabled:
        return None
    return (
        f"policy.sequence_packing.enabled is true, but attention of {KEY}.transformer_impl=local would mix the "
        "sequences of a row; set it to false, or transformer_impl to transformer_engine"
    )


def local_layers_keep_sequences_whole(cfg: PolicyRun) -> str | None:
    """Attention of Megatron's local layers does not split sequences over devices."""
    megatron = megatron_section(cfg)
    if megatron is None or megatron.transformer_impl != "local" or megatron.context_parallel_size == 1:
        return None
    return (
        f"{KEY}.context_parallel_size is {megatron.context_parallel_size}, but attention of "
        "transformer_impl=local sees one device's part only; set it to 1, or transformer_impl to transformer_engine"
    )


def local_layers_have_no_precision_aware_optimizer(cfg: PolicyRun) -> str | None:
    """The precision-aware optimizer is Transformer Engine's, unless the CPU's."""
    megatron = megatron_section(cfg)
    if megatron is None or megatron.transformer_impl != "local":
        return None
    optimizer = megatron.optimizer
    if optimizer.use_precision_aware_optimizer and not optimizer.optimizer_cpu_offload:
        return (
            f"{KEY}.optimizer.use_precision_aware_optimizer is true, but that optimizer is Transformer Engine's and "
            "transformer_impl is local; set it to false, or transformer_impl to transformer_engine"
        )
    return None


def eight_bit_layers_are_transformer_engines(cfg: PolicyRun) -> str | None:
    """8-bit layers are Transformer Engine's."""
    megatron = megatron_section(cfg)
    if megatron is None or not megatron.fp8_cfg.enabled or megatron.transformer_impl != "local":
        return None
    return (
        f"{KEY}.fp8_cfg.enabled is true, but 8-bit layers are Transformer Engine's and transformer_impl is local; set "
        "it to false, or transformer_impl to transformer_engine"
    )


def eight_bit_products_have_whole_blocks(cfg: PolicyRun) -> str | None:
    """Sizes of a model whose layers compute in 8 bits are multiples of 16, on each device."""
    megatron, model = megatron_section(cfg), local_model_config(cfg)
    if megatron is None or model is None or not megatron.fp8_cfg.enabled:
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
                "and 8-bit products take multiples of 16; set it to false, or use fewer devices for a layer"
            )
    return None


def cleared_fp8_caches_exist(cfg: PolicyRun) -> str | None:
    """There are 8-bit caches to clear only in 8-bit training."""
    megatron = megatron_section(cfg)
    if megatron is None or megatron.fp8_cfg.enabled or not megatron.fp8_cfg.force_clear_fp8_caches:
        return None
    return (
        f"{KEY}.fp8_cfg.force_clear_fp8_caches is true, but fp8_cfg.enabled is false and there are no such caches; set "
        "one of them otherwise"
    )


def deferred_logits_need_chunks(cfg: PolicyRun) -> str | None:
    """Deferred float32 logits need a chunk size."""
    megatron = megatron_section(cfg)
    if megatron is None or not megatron.defer_fp32_logits or cfg.policy.logprob_chunk_size is not None:
        return None
    return (
        f"{KEY}.defer_fp32_logits is true, but it converts logits chunk by chunk and policy.logprob_chunk_size is "
        "null; set that, for instance to 1024, or this to false"
    )


RULES: tuple[Rule[PolicyRun], ...] = (
    megatron_sizes_divide_the_world,
    megatron_expert_sizes_divide_the_world,
    megatron_experts_can_be_dealt_out,
    megatron_tensor_parallel_experts_need_sequence_parallel,
    megatron_experts_are_not_gathered_over_devices,
    flexible_dispatch_needs_several_devices,
    router_losses_need_experts,
    losses_of_sequences_need_padded_batches,
    updated_expert_biases_exist,
    megatron_layers_divide_over_devices,
    megatron_splits_the_layers_of_the_family,
    megatron_layers_divide_over_stages,
    megatron_takes_the_whole_model,
    fused_rotary_embeddings_have_no_factor,
    megatron_sequence_parallel_needs_tensor_parallel,
    megatron_lengths_can_be_split,
    local_layers_take_padded_batches,
    local_layers_keep_sequences_whole,
    local_layers_have_no_precision_aware_optimizer,
    eight_bit_layers_are_transformer_engines,
    eight_bit_products_have_whole_blocks,
    cleared_fp8_caches_exist,
    deferred_logits_need_chunks,
)
