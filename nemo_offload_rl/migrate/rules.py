"""What each key of a NeMo-RL file becomes: data only. NeMo-RL is read at commit 7ea279abf.

A pattern is a dotted key; `.*` at its end stands for everything below. The most exact pattern holds. What needs the
values of several keys is in `conversions.py`; a key that no rule names is an error, never dropped.
"""

from __future__ import annotations

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
        note: What is different.
        convert: From their number to ours.
    """

    to: str
    note: str = ""
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Ignored:
    """The key changes nothing that is trained; `reason` says why."""

    reason: str


@dataclass(frozen=True)
class Off:
    """The key is harmless at some values; at any other it turns a feature on that is not available here.

    Attributes:
        values: At which nothing is done.
        feature: What is missing otherwise; `{value}` stands for the value.
    """

    values: tuple[Any, ...]
    feature: str


type Rule = Same | Renamed | Ignored | Off

OFF = (False, None)


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
        "async_engine precision kv_cache_dtype tensor_parallel_size gpu_memory_utilization max_model_len enforce_eager",
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
        "async_engine kv_cache_dtype tensor_parallel_size gpu_memory_utilization max_model_len enforce_eager",
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
    "policy.generation.vllm_cfg.enable_prefix_caching": Renamed("policy.generation.vllm_kwargs.enable_prefix_caching"),
    "policy.generation.vllm_cfg.expose_http_server": Renamed(
        "policy.generation.vllm_cfg.expose_http_server", "on 127.0.0.1, theirs on every address"
    ),
}

_OTHER_ENGINE = "settings of an engine that is not in use"
_NOT_READ = "NeMo-RL does not read it either, where the feature is off"
_TRANSPORT = "how rows and weights travel, not what they are"
_MEMORY = "changes memory or speed only"
_WATCHING = "measures the run and changes nothing in it; residency/* and memory/* are logged here"

IGNORED: Mapping[str, Rule] = {
    **_ignored(
        "settings of a feature that is off",
        "policy.draft.*",
        "policy.router_replay.*",
        "reward_penalties.token_ids",
        "reward_penalties.token_ids.*",
    ),
    **_ignored(
        _OTHER_ENGINE,
        "policy.generation.mcore_generation_config.*",
        "policy.generation.sglang_cfg.*",
        "policy.generation.trtllm_cfg.*",
        "policy.generation.trtllm_kwargs.*",
        "policy.generation.dynamo_cfg.*",
        "policy.generation_batch_size",
    ),
    **_ignored(
        _TRANSPORT,
        "data_plane.*",
        "policy.generation.refit_cfg.*",
        "policy.generation.real_quant_export_cpu_offload",
        "policy.generation.port_range_low",
        "policy.generation.port_range_high",
        "policy.generation.vllm_cfg.http_refit_api_key_env_var",
        "policy.generation.vllm_cfg.http_refit_server_port",
        "policy.generation.vllm_cfg.zmq_refit_server_port",
        "policy.generation.refit_transport",
        "policy.megatron_cfg.moe_enable_deepep",
        "policy.megatron_cfg.moe_flex_dispatcher_backend",
        "policy.megatron_cfg.moe_hybridep_num_sms",
        "cluster.segment_size",
        "data.num_workers",
        "policy.tokenizer.use_fastokens",
    ),
    **_ignored(
        _WATCHING,
        "logger.monitor_gpus",
        "logger.gpu_monitoring.*",
        "logger.swanlab.*",
        "logger.tensorboard",
        "logger.tensorboard.*",
        "logger.wandb.log_nemo_gym_full_result_tables",
        "policy.generation.vllm_cfg.use_tqdm",
        "policy.generation.vllm_cfg.enable_vllm_metrics_logger",
        "policy.generation.vllm_cfg.vllm_metrics_logger_interval",
        "policy.megatron_cfg.moe_per_layer_logging",
        "policy.megatron_cfg.track_moe_metrics",
        "grpo.debug_payload_metrics",
    ),
    **_ignored("copies of small tensors share one page-locked buffer here", "policy.use_coalesced_optimizer_offload"),
    **_ignored(
        _MEMORY,
        "grpo.calculate_advantages_on_gpu",
        "grpo.deduplicate_multimodal_data",
        "policy.sequence_packing.fuse_loss",
        "policy.dtensor_cfg.clear_cache_every_n_steps",
        "policy.dtensor_cfg.lora_cfg.use_triton",
        "policy.dtensor_cfg.defer_fsdp_grad_sync",
        "policy.megatron_cfg.attention_backend",
        "policy.megatron_cfg.use_gloo_process_groups",
        "policy.megatron_cfg.gradient_accumulation_fusion",
        "policy.megatron_cfg.moe_grouped_gemm",
        "policy.megatron_cfg.moe_shared_expert_overlap",
        "policy.megatron_cfg.force_reconvert_from_hf",
        "policy.megatron_cfg.peft.a2a_experimental",
        "policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy",
        "policy.megatron_cfg.distributed_data_parallel_config.average_in_collective",
        "policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update",
        "policy.generation.vllm_cfg.skip_tokenizer_init",
    ),
    **_ignored(
        "micro-batches add up to the same gradient in whatever order they are packed",
        "policy.sequence_packing.algorithm",
        "policy.sequence_packing.microbatch_order",
    ),
    **_ignored(
        _NOT_READ,
        "policy.megatron_cfg.fused_linear_logprobs_chunk_size",
        "policy.megatron_cfg.cuda_graph_modules",
        "policy.megatron_cfg.cuda_graph_warmup_steps",
        "policy.megatron_cfg.mtp_use_repeated_layer",
        "policy.megatron_cfg.mtp_detach_heads",
        "policy.megatron_cfg.mtp_loss_scaling_factor",
        "policy.generation.vllm_cfg.use_deep_gemm",
        "policy.generation.vllm_cfg.num_last_layers_in_bf16",
        "policy.generation.vllm_cfg.num_first_layers_in_bf16",
        "policy.generation.vllm_cfg.quantization_ignored_layer_kws",
        "policy.megatron_cfg.converter_type",
        "grpo.stop_at_validation_threshold",
        "grpo.reward_penalties.*",
    ),
    **_ignored("one implementation is here for both", "policy.dtensor_cfg._v2"),
    **_ignored(
        "the reference is computed where its KL has a weight, there and here",
        "grpo.skip_reference_policy_logprobs_calculation",
    ),
    **_ignored(
        "a checkpoint is continued with its schedule", "policy.megatron_cfg.scheduler.override_opt_param_scheduler"
    ),
    **_ignored(
        "checkpoints have one format here; save_consolidated writes safetensors",
        "checkpointing.model_save_format",
        "policy.megatron_cfg.checkpoint.ckpt_assume_constant_structure",
    ),
    **_ignored("NeMo-RL reads it in PPO alone", "loss_fn.positive_example_nll_weight"),
    **_ignored("is 1 in any case where no data set names another", "data.num_prompts_per_dataloader"),
}
