"""Errors of moving state."""


class ResidencyError(RuntimeError):
    """A transition was refused or failed; the message says which group, why, and what to do."""


class OpenStepError(ResidencyError):
    """A transition would drop gradients that no optimizer step has used yet."""


class DeviceOutOfMemoryError(ResidencyError):
    """The device has no room for a group that a phase needs."""


class HostBudgetError(ResidencyError):
    """The host arena would grow over its budget."""
