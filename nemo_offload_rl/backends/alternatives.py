"""Which other training backend takes a model that one refuses: what a refusal may send its reader to."""

from __future__ import annotations

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
    """Section of the backend beside `backend`, if it trains the model; None if it refuses it too.

    Args:
        config: The contents of a config.json.
        backend: `DTENSOR` or `MEGATRON`.
        has_gpus: Whether the run has GPUs, without which there is no Megatron.
    """
    section, refuses = _OTHERS[backend]
    if refuses(config) is not None or (backend == DTENSOR and not has_gpus):
        return None
    return section


def advice(config: Mapping[str, Any], backend: str, *, has_gpus: bool = True) -> str:
    """End of a refusal of a model; arguments as for `other_backend`."""
    section = other_backend(config, backend, has_gpus=has_gpus)
    if section is None:
        return "use another model (docs/reference/models.md)"
    return f"use {section}, which trains it, or another model"
