"""Builds the residency manager from a policy's settings and backend, and allocates its host memory."""

from contextlib import ExitStack
from dataclasses import replace

import torch

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.memory.host_check import claim_host_memory
from nemo_offload_rl.memory.host_plan import HostNeed, gpu_limit_problem, host_need, left_by_engine_bytes
from nemo_offload_rl.memory.passes import pass_needs
from nemo_offload_rl.policy.teacher import Teacher
from nemo_offload_rl.protocols.backend import ExpectedBytes, PolicyBackend, ProcessInfo
from nemo_offload_rl.residency import (
    BASE,
    GRADS,
    PARAMS,
    PARAMS_PART,
    REFERENCE,
    TEACHER,
    TEACHER_HEAD,
    TEACHER_LAYER,
    Device,
    GradsGroup,
    HostArena,
    PassKind,
    ResidencyManager,
    part_copy_bytes,
    row_of,
    snapshot_bytes,
    snapshot_is_cast,
)


def limit_gpu_memory(limit_gib: float | None, device: Device, process: ProcessInfo) -> None:
    """Limit the GPU memory that torch's allocator may give to this process.

    Args:
        limit_gib: `policy.gpu_memory_limit_gib`; None for no limit.
        device: Device of the state groups.
        process: This rank.

    Raises:
        ConfigError: The device is host memory, or smaller than the limit.
    """
    total_bytes = device.total_bytes()
    problem = gpu_limit_problem(limit_gib, total_bytes, on_cpu=device.is_host_memory)
    if problem is not None:
        raise ConfigError(problem)
    if limit_gib is not None:
        torch.cuda.set_per_process_memory_fraction(limit_gib * 2**30 / total_bytes, torch.device(process.device))


def begin_host_memory(
    settings: PolicySettings,
    expected: ExpectedBytes,
    keep_reference: bool,
    device: Device,
) -> HostArena:
    """Begin to allocate a worker's host memory in the background, while its model is loaded.

    If sizes are known, this is a collective of all workers.

    Args:
        settings: The policy's settings.
        expected: The groups' sizes; if they are not known yet, nothing is allocated.
        keep_reference: A reference will be kept.
        device: Device of the state groups.

    Raises:
        ConfigError: The state will not fit into host memory.
    """
    arena = HostArena(device.new_region)
    if expected.state:
        kept = expected if keep_reference else replace(expected, reference=0)
        need = host_need(settings, kept, on_cpu=device.is_host_memory, device_bytes=device.total_bytes())
        arena.limit_bytes = claim_host_memory(need)
        plan = need.resolve()
        arena.begin_reserve(plan.plan.host_bytes(plan.arena))
    return arena


def build_manager(
    settings: PolicySettings,
    backend: PolicyBackend,
    keep_reference: bool,
    arena: HostArena,
    device: Device,
    teacher: Teacher | None = None,
) -> tuple[ResidencyManager, HostNeed]:
    """Build one rank's manager, reserve its host memory and copy the reference; return it and its host need.

    Raises:
        ConfigError: The state does not fit into host memory.
        HostBudgetError: Host memory ran out during the reservation.
    """
    sizes = {**backend.expected_bytes(), **(teacher.expected_bytes() if teacher is not None else {})}
    loaded = {PARAMS, PARAMS_PART, BASE, TEACHER, TEACHER_LAYER, TEACHER_HEAD}  # and gradients, if they have buffers
    groups = [*backend.state_groups(), *(teacher.state_groups() if teacher is not None else ())]
    params = next(group for group in groups if group.name == PARAMS)
    parts = [group for group in groups if row_of(group.name) == PARAMS_PART]
    expected = ExpectedBytes(
        state=sizes,
        loading=0,
        reference=snapshot_bytes(params) + sum(map(part_copy_bytes, parts)) if keep_reference else 0,
        activations=backend.activation_host_bytes(),
        reference_is_cast=snapshot_is_cast(params),
    )
    need = host_need(settings, expected, on_cpu=device.is_host_memory, device_bytes=device.total_bytes(), loaded=loaded)
    if not arena.reserved_bytes:
        arena.limit_bytes = claim_host_memory(need)
    plan = need.resolve()
    # Gradients have the parameters' size where a backend does not tell theirs.
    grads_bytes = sizes.get(GRADS, sizes.get(PARAMS, 0) + sizes.get(PARAMS_PART, 0))
    num_workers = backend.rank_info.world_size
    estimates = {} if device.is_host_memory else dict(pass_needs(settings, num_workers, grads_bytes))
    come_in_pass = not parts and any(group.name == GRADS and isinstance(group, GradsGroup) for group in groups)
    if come_in_pass and PassKind.TRAINING in estimates:
        # They are not among what is held when the pass begins.
        estimates[PassKind.TRAINING] = estimates[PassKind.TRAINING].plus(grads_bytes)
    manager = ResidencyManager(
        plan=plan.plan,
        groups=groups,
        device=device,
        arena=arena,
        overlap=settings.residency_overlap,
        verify=settings.residency_verify,
        left_by_engine_bytes=left_by_engine_bytes(settings, device.total_bytes()),
        estimates=estimates,
    )
    with ExitStack() as unless_done:
        unless_done.callback(manager.close)
        manager.reserve(plan.arena)
        if manager.passing is not None:
            backend.use_parts(manager.passing)
        if keep_reference:
            manager.snapshot(PARAMS, REFERENCE)
        unless_done.pop_all()
    return manager, need
