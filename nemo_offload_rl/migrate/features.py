"""Features of NeMo-RL that are not available here, by the keys that turn them on: data only, continued from `rules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.migrate.rules import OFF, Off, Rule


def _off(feature: str, *patterns: str, values: tuple[Any, ...] = OFF) -> dict[str, Rule]:
    return dict.fromkeys(patterns, Off(values, feature))


FEATURES: Mapping[str, Rule] = {
    # Another way to run.
    **_off("on-policy distillation", "on_policy_distillation", "on_policy_distillation.*"),
    **_off("generation backend {value}", "policy.generation.backend", values=("vllm",)),
    **_off("images, audio and video", "policy.is_vlm", "policy.tokenizer.video.*", "policy.tokenizer.audio.*"),
    **_off("SwanLab", "logger.swanlab_enabled"),
    # The algorithm.
    **_off(
        "penalties for tool calls, thinking and answers",
        "grpo.invalid_tool_call_advantage",
        "grpo.malformed_thinking_advantage",
        "reward_penalties.penalize_duplicated_reasoning",
        "reward_penalties.penalize_empty_final_answer",
        "reward_penalties.penalize_unwanted_tokens",
        "reward_penalties.penalize_malformed_think_tag",
    ),
    **_off("validation that begins late (val_start_at)", "grpo.val_start_at", values=(-1, 0)),
    **_off("early stop at a validation metric", "grpo.stop_at_validation_metric"),
    # The model and its training.
    **_off("draft models", "policy.draft.enabled"),
    **_off("router replay", "policy.router_replay.enabled"),
    **_off("settings of DTensor's expert parallelism", "policy.dtensor_cfg.moe_parallelizer.*", values=()),
    **_off("custom_parallel_plan", "policy.dtensor_cfg.custom_parallel_plan"),
    **_off("dropout before an adapter", "policy.dtensor_cfg.lora_cfg.dropout_position", values=("post",)),
    **_off("Automodel's models (automodel_kwargs)", "policy.dtensor_cfg.automodel_kwargs.*", values=()),
    **_off(
        "Automodel's models (automodel_kwargs)",
        "policy.dtensor_cfg.automodel_kwargs",
        values=({}, None),
    ),
    **_off(
        "Automodel's models (automodel_kwargs)",
        "policy.dtensor_cfg.automodel_kwargs.force_hf",
        "policy.dtensor_cfg.automodel_kwargs.use_liger_kernel",
        values=(True, False, None),
    ),
    **_off("Automodel's models (automodel_kwargs)", "policy.dtensor_cfg.automodel_kwargs.use_liger_kernel"),
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
    **_off("adapters of another type (lora_dtype)", "policy.megatron_cfg.peft.lora_dtype", values=(None, "None")),
    # The engine.
    **_off(
        "weights of the engine in {value}",
        "policy.generation.vllm_cfg.precision",
        values=("float32", "bfloat16", "float16"),
    ),
    **_off("engines by {value}", "policy.generation.vllm_cfg.distributed_executor_backend", values=(None, "mp")),
    **_off("an engine of pipeline stages", "generation.vllm_cfg.pipeline_parallel_size", values=(1,)),
    **_off("an expert-parallel engine", "generation.vllm_cfg.expert_parallel_size", values=(1,)),
    **_off("mxfp8 in the engine", "policy.generation.vllm_cfg.is_mx"),
    **_off("an engine of pipeline stages", "policy.generation.vllm_cfg.pipeline_parallel_size", values=(1,)),
    **_off("an expert-parallel engine", "policy.generation.vllm_cfg.expert_parallel_size", values=(1,)),
    **_off("an expert-parallel engine", "policy.generation.vllm_cfg.enable_expert_parallel"),
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
