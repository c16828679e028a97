"""Turns settings into the arguments and the environment of a vLLM engine."""

import logging
import os
import tempfile
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.generation.vllm.adapter_loading import lora_args
from nemo_offload_rl.generation.vllm.fp8_loading import METHOD, quantization
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.models.rope import for_engine, query_scaling_for_engine
from nemo_offload_rl.models.towers import PART_OF, language_config
from nemo_offload_rl.utils.hub import looking_up
from nemo_offload_rl.utils.sockets import short_folder

_LOG = logging.getLogger(__name__)
_PACKAGE = "nemo_offload_rl.generation.vllm"
_CPU_BATCH_TOKENS = 4096  # vLLM's default for CPUs
_EMPTY = "dummy_"  # vLLM asks with an empty config first, whose type begins so
_SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"

# vLLM warns that asynchronous scheduling may be off with a `scheduler_cls`; with ours it is on. Every process that
# reads the arguments would warn. A filter stays when vLLM configures its loggers, where a level would be lost.
logging.getLogger("vllm.config.scheduler").addFilter(lambda record: "custom scheduler class" not in str(record.msg))


def vllm_env(device_type: str, use_deep_gemm: bool | None = None) -> dict[str, str]:
    """Environment variables of a process with a `"cpu"` or `"cuda"` engine; they must be set before `vllm` is imported.

    `use_deep_gemm` is the key of that name, or None without 8-bit weights.

    Ray sets them when it starts the engine's actor (`env_vars`).
    """
    chosen = os.environ.get(_SOCKET_FOLDER) or tempfile.gettempdir()
    folder = short_folder(chosen, str(uuid.UUID(int=0)))  # socket paths may be too long in the chosen folder
    common = {
        **({} if folder == chosen else {_SOCKET_FOLDER: folder}),
        # Latent attention (DeepSeek-V3) computes whole keys and values. For its latent form vLLM would derive weights
        # after loading, which refits do not renew.
        "VLLM_MLA_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # `LLM` keeps its engine core in this process
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device_type == "cpu":
        return {
            **common,
            "TORCHDYNAMO_DISABLE": "1",  # `enforce_eager` still compiles the sampler with g++: LLM() 20 s, not 2 s
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" binds every engine to core 0
            "VLLM_CPU_SGL_KERNEL": "0",  # it packs weights after loading
            "OMP_NUM_THREADS": "1",  # a second thread gains 15 % on an idle machine, costs up to 20 times on a busy one
            "CUDA_VISIBLE_DEVICES": "",
        }
    return {
        **common,
        # FlashInfer's sampler cannot return logprobs of tokens sampled after truncation, so vLLM would not use it here.
        # Its import fails where it is not installed.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # DeepGEMM's scales that are powers of two would need other weights than those that a refit brings.
        **(
            {}
            if use_deep_gemm is None
            else {"VLLM_USE_DEEP_GEMM": str(int(use_deep_gemm)), "VLLM_USE_DEEP_GEMM_E8M0": "0"}
        ),
    }


def engine_env(settings: VllmSettings, device_type: str) -> dict[str, str]:
    """Return `vllm_env` of an engine with these settings."""
    return vllm_env(device_type, settings.use_deep_gemm if settings.is_quantized else None)


def engine_args(settings: VllmSettings, device_type: str) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` and `vllm.AsyncEngineArgs`; `settings.vllm_kwargs` overrides all of them.

    `logprobs_mode` is fixed: a response's logprobs must be those of its sampling distribution (temperature, top-k,
    top-p). vLLM's default, `raw_logprobs`, differs.

    Raises:
        ConfigError: The model folder or, on CPU, the size of the KV cache is missing.
    """
    model = Path(settings.model_name)
    if (model.is_absolute() or settings.model_name.startswith(".")) and not (model / "config.json").is_file():
        raise ConfigError(
            f"policy.model_name={settings.model_name} has no config.json; name a Hugging Face model folder"
        )
    register_models()
    arguments: dict[str, Any] = {
        "model": settings.model_name,
        **_model_config(settings),
        "seed": settings.seed,
        "dtype": settings.dtype,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "max_model_len": settings.max_model_len,
        "enforce_eager": settings.enforce_eager,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": f"{_PACKAGE}.worker_extension.WorkerExtension",
        "scheduler_cls": f"{_PACKAGE}.schedulers.rollout_scheduler",
    }
    if settings.endpoint is not None:
        arguments["tokenizer"] = settings.endpoint.tokenizer.name
    if settings.tensor_parallel_size > 1:
        # Use child processes. Inside a placement group vLLM would start Ray actors, for which the policy workers of
        # these GPUs leave no slot.
        arguments["distributed_executor_backend"] = "mp"
    if settings.expert_parallel_size > 1:
        arguments["enable_expert_parallel"] = True
    if settings.kept_kv_bytes is not None:
        from nemo_offload_rl.generation.vllm.schedulers import KeptKvSettings

        arguments["additional_config"] = KeptKvSettings(settings.kept_kv_bytes)
    if settings.returns_routed_experts:
        arguments["enable_return_routed_experts"] = True
    if settings.adapters is not None:
        arguments |= lora_args(settings.adapters)
    if settings.kv_cache_memory_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(settings.kv_cache_memory_gib * 2**30)
    if device_type == "cpu":
        if settings.kv_cache_memory_gib is None:
            raise ConfigError(
                "policy.generation.vllm_cfg.kv_cache_memory_gib is null, but on CPU vLLM would take "
                "gpu_memory_utilization of the machine's memory; give a size, for example 0.25"
            )
        arguments["enforce_eager"] = True  # TorchDynamo is off (`vllm_env`), and a CPU has no graphs
        arguments["worker_cls"] = f"{_PACKAGE}.cpu_worker.RefitCpuWorker"
        if settings.per_request_seeds:
            # vLLM 0.25.1 rewinds a request's generator if its prompt is computed in chunks; a CPU's cannot be rewound.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(_CPU_BATCH_TOKENS, settings.max_model_len)
    else:
        arguments["worker_cls"] = f"{_PACKAGE}.gpu_worker.SharingWorker"
        arguments["enable_sleep_mode"] = settings.enable_sleep_mode
        # Other kernels reformat the weights of experts once after loading, and refits bring them in the plain format.
        arguments["moe_backend"] = "triton"
        if "additional_config" not in arguments:
            # For prompts of gated delta nets vLLM 0.25.1 chooses FlashInfer's kernel on Hopper GPUs, even if FlashInfer
            # is not installed, and compiles it at the first prompt, which needs nvcc. vLLM writes this argument into
            # `additional_config`. With kept KV blocks that has our settings; models with such nets keep none.
            arguments["gdn_prefill_backend"] = "triton"
        if settings.vllm_kwargs.get("async_scheduling") is False:
            # The only argument that is allowed and turns it off; vLLM itself does so on a CPU.
            _LOG.warning(
                "vllm_kwargs.async_scheduling is false, so the GPU waits for the host after each token (512 responses "
                "of 1,024 tokens took 25.4 s instead of 16.9 s); remove the key"
            )
    return {**arguments, **settings.vllm_kwargs}


def register_models() -> None:
    """Tell vLLM, in this process, of the classes of `text_models.py`; they are imported when a model needs them."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, Qwen3_5ForConditionalGenerationConfig

    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        ModelRegistry.register_model(name, f"{_PACKAGE}.text_models:{name}")
        MODELS_CONFIG_MAP[name] = Qwen3_5ForConditionalGenerationConfig  # states in the type that config.json has


def _model_config(settings: VllmSettings) -> dict[str, Any]:
    """Arguments that say which model is built, and which of its weights are in 8 bits.

    Refits quantize such weights, or vLLM does as it loads files.
    """
    in_refits = settings.adapters is None or settings.adapters.with_weights
    weights_come = in_refits and settings.vllm_kwargs.get("load_format", "dummy") == "dummy"
    language = _language_of(settings.model_name)  # in any case: without a hub, vLLM then reads its cache too
    reads = partial(
        as_the_policy_reads_it,
        overrides=dict(settings.hf_config_overrides),
        weights_come=weights_come,
        language=language if weights_come else None,
    )
    if not settings.is_quantized:
        return {"hf_overrides": reads}
    kept = {
        "num_first": settings.num_first_layers_in_bf16,
        "num_last": settings.num_last_layers_in_bf16,
        "names": settings.quantization_ignored_layer_kws,
    }
    return {"hf_overrides": partial(reads, kept=kept), "quantization": METHOD}


def _language_of(model_name: str) -> dict[str, Any] | None:
    """Return config.json of the language model in a folder that reads images too; None for other folders."""
    from transformers import PreTrainedConfig

    try:
        with looking_up(model_name):
            language = language_config(PreTrainedConfig.get_config_dict(model_name)[0])
    except OSError:  # vLLM reports it
        return None
    return language if PART_OF in language else None


def as_the_policy_reads_it(
    config: Any,
    overrides: Mapping[str, Any],
    *,
    weights_come: bool = True,
    kept: Mapping[str, Any] | None = None,
    language: Mapping[str, Any] | None = None,
) -> Any:
    """Change the model's config so that the engine builds the policy's model.

    Args:
        config: Config of transformers, as vLLM has read it; changed in place.
        overrides: `policy.hf_config_overrides`.
        weights_come: The weights come from the policy, in 16 or 32 bits, and not from the model's folder, which may
            have them in 8 or 4 bits.
        kept: With 8-bit weights, the layers that keep theirs in bfloat16: how many first and last ones, and names.
        language: config.json of the language model in a folder that reads images too. The engine builds it alone.

    Returns:
        The changed config.
    """
    if language is not None and not config.model_type.startswith(_EMPTY):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        config = CONFIG_MAPPING[language["model_type"]].from_dict(dict(language))
    part = getattr(config, "text_config", config)  # of a folder that is evaluated, with its own weights
    part.update(overrides)
    if weights_come and hasattr(config, "quantization_config"):
        del config.quantization_config
    if kept is not None:
        layers = range(getattr(part, "num_hidden_layers", 0))  # vLLM asks with an empty config first
        layers = {*layers[: kept["num_first"]], *layers[len(layers) - kept["num_last"] :]}
        config.quantization_config = quantization(sorted(layers), kept["names"], of_files=not weights_come)
    if (rope := for_engine(part.to_dict())) is not None:
        part.rope_parameters = rope
    if (scaling := query_scaling_for_engine(part.to_dict())) is not None:
        part.llama_4_scaling = scaling
    return config
