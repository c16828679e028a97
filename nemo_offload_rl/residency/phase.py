"""The phases of a training step and the places where state can be."""

from enum import StrEnum


class Phase(StrEnum):
    """What a worker is doing. One phase at a time; entering one moves what the plan says."""

    TRAINING = "training"
    OPTIM_STEP = "optim_step"
    LP_INFERENCE = "lp_inference"
    REFIT = "refit"
    GENERATION = "generation"


class Placement(StrEnum):
    """Where a state group must be in a phase."""

    DEVICE = "device"
    HOST = "host"
    FREED = "freed"  # contents dropped; they are made anew when needed (gradients)
    UNCHANGED = "as it was"
