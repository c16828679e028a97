"""From a policy's settings and backend to its residency manager: sizes, the resolved plan, host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.backends.base import PolicyBackend
from nemo_offload_rl.policy.settings import PolicySettings
from nemo_offload_rl.residency import (
    BASE,
    PARAMS,
    REFERENCE,
    Device,
    HostArenas,
    Phase,
    Placement,
    ResidencyManager,
    ResidencyPlan,
    ResidencySettings,
    choose_resident,
    read_host_budget,
    resolve_plan,
)

# CUDA contexts and communication buffers of both processes, fragmentation.
SHARED_RESERVE_BYTES = 6 << 30
ACTIVATIONS = "offloaded activations"  # in messages: no state group, but on the same host


@dataclass(frozen=True)
class _HostPlan:
    """The resolved plan, the sizes of its rows, and what they need on the host, in bytes."""

    plan: ResidencyPlan
    sizes: dict[str, int]
    host: dict[str, int]


def begin_host_memory(
    settings: PolicySettings, sizes_bytes: Mapping[str, int], keep_reference: bool, device: Device
) -> HostArenas:
    """Host memory for a worker whose model is still to be loaded; it is taken while that happens.

    Args:
        settings: The policy's settings.
        sizes_bytes: The groups' sizes, as far as they are known already; empty for nothing to be taken yet.
        keep_reference: A reference will be kept.
        device: Where the groups will live.

    Raises:
        ConfigError: The state will not fit into host memory.
    """
    arenas = HostArenas(device)
    if sizes_bytes:
        needed = _host_plan(settings, sizes_bytes, keep_reference, device)
        check_host_memory(needed.host, 0, settings)  # backends that know sizes so early offload no activations
        arenas.begin_reserve(needed.plan.host_bytes(needed.host))
    return arenas


def build_manager(
    settings: PolicySettings, backend: PolicyBackend, keep_reference: bool, arenas: HostArenas, device: Device
) -> tuple[ResidencyManager, dict[str, int]]:
    """The manager of one rank, with its host memory reserved and the reference taken, and the groups' sizes in bytes.

    Raises:
        ConfigError: The state does not fit into host memory.
        HostBudgetError: Host memory ran out while it was taken.
    """
    needed = _host_plan(settings, backend.expected_bytes(), keep_reference, device)
    if not arenas.reserved_bytes:
        check_host_memory(needed.host, backend.activation_host_bytes(), settings)
    manager = ResidencyManager(
        plan=needed.plan,
        groups=backend.state_groups(),
        device=device,
        arenas=arenas,
        overlap=settings.residency_overlap,
        verify=settings.residency_verify,
    )
    manager.reserve(needed.host)
    if keep_reference:
        manager.snapshot(PARAMS, REFERENCE)
    return manager, needed.sizes


def _host_plan(
    settings: PolicySettings, sizes_bytes: Mapping[str, int], keep_reference: bool, device: Device
) -> _HostPlan:
    plan = resolve_plan(
        ResidencySettings(
            colocated=settings.colocated,
            use_pinned_optimizer_offload=settings.use_pinned_optimizer_offload,
            offload_optimizer_states_for_logprob=settings.offload_optimizer_states_for_logprob,
            offload_optimizer_states=settings.offload_optimizer_states,
            optimizer_cpu_offload=settings.optimizer_cpu_offload,
            resident_groups=resident_groups(settings, sizes_bytes, device),
            has_base=BASE in sizes_bytes,
        )
    )
    leaving = {
        name: size for name, size in sizes_bytes.items() if Placement.HOST in (plan.placement(name, p) for p in Phase)
    }
    if not keep_reference:
        return _HostPlan(plan, dict(sizes_bytes), leaving)
    reference = {REFERENCE: sizes_bytes[PARAMS]}
    # A swapped-in reference pushes the policy's own parameters to the host.
    return _HostPlan(plan, {**sizes_bytes, **reference}, {**leaving, **reference, PARAMS: sizes_bytes[PARAMS]})


def check_host_memory(expected_bytes: Mapping[str, int], activation_bytes: int, settings: PolicySettings) -> None:
    """Refuse a plan that host memory cannot hold, before training.

    Args:
        expected_bytes: Host bytes by group and snapshot.
        activation_bytes: What offloaded activations can take beside it; 0 where they are not offloaded.
        settings: `host_memory_budget_gib`, and what to name in the message.

    Raises:
        ConfigError: With the numbers, and the smallest change that fits.
    """
    gib = 2**30
    if settings.host_memory_budget_gib is not None:
        budget, limit = int(settings.host_memory_budget_gib * gib), "policy.host_memory_budget_gib"
    else:
        read = read_host_budget()
        budget, limit = read.num_bytes, read.limit_name
    all_bytes = dict(expected_bytes)
    if activation_bytes:
        all_bytes[ACTIVATIONS] = activation_bytes
    needed = sum(all_bytes.values())
    if needed <= budget:
        return
    parts = ", ".join(f"{name} {size / gib:.2f}" for name, size in all_bytes.items())
    raise ConfigError(
        f"offloaded state of one worker needs {needed / gib:.2f} GiB of host memory ({parts}), but {limit} leaves "
        f"{budget / gib:.2f} GiB; {_mend_of_host_memory(settings, all_bytes, budget)}, or raise the limit"
    )


def _mend_of_host_memory(settings: PolicySettings, all_bytes: Mapping[str, int], budget_bytes: int) -> str:
    """The smallest change with which `all_bytes`, which are more, fit the budget."""
    gib = 2**30
    needed = sum(all_bytes.values())
    if ACTIVATIONS in all_bytes:
        room_gib = int((budget_bytes - needed + all_bytes[ACTIVATIONS]) / gib * 100) / 100
        if room_gib > 0:
            return f"lower policy.megatron_cfg.activation_offload_host_limit_gib to {room_gib}"
    ways = _ways_to_need_less(settings, all_bytes)
    rests = {way: needed - sum(all_bytes.get(name, 0) for name in names) for way, names in ways.items()}
    smallest = max((way for way in ways if rests[way] <= budget_bytes), key=lambda way: rests[way])
    return f"use {smallest}, which needs {rests[smallest] / gib:.2f} GiB"


def _ways_to_need_less(settings: PolicySettings, expected_bytes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Overrides, and what the host then does not hold; the last one leaves nothing to hold."""
    ways = _ways_to_hold_less_state(settings, expected_bytes)
    if ACTIVATIONS not in expected_bytes:
        return ways
    # Looked for only where the state alone is too much, or leaves no room that is worth naming.
    without = "policy.megatron_cfg.fine_grained_activation_offloading=false"
    return {without: (ACTIVATIONS,)} | {f"{without} {way}": tuple({*names, ACTIVATIONS}) for way, names in ways.items()}


