"""Access to the Megatron backend's section of the settings."""

from __future__ import annotations

from nemo_offload_rl.keys.master import PolicyRun
from nemo_offload_rl.keys.megatron import MegatronConfig


def megatron_section(cfg: PolicyRun) -> MegatronConfig | None:
    """Return `policy.megatron_cfg` if that backend runs, else None."""
    backend = cfg.policy.backend
    return backend if isinstance(backend, MegatronConfig) else None
