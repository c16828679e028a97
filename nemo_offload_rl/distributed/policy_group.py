"""Policy workers as Ray actors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_offload_rl.distributed.prepared import IMPORT_BACKEND
from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster
from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec
from nemo_offload_rl.keys.worker import PolicySettings, TeacherSettings
from nemo_offload_rl.policy.early_start import MOST_BYTES, compiles_layers
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.policy.process import policy_env_vars
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
        kwargs={"settings": settings, "keep_reference": keep_reference, "teacher": teacher},
        per_rank_kwargs=[{"process": process} for process in processes],
        env_vars=policy_env_vars(settings, None if on_gpu else cluster.settings.workers_per_node),
    )
    group = RayWorkerGroup(cluster, spec, builds=engine is None)
    if engine is not None:
        is_compiled, shares_devices = compiles_layers(settings, processes[0]), engine.begin is not None
        # Before the imports, since an engine on the same devices waits for it.
        holds = group.start_before_build(f"{_EARLY}:hold_memory") if is_compiled and shares_devices else None
        group.start_before_build(IMPORT_BACKEND)
        most_bytes = MOST_BYTES if holds is None else min(holds())
        if is_compiled and most_bytes:
            group.start_before_build(f"{_EARLY}:compile_early", most_bytes=most_bytes)
        if engine.begin is not None:
            engine.begin()
        engine.wait()
        group.build()
    return Policy(group, settings, teacher)