def _ways_to_hold_less_state(settings: PolicySettings, expected_bytes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    if not settings.colocated:
        # Without an engine the reference of DPO pushes the parameters out, and only its own keys the optimizer.
        no_reference = "dpo.precompute_reference_logprobs=true"
        no_offload = "policy.offload_optimizer_states_for_logprob=false and offload_optimizer_states=false"
        return {
            no_reference: (REFERENCE, PARAMS),
            no_offload: ("optimizer",),
            f"{no_reference} {no_offload}": tuple(expected_bytes),
        }
    no_reference, keep = "loss_fn.reference_policy_kl_penalty=0", "++policy.residency_overrides.{}=device"
    return {
        no_reference: (REFERENCE,),
        keep.format("optimizer"): ("optimizer",),
        f"{no_reference} {keep.format('optimizer')}": (REFERENCE, "optimizer"),
        # Without a reference, and with everything on the device, nothing is left to hold.
        f"{no_reference} {keep.format('optimizer')} {keep.format('params')}": tuple(expected_bytes),
    }


def resident_groups(settings: PolicySettings, sizes_bytes: Mapping[str, int], device: Device) -> frozenset[str]:
    """Groups that stay on the device while the engine generates: those told to, and with `auto` those that fit.

    Args:
        settings: `residency`, `residency_overrides` and the engine's share of the device.
        sizes_bytes: The groups' sizes.
        device: Whose memory is shared.
    """
    overrides = settings.residency_overrides
    kept = {name for name, place in overrides.items() if place == "device"}
    if PARAMS in kept and BASE in sizes_bytes:
        kept.add(BASE)
    if settings.residency == "auto":
        candidates = {name: size for name, size in sizes_bytes.items() if name not in overrides}
        engine_bytes = int(settings.engine_memory_share * device.total_bytes())
        # The share says nothing of a cache whose size was fixed.
        engine_bytes += int((settings.engine_kv_cache_gib or 0.0) * 2**30)
        room = device.total_bytes() - engine_bytes - SHARED_RESERVE_BYTES - sum(sizes_bytes[name] for name in kept)
        kept |= choose_resident(candidates, max(0, room))
    return frozenset(kept)
