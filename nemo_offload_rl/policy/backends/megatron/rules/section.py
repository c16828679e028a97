"""The Megatron backend's section, where that backend is on."""

from __future__ import annotations

from nemo_offload_rl.policy.backends.megatron.config import MegatronConfig
from nemo_offload_rl.policy.rules import PolicyRun


def megatron_section(cfg: PolicyRun) -> MegatronConfig | None:
    """`policy.megatron_cfg` where that backend is the one to run, else None."""
    backend = cfg.policy.backend
    return backend if isinstance(backend, MegatronConfig) else None
