"""Counts host memory of a worker and the processes next to it, compares it with limits, and refuses with advice.

Advice names a change of settings only if the plan, resolved again with it, fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from nemo_offload_rl.backends.megatron.optimizer_spec import optimizer_spec
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.memory.limits import HostShare, HostShortage, host_limits, judge_host_memory, reserve_host_memory
from nemo_offload_rl.memory.machine import Machine
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES, ExpectedBytes
from nemo_offload_rl.residency import (
    BASE,
    OPTIMIZER,
    OPTIMIZER_PART,
    PARAMS,
    PARAMS_PART,
    REFERENCE,
    TEACHER,
    TEACHER_HEAD,
    TEACHER_LAYER,
    Phase,
    Placement,
    ResidencyPlan,
    ResidencySettings,
    resolve_plan,
)

_GIB = 2**30
# For CUDA contexts and communication buffers of both processes, and fragmentation.
SHARED_RESERVE_BYTES = 6 * _GIB
# Names in messages for host memory other than state groups.
ACTIVATIONS, LOADING, DEVICE_STATE = "offloaded activations", "loading", "state in use"
PROCESS, ENGINE = "process", "engine"
# Growth of a worker's process after its backend's libraries are imported: communicators, kernels, staging.
GROWTH_BYTES = _GIB // 2
# Main memory of whole processes, libraries and CUDA context included, without any state: measured by
# benchmarks/large_model.py (docs/measurements/large-models.md). Engine processes took 1.5 to 1.9 GiB
# each on one GPU, and 2.7 to 2.8 on each of two. The driver's memory, 2.0 to 2.7 GiB, includes the daemons of a Ray
# cluster that it has started.
POLICY_PROCESS_BYTES = {"cuda": 3 * _GIB, "cpu": _GIB // 2}
ENGINE_PROCESS_BYTES = {"cuda": 2 * _GIB, "cpu": 3 * _GIB // 4}
ENGINE_OF_SEVERAL_BYTES = 14 * _GIB // 5
DRIVER_BYTES = {"cuda": 27 * _GIB // 10, "cpu": _GIB}
_ADAMW_ARGUMENTS = {"lr", "betas", "eps", "weight_decay", "fused"}  # of torch's AdamW and of ours


@dataclass(frozen=True)
class HostPlan:
    """A resolved plan and its memory.

    Attributes:
        plan: The table.
        sizes: Bytes of each row of the table.
        arena: Bytes of each row that the host holds.
    """

    plan: ResidencyPlan
    sizes: Mapping[str, int]
    arena: Mapping[str, int]


@dataclass(frozen=True)
class HostNeed:
    """The quantities that decide how much host memory a worker takes.

    Attributes:
        settings: The policy's settings.
        expected: Bytes of state, of a reference if one is kept, and of offloaded activations.
        device_bytes: Memory of the worker's device.
        other: Bytes by name of everything but offloaded state and offloaded activations.
    """

    settings: PolicySettings
    expected: ExpectedBytes
    device_bytes: int
    other: Mapping[str, int]

    def resolve(self) -> HostPlan:
        """Resolve the plan of these settings."""
        settings, expected, sizes = self.settings, self.expected, dict(self.expected.state)
        resident = resident_groups(settings, sizes, self.device_bytes)
        plan = resolve_plan(replace(_plain_plan(settings, sizes), resident_groups=resident))
        held = {name: size for name, size in sizes.items() if plan.leaves_the_device(name)}
        if expected.reference:
            sizes[REFERENCE] = held[REFERENCE] = expected.reference
            if expected.reference_is_cast:
                # Without room for both on the device, swapping it in pushes the policy's parameters to the host.
                held[PARAMS] = sizes[PARAMS]
        return HostPlan(plan, sizes, held)

    def state_parts(self) -> dict[str, int]:
        """Bytes by name of offloaded state and activations, which `policy.host_memory_budget_gib` bounds."""
        activations = {ACTIVATIONS: self.expected.activations} if self.expected.activations else {}
        return {**self.resolve().arena, **activations}

    def expecting(self, **changes: object) -> HostNeed:
        """Return this need with other values in `expected`."""
        return replace(self, expected=replace(self.expected, **changes))

    def parts(self) -> dict[str, int]:
        """Bytes by name of all host memory that this worker will still take."""
        return {**self.state_parts(), **self.other}


def host_need(
    settings: PolicySettings,
    expected: ExpectedBytes,
    *,
    on_cpu: bool,
    device_bytes: int,
    num_workers: int | None = None,
    loaded: Collection[str] = (),
    engine_weight_bytes: int | None = None,
) -> HostNeed:
    """Count the host memory that a worker will still take.

    Args:
        settings: The policy's settings.
        expected: Bytes of its state by row of the plan, of a reference if one is kept, of loading and activations.
        on_cpu: State in use and an engine take main memory as well.
        device_bytes: Memory of the worker's device.
        num_workers: Workers of the host, if their processes have not started; None in a running worker.
        loaded: Rows whose state is in memory already.
        engine_weight_bytes: Weights of an engine on the CPU; None for the size of the worker's own.
    """
    sizes = expected.state
    if num_workers is None:
        other = {PROCESS: GROWTH_BYTES, LOADING: expected.loading}
    else:
        other = process_bytes(settings, "cpu" if on_cpu else "cuda", num_workers)
    if on_cpu:
        gradients_bytes = sizes[PARAMS]
        other[DEVICE_STATE] = sum(size for row, size in sizes.items() if row not in loaded) + gradients_bytes
        if settings.engine_memory_share > 0:
            if engine_weight_bytes is None:
                engine_weight_bytes = sum(sizes.get(row, 0) for row in (PARAMS, PARAMS_PART, BASE))
            cache_bytes = int((settings.engine_kv_cache_gib or 0.0) * _GIB)
            other[ENGINE] = engine_weight_bytes + cache_bytes + ENGINE_PROCESS_BYTES["cpu"]
    return HostNeed(settings, expected, device_bytes, other)


def claim_host_memory(need: HostNeed) -> int:
    """Check that each host has the memory that its workers need, before they take it; a collective of all workers.

    Returns:
        Bytes that this worker's arenas may take: the planned ones, and its part of the rest.

    Raises:
        ConfigError: The need does not fit; the message has the numbers and the smallest sufficient change. All workers
            raise.
    """
    if need.settings.host_memory_budget_gib is not None:
        return _within_budget(need, need.settings.host_memory_budget_gib)
    return _granted(need, reserve_host_memory(need.parts(), host_limits()))


def foresee_host_memory(need: HostNeed, num_workers: int, device_type: str, machine: Machine) -> None:
    """Check before anything starts that one machine has the host memory that all workers need.

    A budget replaces the limits of the present machine.

    Args:
        need: Need of each worker, with the processes that are to start.
        num_workers: Number of workers.
        device_type: `cuda` or `cpu`.
        machine: Machine of the workers.

    Raises:
        ConfigError: The workers will not fit.
    """
    if need.settings.host_memory_budget_gib is not None:
        _within_budget(need, need.settings.host_memory_budget_gib)
        if not machine.is_planned:
            return
    left = machine.host_limits(DRIVER_BYTES[device_type])
    _granted(need, judge_host_memory([(left, need.parts())] * num_workers, 0))


def _within_budget(need: HostNeed, budget_gib: float) -> int:
    state, budget_bytes = need.state_parts(), int(budget_gib * _GIB)
    if sum(state.values()) > budget_bytes:
        where = f"policy.host_memory_budget_gib leaves {budget_bytes / _GIB:.2f} GiB"
        raise ConfigError(_host_refusal(need, state, where, budget_bytes))
    return budget_bytes - need.expected.activations


def _granted(need: HostNeed, verdict: HostShare | HostShortage) -> int:
    if isinstance(verdict, HostShortage):
        left = f"{verdict.limit.name} leaves {verdict.limit.left_bytes / _GIB:.2f} GiB"
        if verdict.num_ranks > 1:
            left += f" for {verdict.num_ranks} workers that need {verdict.needed_bytes / _GIB:.2f}"
        raise ConfigError(_host_refusal(need, verdict.parts, left, verdict.worker_bytes))
    return verdict.num_bytes - sum(need.parts().values()) + sum(need.resolve().arena.values())


def _host_refusal(need: HostNeed, parts: Mapping[str, int], left: str, left_bytes: int) -> str:
    fix = advice(need, sum(parts.values()), left_bytes)
    return refusal("offloaded state of one worker", parts, "of host memory", left, fix, digits=2)


def refusal(
    subject: str, parts: Mapping[str, int], where: str, has: str, fix: str, *, note: str = "", digits: int = 1
) -> str:
    """Compose a one-line message on insufficient memory.

    Args:
        subject: Owner of the need.
        parts: Bytes by name, which add up to the need.
        where: Kind of memory.
        has: Available memory.
        fix: Change to make.
        note: Part that is not counted.
        digits: Decimals of numbers in GiB.
    """
    needed_gib = sum(parts.values()) / _GIB
    shown = ", ".join(f"{name} {size / _GIB:.{digits}f}" for name, size in parts.items() if size)
    return f"{subject} needs {needed_gib:.{digits}f} GiB {where} ({shown}){note}, but {has}; {fix}"


@dataclass(frozen=True)
class Change:
    """An override and its effect on a need; among equally many changes, lower ranks are preferred."""

    override: str
    apply: Callable[[HostNeed], HostNeed]
    rank: int = 0


def advice(need: HostNeed, needed_bytes: int, budget_bytes: int) -> str:
    """Name the fewest changes with which the need fits, and of those the smallest; other advice if none suffice."""
    room_gib = int((budget_bytes - needed_bytes + need.expected.activations) / _GIB * 100) / 100
    if need.expected.activations and room_gib > 0:
        section = need.settings.backend.section
        return f"lower policy.{section}.activation_offload_host_limit_gib to {room_gib}, or raise the limit"
    # Everything but offloaded state, as counted on the rank that is short.
    other_bytes = needed_bytes - sum(need.state_parts().values())
    best: tuple[int, int, int, str] | None = None
    changes = _changes(need)
    for chosen in (some for count in range(len(changes)) for some in combinations(changes, count + 1)):
        changed = need
        for change in chosen:
            changed = change.apply(changed)
        rest = sum(changed.state_parts().values()) + other_bytes
        rank = max(change.rank for change in chosen)
        found = (-len(chosen), -rank, rest, " ".join(change.override for change in chosen))
        if rest <= budget_bytes and (best is None or found[:3] > best[:3]):
            best = found
    if best is None and need.settings.backend.streams_parameters:  # supports one worker only
        return "no setting makes it fit: raise the limit, or share the state among several GPUs without cpu_offload"
    if best is None:
        return "no setting makes it fit: raise the limit, or use more hosts with fewer workers each"
    return f"use {best[3]}, which needs {best[2] / _GIB:.2f} GiB, or raise the limit"


def _changes(need: HostNeed) -> list[Change]:
    """List overrides that may reduce host memory; `advice` tries which of them do."""
    settings, changes = need.settings, []
    if need.expected.activations:
        changes.append(Change(f"{settings.backend.activation_key}=false", lambda need: need.expecting(activations=0)))
    backend = settings.backend
    if backend.streamed_share and not backend.streams_parameters:
        changes.append(Change(f"{backend.streaming_section}.offload_optimizer_states=false", _without_streaming))
    if settings.offload_optimizer_states_for_logprob:
        key = "policy.offload_optimizer_states_for_logprob=false"
        changes.append(Change(key, lambda need: _with_settings(need, offload_optimizer_states_for_logprob=False)))
    if settings.colocated:
        changes += [_kept(name) for name in (OPTIMIZER, PARAMS) if settings.residency_overrides.get(name) != "device"]
    # These change a run's results.
    has_engine = settings.colocated or settings.engine_memory_share > 0
    if need.expected.reference:
        key = "loss_fn.reference_policy_kl_penalty=0" if has_engine else "dpo.precompute_reference_logprobs=true"
        changes.append(Change(key, lambda need: need.expecting(reference=0), rank=1))
    if (moments := _narrow_moments(settings)) is not None:
        changes.append(moments)
    return changes


def _kept(name: str) -> Change:
    def keep(need: HostNeed) -> HostNeed:
        return _with_settings(need, residency_overrides={**need.settings.residency_overrides, name: "device"})

    return Change(f"++policy.residency_overrides.{name}=device", keep)


def _narrow_moments(settings: PolicySettings) -> Change | None:
    """Return the change to 16-bit moments of Adam; None if keys alone cannot make it."""
    backend, adam = settings.backend, settings.optimizer
    if isinstance(backend, MegatronConfig):
        wide = backend.optimizer
        narrow = replace(wide, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
        dtype = COMPUTE_DTYPES[settings.precision]
        old, new = (optimizer_spec(it).bytes_per_element(dtype) for it in (wide, narrow))
        override = " ".join(
            f"policy.megatron_cfg.optimizer.{name}_dtype=bfloat16" for name in ("exp_avg", "exp_avg_sq")
        )
        if old == new or wide.optimizer_cpu_offload:
            return None
    elif adam is not None and adam.name == "torch.optim.AdamW" and adam.kwargs.keys() <= _ADAMW_ARGUMENTS:
        old, new, override = 8, 4, "policy.optimizer.name=nemo_offload_rl.optim.AdamW"
    else:
        return None

    def narrowed(need: HostNeed) -> HostNeed:
        sizes = need.expected.state
        states = {name: size * new // old for name, size in sizes.items() if name in (OPTIMIZER, OPTIMIZER_PART)}
        return need.expecting(state={**sizes, **states})

    return Change(override, narrowed, rank=1)


def _with_settings(need: HostNeed, **changes: object) -> HostNeed:
    return replace(need, settings=replace(need.settings, **changes))


def _without_streaming(need: HostNeed) -> HostNeed:
    backend = need.settings.backend
    sizes = dict(need.expected.state)
    if OPTIMIZER_PART in sizes:
        sizes[OPTIMIZER] = sizes.pop(OPTIMIZER_PART) + sizes.get(OPTIMIZER, 0)
    return _with_settings(need.expecting(state=sizes), **{backend.section: backend.without_streaming()})


def _plain_plan(settings: PolicySettings, sizes_bytes: Mapping[str, int]) -> ResidencySettings:
    """Make the settings of the plan, without the groups that may stay on the device."""
    return ResidencySettings(
        colocated=settings.colocated,
        use_pinned_optimizer_offload=settings.use_pinned_optimizer_offload,
        offload_optimizer_states_for_logprob=settings.offload_optimizer_states_for_logprob,
        offload_optimizer_states=settings.backend.streamed_share > 0,
        streams_parameters=settings.backend.streams_parameters,
        optimizer_cpu_offload=settings.backend.keeps_optimizer_on_host,
        rows=frozenset(sizes_bytes),
    )


def resident_groups(settings: PolicySettings, sizes_bytes: Mapping[str, int], device_bytes: int) -> frozenset[str]:
    """Choose groups that stay on the device while the engine generates: by override, and with `auto` if they fit.

    Args:
        settings: `residency`, `residency_overrides`, the engine's share of the device and the policy's limit.
        sizes_bytes: The groups' sizes by row of the plan.
        device_bytes: Memory of the shared device.
    """
    overrides = settings.residency_overrides
    kept = {name for name, place in overrides.items() if place == "device"}
    if PARAMS in kept and BASE in sizes_bytes:
        kept.add(BASE)
    if settings.residency == "auto":
        plain = _plain_plan(settings, sizes_bytes)
        # A row that leaves in any case, such as streamed parts of the optimizer, gets no room.
        all_kept = resolve_plan(replace(plain, resident_groups=frozenset(sizes_bytes)))
        stays = {
            name: size
            for name, size in sizes_bytes.items()
            if all_kept.placement(name, Phase.GENERATION) is not Placement.HOST
        }
        of_teacher = (TEACHER, TEACHER_LAYER, TEACHER_HEAD)
        candidates = {name: size for name, size in stays.items() if name not in overrides and name not in of_teacher}
        kept_bytes = sum(size for name, size in stays.items() if name in kept)
        kept |= choose_resident(candidates, max(0, left_by_engine_bytes(settings, device_bytes) - kept_bytes))
    return frozenset(kept)


def choose_resident(sizes_bytes: Mapping[str, int], room_bytes: int) -> frozenset[str]:
    """Choose groups that may stay on the device with the engine: the largest first, as far as the room goes.

    Args:
        sizes_bytes: Sizes of the candidates.
        room_bytes: Device memory that neither the engine nor the reserve claims.
    """
    chosen: set[str] = set()
    for name, size in sorted(sizes_bytes.items(), key=lambda item: -item[1]):
        if size <= room_bytes:
            chosen.add(name)
            room_bytes -= size
    return frozenset(chosen)


def left_by_engine_bytes(settings: PolicySettings, device_bytes: int) -> int:
    """Count the device's bytes that a worker's tensors may take while the engine is awake; at least 0."""
    engine_bytes = int(settings.engine_memory_share * device_bytes)
    # The share does not include a cache of a fixed size.
    engine_bytes += int((settings.engine_kv_cache_gib or 0.0) * _GIB)
    room = device_bytes - engine_bytes
    if settings.gpu_memory_limit_gib is not None:
        room = min(room, int(settings.gpu_memory_limit_gib * _GIB))
    return max(0, room - SHARED_RESERVE_BYTES)


def gpu_limit_problem(limit_gib: float | None, gpu_bytes: int | None, *, on_cpu: bool) -> str | None:
    """Return one line if `policy.gpu_memory_limit_gib` is above the GPU's memory or there is no GPU; else None.

    Args:
        limit_gib: The limit; None for none.
        gpu_bytes: Memory of the GPU; None if unknown.
        on_cpu: The policy trains on a CPU.
    """
    if limit_gib is None:
        return None
    if on_cpu:
        return f"policy.gpu_memory_limit_gib is {limit_gib}, but the policy trains on a CPU; set it to null"
    if gpu_bytes is None or limit_gib * _GIB <= gpu_bytes:
        return None
    has = f"the GPU has {gpu_bytes / _GIB:.1f} GiB"
    return f"policy.gpu_memory_limit_gib is {limit_gib}, but {has}; set it to less, or to null for all of it"


def render_host_plan(need: HostNeed, device_type: str, num_workers: int) -> str:
    """Render one line: host memory of all processes during a run, by owner, in GiB.

    Args:
        need: Need of one worker.
        device_type: `cuda` or `cpu`.
        num_workers: Workers of the host; there are as many engine processes if engines share their devices.
    """
    owners = host_bytes_by_owner(need, device_type, num_workers)
    state = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in need.state_parts().items() if size)
    shown = [f"{owner} {size / _GIB:.2f}" for owner, size in owners.items()]
    text = f"host memory: {' + '.join(shown)} = {sum(owners.values()) / _GIB:.2f} GiB"
    return f"{text} (of each policy worker: {state})" if state else text


def process_bytes(settings: PolicySettings, device_type: str, num_workers: int) -> dict[str, int]:
    """Main memory, without state, of one worker and of the engine process that shares its device."""
    parts = {PROCESS: POLICY_PROCESS_BYTES[device_type]}
    if settings.engine_memory_share == 0 or not settings.colocated:
        return parts
    over_several = device_type == "cuda" and num_workers > 1
    return parts | {ENGINE: ENGINE_OF_SEVERAL_BYTES if over_several else ENGINE_PROCESS_BYTES[device_type]}


def host_bytes_by_owner(need: HostNeed, device_type: str, num_workers: int) -> dict[str, int]:
    """Main memory during a run by owner: `policy`, `engine` (if it shares the devices), `driver`."""
    in_use, processes = need.other.get(DEVICE_STATE, 0), process_bytes(need.settings, device_type, num_workers)
    worker_bytes = processes[PROCESS] + sum(need.state_parts().values()) + in_use
    owners = {"policy": num_workers * worker_bytes}
    if ENGINE in processes:
        owners["engine"] = num_workers * need.other.get(ENGINE, processes[ENGINE])
    return {**owners, "driver": DRIVER_BYTES[device_type]}
