"""The key `policy.suspend_nccl_comms`: checks that suspending is possible, and makes a worker's communicators."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.residency import SUSPENDING_NCCL, Communicators, Nccl, loaded_nccl

_KEY = "policy.suspend_nccl_comms is true, but"
_OFF = "set policy.suspend_nccl_comms=false"


def make_communicators(settings: PolicySettings, device: torch.device) -> Communicators:
    """Make the object that suspends and resumes a worker's communicators, if that is on.

    Raises:
        ConfigError: Suspending is on, but would fail or gain nothing.
    """
    if not settings.suspend_nccl_comms:
        return Communicators(None, device)
    problem = placement_problem(on_gpu=device.type == "cuda", shares_device=settings.colocated) or nccl_problem()
    if problem is not None:
        raise ConfigError(problem)
    return Communicators(Nccl(), device)


def placement_problem(*, on_gpu: bool, shares_device: bool) -> str | None:
    """Return the reason why suspending would gain nothing; None if an engine can use the memory.

    Args:
        on_gpu: The policy's workers are on GPUs.
        shares_device: An engine on the same devices sleeps while the workers compute.
    """
    if not on_gpu:
        return f"{_KEY} workers on a CPU have no NCCL communicators; {_OFF}"
    if not shares_device:
        return (
            f"{_KEY} no engine on the same GPUs sleeps and wakes, so nothing would use the memory; {_OFF}, or "
            "policy.generation.colocated.enabled=true with policy.generation.vllm_cfg.enable_sleep_mode=true"
        )
    return None


def nccl_problem(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the reason why the NCCL of this process cannot suspend communicators; None if it can.

    Args:
        environment: Variables that NCCL reads.
    """
    loaded = loaded_nccl()
    if loaded is None:
        return f"{_KEY} this torch has no NCCL; {_OFF}"
    needed = ".".join(map(str, SUSPENDING_NCCL))
    if loaded < SUSPENDING_NCCL:
        package = f"nvidia-nccl-cu{(torch.version.cuda or '13').partition('.')[0]}"
        return (
            f"{_KEY} it needs NCCL {needed} or later, and NCCL {'.'.join(map(str, loaded))} is loaded; install it over "
            f"torch's (pip install --no-deps {package}=={needed}), start with LD_PRELOAD=PATH/libnccl.so.2 of that "
            f"package, or {_OFF}"
        )
    if environment.get("NCCL_CUMEM_ENABLE") == "0":
        return f"{_KEY} with NCCL_CUMEM_ENABLE=0 NCCL cannot release its memory; unset that variable, or {_OFF}"
    return None
