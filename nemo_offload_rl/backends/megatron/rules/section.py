"""The Megatron backend's section, where that backend is on."""

from __future__ import annotations

from nemo_offload_rl.keys.master import PolicyRun
from nemo_offload_rl.keys.megatron import MegatronConfig


def megatron_section(cfg: PolicyRun) -> MegatronConfig | None:
    """`policy.megatron_cfg` where that backend is the one to run, else None."""
    backend = cfg.policy.backend
    return backend if isinstance(backend, MegatronConfig) else None
