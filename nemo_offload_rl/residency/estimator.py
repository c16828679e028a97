"""How much device memory a plan needs, before anything moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemo_offload_rl.residency.phase import Phase, Placement
from nemo_offload_rl.residency.plan import ResidencyPlan


def placements_along(plan: ResidencyPlan, groups: Sequence[str], phases: Sequence[Phase]) -> list[dict[str, Placement]]:
    """Where each group is after each of `phases`, starting with everything on the device."""
    now = dict.fromkeys(groups, Placement.DEVICE)
    history = []
    for phase in phases:
        for name in groups:
            place = plan.placement(name, phase)
            if place is not Placement.UNCHANGED:
                now[name] = place
        history.append(dict(now))
    return history


def resident_bytes_along(plan: ResidencyPlan, sizes_bytes: Mapping[str, int], phases: Sequence[Phase]) -> list[int]:
    """Device bytes of all groups after each of `phases`."""
    return [
        sum(sizes_bytes[name] for name, place in placements.items() if place is Placement.DEVICE)
        for placements in placements_along(plan, list(sizes_bytes), phases)
    ]


def peak_bytes(plan: ResidencyPlan, sizes_bytes: Mapping[str, int], phases: Sequence[Phase]) -> int:
    """Most device bytes that the groups hold at any moment along `phases`, starting with everything on the device.

    A transition releases before it loads, so no moment of it holds more than the larger of its two ends.
    """
    return max([sum(sizes_bytes.values()), *resident_bytes_along(plan, sizes_bytes, phases)])


# One step of colocated RL.
STEP_PHASES = (
    Phase.GENERATION,
    Phase.LP_INFERENCE,
    Phase.TRAINING,
    Phase.OPTIM_STEP,
    Phase.TRAINING,
    Phase.REFIT,
)


def adam_state_bytes(param_bytes: int, param_itemsize: int = 4, state_itemsize: int = 4) -> int:
    """Bytes of Adam's exp_avg and exp_avg_sq for parameters of `param_bytes`."""
    return 2 * (param_bytes // param_itemsize) * state_itemsize


def choose_resident(sizes_bytes: Mapping[str, int], room_bytes: int) -> frozenset[str]:
    """Groups that may stay on the device beside the engine: the largest first, as far as the room goes.

    Args:
        sizes_bytes: Candidates and their sizes.
        room_bytes: Device memory that neither the engine nor the reserve claims.
    """
    chosen: set[str] = set()
    for name, size in sorted(sizes_bytes.items(), key=lambda item: -item[1]):
        if size <= room_bytes:
            chosen.add(name)
            room_bytes -= size
    return frozenset(chosen)
