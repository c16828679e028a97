"""The YAML keys `policy.megatron_cfg.*`. Names and meanings are Megatron-core's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, Self

from nemo_offload_rl.keys.backend import ModelParallel
from nemo_offload_rl.keys.section import doc, section, value_of

# Megatron's linear layers of attention and of dense MLPs: those that can have adapters.
MEGATRON_ADAPTED_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
OFFLOAD_VARIABLE = "NVTE_CPU_OFFLOAD_V1"


@section
class MegatronOptimizerConfig:
    """`policy.megatron_cfg.optimizer`."""

    optimizer: Annotated[Literal["adam", "sgd"], doc("The optimizer.")] = "adam"
    lr: Annotated[float, doc("Learning rate.", ge=0)] = 5e-06
    min_lr: Annotated[float, doc("Learning rate at the end of the decay.", ge=0)] = 5e-07
    weight_decay: Annotated[float, doc("Decoupled weight decay.", ge=0)] = 0.01
    bf16: Annotated[bool, doc("Parameters are bfloat16.")] = True
    fp16: Annotated[bool, doc("Parameters are float16.")] = False
    params_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], doc("Not read: parameters have the type of `policy.precision`.")
    ] = "float32"
    adam_beta1: Annotated[float, doc("Decay of Adam's first moment.", ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, doc("Decay of Adam's second moment.", ge=0, lt=1)] = 0.999
    adam_eps: Annotated[float, doc("Adam's epsilon.", gt=0)] = 1e-08
    sgd_momentum: Annotated[float, doc("Momentum of SGD.", ge=0)] = 0.9
    use_distributed_optimizer: Annotated[bool, doc("Shard the optimizer over the data-parallel ranks.")] = True
    use_precision_aware_optimizer: Annotated[
        bool, doc("Use Transformer Engine's optimizer, which holds the fp32 masters itself.")
    ] = True
    exp_avg_dtype: Annotated[
        Literal["float32", "bfloat16"],
        doc("Type of Adam's first moment; bfloat16 needs `use_precision_aware_optimizer`."),
    ] = "float32"
    exp_avg_sq_dtype: Annotated[
        Literal["float32", "bfloat16"], doc("Type of Adam's second moment; see `exp_avg_dtype`.")
    ] = "float32"
    clip_grad: Annotated[float | None, doc("Clip gradients to this norm; 0 or null for no limit.", ge=0)] = value_of(
        "${policy.max_grad_norm}"
    )
    optimizer_cpu_offload: Annotated[
        bool,
        doc(
            "Keep the optimizer on the host and update there; slower than `offload_optimizer_states`, which updates on "
            "the GPU."
        ),
    ] = False
    optimizer_offload_fraction: Annotated[
        float,
        doc("Fraction of the parameters whose optimizer is on the host, with `optimizer_cpu_offload`.", ge=0, le=1),
    ] = 0.0
    overlap_cpu_optimizer_d2h_h2d: Annotated[
        bool,
        doc(
            "Overlap copies of gradients and parameters with the update on the CPU; needs `optimizer_cpu_offload`. "
            "Faster with an `optimizer_offload_fraction` of 1.0; with less it also takes more GPU memory "
            "(docs/guides/memory.md)."
        ),
    ] = False
    offload_optimizer_states: Annotated[
        bool,
        doc(
            "Keep optimizer states and fp32 masters on the host except during the optimizer step, which runs on the "
            "GPU. Excludes `optimizer_cpu_offload`."
        ),
    ] = False
    offload_optimizer_states_fraction: Annotated[
        float,
        doc(
            "Fraction of those bytes to offload, with `offload_optimizer_states`; the rest stays resident.", ge=0, le=1
        ),
    ] = 1.0
    offload_optimizer_states_chunk_mib: Annotated[
        float | None,
        doc(
            "With `offload_optimizer_states`: stream the states in parts of this many MiB. During the step at least "
            "two parts are on the GPU, more if passes leave room. null uses one part, which needs room for all states.",
            gt=0,
        ),
    ] = None

    @property
    def streamed_share(self) -> float:
        """Smallest share of states and masters that are on the device only during the optimizer step; 0 for none."""
        return self.offload_optimizer_states_fraction if self.offload_optimizer_states else 0.0


@section
class MegatronSchedulerConfig:
    """`policy.megatron_cfg.scheduler`."""

    start_weight_decay: Annotated[float, doc("Weight decay at the first step.", ge=0)] = value_of(
        "${policy.megatron_cfg.optimizer.weight_decay}"
    )
    end_weight_decay: Annotated[float, doc("Weight decay at the last step.", ge=0)] = value_of(
        "${policy.megatron_cfg.optimizer.weight_decay}"
    )
    weight_decay_incr_style: Annotated[
        Literal["constant", "linear", "cosine"], doc("How the weight decay changes from the first step to the last.")
    ] = "constant"
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"], doc("Shape of the learning-rate decay.")
    ] = "constant"
    lr_decay_iters: Annotated[int, doc("Length of the decay in steps of the run.", ge=1)] = 1000
    lr_warmup_iters: Annotated[int, doc("Length of the warm-up in steps of the run.", ge=0)] = 13
    lr_warmup_init: Annotated[float, doc("Learning rate at the first step.", ge=0)] = 5e-07


@section
class MegatronDdpConfig:
    """`policy.megatron_cfg.distributed_data_parallel_config`."""

    grad_reduce_in_fp32: Annotated[bool, doc("Accumulate and reduce gradients in float32.")] = False
    overlap_grad_reduce: Annotated[bool, doc("Overlap gradient reduction with the backward pass.")] = True
    overlap_param_gather: Annotated[bool, doc("Overlap parameter gathering with the forward pass.")] = True


@section
class MegatronFp8Config:
    """`policy.megatron_cfg.fp8_cfg`: 8-bit matrix products in Transformer Engine."""

    enabled: Annotated[bool, doc("Compute linear layers in 8 bits.")] = False
    fp8: Annotated[
        Literal["e4m3", "hybrid"], doc("Number format; `hybrid` is e4m3 in the forward and e5m2 in the backward pass.")
    ] = "e4m3"
    fp8_recipe: Annotated[
        Literal["blockwise", "tensorwise", "delayed", "mxfp8"],
        doc("How scales are chosen; mxfp8 needs a Blackwell GPU."),
    ] = "blockwise"
    force_clear_fp8_caches: Annotated[
        bool, doc("Free the 8-bit copies of the weights before each refit; the next forward pass recreates them.")
    ] = False

    @property
    def token_multiple(self) -> int:
        """A device's tokens must be a multiple of this: the size of the blocks that share a scale, else 16."""
        return {"blockwise": 128, "mxfp8": 32}.get(self.fp8_recipe, 16) if self.enabled else 1


