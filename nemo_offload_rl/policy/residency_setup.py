"""From a policy's settings and backend to its residency manager: sizes, the resolved plan, host memory."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.backends.base import PolicyBackend
from nemo_offload_rl.policy.settings import PolicySettings
from nemo_offload_rl.residency import (
    Device,
    Phase,
    Placement,
    ResidencyManager,
    ResidencySettings,
    adam_state_bytes,
    choose_resident,
    make_device,
    read_host_budget,
    resolve_plan,
    unique_storages,
)

REFERENCE = "reference"
# CUDA contexts and communication buffers of both processes, fragmentation.
SHARED_RESERVE_BYTES = 6 << 30


def build_manager(
    settings: PolicySettings, backend: PolicyBackend, keep_reference: bool
) -> tuple[ResidencyManager, dict[str, int]]:
    """The manager of one rank, with its host memory reserved and the reference taken, and the groups' sizes in bytes.

    Raises:
        HostBudgetError: The state does not fit into host memory.
    """
    device = make_device(backend.device)
    groups = backend.state_groups()
    params_bytes = sum(
        record.storage.nbytes()
        for group in groups
        if group.name == "params"
        for record in unique_storages(group.tensors()).values()
    )
    sizes = {"params": params_bytes}
    if "adam" in settings.optimizer.name.lower():
        sizes["optimizer"] = adam_state_bytes(params_bytes)
    plan = resolve_plan(
        ResidencySettings(
            colocated=settings.colocated,
            use_pinned_optimizer_offload=settings.use_pinned_optimizer_offload,
            offload_optimizer_states_for_logprob=settings.offload_optimizer_states_for_logprob,
            offload_optimizer_states=settings.dtensor_cfg.offload_optimizer_states,
            resident_groups=resident_groups(settings, sizes, device),
        )
    )
    manager = ResidencyManager(
        plan=plan,
        groups=groups,
        device=device,
        overlap=settings.residency_overlap,
        verify=settings.residency_verify,
    )
    expected = {
        name: size for name, size in sizes.items() if any(plan.placement(name, p) is Placement.HOST for p in Phase)
    }
    if keep_reference:
        # A swapped-in reference pushes the policy's own parameters to the host.
        expected |= {REFERENCE: params_bytes, "params": params_bytes}
    check_host_memory(expected, settings)
    manager.reserve(expected)
    if keep_reference:
        manager.snapshot("params", REFERENCE)
    return manager, sizes | ({REFERENCE: params_bytes} if keep_reference else {})


def check_host_memory(expected_bytes: Mapping[str, int], settings: PolicySettings) -> None:
    """Refuse a plan that host memory cannot hold, before training.

    Args:
        expected_bytes: Host bytes by group and snapshot.
        settings: `host_memory_budget_gib`.

    Raises:
        ConfigError: With the numbers, and the smallest change that fits.
    """
    gib = 2**30
    if settings.host_memory_budget_gib is not None:
        budget, limit = int(settings.host_memory_budget_gib * gib), "policy.host_memory_budget_gib"
    else:
        read = read_host_budget()
        budget, limit = read.num_bytes, read.limit_name
    needed = sum(expected_bytes.values())
    if needed <= budget:
        return
    no_reference = "loss_fn.reference_policy_kl_penalty=0"
    keep = "++policy.residency_overrides.{}=device"
    ways = {
        no_reference: (REFERENCE,),
        keep.format("optimizer"): ("optimizer",),
        f"{no_reference} {keep.format('optimizer')}": (REFERENCE, "optimizer"),
        # Without a reference, and with everything on the device, nothing is left to hold.
        f"{no_reference} {keep.format('optimizer')} {keep.format('params')}": tuple(expected_bytes),
    }
    rests = {way: needed - sum(expected_bytes.get(name, 0) for name in names) for way, names in ways.items()}
    smallest = max((way for way in ways if rests[way] <= budget), key=lambda way: rests[way])
    mend = f"use {smallest}, which needs {rests[smallest] / gib:.2f} GiB"
    parts = ", ".join(f"{name} {size / gib:.2f}" for name, size in expected_bytes.items())
    raise ConfigError(
        f"offloaded state of one worker needs {needed / gib:.2f} GiB of host memory ({parts}), but {limit} leaves "
        f"{budget / gib:.2f} GiB; {mend}, or raise the limit"
    )


def resident_groups(settings: PolicySettings, sizes_bytes: dict[str, int], device: Device) -> frozenset[str]:
    """Groups that stay on the device while the engine generates: those told to, and with `auto` those that fit.

    Args:
        settings: `residency`, `residency_overrides` and the engine's share of the device.
        sizes_bytes: The groups' sizes.
        device: Whose memory is shared.
    """
    overrides = settings.residency_overrides
    kept = {name for name, place in overrides.items() if place == "device"}
    if settings.residency == "auto":
        candidates = {name: size for name, size in sizes_bytes.items() if name not in overrides}
        engine_bytes = int(settings.engine_memory_share * device.total_bytes())
        room = device.total_bytes() - engine_bytes - SHARED_RESERVE_BYTES - sum(sizes_bytes[name] for name in kept)
        kept |= choose_resident(candidates, max(0, room))
    return frozenset(kept)
