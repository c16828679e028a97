"""The residency plan: which group must be where in which phase. No other place in the code decides that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nemo_offload_rl.residency.phase import Phase, Placement

PARAMS, GRADS, OPTIMIZER, REFERENCE = "params", "grads", "optimizer", "reference"
BASE = "base"  # frozen parameters under adapters: nothing writes them, so they cross to the host once
OPTIMIZER_PART = "optimizer/part"  # the row of every group `optimizer/part.<index>`

# What a phase reads or writes from its first kernel on. A group that arrives earlier is waited for only here.
TOUCHED: Mapping[Phase, frozenset[str]] = {
    Phase.TRAINING: frozenset({PARAMS, BASE, GRADS}),
    Phase.OPTIM_STEP: frozenset({PARAMS, GRADS, OPTIMIZER}),
    Phase.LP_INFERENCE: frozenset({PARAMS, BASE}),
    Phase.REFIT: frozenset({PARAMS, BASE}),
    Phase.GENERATION: frozenset(),
}

# Phases that read parameters in forward passes first: those of later layers may still be on their way.
FORWARD_FIRST: frozenset[Phase] = frozenset({Phase.TRAINING, Phase.LP_INFERENCE})

# Phases whose memory somebody else takes as soon as they are entered: nothing may still be on its way out.
SETTLED: frozenset[Phase] = frozenset({Phase.LP_INFERENCE, Phase.GENERATION})

# The first phase only reads state that leaves at the second one: its host copy is brought up to date meanwhile.
READ_BEFORE: Mapping[Phase, Phase] = {Phase.REFIT: Phase.GENERATION}

# While in the first phase, what the second one needs may come already, if there is room.
PREFETCHED: Mapping[Phase, Phase] = {Phase.LP_INFERENCE: Phase.TRAINING}


@dataclass(frozen=True, kw_only=True)
class ResidencySettings:
    """The configuration keys that shape the plan, with their YAML names.

    Attributes:
        colocated: Generation shares this worker's devices and waits for their memory
            (`policy.generation.colocated.enabled` and `vllm_cfg.enable_sleep_mode`).
        use_pinned_optimizer_offload: The optimizer's host copy is page-locked, so that its copies are asynchronous.
        offload_optimizer_states_for_logprob: The optimizer leaves the device for logprob passes too.
        offload_optimizer_states: Parts of the optimizer are on the device for their own update only.
        optimizer_cpu_offload: The optimizer lives and updates on the host; no phase moves it.
        resident_groups: Groups that stay on the device for refit and generation, since there is room beside the engine.
        has_base: Adapters are trained; the model's own parameters are the group `base`.
    """

    colocated: bool
    use_pinned_optimizer_offload: bool
    offload_optimizer_states_for_logprob: bool
    offload_optimizer_states: bool = False
    optimizer_cpu_offload: bool = False
    resident_groups: frozenset[str] = frozenset()
    has_base: bool = False


@dataclass(frozen=True)
class ResidencyPlan:
    """A table of placements, one row a group and one column a phase.

    Attributes:
        table: group name -> phase -> placement.
        pinned_groups: Groups whose host copy is page-locked where the device can use that.
    """

    table: Mapping[str, Mapping[Phase, Placement]]
    pinned_groups: frozenset[str]

    def placement(self, group: str, phase: Phase) -> Placement:
        """Where `group` must be in `phase`."""
        return self.table[row_of(group)][phase]

    def host_bytes(self, sizes_bytes: Mapping[str, int]) -> dict[bool, int]:
        """Sums of these groups' and snapshots' sizes: under True what is page-locked, under False the rest."""
        totals = {True: 0, False: 0}
        for name, size in sizes_bytes.items():
            totals[row_of(name) in self.pinned_groups] += size
        return totals

    def makes_room(self, phase: Phase) -> bool:
        """Whether another process takes the device's memory in this phase, so that cached memory must go back too.

        In any other phase it stays: giving it back waits for the whole GPU, and the next pass would ask for it again.
        """
        return phase in {Phase.REFIT, Phase.GENERATION} and self.placement(GRADS, phase) is Placement.FREED

    def render(self, sizes_bytes: Mapping[str, int] | None = None) -> str:
        """The table as text, with each group's size in GiB where `sizes_bytes` has it."""
        sizes = {name: f" ({size / 2**30:.2f} GiB)" for name, size in (sizes_bytes or {}).items()}
        lines = [["group", *(phase.name for phase in Phase)]]
        lines += [[name + sizes.get(name, ""), *(row[p].name for p in Phase)] for name, row in self.table.items()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


def row_of(group: str) -> str:
    """The row of the plan that a group follows."""
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

    # Without colocation nobody waits for this device's memory, so nothing leaves it for refit or generation.
    def away(group: str) -> Placement:
        return host if settings.colocated and group not in settings.resident_groups else same

    drop = freed if settings.colocated else same
    optimizer_row = (
        device,
        device,
        host if settings.offload_optimizer_states_for_logprob else same,
        away(OPTIMIZER),
        away(OPTIMIZER),
    )
    rows = {
        PARAMS: (device, device, device, device if settings.colocated else same, away(PARAMS)),
        GRADS: (device, device, freed, drop, drop),
        OPTIMIZER: (host,) * len(Phase) if settings.optimizer_cpu_offload else optimizer_row,
        REFERENCE: (host,) * len(Phase),  # a snapshot: swapped into the parameters inside the reference context
    }
    pinned = {PARAMS, REFERENCE}
    if settings.has_base:
        pinned.add(BASE)
        rows[BASE] = (device, device, device, device if settings.colocated else same, away(BASE))
    if settings.offload_optimizer_states:
        rows[OPTIMIZER_PART] = (host, same, host, host, host)  # inside the step they come and go one by one
    if settings.use_pinned_optimizer_offload:
        pinned |= {OPTIMIZER, OPTIMIZER_PART}
    table = {name: MappingProxyType(dict(zip(Phase, row, strict=True))) for name, row in rows.items()}
    return ResidencyPlan(table=MappingProxyType(table), pinned_groups=frozenset(pinned))
