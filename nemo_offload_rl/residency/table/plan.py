"""The residency plan: the phases, their use of state, and the place of each group in each phase.

No other code decides where state is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

PARAMS, GRADS, OPTIMIZER, REFERENCE = "params", "grads", "optimizer", "reference"
BASE = "base"  # frozen parameters under adapters: nothing writes them, so they cross to the host once
TEACHER = "teacher"  # a separate frozen model: on the host except for its pass
TEACHER_LAYER = "teacher/layer"  # row of the groups `teacher/layer.<index>`, if the teacher's layers are streamed
TEACHER_HEAD = "teacher_head"  # rows of the teacher's output layer that training reads
OPTIMIZER_PART = "optimizer/part"  # row of the groups `optimizer/part.<index>`
# Rows of the groups with the same indices, if parameters and gradients pass through the device too.
PARAMS_PART, GRADS_PART = "params/part", "grads/part"


class Phase(StrEnum):
    """Phase of a worker's work; entering it moves state to its places in the plan."""

    TRAINING = "training"
    OPTIM_STEP = "optim_step"
    LP_INFERENCE = "lp_inference"
    REFIT = "refit"
    GENERATION = "generation"
    TEACHER_INFERENCE = "teacher_inference"


class Placement(StrEnum):
    """Place of a state group in a phase."""

    DEVICE = "device"
    HOST = "host"
    FREED = "freed"  # contents dropped; they are made again when needed (gradients)
    UNCHANGED = "as it was"


@dataclass(frozen=True, kw_only=True)
class PhaseSpec:
    """Use that a phase makes of the state groups, in every configuration.

    Attributes:
        touches: Groups that it reads or writes from its first kernel on. Groups still arriving are waited for only when
            such a phase is entered.
        begins_with_forward: It first reads parameters in forward passes, so those of later layers may still arrive.
        settles: Its work takes the device's memory at once, so entering it waits for all copies out.
        is_for_engine: An inference engine that shares the device uses its memory in this phase.
        reads_before: Later phase at which state leaves the device. Until then it is only read, so host copies are
            updated meanwhile.
        prefetches_for: Later phase whose groups may come as soon as this one has begun, if there is room.
        prefetches_snapshots: Snapshots that are to be swapped in may be prefetched too.
    """

    touches: frozenset[str] = frozenset()
    begins_with_forward: bool = False
    settles: bool = False
    is_for_engine: bool = False
    reads_before: Phase | None = None
    prefetches_for: Phase | None = None
    prefetches_snapshots: bool = False


PHASES: Mapping[Phase, PhaseSpec] = MappingProxyType(
    {
        Phase.TRAINING: PhaseSpec(touches=frozenset({PARAMS, BASE, GRADS, TEACHER_HEAD}), begins_with_forward=True),
        Phase.OPTIM_STEP: PhaseSpec(touches=frozenset({PARAMS, GRADS, OPTIMIZER})),
        Phase.LP_INFERENCE: PhaseSpec(
            touches=frozenset({PARAMS, BASE}),
            begins_with_forward=True,
            settles=True,
            prefetches_for=Phase.TRAINING,
            prefetches_snapshots=True,
        ),
        Phase.REFIT: PhaseSpec(touches=frozenset({PARAMS, BASE}), is_for_engine=True, reads_before=Phase.GENERATION),
        Phase.GENERATION: PhaseSpec(settles=True, is_for_engine=True),
        Phase.TEACHER_INFERENCE: PhaseSpec(
            touches=frozenset({TEACHER}), begins_with_forward=True, settles=True, prefetches_for=Phase.TRAINING
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class ResidencySettings:
    """Configuration that shapes the plan, mostly under its YAML names.

    Attributes:
        colocated: Generation shares this worker's devices and waits for their memory
            (`policy.generation.colocated.enabled` and `vllm_cfg.enable_sleep_mode`).
        use_pinned_optimizer_offload: The optimizer's host copy is page-locked, so that its copies are asynchronous.
        offload_optimizer_states_for_logprob: The optimizer leaves the device for logprob passes too.
        offload_optimizer_states: Parts of the optimizer are on the device around their own update only.
        streams_parameters: Parts of the parameters and gradients that have an optimizer's part stream too; passes bring
            them one after the other.
        optimizer_cpu_offload: The optimizer lives and updates on the host; no phase moves it.
        refits_read_base: Refits send the frozen model's weights, and read them on the device, not from the host copy.
        resident_groups: Groups that stay on the device for refit and generation, since the engine leaves room.
        rows: Rows of the run's groups. BASE and those of a teacher are in the plan only if they are in this set.
    """

    colocated: bool
    use_pinned_optimizer_offload: bool
    offload_optimizer_states_for_logprob: bool
    offload_optimizer_states: bool = False
    streams_parameters: bool = False
    optimizer_cpu_offload: bool = False
    refits_read_base: bool = True
    resident_groups: frozenset[str] = frozenset()
    rows: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ResidencyPlan:
    """A table of placements, one row a group and one column a phase.

    Attributes:
        table: group name -> phase -> placement.
        pinned_groups: Groups whose host copy is page-locked, if the device can use that.
        shares_device: An inference engine uses this device's memory in its phases.
    """

    table: Mapping[str, Mapping[Phase, Placement]]
    pinned_groups: frozenset[str]
    shares_device: bool

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of a run with this plan."""
        return tuple(phase for phase in Phase if TEACHER in self.table or phase is not Phase.TEACHER_INFERENCE)

    def placement(self, group: str, phase: Phase) -> Placement:
        """Place of `group` in `phase`."""
        return self.table[row_of(group)][phase]

    def leaves_the_device(self, group: str) -> bool:
        """Tell whether `group` is on the host in some phase, so that it needs host memory."""
        return any(self.placement(group, phase) is Placement.HOST for phase in Phase)

    def host_bytes(self, sizes_bytes: Mapping[str, int]) -> dict[bool, int]:
        """Sum these groups' and snapshots' sizes: page-locked ones under True, the rest under False."""
        totals = {True: 0, False: 0}
        for name, size in sizes_bytes.items():
            totals[row_of(name) in self.pinned_groups] += size
        return totals

    def device_bytes(self, sizes_bytes: Mapping[str, int], phase: Phase) -> int:
        """Most bytes of these groups that are on the device in `phase`, counting groups that stay where they were."""
        on_device = (Placement.DEVICE, Placement.UNCHANGED)
        return sum(size for name, size in sizes_bytes.items() if self.placement(name, phase) in on_device)

    def releases_cache(self, phase: Phase) -> bool:
        """Tell whether an engine uses the device's memory in this phase, so that cached memory goes back to the driver.

        In other phases it stays: releasing it waits for the whole GPU, and the next pass would allocate it again.
        """
        return self.shares_device and PHASES[phase].is_for_engine

    def render(self, sizes_bytes: Mapping[str, int] | None = None) -> str:
        """Render the table as text, with each group's size in GiB if `sizes_bytes` has it."""
        sizes = {name: f" ({size / 2**30:.2f} GiB)" for name, size in (sizes_bytes or {}).items()}
        lines = [["group", *(phase.name for phase in self.phases)]]
        lines += [[name + sizes.get(name, ""), *(row[p].name for p in self.phases)] for name, row in self.table.items()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


def row_of(group: str) -> str:
    """Row of the plan that a group follows."""
    return group.partition(".")[0]


def resolve_plan(settings: ResidencySettings) -> ResidencyPlan:
    """Turn the configuration into the table.

    Raises:
        ValueError: `optimizer_cpu_offload` and `offload_optimizer_states` are both set.
    """
    if settings.optimizer_cpu_offload and settings.offload_optimizer_states:
        raise ValueError(
            "optimizer_cpu_offload and offload_optimizer_states are both true: the first keeps the optimizer on the "
            "host for good, the second brings it to the device for every step. Set one of them to false."
        )
    device, host, freed, same = Placement.DEVICE, Placement.HOST, Placement.FREED, Placement.UNCHANGED

    # Without colocation no engine needs this device's memory, so nothing leaves it for refit or generation.
    def away(group: str) -> Placement:
        return host if settings.colocated and group not in settings.resident_groups else same

    drop = freed if settings.colocated else same
    # The teacher's pass reads nothing of the policy: absent groups stay away, and gradients are not needed.
    optimizer_row = (
        device,
        device,
        host if settings.offload_optimizer_states_for_logprob else same,
        away(OPTIMIZER),
        away(OPTIMIZER),
        host if settings.offload_optimizer_states_for_logprob else same,
    )
    in_refit = device if settings.colocated else same
    rows = {
        PARAMS: (device, device, device, in_refit, away(PARAMS), same),
        GRADS: (device, device, freed, drop, drop, freed),
        OPTIMIZER: (host,) * len(Phase) if settings.optimizer_cpu_offload else optimizer_row,
        REFERENCE: (host,) * len(Phase),  # a snapshot: swapped into the parameters inside the reference context
    }
    optional = {
        BASE: (device, device, device, in_refit if settings.refits_read_base else away(BASE), away(BASE), same),
        TEACHER: (host, host, host, host, host, device),
        TEACHER_LAYER: (host,) * len(Phase),  # inside its pass they come and go one by one
        TEACHER_HEAD: (device, same, host, host, host, same),
    }
    rows |= {row: places for row, places in optional.items() if row in settings.rows}
    pinned = {PARAMS, REFERENCE, *optional}
    if settings.offload_optimizer_states:
        # Around the step they come and go one by one.
        rows[OPTIMIZER_PART] = (host, same, host, host, host, host)
    if settings.streams_parameters:
        # Inside passes and the step they come and go one by one.
        pinned |= {PARAMS_PART, GRADS_PART}
        rows[PARAMS_PART] = (host, same, host, host, host, host)
        rows[GRADS_PART] = (host, same, freed, drop, drop, freed)
    if settings.use_pinned_optimizer_offload:
        pinned |= {OPTIMIZER, OPTIMIZER_PART}
    table = {name: MappingProxyType(dict(zip(Phase, row, strict=True))) for name, row in rows.items()}
    return ResidencyPlan(
        table=MappingProxyType(table), pinned_groups=frozenset(pinned & rows.keys()), shares_device=settings.colocated
    )
