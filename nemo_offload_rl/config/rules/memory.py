"""Whether the policy, and an engine beside it, fit the GPU and the host, by the sizes known before anything starts.

Known are the model's parameters (a local folder) and the GPU's memory (from the driver). Activations are not: what is
refused here cannot work; what passes may still be too tight. Where either is unknown, nothing is said. Each
backend says what its groups take at least.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from nemo_offload_rl.backends.dtensor import rules as dtensor
from nemo_offload_rl.backends.hf.local_config import local_model_config
from nemo_offload_rl.backends.hf.model_folder import local_folder
from nemo_offload_rl.backends.megatron import rules as megatron
from nemo_offload_rl.config.convert import grpo_worker, supervised_worker
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import (
    WITH_ROLLOUTS,
    DistillationMasterConfig,
    DpoMasterConfig,
    GrpoMasterConfig,
    RolloutMasterConfig,
    Rule,
    RunConfig,
)
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.memory.host_plan import (
    DEVICE_STATE,
    ENGINE,
    ENGINE_PROCESS_BYTES,
    HostNeed,
    foresee_host_memory,
    gpu_limit_refusal,
)
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.policy.communicators import nccl_problem, placement_problem
from nemo_offload_rl.protocols.backend import COMPUTE_DTYPES
from nemo_offload_rl.residency import (
    BASE,
    GRADS,
    GRADS_PART,
    OPTIMIZER,
    OPTIMIZER_PART,
    PARAMS,
    PARAMS_PART,
    TEACHER,
    HostLimit,
    Phase,
    ResidencyPlan,
    ResidencySettings,
    memory_total_bytes,
    resolve_plan,
)
from nemo_offload_rl.utils.flops import ModelSizes, read_model_sizes
from nemo_offload_rl.utils.gpu_memory import read_gpus

_GIB = 2**30
# What stays on a GPU whatever leaves it, seen on H100s and H200s (docs/measurements/large-models.md, parallelism.md).
# Of a policy worker, contexts, code and NCCL's buffers: 0.8 GiB of DTensor and 1.3 of Megatron alone, up to 1.9 and 2.9
# as one of two. Of an engine asleep, captured graphs too: 1.0 to 1.8, and 4.5 over two GPUs. Of the driver: 0.7 to 0.8.
DRIVER_REST_BYTES = _GIB
DTENSOR_REST_BYTES = {"one": _GIB, "several": 2 * _GIB}
MEGATRON_REST_BYTES = {"one": 3 * _GIB // 2, "several": 3 * _GIB}
ENGINE_REST_BYTES = {"one": 3 * _GIB // 2, "several": 9 * _GIB // 2}


def engine_leaves_room_for_the_policy(cfg: RolloutMasterConfig) -> str | None:
    """The awake engine and what the policy keeps on the GPU meanwhile fit the GPU."""
    generation = cfg.policy.generation
    share = generation.vllm_cfg.gpu_memory_utilization
    known = _known_bytes(cfg)
    if known is None or not generation.colocated.enabled:
        return None
    total_bytes, group_bytes = known
    kept = [name for name, place in cfg.policy.residency_overrides.items() if place == "device"]
    del group_bytes[OPTIMIZER_PART]  # away, whatever is kept
    kept_bytes = _plan(kept).device_bytes(group_bytes, Phase.GENERATION) + rest_bytes(cfg, Phase.GENERATION)
    if share * total_bytes + kept_bytes <= total_bytes:
        return None
    largest = (total_bytes - kept_bytes) / total_bytes
    fix = f"lower it to {int(largest * 100) / 100}" if largest > 0.02 else "keep less in policy.residency_overrides"
    return (
        f"policy.generation.vllm_cfg.gpu_memory_utilization {share} of {total_bytes / _GIB:.1f} GiB leaves less than "
        f"the {kept_bytes / _GIB:.1f} GiB that stay beside the engine ({' and '.join([*kept, 'contexts'])}); {fix}"
    )


@dataclass(frozen=True)
class Machine:
    """A host that a run is planned for.

    Attributes:
        gpu_bytes: Memory of each of its GPUs.
        host_bytes: Main memory that a run may take.
        num_parameters: Of the policy's model; None reads them from its folder.
    """

    gpu_bytes: int
    host_bytes: int
    num_parameters: int | None = None


_PLANNED: ContextVar[Machine | None] = ContextVar("planned machine", default=None)


@contextmanager
def planned_for(machine: Machine) -> Iterator[None]:
    """The rules of this module are about `machine` and not about this host."""
    token = _PLANNED.set(machine)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def smallest_gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this host, or of a planned machine's; None without one."""
    if (planned := _PLANNED.get()) is not None:
        return planned.gpu_bytes
    return min((use.total_bytes for use in read_gpus().values()), default=None)


