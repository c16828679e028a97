"""What goes wrong while weights travel."""

from __future__ import annotations

from collections.abc import Iterable

from nemo_offload_rl.errors import UserError

_NAMES_SHOWN = 8


class RefitError(UserError):
    """The engine did not get the weights it should have: tensors are missing, unexpected or of another shape.

    Where policy and engine are of the same model this is a bug; settings of the engine can make them differ.
    """


def listed(names: Iterable[str]) -> str:
    """The first few names in a stable order, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NAMES_SHOWN])
    hidden = len(ordered) - _NAMES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown
