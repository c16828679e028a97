"""Counts host memory of a worker and the processes next to it, and chooses what stays on the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.protocols.backend import ExpectedBytes
from nemo_offload_rl.residency import (
    BASE,
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
PROCESS, ENGINE, KEPT_KV = "process", "engine", "the engine's kept KV blocks"
# Growth of a worker's process after its backend's libraries are imported: communicators, kernels, staging.
GROWTH_BYTES = _GIB // 2
# Main memory of whole processes, libraries and CUDA context included, without state: proportional set sizes of
# benchmarks/large_model.py, and resident ones of benchmarks/plan_runs.py. Megatron's workers took 2.5 to 2.9 GiB, those
# of DTensor 2.1, with compiled layers 2.5 to 3.0, and 3.2 to 3.4 where all state passes through the GPU. Engines took
# 1.5 to 1.9 GiB on one GPU, and 2.7 to 2.8 on each of two. The driver, with the daemons of a Ray that it has started,
# took 1.0 GiB, and 1.2 to 1.3 with Megatron, less 46 MiB a core of idle processes that are not started any more.
MEGATRON_PROCESS_BYTES = 11 * _GIB // 4
DTENSOR_PROCESS_BYTES = {"plain": 21 * _GIB // 10, "compiled": 11 * _GIB // 4}
PASSING_BYTES = 6 * _GIB // 10
CPU_PROCESS_BYTES = _GIB // 2
ENGINE_PROCESS_BYTES = {"cuda": 7 * _GIB // 4, "cpu": 3 * _GIB // 4}
ENGINE_OF_SEVERAL_BYTES = 14 * _GIB // 5
DRIVER_BYTES = _GIB
MEGATRON_DRIVER_BYTES = 5 * _GIB // 4


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

    @property
    def cache_bytes(self) -> int:
        """Bytes of `other` that are an engine's KV cache; 0 if the engine's memory is a GPU's."""
        is_counted = ENGINE in self.other and DEVICE_STATE in self.other
        return int((self.settings.engine_kv_cache_gib or 0.0) * _GIB) if is_counted else 0

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
    has_started: bool = True,
    loaded: Collection[str] = (),
    engine_weight_bytes: int | None = None,
) -> HostNeed:
    """Count the host memory that a worker will still take.

    Args:
        settings: The policy's settings.
        expected: Bytes of its state by row of the plan, of a reference if one is kept, of loading and activations.
        on_cpu: State in use and an engine take main memory as well.
        device_bytes: Memory of the worker's device.
        has_started: The worker's process has; otherwise it and the engine's process count whole.
        loaded: Rows whose state is in memory already.
        engine_weight_bytes: Weights of an engine on a CPU; None for the size of the worker's own.
    """
    sizes = expected.state
    if has_started:
        other = {PROCESS: GROWTH_BYTES, LOADING: expected.loading}
    else:
        other = process_bytes(settings, "cpu" if on_cpu else "cuda")
    if on_cpu:
        gradients_bytes = sizes[PARAMS]
        other[DEVICE_STATE] = sum(size for row, size in sizes.items() if row not in loaded) + gradients_bytes
        if settings.engine_memory_share > 0:
            if engine_weight_bytes is None:
                engine_weight_bytes = sum(sizes.get(row, 0) for row in (PARAMS, PARAMS_PART, BASE))
            cache_bytes = int((settings.engine_kv_cache_gib or 0.0) * _GIB)
            other[ENGINE] = engine_weight_bytes + cache_bytes + ENGINE_PROCESS_BYTES["cpu"]
    if settings.engine_kept_kv_gib:
        other[KEPT_KV] = int(settings.engine_kept_kv_gib * _GIB)
    return HostNeed(settings, expected, device_bytes, other)


def _plain_plan(settings: PolicySettings, sizes_bytes: Mapping[str, int]) -> ResidencySettings:
    """Make the settings of the plan, without the groups that may stay on the device."""
    return ResidencySettings(
        colocated=settings.colocated,
        use_pinned_optimizer_offload=settings.use_pinned_optimizer_offload,
        offload_optimizer_states_for_logprob=settings.offload_optimizer_states_for_logprob,
        offload_optimizer_states=settings.backend.streamed_share > 0,
        streams_parameters=settings.backend.streams_parameters,
        optimizer_cpu_offload=settings.backend.keeps_optimizer_on_host,
        refits_read_base=settings.sends_weights and settings.residency_overrides.get(BASE) != "host",
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
    if PARAMS in kept and BASE in sizes_bytes and BASE not in overrides:
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


def process_bytes(settings: PolicySettings, device_type: str) -> dict[str, int]:
    """Main memory, without state, of one worker and of the engine process that shares its device."""
    parts = {PROCESS: _worker_bytes(settings) if device_type == "cuda" else CPU_PROCESS_BYTES}
    if settings.engine_memory_share == 0 or not settings.colocated:
        return parts
    is_split = device_type == "cuda" and settings.engine_tensor_parallel_size > 1
    return parts | {ENGINE: ENGINE_OF_SEVERAL_BYTES if is_split else ENGINE_PROCESS_BYTES[device_type]}


def _worker_bytes(settings: PolicySettings) -> int:
    if not settings.dtensor_cfg.enabled:
        return MEGATRON_PROCESS_BYTES
    num_bytes = DTENSOR_PROCESS_BYTES["compiled" if settings.dtensor_cfg.torch_compile else "plain"]
    return num_bytes + (PASSING_BYTES if settings.backend.streams_parameters else 0)


def driver_bytes(settings: PolicySettings, device_type: str) -> int:
    """Main memory of the driver and of the daemons of a Ray cluster that it starts."""
    on_megatron = device_type == "cuda" and not settings.dtensor_cfg.enabled
    return MEGATRON_DRIVER_BYTES if on_megatron else DRIVER_BYTES


def host_bytes_by_owner(need: HostNeed, device_type: str, num_workers: int) -> dict[str, int]:
    """Main memory during a run by owner: `policy`, `engine` (if it shares the devices), `driver`."""
    in_use, processes = need.other.get(DEVICE_STATE, 0), process_bytes(need.settings, device_type)
    worker_bytes = processes[PROCESS] + sum(need.state_parts().values()) + in_use
    owners = {"policy": num_workers * worker_bytes}
    if ENGINE in processes:
        owners["engine"] = num_workers * (need.other.get(ENGINE, processes[ENGINE]) + need.other.get(KEPT_KV, 0))
    return {**owners, "driver": driver_bytes(need.settings, device_type)}
