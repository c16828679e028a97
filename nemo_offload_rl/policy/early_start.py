"""Work of a policy's process while an engine starts: it compiles the layers, before the worker is built.

An engine on the same GPU measures the free memory as it starts, and takes what other processes take meanwhile for its
own need. So the process takes all memory for this work before the engine begins, and returns it as the worker is built,
after the engine is ready.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch

from nemo_offload_rl.keys.dtensor import DTensorConfig
from nemo_offload_rl.keys.worker import PolicySettings, TeacherSettings
from nemo_offload_rl.policy.process import use_deterministic_algorithms
from nemo_offload_rl.protocols.backend import ProcessInfo

logger = logging.getLogger(__name__)

MOST_BYTES = 2 << 30
_SPARE_BYTES = 256 << 20  # of the held memory, for small tensors, which torch allocates apart
_FEWEST_BYTES = 256 << 20
_ENGINE_BYTES = 1 << 30  # the engine makes its context, and communicators, before it looks for its share


def compiles_layers(settings: PolicySettings, process: ProcessInfo) -> bool:
    """Tell whether the settings let layers be compiled on this rank's device."""
    backend = settings.backend
    on_gpu = torch.device(process.device).type == "cuda"
    return on_gpu and isinstance(backend, DTensorConfig) and backend.torch_compile


def hold_memory(settings: PolicySettings, process: ProcessInfo, **_others: Any) -> int:
    """Hold up to 2 GiB of the GPU's memory for `compile_early`, as far as an engine can do without it.

    Returns:
        Bytes that are held; 0 if nothing is to be compiled, or there is no room.
    """
    if not compiles_layers(settings, process):
        return 0
    if settings.deterministic:
        use_deterministic_algorithms()  # before the first product
    device = torch.device(process.device)
    torch.cuda.set_device(device)
    square = torch.zeros(64, 64, device=device, dtype=torch.bfloat16)
    torch.mm(square, square)  # the libraries take memory of their own at their first call
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    taken_bytes = _ENGINE_BYTES if settings.engine_tensor_parallel_size == 1 else 2 * _ENGINE_BYTES
    room_bytes = int(free_bytes - settings.engine_memory_share * total_bytes) - taken_bytes
    limit_gib = settings.gpu_memory_limit_gib
    held_bytes = min(MOST_BYTES, room_bytes, MOST_BYTES if limit_gib is None else int(limit_gib * 2**30))
    if held_bytes < _FEWEST_BYTES + _SPARE_BYTES:
        return 0
    try:
        torch.empty(held_bytes - _SPARE_BYTES, dtype=torch.uint8, device=device)  # torch's allocator keeps it
    except torch.OutOfMemoryError:
        return 0  # another process was faster
    torch.cuda.set_per_process_memory_fraction(held_bytes / total_bytes, device)
    return held_bytes - _SPARE_BYTES


def return_memory(process: ProcessInfo) -> None:
    """Return what `hold_memory` holds, and forget that it was used."""
    if torch.device(process.device).type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.set_per_process_memory_fraction(1.0, torch.device(process.device))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def compile_early(
    settings: PolicySettings,
    process: ProcessInfo,
    teacher: TeacherSettings | None = None,
    most_bytes: int = MOST_BYTES,
    **_others: Any,
) -> None:
    """Compile the layers of the policy and its teacher; a failure is a warning, since passes compile them as well.

    Args:
        settings: The policy's settings.
        process: This rank.
        teacher: Settings of a frozen model in the same worker.
        most_bytes: Device memory that this may take.
    """
    if not compiles_layers(settings, process):
        return
    from nemo_offload_rl.backends.dtensor.early_compile import compile_early as compile_model  # imports transformers

    if settings.deterministic:
        use_deterministic_algorithms()
    try:
        reason = compile_model(settings, process, most_bytes)
        if teacher is not None and compiles_layers(teacher.model, process) and not teacher.streams_layers:
            reason = reason or compile_model(teacher.model, process, most_bytes, is_frozen=True)
        if reason is not None:
            logger.info("The layers are compiled in the first step, not while the engine starts: %s", reason)
    except Exception as error:  # the model's code may fail in any way on a sample; the first step runs it on data
        told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        logger.warning("Compiling the layers while the engine starts failed, so the first step compiles them: %s", told)
    gc.collect()  # a sample has circles of references
