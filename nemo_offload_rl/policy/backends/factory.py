"""Which backend the settings ask for."""

from __future__ import annotations

import torch

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.backends.base import ExpectedBytes, PolicyBackend, ProcessInfo
from nemo_offload_rl.policy.backends.megatron.engine import load_engine
from nemo_offload_rl.policy.settings import PolicySettings


def expected_bytes(settings: PolicySettings, process: ProcessInfo) -> ExpectedBytes:
    """What the backend's `expected_bytes` will say, before anything is loaded; empty where only the backend knows.

    Raises:
        UserError: The model's configuration cannot be read.
    """
    if settings.megatron is not None or settings.dtensor_cfg.lora_cfg.enabled:
        return ExpectedBytes({}, 0)
    from nemo_offload_rl.policy.backends.dtensor.sizes import expected_state_bytes

    return expected_state_bytes(settings, process.world_size, torch.device(process.device))


def build_backend(settings: PolicySettings, process: ProcessInfo) -> PolicyBackend:
    """The backend of one rank, with its model loaded.

    Raises:
        UserError: The model or a setting cannot be used.
    """
    if settings.megatron is not None:
        load_engine(settings)
        # Here, since these libraries take seconds to import.
        from nemo_offload_rl.policy.backends.megatron.backend import MegatronBackend

        return MegatronBackend(settings, settings.megatron, process)
    if not settings.dtensor_cfg.enabled:
        raise ConfigError("policy.dtensor_cfg.enabled=false leaves no training backend; set it to true.")
    from nemo_offload_rl.policy.backends.dtensor.backend import DTensorBackend

    return DTensorBackend(settings, process)
