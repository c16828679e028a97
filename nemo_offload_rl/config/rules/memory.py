"""Rules that a run fits the memory of its machine; sizes that are not known refuse nothing."""

import os
from functools import partial

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import RolloutMasterConfig, rules_in
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.memory.account import Account, PhaseUse
from nemo_offload_rl.memory.groups import has_adapters
from nemo_offload_rl.memory.host_check import foresee_host_memory, refusal
from nemo_offload_rl.memory.host_plan import gpu_limit_problem
from nemo_offload_rl.memory.passes import PASSES, advice
from nemo_offload_rl.policy.communicators import nccl_problem, placement_problem
from nemo_offload_rl.residency import BASE, GRADS, OPTIMIZER, PARAMS, Phase

_GIB = 2**30
_VLLM = "policy.generation.vllm_cfg"
_DDP = "policy.megatron_cfg.distributed_data_parallel_config"


def gpu_limit_is_within_the_gpu(account: Account) -> str | None:
    """`policy.gpu_memory_limit_gib` needs a GPU, and is at most the GPU's memory."""
    limit_gib, on_cpu = account.cfg.policy.gpu_memory_limit_gib, not account.cfg.cluster.gpus_per_node
    return gpu_limit_problem(limit_gib, account.gpu_bytes, on_cpu=on_cpu)


def every_phase_has_room(account: Account) -> str | None:
    """State, passes, engine and contexts fit the GPU in every phase."""
    short = {use.phase: use for use in account.phases if use.is_short}
    if not short:
        return None
    # A shortage in the update, or while the engine is awake, has its own fixes and causes those of other phases.
    first = next((phase for phase in (Phase.OPTIM_STEP, Phase.GENERATION) if phase in short), None)
    use = short[first] if first else min(short.values(), key=lambda use: use.left_bytes)
    parts = {**use.state, "passes": use.pass_bytes or 0}
    note = " without activations" if use.pass_bytes is None else ""
    engine = "the engine's weights" if use.phase is Phase.REFIT else "the awake engine"
    if use.exceeds_limit:  # the limit is for the policy's own process alone
        has = f"it has {account.cfg.policy.gpu_memory_limit_gib:.1f} within policy.gpu_memory_limit_gib"
    else:
        has = f"it has {use.gpu_bytes / _GIB:.1f}"
        parts |= {"contexts": use.other_bytes, engine: use.engine_bytes}
    if use.phase is not Phase.OPTIM_STEP:
        is_by_passes = use.left_bytes + (use.pass_bytes or 0) >= 0
        fix = advice(account.settings, PASSES[use.phase]) if is_by_passes else _fix_of_phase(account, use)
        return refusal(f"phase {use.phase.name}", parts, "on each GPU", has, fix, note=note)
    subject = "policy.model_name"
    if account.cfg.policy.backend.streams_parameters:
        subject = f"the embedding of {subject}, the largest part that the GPU holds whole,"
    fix = _fix_of_training(account, use)
    return refusal(subject, parts, "on each GPU in training", has, fix, note=note)


def _fix_of_training(account: Account, use: PhaseUse) -> str:
    backend = account.cfg.policy.backend
    if backend.streams_parameters:  # supports one worker only
        return "raise that limit" if use.exceeds_limit else "use a GPU with more memory"
    is_awake = use.engine_bytes and not use.exceeds_limit
    fix = f"set {_VLLM}.enable_sleep_mode=true, or use more GPUs" if is_awake else "use more GPUs"
    if use.state.get(OPTIMIZER) and not backend.streams_in_parts:
        fix += f", or {backend.streaming_section}.offload_optimizer_states=true with offload_optimizer_states_chunk_mib"
    if isinstance(backend, MegatronConfig) and backend.distributed_data_parallel_config.grad_reduce_in_fp32:
        saved_bytes = use.state[GRADS] - min(use.state[PARAMS], use.state[GRADS])
        if saved_bytes and saved_bytes + use.left_bytes >= 0:
            fix += f", or {_DDP}.grad_reduce_in_fp32=false"
    return fix


