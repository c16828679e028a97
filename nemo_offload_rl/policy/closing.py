"""Closing what a constructor had made before it failed, without hiding why it failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Closes(Protocol):
    """What has to be closed."""

    def close(self) -> None: ...


def closing(made: Closes) -> Callable[..., None]:
    """For `ExitStack.push`: closes `made`; what goes wrong with that becomes a note of the error under way, if any."""

    def close(_type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            made.close()
        except (RuntimeError, OSError) as second:
            if error is None:
                raise
            error.add_note(f"and then: {type(second).__name__}: {second}")

    return close
