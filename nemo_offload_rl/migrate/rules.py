"""Rules from the keys of a NeMo-RL file (commit 7ea279abf) to ours, as data.

A pattern is a dotted key; `.*` at its end stands for all keys below. The longest pattern that matches applies.
Conversions that need several keys are functions (`draft.converts`). A key without a rule is an error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Same:
    """The key has the same place, name and meaning here."""


@dataclass(frozen=True)
class Renamed:
    """The key has another place, name or unit.

    Attributes:
        to: Its name here.
        note: The difference.
        convert: From their number to ours.
    """

    to: str
    note: str = ""
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Ignored:
    """The key does not change training; `reason` says why."""

    reason: str


@dataclass(frozen=True)
class Off:
    """The key is harmless with some values; with any other it turns on a feature that is not available here.

    Attributes:
        values: Harmless values.
        feature: The missing feature; `{value}` stands for the value.
    """

    values: tuple[Any, ...]
    feature: str


type Rule = Same | Renamed | Ignored | Off

OFF = (False, None)


def _in(section: str, names: str) -> tuple[str, ...]:
    """Patterns of keys of one section."""
    return tuple(f"{section}.{name}" for name in names.split())


def _same(section: str, names: str) -> dict[str, Rule]:
    return {f"{section}.{name}": Same() for name in names.split()}


def _ignored(reason: str, *patterns: str) -> dict[str, Rule]:
    return dict.fromkeys(patterns, Ignored(reason))


def _off(feature: str, *patterns: str, values: tuple[Any, ...] = OFF) -> dict[str, Rule]:
    return dict.fromkeys(patterns, Off(values, feature))


_BATCHING = "enabled train_mb_tokens logprob_mb_tokens sequence_length_round"
_LORA = "enabled target_modules exclude_modules dim alpha dropout"

SAME: Mapping[str, Rule] = {
    **_same(
        "grpo",
        "num_prompts_per_step num_generations_per_prompt max_rollout_turns max_num_epochs max_num_steps val_at_start "
        "val_at_end val_batch_size val_num_generations_per_prompt overlong_filtering use_dynamic_sampling "
        "dynamic_sampling_max_gen_batches batch_multiplier seed advantage_clip_low advantage_clip_high "
        "seq_logprob_error_threshold",
    ),
    **_same("grpo.adv_estimator", "minus_baseline"),
    **_same("grpo.reward_scaling", "enabled source_min source_max target_min target_max"),
    **_same(
        "grpo.reward_shaping",
        "enabled overlong_buffer_length overlong_buffer_penalty max_response_length stop_properly_penalty_coef",
    ),
    **_same(
        "loss_fn",
        "reference_policy_kl_penalty kl_input_clamp_value kl_output_clamp_value ratio_clip_min ratio_clip_max "
        "ratio_clip_c use_on_policy_kl_approximation use_importance_sampling_correction "
        "sequence_level_importance_ratios token_level_loss force_on_policy_ratio use_cispo disable_ppo_ratio",
    ),
    **_same("sft", "max_num_epochs max_num_steps val_global_batch_size val_micro_batch_size val_at_start val_at_end"),
    **_same("sft", "seed only_unmask_final"),
    **_same("dpo", "max_num_epochs max_num_steps val_global_batch_size val_micro_batch_size val_at_start val_at_end"),
    **_same(
        "dpo",
        "seed reference_policy_kl_penalty preference_loss_weight preference_average_log_probs sft_loss_weight "
        "sft_average_log_probs",
    ),
    **_same(
        "distillation",
        "num_prompts_per_step num_generations_per_prompt max_rollout_turns max_num_epochs max_num_steps val_at_start "
        "val_at_end val_batch_size topk_logits_k seed",
    ),
    **_same("eval", "metric num_tests_per_prompt k_value seed save_path"),
    **_same("generation", "backend model_name max_new_tokens temperature top_p stop_token_ids stop_strings"),
    **_same(
        "generation.vllm_cfg",
        "async_engine precision kv_cache_dtype tensor_parallel_size expert_parallel_size gpu_memory_utilization "
        "max_model_len enforce_eager",
    ),
    **_same("tokenizer", "name chat_template_kwargs chat_template_kwargs.*"),
    **_same("loss_fn", "kl_type mixed_kl_weight zero_outside_topk"),
    **_same(
        "policy",
        "model_name hf_config_overrides hf_config_overrides.* train_global_batch_size train_micro_batch_size "
        "logprob_batch_size logprob_chunk_size max_total_sequence_length precision "
        "max_grad_norm use_pinned_optimizer_offload offload_optimizer_states_for_logprob",
    ),
    **_same("policy.tokenizer", "name chat_template_kwargs chat_template_kwargs.*"),
    **_same("policy.router_replay", "enabled"),
    **_same("policy.dynamic_batching", _BATCHING),
    **_same("policy.sequence_packing", _BATCHING),
    **_same("policy.dtensor_cfg", "enabled tensor_parallel_size expert_parallel_size activation_checkpointing"),
    **_same("policy.dtensor_cfg.lora_cfg", f"{_LORA} match_all_linear lora_A_init"),
    **_same(
        "policy.megatron_cfg",
        "enabled tensor_model_parallel_size pipeline_model_parallel_size num_layers_in_first_pipeline_stage "
        "num_layers_in_last_pipeline_stage context_parallel_size expert_model_parallel_size "
        "expert_tensor_parallel_size pipeline_dtype sequence_parallel activation_checkpointing recompute_granularity "
        "recompute_modules fine_grained_activation_offloading offload_modules clear_memory_caches_before_refit "
        "empty_unused_memory_level freeze_moe_router moe_router_dtype moe_permute_fusion moe_token_dispatcher_type "
        "apply_rope_fusion bias_activation_fusion env_vars env_vars.*",
    ),
    **_same("policy.megatron_cfg.fp8_cfg", "enabled fp8 fp8_recipe force_clear_fp8_caches"),
    **_same("policy.megatron_cfg.peft", f"{_LORA} dropout_position lora_A_init_method lora_B_init_method"),
    **_same(
        "policy.megatron_cfg.optimizer",
        "optimizer lr min_lr weight_decay bf16 fp16 params_dtype adam_beta1 adam_beta2 adam_eps sgd_momentum "
        "use_distributed_optimizer use_precision_aware_optimizer clip_grad optimizer_cpu_offload "
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d",
    ),
    **_same(
        "policy.megatron_cfg.scheduler",
        "start_weight_decay end_weight_decay weight_decay_incr_style lr_decay_style lr_warmup_init",
    ),
    **_same(
        "policy.megatron_cfg.distributed_data_parallel_config",
        "grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather",
    ),
    **_same("policy.generation", "max_new_tokens temperature val_temperature stop_token_ids stop_strings"),
    **_same(
        "policy.generation.vllm_cfg",
        "async_engine tensor_parallel_size gpu_memory_utilization max_model_len enforce_eager",
    ),
    **_same("policy.generation.vllm_cfg", "http_server_serving_chat_kwargs"),
    **_same(
        "policy.generation.vllm_cfg.http_server_serving_chat_kwargs", "enable_auto_tools tool_parser reasoning_parser"
    ),
    **_same("policy.generation.colocated", "enabled"),
    **_same("data", "add_eos shuffle"),
    **_same("logger", "log_dir num_val_samples_to_print tensorboard_enabled wandb_enabled mlflow_enabled"),
    **_same("logger.wandb", "project name entity group tags mode"),
    **_same("logger.mlflow", "experiment_name run_name tracking_uri"),
    **_same("cluster", "master_port_range_low master_port_range_high"),
    **_same(
        "checkpointing",
        "enabled checkpoint_dir higher_is_better keep_top_k save_period save_optimizer save_consolidated "
        "checkpoint_must_save_by",
    ),
}

RENAMED: Mapping[str, Rule] = {
    "policy.offload_optimizer_for_logprob": Renamed("policy.offload_optimizer_states_for_logprob"),
    "policy.megatron_cfg.checkpoint.async_save": Renamed("checkpointing.async_save"),
    "policy.refit_buffer_size_gb": Renamed(
        "policy.refit_buffer_size_gib", "GiB of each of the two buffers, not of both together", lambda size: size / 2
    ),
    "policy.generation.vllm_cfg.kv_cache_dtype": Renamed(
        "policy.generation.vllm_cfg.kv_cache_dtype", "scales of an 8-bit cache are 1; NeMo-RL calibrates them"
    ),
    "policy.generation.vllm_cfg.enable_prefix_caching": Renamed("policy.generation.vllm_kwargs.enable_prefix_caching"),
    "policy.generation.vllm_cfg.expose_http_server": Renamed(
        "policy.generation.vllm_cfg.expose_http_server", "on 127.0.0.1; NeMo-RL's listens on every address"
    ),
}

_OTHER_ENGINE = "settings of an engine that is not in use"
_NOT_READ = "not read by NeMo-RL either while the feature is off"
_TRANSPORT = "a setting of transport, which changes no result"
_MEMORY = "changes memory or speed only"
_WATCHING = "only measures the run; residency/* and memory/* are logged here"

IGNORED: Mapping[str, Rule] = {
    **_ignored(
        "settings of a feature that is off",
        *_in("policy", "draft.*"),
        *_in("reward_penalties", "token_ids token_ids.*"),
    ),
    **_ignored(
        _OTHER_ENGINE,
        *_in("policy.generation", "mcore_generation_config.* sglang_cfg.* trtllm_cfg.* trtllm_kwargs.* dynamo_cfg.*"),
        "policy.generation_batch_size",
    ),
    **_ignored(
        _TRANSPORT,
        "data_plane.*",
        *_in(
            "policy.generation",
            "refit_cfg.* real_quant_export_cpu_offload port_range_low port_range_high refit_transport",
        ),
        *_in("policy.generation.vllm_cfg", "http_refit_api_key_env_var http_refit_server_port zmq_refit_server_port"),
        *_in("policy.megatron_cfg", "moe_enable_deepep moe_flex_dispatcher_backend moe_hybridep_num_sms"),
        "cluster.segment_size",
        "data.num_workers",
        "policy.tokenizer.use_fastokens",
    ),
    **_ignored(
        _WATCHING,
        *_in(
            "logger",
            "monitor_gpus gpu_monitoring.* swanlab.* tensorboard tensorboard.* wandb.log_nemo_gym_full_result_tables",
        ),
        *_in("policy.generation.vllm_cfg", "use_tqdm enable_vllm_metrics_logger vllm_metrics_logger_interval"),
        *_in("policy.megatron_cfg", "moe_per_layer_logging track_moe_metrics"),
        "grpo.debug_payload_metrics",
    ),
    **_ignored(
        "with use_pinned_optimizer_offload all offloaded states share one pinned buffer here",
        "policy.use_coalesced_optimizer_offload",
    ),
    **_ignored(
        _MEMORY,
        *_in("grpo", "calculate_advantages_on_gpu deduplicate_multimodal_data"),
        "policy.sequence_packing.fuse_loss",
        *_in("policy.dtensor_cfg", "clear_cache_every_n_steps lora_cfg.use_triton defer_fsdp_grad_sync"),
        *_in("policy.dtensor_cfg.moe_parallelizer", "ignore_router_for_ac reshard_after_forward wrap_outer_model"),
        *_in(
            "policy.megatron_cfg",
            "attention_backend use_gloo_process_groups gradient_accumulation_fusion "
            "moe_grouped_gemm moe_shared_expert_overlap force_reconvert_from_hf "
            "peft.a2a_experimental distributed_data_parallel_config.data_parallel_sharding_strategy "
            "distributed_data_parallel_config.average_in_collective",
        ),
        *_in("policy.generation.vllm_cfg", "reset_encoder_cache_after_weight_update skip_tokenizer_init"),
    ),
    **_ignored(
        "towers for images and sound are not built, since rows are text",
        *_in(
            "policy.dtensor_cfg.automodel_kwargs.freeze_config",
            "freeze_vision_tower freeze_audio_tower",
        ),
        *_in("policy.megatron_cfg.freeze_config", "freeze_vision_model freeze_vision_projection"),
    ),
    **_ignored(
        "chooses kernels, which change rounding only",
        *_in("policy.dtensor_cfg.automodel_kwargs", "attn_implementation use_liger_kernel use_sdpa_patching"),
    ),
    **_ignored(
        "the gradient does not depend on how rows are packed into micro-batches",
        "policy.sequence_packing.algorithm",
        "policy.sequence_packing.microbatch_order",
    ),
    **_ignored(
        _NOT_READ,
        *_in(
            "policy.megatron_cfg",
            "fused_linear_logprobs_chunk_size cuda_graph_modules cuda_graph_warmup_steps "
            "mtp_use_repeated_layer mtp_detach_heads mtp_loss_scaling_factor converter_type",
        ),
        *_in("grpo", "stop_at_validation_threshold reward_penalties.*"),
    ),
    **_ignored("nothing in NeMo-RL reads it", "policy.activation_checkpointing_enabled"),
    **_ignored(
        "expert_parallel_size decides, in NeMo-RL too",
        "policy.generation.vllm_cfg.enable_expert_parallel",
        "generation.vllm_cfg.enable_expert_parallel",
    ),
    **_ignored("there is one implementation here", "policy.dtensor_cfg._v2"),
    **_ignored(
        "reference logprobs are computed if and only if their KL has a weight, as in NeMo-RL",
        "grpo.skip_reference_policy_logprobs_calculation",
    ),
    **_ignored(
        "a resumed run continues the schedule of its checkpoint",
        "policy.megatron_cfg.scheduler.override_opt_param_scheduler",
    ),
    **_ignored(
        "checkpoints have one format here; save_consolidated writes safetensors",
        "checkpointing.model_save_format",
        "policy.megatron_cfg.checkpoint.ckpt_assume_constant_structure",
    ),
    **_ignored("NeMo-RL reads it in PPO only", "loss_fn.positive_example_nll_weight"),
    **_ignored("is 1 unless a data set says otherwise", "data.num_prompts_per_dataloader"),
}
_FREEZES = ("policy.dtensor_cfg.automodel_kwargs.freeze_config", "policy.megatron_cfg.freeze_config")
FEATURES: Mapping[str, Rule] = {
    # Another way to run.
    **_off("on-policy distillation", "on_policy_distillation", "on_policy_distillation.*"),
    **_off("generation backend {value}", "policy.generation.backend", values=("vllm",)),
    **_off("images, audio and video", "policy.is_vlm", "policy.tokenizer.video.*", "policy.tokenizer.audio.*"),
    **_off("SwanLab", "logger.swanlab_enabled"),
    # The algorithm.
    **_off(
        "penalties for tool calls, thinking and answers",
        *_in("grpo", "invalid_tool_call_advantage malformed_thinking_advantage"),
        *_in(
            "reward_penalties",
            "penalize_duplicated_reasoning penalize_empty_final_answer penalize_unwanted_tokens "
            "penalize_malformed_think_tag",
        ),
    ),
    **_off("validation that begins late", "grpo.val_start_at", values=(-1, 0)),
    **_off("early stop at a validation metric", "grpo.stop_at_validation_metric"),
    # The model and its training.
    **_off("draft models", "policy.draft.enabled"),
    **_off("settings of DTensor's expert parallelism", "policy.dtensor_cfg.moe_parallelizer.*", values=()),
    **_off("custom_parallel_plan", "policy.dtensor_cfg.custom_parallel_plan"),
    **_off("dropout before an adapter", "policy.dtensor_cfg.lora_cfg.dropout_position", values=("post",)),
    **_off("Automodel's models", "policy.dtensor_cfg.automodel_kwargs.*", values=()),
    **_off(
        "Automodel's models",
        "policy.dtensor_cfg.automodel_kwargs",
        values=({}, None),
    ),
    **_off("Automodel's models", "policy.dtensor_cfg.automodel_kwargs.force_hf", values=(True, False, None)),
    **_off("frozen parts of the model", "policy.dtensor_cfg.automodel_kwargs.freeze_config.*", values=()),
    **_off("frozen parts of the model", *(f"{_FREEZE}.freeze_language_model" for _FREEZE in _FREEZES)),
    **_off("a base model that stays in 8 or 4 bits", "policy.dequantize_base_checkpoint", values=(True,)),
    **_off("overrides of Megatron's model", "policy.megatron_cfg.model_overrides.*", values=()),
    **_off("overrides of Megatron's model", "policy.megatron_cfg.model_overrides", values=({}, None)),
    **_off(
        "Megatron layers by transformer_impl {value}",
        "policy.megatron_cfg.transformer_impl",
        values=("transformer_engine",),
    ),
    **_off("frozen parts of the model", "policy.megatron_cfg.freeze_config.*", values=()),
    **_off("CUDA graphs in training", "policy.megatron_cfg.cuda_graph_impl", values=("none", None)),
    **_off("multi-token prediction", "policy.megatron_cfg.mtp_num_layers", values=(0, None)),
    **_off("a fused squared ReLU", "policy.megatron_cfg.use_fused_weighted_squared_relu"),
    **_off("Megatron's own FSDP", "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp"),
    **_off("parameters in 8 bits", "policy.megatron_cfg.fp8_cfg.fp8_param"),
    **_off("adapters of another type", "policy.megatron_cfg.peft.lora_dtype", values=(None, "None")),
    # The engine.
    **_off(
        "weights of the engine in {value}",
        "policy.generation.vllm_cfg.precision",
        values=("float32", "bfloat16", "float16", "fp8"),
    ),
    **_off("engines by {value}", "policy.generation.vllm_cfg.distributed_executor_backend", values=(None, "mp")),
    **_off("an engine of pipeline stages", "generation.vllm_cfg.pipeline_parallel_size", values=(1,)),
    **_off("mxfp8 in the engine", "policy.generation.vllm_cfg.is_mx"),
    **_off(
        "scales of 8-bit weights or inputs that are powers of two",
        *_in("policy.generation.vllm_cfg", "pow2_weight_scaling_factors pow2_activation_scaling_factors"),
    ),
    **_off("an engine of pipeline stages", "policy.generation.vllm_cfg.pipeline_parallel_size", values=(1,)),
    **_off(
        "the engine's logprobs before temperature (raw_logprobs)",
        "policy.generation.vllm_cfg.logprobs_mode",
        values=("processed_logprobs",),
    ),
    **_off("an argument of the HTTP server", "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.*", values=()),
    **_off("parsers of the user", "policy.generation.vllm_cfg.reasoning_parser_plugin"),
    **_off("bad_words", "policy.generation.bad_words", values=([], None)),
    **_off("several data loaders", "data.use_multiple_dataloader"),
    **_off("a data loader of the user", "data.custom_dataloader"),
}
ABSENT: Mapping[str, Any] = {
    "grpo.val_period": 10,
    "grpo.max_val_samples": 256,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.normalize_rewards": True,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.reference_policy_kl_type": "k3",
    "sft.max_num_steps": 60,
    "sft.val_period": 10,
    "sft.val_at_end": False,
    "dpo.val_period": 25,
    "dpo.val_at_end": False,
}
"""NeMo-RL's defaults of keys that its file may leave out, if ours differ or a conversion reads them."""

