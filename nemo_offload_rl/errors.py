"""Errors that a user can act on.

Launch scripts print a `UserError` as one line and exit with status 2; everything else is a bug and keeps its traceback.
"""

import math
from collections.abc import Mapping


class UserError(Exception):
    """Bad input. The message says what is wrong, why, and what to change, in one line."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and notebooks show in the place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(UserError):
    """A configuration file, an override or a rule between keys is wrong."""


class DataError(UserError):
    """A data file, a row or a prompt cannot be used."""


class DeviceMemoryError(UserError):
    """A device lacks memory for a phase; the message says how much and who holds the rest."""


class WorkerDiedError(UserError):
    """A worker process ended while the driver needed it; the message names the worker, its phase and the cause."""


class WorkerHungError(WorkerDiedError):
    """A worker makes no progress and has to be ended; the message names worker, call and seconds."""


class NonFiniteGradientsError(UserError):
    """Too many updates in a row had gradients that are not finite; the message names the limit's key."""


class CheckpointError(UserError):
    """A checkpoint cannot be written or read; the message has its path and the reason."""


class AgreementError(UserError):
    """Engine and policy give the same tokens different probabilities: they are not the same model."""


class UserCodeError(UserError):
    """Code from outside of the package cannot be used, or has failed; the message has its file and line."""


def division_problem(sizes: Mapping[str, int], number: int, what: str, fix: str) -> str | None:
    """Say that the product of some keys does not divide a number of things; None where it does.

    Args:
        sizes: Values by key; of several keys the first has the section's name.
        number: Number of things to divide.
        what: Name of the things, and why all of them must be used.
        fix: Change to make.
    """
    product = math.prod(sizes.values())
    if number % product == 0:
        return None
    keys = " x ".join(f"{key} {size}" for key, size in sizes.items())
    total = f" = {product}" if len(sizes) > 1 else ""
    return f"{keys}{total} does not divide the {number} {what}; {fix}"


def share_problem(key: str, number: int, num_workers: int) -> str | None:
    """Say that data-parallel workers cannot take equal shares of a key's number of rows; None where they can."""
    if number % num_workers == 0:
        return None
    return (
        f"{key} {number} does not divide by the {num_workers} data-parallel workers, which all take the same share; "
        f"make it a multiple of {num_workers}"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the name of its type if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