def _fix_of_phase(account: Account, use: PhaseUse) -> str:
    cfg = account.cfg
    if use.phase is Phase.GENERATION and isinstance(cfg, RolloutMasterConfig):
        keep_less = "keep less in policy.residency_overrides"
        if use.exceeds_limit:
            return f"raise that limit, or {keep_less}"
        if cfg.policy.generation.vllm_cfg.kv_cache_memory_gib is not None:
            return f"lower {_VLLM}.kv_cache_memory_gib, or {keep_less}"
        largest = (use.gpu_bytes - use.state_bytes - use.other_bytes) / use.gpu_bytes
        return f"lower {_VLLM}.gpu_memory_utilization to {int(largest * 100) / 100}" if largest > 0.02 else keep_less
    fix = "raise that limit, or use more GPUs" if use.exceeds_limit else "use more GPUs"
    if use.phase is Phase.TEACHER_INFERENCE and not isinstance(cfg.policy.backend, MegatronConfig):
        fix += ", or set teacher.stream_layers=true"
    if use.phase is Phase.REFIT:
        fix += f", with {_VLLM}.tensor_parallel_size for the engine's weights"
        if account.has_adapters and not account.refits_read_host and cfg.policy.dtensor_cfg.enabled:
            fix += ", or ++policy.residency_overrides.base=host"
    return fix


def engine_weights_fit_their_share(account: Account) -> str | None:
    """The engine's share of a GPU holds its weights."""
    if not account.engine_short_bytes:
        return None
    weight_bytes = account.engine_weight_bytes
    share_bytes = weight_bytes - account.engine_short_bytes
    fix = f"raise {_VLLM}.gpu_memory_utilization, or {_VLLM}.tensor_parallel_size where there are more GPUs"
    return refusal(
        "the engine", {"weights": weight_bytes}, "of each GPU", f"its share is {share_bytes / _GIB:.1f}", fix
    )


def host_memory_holds_the_state(account: Account) -> str | None:
    """The workers of a host fit its memory; checked if all of them run on this machine, or on a planned one."""
    cluster = account.cfg.cluster
    if not account.machine.has_all_workers or not account.groups:
        return None
    if cluster.gpus_per_node and not sum(account.need.state_parts().values()):
        return None
    try:
        device_type = "cuda" if cluster.gpus_per_node else "cpu"
        workers = cluster.workers_per_node
        foresee_host_memory(
            account.need, workers, device_type, account.machine, may_advise=partial(_leaves_room, account)
        )
    except ConfigError as error:
        return str(error)
    return None


def _leaves_room(account: Account, overrides: str) -> bool:
    """Tell whether no phase lacks room on the GPU, or lacks more of it, because of overrides."""
    room = {use.phase: min(0, use.left_bytes) for use in account.phases}
    return all(use.left_bytes >= room.get(use.phase, 0) for use in account.with_keys(overrides).phases)


def suspended_communicators_make_room_for_an_engine(account: Account) -> str | None:
    """`suspend_nccl_comms` needs GPUs that the policy shares with an engine, and NCCL 2.29.7 or later."""
    cfg, machine = account.cfg, account.machine
    if not isinstance(cfg, RolloutMasterConfig) or not cfg.policy.suspend_nccl_comms:
        return None
    generation, variables = cfg.policy.generation, cfg.policy.backend.worker_env_vars
    on_gpu = cfg.cluster.gpus_per_node > 0
    problem = placement_problem(on_gpu=on_gpu, shares_device=generation.engines_sleep)
    if problem is not None or machine.is_planned or not machine.has_all_workers or "LD_PRELOAD" in variables:
        return problem  # each worker then checks its own library
    return nccl_problem(os.environ | variables)


def host_held_state_is_nowhere_else(cfg: RolloutMasterConfig) -> str | None:
    """`cpu_offload` excludes `policy.residency_overrides`."""
    policy = cfg.policy
    if policy.dtensor_cfg.enabled and policy.dtensor_cfg.cpu_offload and policy.residency_overrides:
        return (
            f"policy.dtensor_cfg.cpu_offload is true and policy.residency_overrides names "
            f"{' and '.join(policy.residency_overrides)}, but all state is on the host and passes through the device "
            "part by part; set cpu_offload to false, or residency_overrides to {}"
        )
    return None


def a_frozen_model_has_adapters(cfg: RolloutMasterConfig) -> str | None:
    """`policy.residency_overrides.base` needs adapters, and `host` the DTensor backend."""
    policy = cfg.policy
    place = policy.residency_overrides.get(BASE)
    if place is None:
        return None
    if not has_adapters(policy):
        return (
            f"policy.residency_overrides.base is {place}, but no adapters are trained, so that no model is frozen; "
            "remove it, or set policy.dtensor_cfg.lora_cfg.enabled to true"
        )
    if place == "host" and isinstance(policy.backend, MegatronConfig):
        return (
            "policy.residency_overrides.base is host, but Megatron's refits read the frozen model on the GPU; remove "
            "it, or use adapters of policy.dtensor_cfg"
        )
    return None


RULES = rules_in(__name__, Account)
ROLLOUT_RULES = rules_in(__name__, RolloutMasterConfig)