_WEIGHT_DECAY = "policy.megatron_cfg.optimizer.weight_decay"
FOLLOWS: Mapping[str, tuple[str, str]] = {
    "policy.tokenizer.name": ("policy.model_name", "the model's"),
    "policy.logprob_batch_size": ("policy.train_micro_batch_size", "that of training"),
    "policy.dynamic_batching.logprob_mb_tokens": ("policy.dynamic_batching.train_mb_tokens", "those of training"),
    "policy.sequence_packing.logprob_mb_tokens": ("policy.sequence_packing.train_mb_tokens", "those of training"),
    "policy.generation.val_temperature": ("policy.generation.temperature", "that of rollouts"),
    "policy.generation.val_top_p": ("policy.generation.top_p", "that of rollouts"),
    "policy.generation.val_top_k": ("policy.generation.top_k", "that of rollouts"),
    "policy.generation.vllm_cfg.max_model_len": ("policy.max_total_sequence_length", "the policy's longest sequence"),
    "policy.generation.vllm_cfg.precision": ("policy.precision", "the policy's"),
    "policy.megatron_cfg.pipeline_dtype": ("policy.precision", "the policy's"),
    "policy.megatron_cfg.optimizer.clip_grad": ("policy.max_grad_norm", "the policy's limit"),
    "policy.megatron_cfg.scheduler.start_weight_decay": (_WEIGHT_DECAY, "the optimizer's"),
    "policy.megatron_cfg.scheduler.end_weight_decay": (_WEIGHT_DECAY, "the optimizer's"),
    "dpo.sft_average_log_probs": ("dpo.preference_average_log_probs", "that of the preference term"),
}
"""Our key, the key of ours whose value it takes, and the reason."""