def gpu_limit_is_within_the_gpu(cfg: RunConfig) -> str | None:
    """The policy's limit of GPU memory is for a GPU, and at most all of it."""
    limit_gib = cfg.policy.gpu_memory_limit_gib
    if limit_gib is None:
        return None
    if not cfg.cluster.gpus_per_node:
        return gpu_limit_refusal(limit_gib, None)
    total_bytes = smallest_gpu_bytes()
    if total_bytes is None or limit_gib * _GIB <= total_bytes:
        return None
    return gpu_limit_refusal(limit_gib, total_bytes / _GIB)


def host_held_state_is_nowhere_else(cfg: RolloutMasterConfig) -> str | None:
    """`cpu_offload` excludes groups with a place of their own."""
    policy = cfg.policy
    if policy.dtensor_cfg.enabled and policy.dtensor_cfg.cpu_offload and policy.residency_overrides:
        return (
            f"policy.dtensor_cfg.cpu_offload is true and policy.residency_overrides names "
            f"{' and '.join(policy.residency_overrides)}, but all state is on the host and passes through the device "
            "part by part; set cpu_offload to false, or residency_overrides to {}"
        )
    return None


def suspended_communicators_make_room_for_an_engine(cfg: RolloutMasterConfig) -> str | None:
    """`suspend_nccl_comms` is for GPUs that the policy shares with an engine, and for NCCL 2.29.7 or later."""
    if not cfg.policy.suspend_nccl_comms:
        return None
    generation = cfg.policy.generation
    shares_device = generation.colocated.enabled and generation.vllm_cfg.enable_sleep_mode
    problem = placement_problem(on_gpu=cfg.cluster.gpus_per_node > 0, shares_device=shares_device)
    is_elsewhere = _PLANNED.get() is not None or cfg.cluster.num_nodes != 1 or "RAY_ADDRESS" in os.environ
    if problem is not None or is_elsewhere or "LD_PRELOAD" in cfg.policy.backend.worker_env_vars:
        return problem  # elsewhere, or with another library, each worker looks at its own
    return nccl_problem(os.environ | cfg.policy.backend.worker_env_vars)


