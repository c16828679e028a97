"""From Ray's exceptions to ours: the worker's own error, or `WorkerDiedError` with Ray's cause as its last words."""

from __future__ import annotations

import re

import torch
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from nemo_offload_rl.errors import UserError, WorkerDiedError
from nemo_offload_rl.memory.ray_memory import killed_by_kernel, killed_by_monitor
from nemo_offload_rl.residency import DeviceOutOfMemoryError


def original_error(error: RayError, worker: str, method: str) -> BaseException:
    """What to raise in the driver.

    Args:
        error: What Ray raised for one call.
        worker: Name and rank, for the message.
        method: The call.

    Returns:
        The exception that the worker raised, with the remote traceback as a note, as a `UserError` if it is a lack of
        the device's memory; `WorkerDiedError` if its process ended; otherwise `error` itself.
    """
    if isinstance(error, RayTaskError):
        cause = error.cause
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if not isinstance(cause, BaseException):
            return error
        if isinstance(cause, torch.OutOfMemoryError | DeviceOutOfMemoryError):
            cause = UserError(
                f"{worker} ran out of the device's memory during {method} ({' '.join(str(cause).split())[:300]}); free "
                "what other processes hold of it, lower policy.generation.vllm_cfg.gpu_memory_utilization where an "
                "engine shares it, or use more GPUs"
            )
        cause.add_note(f"Raised in {worker}, {method}:\n{_without_colours(str(error)).strip()}")
        return cause
    if isinstance(error, ActorUnavailableError):
        reason = str(error).partition("RPC error: ")[2].partition(".")[0] or _one_line_cause(str(error))
        return WorkerDiedError(
            f"{worker} died during {method}: its connection broke ({reason}), so its process or its host has ended"
        )
    if isinstance(error, RayActorError | OutOfMemoryError):
        text = str(error)
        cause, by_kernel = killed_by_monitor(text), killed_by_kernel()
        if cause is None:
            cause = _one_line_cause(text) + (f" ({by_kernel})" if by_kernel else "")
        return WorkerDiedError(f"{worker} died during {method}: {cause}")
    return error


def _one_line_cause(text: str) -> str:
    """Ray's several lines as one line that ends in the cause, without the ids that mean nothing to a reader."""
    exit_detail = re.search(r"Worker exit detail: (.*?)(?= If the process was killed by the kernel|$)", text, re.DOTALL)
    if exit_detail:
        pid = re.search(r"^\s*pid: (\d+)", text, re.MULTILINE)
        process = f"process {pid.group(1)}: " if pid else ""
        return process + " ".join(exit_detail.group(1).split())
    lines = [line.strip() for line in _without_colours(text).splitlines()]
    dropped = ("class_name:", "actor_id:", "name:", "namespace:", "The actor died unexpectedly before finishing")
    kept = [line for line in lines if line and not line.startswith(dropped)]
    return " ".join(kept) or text.strip()


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