FILLS: Mapping[str, tuple[Any, str]] = {
    "grpo.max_token_mult_prob_error": (None, "NeMo-RL has no such limit"),
    "distillation.max_token_mult_prob_error": (None, "NeMo-RL has no such limit"),
    "policy.sequence_packing.enabled": (False, "off in NeMo-RL if left out"),
    "policy.dynamic_batching.enabled": (False, "off in NeMo-RL if left out"),
    "policy.offload_optimizer_states_for_logprob": (False, "off in NeMo-RL if left out"),
    "policy.megatron_cfg.enabled": (False, "off in NeMo-RL if left out"),
    "policy.dtensor_cfg.enabled": (False, "off in NeMo-RL if left out"),
    "data.add_bos": (True, "NeMo-RL's default"),
    "data.add_eos": (True, "NeMo-RL's default"),
    "dpo.label_smoothing": (0.0, "NeMo-RL has none"),
    "dpo.precompute_reference_logprobs": (False, "NeMo-RL computes them in each step too"),
    "policy.optimizer.decay_norm_and_bias": (True, "NeMo-RL decays all parameters"),
    "logger.numbered_runs": (True, "exp_001, exp_002, ... in log_dir, as in NeMo-RL"),
    "checkpointing.async_save": (False, "off in NeMo-RL if left out"),
}
"""Our key, its value, and the reason."""
