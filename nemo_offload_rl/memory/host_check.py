"""Compares the host memory that workers need with its limits, and refuses with advice where it does not fit.

Advice names a change of settings only if the plan, resolved again with it, fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from nemo_offload_rl.backends.megatron.optimizer_spec import optimizer_spec
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.memory.host_plan import HostNeed, driver_bytes
from nemo_offload_rl.memory.limits import HostShare, HostShortage, host_limits, judge_host_memory, reserve_host_memory
from nemo_offload_rl.memory.machine import Machine
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES
from nemo_offload_rl.residency import OPTIMIZER, OPTIMIZER_PART, PARAMS

_GIB = 2**30
_CACHE = "policy.generation.vllm_cfg.kv_cache_memory_gib"
_ADAMW_ARGUMENTS = {"lr", "betas", "eps", "weight_decay", "fused"}  # of torch's AdamW and of ours


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


type Judge = Callable[[str], bool]
"""Tells of overrides, written `KEY=VALUE ...`, whether advice may name them."""


def foresee_host_memory(
    need: HostNeed, num_workers: int, device_type: str, machine: Machine, may_advise: Judge | None = None
) -> None:
    """Check before anything starts that one machine has the host memory that all workers need.

    A budget replaces the limits of the present machine.

    Args:
        need: Need of each worker, with the processes that are to start.
        num_workers: Number of workers.
        device_type: `cuda` or `cpu`.
        machine: Machine of the workers.
        may_advise: See `Judge`; None if anything may be advised.

    Raises:
        ConfigError: The workers will not fit.
    """
    if need.settings.host_memory_budget_gib is not None:
        _within_budget(need, need.settings.host_memory_budget_gib, may_advise)
        if not machine.is_planned:
            return
    left = machine.host_limits(driver_bytes(need.settings, device_type))
    _granted(need, judge_host_memory([(left, need.parts())] * num_workers, 0), may_advise)


def _within_budget(need: HostNeed, budget_gib: float, may_advise: Judge | None = None) -> int:
    state, budget_bytes = need.state_parts(), int(budget_gib * _GIB)
    if sum(state.values()) > budget_bytes:
        where = f"policy.host_memory_budget_gib leaves {budget_bytes / _GIB:.2f} GiB"
        raise ConfigError(_host_refusal(need, state, where, budget_bytes, may_advise))
    return budget_bytes - need.expected.activations


def _granted(need: HostNeed, verdict: HostShare | HostShortage, may_advise: Judge | None = None) -> int:
    if isinstance(verdict, HostShortage):
        left = f"{verdict.limit.name} leaves {verdict.limit.left_bytes / _GIB:.2f} GiB"
        if verdict.num_ranks > 1:
            left += f" for {verdict.num_ranks} workers that need {verdict.needed_bytes / _GIB:.2f}"
        raise ConfigError(_host_refusal(need, verdict.parts, left, verdict.worker_bytes, may_advise))
    return verdict.num_bytes - sum(need.parts().values()) + sum(need.resolve().arena.values())


def _host_refusal(
    need: HostNeed, parts: Mapping[str, int], left: str, left_bytes: int, may_advise: Judge | None
) -> str:
    fix = advice(need, sum(parts.values()), left_bytes, may_advise)
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


def advice(need: HostNeed, needed_bytes: int, budget_bytes: int, may_advise: Judge | None = None) -> str:
    """Name the fewest changes with which the need fits, and of those the smallest; other advice if none suffice."""
    room_gib = _in_hundredths(budget_bytes - needed_bytes + need.expected.activations)
    if need.expected.activations and room_gib > 0:
        section = need.settings.backend.section
        return f"lower policy.{section}.activation_offload_host_limit_gib to {room_gib}, or raise the limit"
    # Everything but offloaded state, as counted on the rank that is short.
    other_bytes = needed_bytes - sum(need.state_parts().values())
    found: list[tuple[int, int, int, str]] = []
    changes = _changes(need)
    for chosen in (some for count in range(len(changes) + 1) for some in combinations(changes, count)):
        changed = need
        for change in chosen:
            changed = change.apply(changed)
        rest = sum(changed.state_parts().values()) + other_bytes
        overrides = [change.override for change in chosen]
        if rest > budget_bytes and other_bytes and (cache_bytes := need.cache_bytes):
            cache_gib = _in_hundredths(budget_bytes - rest + cache_bytes)
            if cache_gib > 0:
                rest += int(cache_gib * _GIB) - cache_bytes
                overrides.append(f"{_CACHE}={cache_gib}")
        if overrides and rest <= budget_bytes:
            rank = max((change.rank for change in chosen), default=0)
            found.append((len(overrides), rank, -rest, " ".join(overrides)))
    for _, _, rest, text in sorted(found, key=lambda each: each[:3]):  # of equals, the first
        if may_advise is None or may_advise(text):
            return f"use {text}, which needs {-rest / _GIB:.2f} GiB, or raise the limit"
    if need.settings.backend.streams_parameters:  # supports one worker only
        return "no setting makes it fit: raise the limit, or share the state among several GPUs without cpu_offload"
    return "no setting makes it fit: raise the limit, or use more hosts with fewer workers each"


def _in_hundredths(num_bytes: int) -> float:
    """Convert to GiB, rounded down to hundredths."""
    return math.floor(num_bytes / _GIB * 100) / 100


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