def training_state_fits_the_gpu(cfg: RunConfig) -> str | None:
    """Parameters, gradients and optimizer of one worker fit the GPU, together with an engine if there is one."""
    known = _known_bytes(cfg)
    if known is None:
        return None
    total_bytes, group_bytes = known
    backend = cfg.policy.backend
    # The whole optimizer is there in its step, beside parameters and gradients, but for what comes in parts.
    part_bytes, subject = group_bytes.pop(OPTIMIZER_PART), "policy.model_name"
    largest = largest_part(cfg, {**group_bytes, OPTIMIZER: group_bytes[OPTIMIZER] + part_bytes})
    if backend.streams_parameters:
        group_bytes, subject = largest, "the embedding of policy.model_name, the largest part that the GPU holds whole,"
    else:
        group_bytes[OPTIMIZER] += largest[OPTIMIZER] if backend.streams_in_parts else part_bytes
    resting_bytes = rest_bytes(cfg, Phase.TRAINING)
    awake_bytes = _awake_bytes(cfg, total_bytes)
    state_bytes = _plan().device_bytes(group_bytes, Phase.OPTIM_STEP)
    limit_gib = cfg.policy.gpu_memory_limit_gib
    limit_bytes = total_bytes if limit_gib is None else int(limit_gib * _GIB)
    within = ""
    if limit_gib is not None and state_bytes > limit_bytes:
        # Of its own process alone; contexts and the engine are not within it.
        total_bytes, resting_bytes, awake_bytes = limit_bytes, 0, 0
        within = " within policy.gpu_memory_limit_gib"
    needed_bytes = state_bytes + resting_bytes + awake_bytes
    if needed_bytes <= total_bytes:
        return None
    has_adapters = not group_bytes["grads"]
    sizes = {"frozen params": group_bytes["params"]} if has_adapters else group_bytes
    parts = [f"{name} {size / _GIB:.1f}" for name, size in sizes.items() if size]
    if resting_bytes:
        parts.append(f"contexts {resting_bytes / _GIB:.1f}")
    if awake_bytes:
        parts.append(f"the awake engine {awake_bytes / _GIB:.1f}")
    fix = "set policy.generation.vllm_cfg.enable_sleep_mode=true, or use more GPUs" if awake_bytes else "use more GPUs"
    if backend.streams_parameters:  # which is for one worker
        fix = "raise that limit" if within else "use a GPU with more memory"
    elif group_bytes["optimizer"] and not backend.streams_in_parts:
        fix += f", or {backend.streaming_section}.offload_optimizer_states=true with offload_optimizer_states_chunk_mib"
    if isinstance(backend, MegatronConfig) and backend.distributed_data_parallel_config.grad_reduce_in_fp32:
        saved_bytes = group_bytes["grads"] - min(group_bytes["params"], group_bytes["grads"])
        if saved_bytes and needed_bytes - saved_bytes <= total_bytes:
            fix += ", or policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=false"
    return (
        f"{subject} needs {needed_bytes / _GIB:.1f} GiB on each GPU in training ({', '.join(parts)}) without "
        f"activations, but it has {total_bytes / _GIB:.1f}{within}; {fix}"
    )


