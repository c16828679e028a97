"""What every process of `forked.py` has imported already; their server imports this module once."""

import gc
import importlib
import os
import sys
import warnings

from forked import fork_processes_of_vllm

from nemo_offload_rl.backends.megatron.upstream.imports import import_auto_bridge

MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "nemo_offload_rl.runs.rollouts",
    "nemo_offload_rl.runs.supervised",
    "nemo_offload_rl.config.validate",
    "nemo_offload_rl.backends.dtensor.backend",
    "nemo_offload_rl.policy.worker",
)
# `import vllm` alone imports little: the rest comes with the first engine.
OF_VLLM = (
    "nemo_offload_rl.generation.vllm.cpu_worker",
    "nemo_offload_rl.generation.vllm.engine",
    "nemo_offload_rl.generation.vllm.worker_extension",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)

gc.disable()

# Ray is imported after the fork: its library reads the environment then, such as the job that a worker is for.
sys.modules["ray"] = None  # pyright: ignore[reportArgumentType]
with warnings.catch_warnings(action="ignore"):
    for name in (*MODULES, *(OF_VLLM if os.environ["FORKED_IMPORTS"] == "vllm" else ())):
        importlib.import_module(name)
    import_auto_bridge()
del sys.modules["ray"]
if os.environ["FORKED_IMPORTS"] == "vllm":
    fork_processes_of_vllm()

# What is here already stays: a collection in a process that is forked from this one would go through it, and copy it.
gc.collect()
gc.freeze()
gc.set_threshold(50_000, 20, 20)
gc.unfreeze = lambda: None  # vLLM's engines do it as they end, and collect three times then: 2 s
gc.enable()