@section
class MegatronLoraConfig:
    """`policy.megatron_cfg.peft`: train low-rank adapters instead of the model's own weights."""

    enabled: Annotated[
        bool,
        doc(
            "Train adapters (LoRA) and freeze the model; exports have merged weights, refits these or adapters "
            "(`policy.generation.enable_lora`)."
        ),
    ] = False
    target_modules: Annotated[
        tuple[str, ...],
        doc(
            "Layers that get adapters, by Megatron's names (linear_qkv, linear_proj, linear_fc1, linear_fc2) or "
            "patterns such as `*.layers.0.*.linear_qkv`; empty for all four."
        ),
    ] = ()
    exclude_modules: Annotated[
        tuple[str, ...], doc("Layers of those four that get no adapters when `target_modules` is empty.")
    ] = ()
    dim: Annotated[int, doc("Rank of the adapters.", ge=1)] = 8
    alpha: Annotated[int, doc("Adapter outputs are scaled by alpha / dim.", ge=1)] = 32
    dropout: Annotated[float, doc("Dropout probability of adapters in training.", ge=0, lt=1)] = 0.0
    dropout_position: Annotated[
        Literal["pre", "post"], doc("Apply dropout to an adapter's inputs (pre) or outputs (post).")
    ] = "post"
    lora_A_init_method: Annotated[
        Literal["xavier", "normal", "kaiming"], doc("Initialization of A: Xavier normal, normal or Kaiming uniform.")
    ] = "xavier"
    lora_B_init_method: Annotated[
        Literal["zero", "xavier", "normal", "kaiming"],
        doc("Initialization of B; with zero, training starts from the unmodified model."),
    ] = "zero"


