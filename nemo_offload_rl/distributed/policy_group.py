"""Policy workers as Ray actors."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster
from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec
from nemo_offload_rl.keys.worker import PolicySettings, TeacherSettings
from nemo_offload_rl.policy.early_start import compiles_layers
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.protocols.backend import ProcessInfo

# The driver's time limit is shorter than torch's, so that the stacks of hanging processes can still be logged.
_COLLECTIVE_SHARE = 1.25
_EARLY = "nemo_offload_rl.policy.early_start"


@dataclass(frozen=True)
class EngineStart:
    """The start of an engine, during which policy workers compile their layers.

    Attributes:
        begin: Begins it, after workers on the same devices hold the memory for that; None if it has begun, on devices
            of its own.
        wait: Called before workers allocate more.
    """

    begin: Callable[[], None] | None = None
    wait: Callable[[], None] = lambda: None


def start_policy(
    cluster: VirtualCluster,
    settings: PolicySettings,
    keep_reference: bool,
    teacher: TeacherSettings | None = None,
    engine: EngineStart | None = None,
) -> Policy:
    """Start one policy worker in every slot of the cluster, without waiting for them, and return the `Policy`.

    Args:
        cluster: Slots of the workers, which end with the cluster.
        settings: The policy's settings.
        keep_reference: Keep the initial parameters for reference logprobs.
        teacher: A separate frozen model in each worker.
        engine: The engine of the run; None if there is none.
    """
    world_size = cluster.world_size
    on_gpu = cluster.settings.device_type == "cuda"
    limit_s = cluster.settings.call_timeout_s
    processes = [
        ProcessInfo(
            rank=rank,
            world_size=world_size,
            init_method="env://",
            device="cuda:0" if on_gpu else "cpu",
            workers_per_host=cluster.settings.workers_per_node,
            collective_timeout_s=None if limit_s is None else _COLLECTIVE_SHARE * limit_s,
        )
        for rank in range(world_size)
    ]
    spec = WorkerSpec(
        name="policy",
        factory="nemo_offload_rl.policy.worker:PolicyWorker",
        libraries="nemo_offload_rl.backends.factory:import_backend",
        kwargs={"settings": settings, "keep_reference": keep_reference, "teacher": teacher},
        per_rank_kwargs=[{"process": process} for process in processes],
        env_vars=policy_env_vars(settings, None if on_gpu else cluster.settings.workers_per_node),
    )
    group = RayWorkerGroup(cluster, spec, builds=engine is None)
    if engine is not None:
        compile_early = partial(group.start_before_build, f"{_EARLY}:compile_early")
        is_compiled = compiles_layers(settings, processes[0])
        if engine.begin is None:
            if is_compiled:
                compile_early()
        else:
            held_bytes = min(group.start_before_build(f"{_EARLY}:hold_memory")()) if is_compiled else 0
            if held_bytes:
                compile_early(most_bytes=held_bytes)
            engine.begin()
        engine.wait()
        group.build()
    return Policy(group, settings, teacher)


def policy_env_vars(settings: PolicySettings, cpu_workers_per_node: int | None) -> dict[str, str]:
    """Environment variables of a policy worker, set before any import.

    Args:
        settings: The policy's settings.
        cpu_workers_per_node: Workers that share a host's CPUs; None for workers on GPUs.
    """
    env_vars: dict[str, str] = {}
    if cpu_workers_per_node is not None:
        # Ray gives a worker one thread for its share of a CPU, but the engine is idle while the policy computes.
        # Threads that spin while waiting make a step up to ten times slower as soon as another process needs a core.
        threads = max(1, (os.cpu_count() or 1) // cpu_workers_per_node)
        env_vars |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {**env_vars, **settings.backend.worker_env_vars}
