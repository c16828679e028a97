"""Names the backend to use in place of one that refuses a model, for error messages."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.backends.dtensor.supported import unsupported as unsupported_by_dtensor
from nemo_offload_rl.backends.megatron.supported import unsupported as unsupported_by_megatron
from nemo_offload_rl.models.families import DTENSOR, MEGATRON

_OTHERS = {
    DTENSOR: ("policy.megatron_cfg", unsupported_by_megatron),
    MEGATRON: ("policy.dtensor_cfg", unsupported_by_dtensor),
}


def other_backend(config: Mapping[str, Any], backend: str, *, has_gpus: bool = True) -> str | None:
    """Return the settings section of the other backend; None if it does not train the model either.

    Args:
        config: The contents of a config.json.
        backend: The backend that refuses the model, `DTENSOR` or `MEGATRON`.
        has_gpus: The run has GPUs, which Megatron needs.
    """
    section, refuses = _OTHERS[backend]
    if refuses(config) is not None or (backend == DTENSOR and not has_gpus):
        return None
    return section


def advice(config: Mapping[str, Any], backend: str, *, has_gpus: bool = True) -> str:
    """Return the end of an error message that refuses a model; arguments as for `other_backend`."""
    section = other_backend(config, backend, has_gpus=has_gpus)
    if section is None:
        return "use another model (docs/reference/models.md)"
    return f"use {section}, which trains this model, or another model"