@section
class MegatronConfig:
    """`policy.megatron_cfg`: Megatron-core models."""

    enabled: Annotated[bool, doc("Use this backend. Exactly one of dtensor_cfg and megatron_cfg is enabled.")] = False
    transformer_impl: Annotated[
        Literal["transformer_engine", "local"],
        doc(
            "Layers of Transformer Engine or of megatron-core. The latter run without Transformer Engine and "
            "without a GPU, but cannot pack sequences, split them over devices or offload activations."
        ),
    ] = "transformer_engine"
    tensor_model_parallel_size: Annotated[int, doc("Devices that each layer is sharded over.", ge=1)] = 1
    pipeline_model_parallel_size: Annotated[int, doc("Pipeline stages: devices that share the layers.", ge=1)] = 1
    num_layers_in_first_pipeline_stage: Annotated[
        int | None, doc("Layers in the first stage; null divides evenly.", ge=1)
    ] = None
    num_layers_in_last_pipeline_stage: Annotated[
        int | None, doc("Layers in the last stage; null divides evenly.", ge=1)
    ] = None
    context_parallel_size: Annotated[int, doc("Devices that each sequence is split over.", ge=1)] = 1
    expert_model_parallel_size: Annotated[int, doc("Devices that the experts are distributed over.", ge=1)] = 1
    expert_tensor_parallel_size: Annotated[int, doc("Devices that each expert is sharded over.", ge=1)] = 1
    pipeline_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], doc("Type of the tensors that stages send to each other.")
    ] = value_of("${policy.precision}")
    sequence_parallel: Annotated[bool, doc("Shard norms and residuals by sequence; needs tensor parallelism.")] = False
    activation_checkpointing: Annotated[
        bool, doc("Recompute activations in backward passes instead of keeping them.")
    ] = False
    recompute_granularity: Annotated[
        Literal["full", "selective"], doc("What to recompute: whole layers or only `recompute_modules`.")
    ] = "full"
    recompute_modules: Annotated[
        tuple[str, ...] | None, doc("Modules to recompute with `selective`, such as `[mlp]`; null for `[core_attn]`.")
    ] = None
    fine_grained_activation_offloading: Annotated[
        bool, doc("Offload the activations of `offload_modules` to the host between the forward and the backward pass.")
    ] = False
    offload_modules: Annotated[
        tuple[str, ...] | None,
        doc(
            "Modules whose inputs are offloaded: qkv_linear, core_attn, attn_proj (needs core_attn) and, in "
            "mixture-of-experts models, mlp_norm, expert_fc1 and moe_act. Pays with long rows (docs/guides/memory.md)."
        ),
    ] = None
    min_offloaded_tensor_size: Annotated[int, doc("Tensors with fewer elements (not bytes) stay on the GPU.", ge=0)] = (
        1048576
    )
    activation_offload_fraction: Annotated[
        float,
        doc("Fraction of the layers' modules, counted from the first, whose activations are offloaded.", gt=0, le=1),
    ] = 1.0
    activation_offload_host_limit_gib: Annotated[
        float,
        doc(
            "Maximum pinned host memory in GiB that one worker keeps for activations between passes; buffers not used "
            "recently are released to stay below it. A pass that needs more at once allocates more, with a warning.",
            gt=0,
        ),
    ] = 64.0
    cuda_graph_impl: Annotated[
        Literal["none", "local", "transformer_engine", "full_iteration"],
        doc("CUDA graphs for the training step. Only none is supported."),
    ] = "none"
    clear_memory_caches_before_refit: Annotated[
        bool,
        doc(
            "Before each refit, free the rotary embeddings, the tensors of mixture-of-experts dispatchers and "
            "Transformer Engine's workspaces. The next pass creates them again."
        ),
    ] = True
    empty_unused_memory_level: Annotated[
        int,
        doc(
            "When to release cached GPU memory: 0 only when the phase changes; 1 also after every optimizer step; 2 "
            "also after each micro-batch.",
            ge=0,
            le=2,
        ),
    ] = 0
    freeze_moe_router: Annotated[bool, doc("Freeze the routers of mixture-of-experts models.")] = True
    moe_router_load_balancing_type: Annotated[
        Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"],
        doc(
            "Auxiliary loss that balances tokens over experts: none, per micro-batch (`aux_loss`), per sequence "
            "(`seq_aux_loss`, padded batches only), or over all micro-batches of the step so far (`global_aux_loss`). "
            "For RL use none: this loss adds a gradient that does not come from rewards."
        ),
    ] = "none"
    moe_aux_loss_coeff: Annotated[
        float, doc("Coefficient of that loss, which is a mean over the tokens of a step without padding.", ge=0)
    ] = 0.001
    moe_router_bias_update_rate: Annotated[
        float,
        doc(
            "Step size of the experts' biases in models that have them (DeepSeek-V3, GLM-4.5). After each step, the "
            "bias of an expert rises if it got fewer tokens than the mean, and falls if it got more. 0 leaves it "
            "unchanged.",
            ge=0,
        ),
    ] = 0.0
    moe_router_dtype: Annotated[
        Literal["fp32", "fp64"] | None, doc("Type of the router's computations; null for the model's type.")
    ] = "fp64"
    moe_permute_fusion: Annotated[bool, doc("Use fused kernels to sort tokens by expert.")] = True
    moe_token_dispatcher_type: Annotated[
        Literal["allgather", "alltoall", "flex"], doc("How tokens are sent to their experts.")
    ] = "alltoall"
    apply_rope_fusion: Annotated[
        bool,
        doc("Use a fused kernel for rotary embeddings; false for YaRN, since the kernel omits its attention factor."),
    ] = True
    bias_activation_fusion: Annotated[bool, doc("Use a fused kernel for bias and activation if there is one.")] = True
    defer_fp32_logits: Annotated[
        bool, doc("Cast logits to float32 in chunks, to save memory; needs `policy.logprob_chunk_size`.")
    ] = False
    env_vars: Annotated[dict[str, str] | None, doc("Environment variables of the policy workers.")] = None
    fp8_cfg: Annotated[MegatronFp8Config, doc("8-bit matrix products.")]
    peft: Annotated[MegatronLoraConfig, doc("Low-rank adapters (LoRA).")]
    optimizer: Annotated[MegatronOptimizerConfig, doc("The optimizer.")]
    scheduler: Annotated[MegatronSchedulerConfig, doc("The learning-rate schedule.")]
    distributed_data_parallel_config: Annotated[MegatronDdpConfig, doc("Gradient reduction.")]

    # What `BackendConfig` describes, like the properties below.
    section = "megatron_cfg"
    streaming_section = "policy.megatron_cfg.optimizer"
    activation_key = "policy.megatron_cfg.fine_grained_activation_offloading"
    streams_parameters = False  # they lie in few large buffers

    @property
    def streamed_share(self) -> float:
        """The optimizer's."""
        return self.optimizer.streamed_share

    @property
    def streams_in_parts(self) -> bool:
        """With a chunk size."""
        return self.streamed_share > 0 and self.optimizer.offload_optimizer_states_chunk_mib is not None

    @property
    def keeps_optimizer_on_host(self) -> bool:
        """With a fraction of 1; otherwise the part on the device moves like any other optimizer."""
        return self.optimizer.optimizer_cpu_offload and self.optimizer.optimizer_offload_fraction >= 1.0

    @property
    def model_parallel(self) -> ModelParallel:
        """Ranks of the dense layers."""
        return ModelParallel(
            self.tensor_model_parallel_size, self.context_parallel_size, self.pipeline_model_parallel_size
        )

    def layers_of_stages(self, num_layers: int) -> tuple[int, ...]:
        """Divide a model's layers over the pipeline stages; a rule refuses numbers that do not divide."""
        stages = self.pipeline_model_parallel_size
        ends = {0: self.num_layers_in_first_pipeline_stage, stages - 1: self.num_layers_in_last_pipeline_stage}
        given = {stage: num for stage, num in ends.items() if num is not None and stages > 1}
        each = (num_layers - sum(given.values())) // max(1, stages - len(given))
        return tuple(given.get(stage, each) for stage in range(stages))

    @property
    def worker_env_vars(self) -> Mapping[str, str]:
        """Return the variables of `env_vars`, and one that activation offloading needs."""
        env_vars = dict(self.env_vars or {})
        if self.fine_grained_activation_offloading:
            # Otherwise Transformer Engine 2.10 and later offloads weights too. A rule refuses other values.
            env_vars[OFFLOAD_VARIABLE] = "1"
        return env_vars

    def without_streaming(self) -> Self:
        """Copy the section with `optimizer.offload_optimizer_states` false."""
        return replace(self, optimizer=replace(self.optimizer, offload_optimizer_states=False))
