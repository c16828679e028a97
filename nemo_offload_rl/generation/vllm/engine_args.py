"""From our settings to the arguments of `vllm.LLM` and `vllm.AsyncEngineArgs`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.models.rope import for_engine

_PACKAGE = "nemo_offload_rl.generation.vllm"
_CPU_BATCH_TOKENS = 4096  # vLLM's own for CPUs


def engine_args(settings: VllmSettings, device_type: str) -> dict[str, Any]:
    """Keyword arguments; `settings.vllm_kwargs` wins over all of them, where rules let one through.

    `logprobs_mode` is fixed: the logprobs of a response are those that drew it (temperature, top-k, top-p), which
    vLLM's default (`raw_logprobs`) are not.

    Raises:
        ConfigError: The model folder or, on CPU, the size of the KV cache is missing.
    """
    model = Path(settings.model_name)
    if (model.is_absolute() or settings.model_name.startswith(".")) and not (model / "config.json").is_file():
        raise ConfigError(
            f"policy.model_name={settings.model_name} has no config.json; name a Hugging Face model folder"
        )
    arguments: dict[str, Any] = {
        "model": settings.model_name,
        "hf_overrides": partial(as_the_policy_reads_it, overrides=dict(settings.hf_config_overrides)),
        "seed": settings.seed,
        "dtype": settings.precision,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "max_model_len": settings.max_model_len,
        "enforce_eager": settings.enforce_eager,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": f"{_PACKAGE}.worker_extension.RefitExtension",
    }
    if settings.endpoint is not None:
        arguments["tokenizer"] = settings.endpoint.tokenizer.name
    if settings.tensor_parallel_size > 1:
        # Processes of this one. Inside a placement group vLLM would start Ray actors of its own, for which the policy
        # workers of these GPUs leave no room.
        arguments["distributed_executor_backend"] = "mp"
    if settings.kv_cache_memory_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(settings.kv_cache_memory_gib * 2**30)
    if device_type == "cpu":
        if settings.kv_cache_memory_gib is None:
            raise ConfigError(
                "policy.generation.vllm_cfg.kv_cache_memory_gib is null, but on CPU vLLM would take "
                "gpu_memory_utilization of the machine's memory; give a size, for example 0.25"
            )
        arguments["enforce_eager"] = True  # TorchDynamo is off (`vllm_cpu_env`), and a CPU has no graphs
        arguments["worker_cls"] = f"{_PACKAGE}.cpu_worker.RefitCpuWorker"
        if settings.per_request_seeds:
            # vLLM 0.25.1 rewinds a request's generator where its prompt is computed in chunks; those of a CPU cannot.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(_CPU_BATCH_TOKENS, settings.max_model_len)
    else:
        arguments["enable_sleep_mode"] = settings.enable_sleep_mode
        # Others reformat the weights of experts once after loading, and a refit would bring them as they were.
        arguments["moe_backend"] = "triton"
    return {**arguments, **settings.vllm_kwargs}


def as_the_policy_reads_it(config: Any, overrides: Mapping[str, Any]) -> Any:
    """The model's config, changed so that the engine's model is the policy's.

    Args:
        config: Of transformers, as vLLM has read it; the same is returned.
        overrides: `policy.hf_config_overrides`.
    """
    config.update(overrides)
    if (rope := for_engine(config.to_dict())) is not None:
        config.rope_parameters = rope
    return config
