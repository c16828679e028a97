"""What a GPU holds in each phase, and the rules that every phase has room.

Counted are state, the engine and what stays whatever leaves; activations are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_offload_rl.config.rules.memory import (
    engine_leaves_room_for_the_policy,
    group_bytes,
    host_need,
    largest_part,
    num_parameters,
    rest_bytes,
    smallest_gpu_bytes,
    training_state_fits_the_gpu,
)
from nemo_offload_rl.keys.master import WITH_ROLLOUTS, RolloutMasterConfig, Rule, RunConfig
from nemo_offload_rl.memory.host_plan import HostNeed
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES
from nemo_offload_rl.residency import (
    GRADS,
    GRADS_PART,
    OPTIMIZER,
    OPTIMIZER_PART,
    PARAMS,
    PARAMS_PART,
    PHASES,
    REFERENCE,
    Phase,
    Placement,
)

_GIB = 2**30
_IN_PARTS = {PARAMS_PART: PARAMS, GRADS_PART: GRADS, OPTIMIZER_PART: OPTIMIZER}
_USED_IN = {
    PARAMS_PART: (Phase.TRAINING, Phase.OPTIM_STEP, Phase.LP_INFERENCE, Phase.REFIT),
    GRADS_PART: (Phase.TRAINING, Phase.OPTIM_STEP),
    OPTIMIZER_PART: (Phase.OPTIM_STEP,),
}


@dataclass(frozen=True)
class PhaseUse:
    """Bytes that a GPU holds in a phase.

    Attributes:
        phase: The phase.
        state_bytes: The policy's state; of groups that stream in parts, the embedding's part.
        engine_bytes: The engine's.
        other_bytes: Contexts, communicators and captured graphs.
        early_bytes: State that comes for the next phase, where there is room beside this phase's passes.
        left_bytes: What the GPU, or `policy.gpu_memory_limit_gib`, leaves for passes; negative where it is too little.
    """

    phase: Phase
    state_bytes: int
    engine_bytes: int
    other_bytes: int
    early_bytes: int
    left_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of all, without what comes early."""
        return self.state_bytes + self.engine_bytes + self.other_bytes


def phase_uses(cfg: RunConfig) -> list[PhaseUse]:
    """What a GPU of policy workers holds in each phase; empty where the GPU or the model is not known."""
    gpu_bytes = smallest_gpu_bytes() if cfg.cluster.gpus_per_node else None
    groups = None if gpu_bytes is None else group_bytes(cfg)
    if gpu_bytes is None or groups is None:
        return []
    need = host_need(cfg, groups)
    plan, weights_bytes = need.resolve(), engine_weight_bytes(cfg)
    in_parts = parts_of(need)
    stays = {name: size for name, size in plan.sizes.items() if name not in in_parts}
    if GRADS_PART not in plan.sizes:
        stays[GRADS] = groups[GRADS]
    whole = {**groups, OPTIMIZER: groups[OPTIMIZER] + groups[OPTIMIZER_PART]}
    largest = largest_part(cfg, whole)
    awake_bytes = int(need.settings.engine_memory_share * gpu_bytes)
    if (cache_gib := need.settings.engine_kv_cache_gib) is not None:  # which the share does not bound
        awake_bytes = weights_bytes + int(cache_gib * _GIB)
    engine_bytes = {Phase.REFIT: weights_bytes, Phase.GENERATION: weights_bytes and awake_bytes}
    limit_gib = cfg.policy.gpu_memory_limit_gib
    uses: list[PhaseUse] = []
    for phase in plan.plan.phases:
        if phase in engine_bytes and not weights_bytes:
            continue
        of_parts = sum(largest[_IN_PARTS[row]] for row in in_parts & plan.sizes.keys() if phase in _USED_IN[row])
        state_bytes = plan.plan.device_bytes(stays, phase) + of_parts
        own_bytes, rest = engine_bytes.get(phase, 0), rest_bytes(cfg, phase)
        left_bytes = gpu_bytes - state_bytes - own_bytes - rest
        if limit_gib is not None:  # of the policy's own process
            left_bytes = min(left_bytes, int(limit_gib * _GIB) - state_bytes)
        early_bytes = _early_bytes(need, plan.sizes, phase)
        uses.append(PhaseUse(phase, state_bytes, own_bytes, rest, early_bytes, left_bytes))
    return uses


