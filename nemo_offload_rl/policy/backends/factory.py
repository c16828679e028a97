"""Which backend the settings ask for."""

from __future__ import annotations

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.backends.base import PolicyBackend, ProcessInfo
from nemo_offload_rl.policy.settings import PolicySettings


def build_backend(settings: PolicySettings, process: ProcessInfo) -> PolicyBackend:
    """The backend of one rank, with its model loaded.

    Raises:
        UserError: The model or a setting cannot be used.
    """
    if not settings.dtensor_cfg.enabled:
        raise ConfigError("policy.dtensor_cfg.enabled=false leaves no training backend; set it to true.")
    # Here, since the model library takes seconds to import.
    from nemo_offload_rl.policy.backends.dtensor.backend import DTensorBackend

    return DTensorBackend(settings, process)