def largest_part(cfg: RunConfig, sizes_bytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of one worker's groups that belong to the embedding, which no part that streams divides.

    Zeros where less than everything streams, so that the embedding may be in the rest, and where the model's sizes are
    not known.

    Args:
        cfg: The run's configuration.
        sizes_bytes: Of the groups, each with all of its parts.
    """
    count, shape = num_parameters(cfg), ModelShape.of(local_model_config(cfg) or {})
    elements = (shape.vocab_size or 0) * (shape.hidden_size or 0)
    if not count or cfg.policy.backend.streamed_share < 1:
        return dict.fromkeys((PARAMS, GRADS, OPTIMIZER), 0)
    return {name: sizes_bytes[name] * min(elements, count) // count for name in (PARAMS, GRADS, OPTIMIZER)}


def _plan(kept: Collection[str] = ()) -> ResidencyPlan:
    """Of a worker that shares its GPU with an engine and keeps these groups there; as if nothing were streamed."""
    return resolve_plan(
        ResidencySettings(
            colocated=True,
            use_pinned_optimizer_offload=False,
            offload_optimizer_states_for_logprob=False,
            resident_groups=frozenset(kept),
        )
    )


def rest_bytes(cfg: RunConfig, phase: Phase) -> int:
    """What a GPU of policy workers holds in a phase beside state and weights: contexts, communicators, captured graphs.

    Those of an engine that is awake are within `gpu_memory_utilization`.
    """
    of_policy = MEGATRON_REST_BYTES if isinstance(cfg.policy.backend, MegatronConfig) else DTENSOR_REST_BYTES
    num_bytes = DRIVER_REST_BYTES + of_policy["several" if cfg.cluster.world_size > 1 else "one"]
    if not isinstance(cfg, WITH_ROLLOUTS) or phase is Phase.GENERATION:
        return num_bytes
    generation = cfg.policy.generation
    if not generation.colocated.enabled or not generation.vllm_cfg.enable_sleep_mode:
        return num_bytes
    return num_bytes + ENGINE_REST_BYTES["several" if generation.vllm_cfg.tensor_parallel_size > 1 else "one"]


def _awake_bytes(cfg: RunConfig, total_bytes: int) -> int:
    """What an engine that never sleeps has of a GPU of `total_bytes` while the policy trains."""
    if not isinstance(cfg, WITH_ROLLOUTS) or not cfg.policy.generation.colocated.enabled:
        return 0
    vllm = cfg.policy.generation.vllm_cfg
    if vllm.enable_sleep_mode:
        return 0
    cache_gib = vllm.kv_cache_memory_gib
    return int(vllm.gpu_memory_utilization * total_bytes) if cache_gib is None else int(cache_gib * _GIB)


def _known_bytes(cfg: RunConfig) -> tuple[int, dict[str, int]] | None:
    """Memory of the smallest GPU, and of one worker's state groups, both in bytes."""
    total_bytes = smallest_gpu_bytes() if cfg.cluster.gpus_per_node else None
    groups = None if total_bytes is None else group_bytes(cfg)
    return None if total_bytes is None or groups is None else (total_bytes, groups)


def num_parameters(cfg: RunConfig) -> int | None:
    """Of the policy's model; None for one that is no local folder."""
    if (planned := _PLANNED.get()) is not None and planned.num_parameters is not None:
        return planned.num_parameters
    sizes = _model_sizes(cfg.policy.model_name)
    return None if sizes is None else sizes.num_parameters


def _model_sizes(model_name: str) -> ModelSizes | None:
    """Of a local folder, or of a hub's model whose weights are in the cache."""
    return read_model_sizes(str(local_folder(model_name) or model_name))


def group_bytes(cfg: RunConfig) -> dict[str, int] | None:
    """Of one worker's state groups; None for a model that is no local folder."""
    count = num_parameters(cfg)
    if count is None:
        return None
    if isinstance(cfg.policy.backend, MegatronConfig):
        sizes = _model_sizes(cfg.policy.model_name)
        in_experts = sizes.num_in_experts if sizes is not None and sizes.num_parameters == count else None
        groups = megatron.least_group_bytes(cfg, count, in_experts)
    else:
        groups = dtensor.least_group_bytes(cfg, count)
    streamed_bytes = int(cfg.policy.backend.streamed_share * groups[OPTIMIZER])
    return {**groups, OPTIMIZER: groups[OPTIMIZER] - streamed_bytes, OPTIMIZER_PART: streamed_bytes}


def host_memory_holds_the_state(cfg: RunConfig) -> str | None:
    """The workers of a host fit its memory; checked where all of them run on this one, or on a planned machine."""
    planned = _PLANNED.get()
    is_elsewhere = planned is None and (cfg.cluster.num_nodes != 1 or "RAY_ADDRESS" in os.environ)
    if is_elsewhere or (groups := group_bytes(cfg)) is None:
        return None
    need, limits = host_need(cfg, groups), None
    if not sum(need.parts().values()):
        return None
    if planned is not None:
        limits = [HostLimit("planned", "the machine", planned.host_bytes, planned.host_bytes)]
    try:
        foresee_host_memory(need, cfg.cluster.workers_per_node, "cuda" if cfg.cluster.gpus_per_node else "cpu", limits)
    except ConfigError as error:
        return str(error)
    return None


def host_need(cfg: RunConfig, groups: Mapping[str, int]) -> HostNeed:
    """The least that a worker takes: neither loading nor an engine nor activations of Megatron are counted."""
    if isinstance(cfg, WITH_ROLLOUTS):
        settings = grpo_worker(cfg.policy, cfg.algorithm[1].seed)
    else:
        settings = supervised_worker(cfg.policy, cfg.algorithm[1].seed)
    has_adapters = not groups["grads"]
    reference_bytes = 0 if has_adapters or not _keeps_reference(cfg) else groups["params"]
    read_bytes, fp32_bytes = COMPUTE_DTYPES[settings.precision].itemsize, COMPUTE_DTYPES["float32"].itemsize
    on_megatron = isinstance(settings.backend, MegatronConfig)
    is_cast = not on_megatron and read_bytes < fp32_bytes
    if is_cast:
        reference_bytes = reference_bytes * read_bytes // fp32_bytes
    # Adapters, and what follows from their number, are small.
    sizes = {BASE: groups["params"], PARAMS: 0} if has_adapters else {PARAMS: groups["params"]}
    if settings.backend.streams_parameters:
        sizes = {PARAMS: 0, PARAMS_PART: groups["params"], GRADS_PART: groups["grads"]}
    sizes |= {name: groups[name] for name in (OPTIMIZER, OPTIMIZER_PART) if groups[name]}
    if isinstance(cfg, DistillationMasterConfig) and (teacher_bytes := _teacher_bytes(cfg)) is not None:
        sizes[TEACHER] = teacher_bytes
    on_cpu = cfg.cluster.gpus_per_node == 0
    device_bytes = memory_total_bytes() if on_cpu else smallest_gpu_bytes() or 0
    return HostNeed(
        settings=settings,
        sizes=sizes,
        reference_bytes=reference_bytes,
        device_bytes=device_bytes,
        other={DEVICE_STATE: sum(groups.values()), **_engine_on_the_host(cfg)} if on_cpu else {},
        activation_bytes=0 if on_megatron else dtensor.most_activation_bytes(cfg, settings),
        reference_is_cast=is_cast,
    )


def _engine_on_the_host(cfg: RunConfig) -> dict[str, int]:
    """Main memory of an engine that computes there beside a worker: weights, cache and process."""
    if not isinstance(cfg, WITH_ROLLOUTS) or not cfg.policy.generation.colocated.enabled:
        return {}
    vllm = cfg.policy.generation.vllm_cfg
    weights_bytes = (num_parameters(cfg) or 0) * COMPUTE_DTYPES[vllm.precision].itemsize
    return {ENGINE: weights_bytes + int((vllm.kv_cache_memory_gib or 0.0) * _GIB) + ENGINE_PROCESS_BYTES["cpu"]}


def _keeps_reference(cfg: RunConfig) -> bool:
    if isinstance(cfg, GrpoMasterConfig):
        return cfg.loss_fn.reference_policy_kl_penalty != 0
    return isinstance(cfg, DpoMasterConfig) and not cfg.dpo.precompute_reference_logprobs


def _teacher_bytes(cfg: DistillationMasterConfig) -> int | None:
    """Of one worker's part of the teacher; None for a model that is no local folder."""
    if (sizes := _model_sizes(cfg.teacher.model_name)) is None:
        return None
    backend, num_ranks = cfg.policy.backend, cfg.cluster.world_size
    if isinstance(backend, MegatronConfig):
        parallel = backend.model_parallel
        num_ranks = parallel.tensor * parallel.pipeline * backend.expert_model_parallel_size
    return COMPUTE_DTYPES[cfg.teacher.precision].itemsize * sizes.num_parameters // num_ranks


RULES: tuple[Rule[RunConfig], ...] = (
    gpu_limit_is_within_the_gpu,
    training_state_fits_the_gpu,
    host_memory_holds_the_state,
)
ROLLOUT_RULES: tuple[Rule[RolloutMasterConfig], ...] = (
    engine_leaves_room_for_the_policy,
    host_held_state_is_nowhere_else,
    suspended_communicators_make_room_for_an_engine,
)
