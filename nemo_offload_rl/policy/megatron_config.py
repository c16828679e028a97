"""The YAML keys `policy.megatron_cfg.*`. Names and meanings are Megatron-core's."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from nemo_offload_rl.schema import closed, doc

OffloadModule = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"
]


@closed
class MegatronOptimizerConfig(TypedDict):
    """`policy.megatron_cfg.optimizer`."""

    optimizer: Annotated[Literal["adam", "sgd"], doc("The optimizer.")]
    lr: Annotated[float, doc("Learning rate.", ge=0)]
    min_lr: Annotated[float, doc("Learning rate at the end of the decay.", ge=0)]
    weight_decay: Annotated[float, doc("Decoupled weight decay.", ge=0)]
    bf16: Annotated[bool, doc("Parameters are bfloat16.")]
    fp16: Annotated[bool, doc("Parameters are float16.")]
    params_dtype: Annotated[Literal["float32", "bfloat16", "float16"], doc("Type the parameters are made in.")]
    adam_beta1: Annotated[float, doc("Decay of Adam's first moment.", ge=0, lt=1)]
    adam_beta2: Annotated[float, doc("Decay of Adam's second moment.", ge=0, lt=1)]
    adam_eps: Annotated[float, doc("Adam's epsilon.", gt=0)]
    sgd_momentum: Annotated[float, doc("Momentum of SGD.", ge=0)]
    use_distributed_optimizer: Annotated[bool, doc("Shard the optimizer over the data-parallel ranks.")]
    use_precision_aware_optimizer: Annotated[
        bool, doc("Transformer Engine's optimizer, which holds the fp32 masters itself.")
    ]
    clip_grad: Annotated[float, doc("Gradients are scaled down to this norm; 0 for no limit.", ge=0)]
    optimizer_cpu_offload: Annotated[bool, doc("Keep the optimizer on the host for good and compute its update there.")]
    optimizer_offload_fraction: Annotated[
        float,
        doc("Share of the parameters whose optimizer lives on the host, with `optimizer_cpu_offload`.", ge=0, le=1),
    ]
    overlap_cpu_optimizer_d2h_h2d: Annotated[
        bool, doc("Copy gradients out and parameters in while the CPU computes; needs `optimizer_cpu_offload`.")
    ]
    offload_optimizer_states: Annotated[
        bool,
        doc(
            "Keep optimizer states and fp32 masters on the host except inside the optimizer step, which stays on the "
            "GPU; excludes `optimizer_cpu_offload`."
        ),
    ]


@closed
class MegatronSchedulerConfig(TypedDict):
    """`policy.megatron_cfg.scheduler`."""

    start_weight_decay: Annotated[float, doc("Weight decay at the first step.", ge=0)]
    end_weight_decay: Annotated[float, doc("Weight decay at the last step.", ge=0)]
    weight_decay_incr_style: Annotated[Literal["constant", "linear", "cosine"], doc("How it gets there.")]
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"], doc("How the learning rate decays.")
    ]
    lr_decay_iters: Annotated[int, doc("Optimizer steps of the decay.", ge=1)]
    lr_warmup_iters: Annotated[int, doc("Optimizer steps of the warm-up.", ge=0)]
    lr_warmup_init: Annotated[float, doc("Learning rate at the first step.", ge=0)]


@closed
class MegatronDdpConfig(TypedDict):
    """`policy.megatron_cfg.distributed_data_parallel_config`."""

    grad_reduce_in_fp32: Annotated[bool, doc("Keep and reduce gradients in float32.")]
    overlap_grad_reduce: Annotated[bool, doc("Reduce gradients while the backward pass runs.")]
    overlap_param_gather: Annotated[bool, doc("Gather parameters while the forward pass runs.")]


@closed
class MegatronConfig(TypedDict):
    """`policy.megatron_cfg`: Megatron-core models."""

    enabled: Annotated[bool, doc("Use this backend. It is not available yet.")]
    tensor_model_parallel_size: Annotated[int, doc("Devices that each layer is split over.", ge=1)]
    pipeline_model_parallel_size: Annotated[int, doc("Devices that the layers are dealt out to.", ge=1)]
    num_layers_in_first_pipeline_stage: Annotated[
        int | None, doc("Layers of the first stage; null for an even share.", ge=1)
    ]
    num_layers_in_last_pipeline_stage: Annotated[
        int | None, doc("Layers of the last stage; null for an even share.", ge=1)
    ]
    context_parallel_size: Annotated[int, doc("Devices that each sequence is split over.", ge=1)]
    expert_model_parallel_size: Annotated[int, doc("Devices that the experts are dealt out to.", ge=1)]
    expert_tensor_parallel_size: Annotated[int, doc("Devices that each expert is split over.", ge=1)]
    pipeline_dtype: Annotated[Literal["float32", "bfloat16", "float16"], doc("Type of what stages send each other.")]
    sequence_parallel: Annotated[
        bool, doc("Also split norms and residuals along the sequence; needs tensor parallelism.")
    ]
    activation_checkpointing: Annotated[
        bool, doc("Recompute activations in the backward pass instead of keeping them.")
    ]
    recompute_granularity: Annotated[
        Literal["full", "selective"], doc("Recompute whole layers or `recompute_modules`.")
    ]
    recompute_modules: Annotated[list[str] | None, doc("Modules to recompute when selective.")]
    fine_grained_activation_offloading: Annotated[
        bool, doc("Move the activations of `offload_modules` to the host between the forward and the backward pass.")
    ]
    offload_modules: Annotated[
        list[OffloadModule] | None, doc("Modules whose activations move; `attn_proj` needs `core_attn` beside it.")
    ]
    empty_unused_memory_level: Annotated[
        int,
        doc("Give cached GPU memory back: 0 never, 1 after a training step, 2 after each micro-batch too.", ge=0, le=2),
    ]
    freeze_moe_router: Annotated[bool, doc("Do not train the routers of mixture-of-experts models.")]
    moe_router_dtype: Annotated[
        Literal["fp32", "fp64"] | None, doc("Type the router computes in; null for the model's.")
    ]
    moe_permute_fusion: Annotated[bool, doc("Fused kernels to sort tokens by expert.")]
    moe_token_dispatcher_type: Annotated[
        Literal["allgather", "alltoall", "flex"], doc("How tokens reach their experts.")
    ]
    apply_rope_fusion: Annotated[bool, doc("Fused kernel for rotary embeddings.")]
    bias_activation_fusion: Annotated[bool, doc("Fused kernel for bias and activation.")]
    defer_fp32_logits: Annotated[
        bool, doc("Turn logits into float32 chunk by chunk; needs `policy.logprob_chunk_size`.")
    ]
    env_vars: Annotated[dict[str, str] | None, doc("Environment variables of the policy workers.")]
    optimizer: Annotated[MegatronOptimizerConfig, doc("The optimizer.")]
    scheduler: Annotated[MegatronSchedulerConfig, doc("The learning-rate schedule.")]
    distributed_data_parallel_config: Annotated[MegatronDdpConfig, doc("Gradient reduction.")]