def parts_of(need: HostNeed) -> set[str]:
    """Rows of the plan whose groups are on the GPU part by part."""
    return {PARAMS_PART, GRADS_PART, *([OPTIMIZER_PART] if need.settings.backend.streams_in_parts else [])}


def _early_bytes(need: HostNeed, sizes: Mapping[str, int], phase: Phase) -> int:
    """See `PhaseUse`: snapshots beside their groups, and groups of the phase that follows."""
    if not need.settings.residency_overlap:
        return 0
    spec, plan = PHASES[phase], need.resolve().plan
    # Parts of a reference come one by one.
    names = {REFERENCE} if spec.prefetches_snapshots and PARAMS_PART not in sizes else set()
    following = Phase.OPTIM_STEP if phase is Phase.TRAINING else spec.prefetches_for
    if following is not None:
        # Groups that a phase leaves as they were may come. Parts come for the step alone, in passes before it.
        names |= {
            name
            for name in sizes
            if name in plan.table
            and plan.placement(name, phase) is Placement.UNCHANGED
            and plan.placement(name, following) is Placement.DEVICE
        }
        names |= {OPTIMIZER_PART} if phase is Phase.TRAINING else set()
    return sum(sizes.get(name, 0) for name in names)


def engine_weight_bytes(cfg: RunConfig) -> int:
    """Of an engine that sleeps on each GPU of the policy; 0 where there is none, or the model's size is not known."""
    count = num_parameters(cfg)
    if not isinstance(cfg, WITH_ROLLOUTS) or not cfg.policy.generation.colocated.enabled or count is None:
        return 0
    vllm = cfg.policy.generation.vllm_cfg
    if not vllm.enable_sleep_mode:  # its memory counts as awake throughout
        return 0
    return count * COMPUTE_DTYPES[vllm.precision].itemsize // vllm.tensor_parallel_size


def engine_weights_fit_their_share(cfg: RolloutMasterConfig) -> str | None:
    """The engine's share of a GPU holds its weights."""
    gpu_bytes = smallest_gpu_bytes() if cfg.cluster.gpus_per_node else None
    vllm, weights_bytes = cfg.policy.generation.vllm_cfg, engine_weight_bytes(cfg)
    if gpu_bytes is None or vllm.kv_cache_memory_gib is not None:
        return None
    share_bytes = vllm.gpu_memory_utilization * gpu_bytes
    if weights_bytes <= share_bytes:
        return None
    return (
        f"the engine's weights take {weights_bytes / _GIB:.1f} GiB of each GPU, and its share is "
        f"{share_bytes / _GIB:.1f}; raise policy.generation.vllm_cfg.gpu_memory_utilization, or "
        "policy.generation.vllm_cfg.tensor_parallel_size where there are more GPUs"
    )


def every_phase_has_room(cfg: RunConfig) -> str | None:
    """State, engine and contexts fit the GPU in every phase."""
    others = [training_state_fits_the_gpu(cfg)]
    if isinstance(cfg, WITH_ROLLOUTS):
        others += [engine_leaves_room_for_the_policy(cfg), engine_weights_fit_their_share(cfg)]
    use = min(phase_uses(cfg), key=lambda use: use.left_bytes, default=None)
    if use is None or use.left_bytes >= 0 or any(others):
        return None
    limit_gib = cfg.policy.gpu_memory_limit_gib
    if limit_gib is not None and limit_gib * _GIB - use.state_bytes == use.left_bytes:
        where, fix = "policy.gpu_memory_limit_gib", "raise that limit, or use more GPUs"
    else:
        where, fix = "a GPU", "use more GPUs"
    if use.phase is Phase.REFIT:
        fix += ", with policy.generation.vllm_cfg.tensor_parallel_size for the engine's weights"
    elif use.phase is Phase.GENERATION:
        fix = "lower policy.generation.vllm_cfg.kv_cache_memory_gib, or keep less in policy.residency_overrides"
    parts = {"the policy": use.state_bytes, "the engine": use.engine_bytes, "contexts": use.other_bytes}
    shown = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items() if size)
    return (
        f"phase {use.phase.name} needs {-use.left_bytes / _GIB:.1f} GiB more than {where} has ({shown} GiB), without "
        f"activations; {fix}"
    )


RULES: tuple[Rule[RunConfig], ...] = (every_phase_has_room,)
ROLLOUT_RULES: tuple[Rule[RolloutMasterConfig], ...] = (engine_weights_fit_their_share,)
