"""Environment variables of a vLLM process; they must be set before `vllm` is imported.

Ray sets them when it starts the engine's actor (`env_vars`); an engine in one's own process needs them first.
"""

from __future__ import annotations

import os
import tempfile
import uuid

from nemo_offload_rl.utils.sockets import short_folder

_SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"


def vllm_env(device_type: str) -> dict[str, str]:
    """Variables for a `"cpu"` or `"cuda"` engine."""
    return vllm_cpu_env() if device_type == "cpu" else vllm_cuda_env()


def vllm_cpu_env() -> dict[str, str]:
    """Variables of an engine that runs in its own process on the CPU.

    Without multiprocessing vLLM stays in this process instead of three; `enforce_eager` alone still compiles the
    sampler with g++ (LLM() 20 s instead of 2 s), so Dynamo is off; "auto" binding pins every engine to core 0; a
    second OpenMP thread gains 15 % on an idle machine and loses up to 20 times on a busy one.
    """
    return {
        **_common_env(),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_SGL_KERNEL": "0",  # it packs weights after loading
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def vllm_cuda_env() -> dict[str, str]:
    """Variables of an engine on a GPU.

    FlashInfer's sampler cannot give the logprobs of what was sampled after truncation, so vLLM would not use it here,
    but importing it fails where it is not installed. Expandable segments (refused before Ray starts) break the memory
    pool of vLLM's sleep mode.
    """
    return {**_common_env(), "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def _socket_folder() -> dict[str, str]:
    """Another folder for vLLM's sockets if their paths would be too long in the one that vLLM chooses."""
    chosen = os.environ.get(_SOCKET_FOLDER) or tempfile.gettempdir()
    folder = short_folder(chosen, str(uuid.UUID(int=0)))
    return {} if folder == chosen else {_SOCKET_FOLDER: folder}


def _common_env() -> dict[str, str]:
    """Quiet, unless the run was started with a level; and latent attention (DeepSeek-V3) by whole keys and values.

    In its latent form vLLM derives weights once after loading, which refits would leave as they were.
    """
    return {
        **_socket_folder(),
        "VLLM_MLA_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
