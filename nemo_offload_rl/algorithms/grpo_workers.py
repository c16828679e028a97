"""The processes of a GRPO run: policy workers and engines, on the same devices or each on their own.

The order where devices are shared: the engines start first, while the devices are empty (vLLM measures what it may
take), and go to sleep; the policy is built into what is free and leaves the devices; the first refit wakes the engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_offload_rl.config.convert import GrpoConfig
from nemo_offload_rl.generation.interfaces import GenerationEngine
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.weight_sync.interfaces import RefitGroupAddress

if TYPE_CHECKING:
    from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
    from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster


@contextmanager
def grpo_workers(config: GrpoConfig) -> Iterator[tuple[Policy, GenerationEngine, dict[int, str]]]:
    """Policy and engines, both resting, and which of the two each process belongs to."""
    # Ray takes seconds to import: bad input has been refused before.
    from nemo_offload_rl.distributed.virtual_cluster import cluster_session

    colocated = config.generation.colocated
    with cluster_session(config.cluster, num_colocated_groups=2 if colocated else 1) as cluster:
        policy, engine = _share_devices(config, cluster) if colocated else _use_own_devices(config, cluster)
        policy_pids, engine_pids = policy.pids(), engine.group.pids()
        names = {pid: f"policy worker {rank}" for rank, pid in enumerate(policy_pids)}
        engine.name_processes(names | {pid: f"engine {rank}" for rank, pid in enumerate(engine_pids)})
        yield policy, engine, dict.fromkeys(policy_pids, "policy") | dict.fromkeys(engine_pids, "engine")


def _share_devices(config: GrpoConfig, cluster: VirtualCluster) -> tuple[Policy, RayGenerationEngine]:
    from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
    from nemo_offload_rl.distributed.policy_group import start_policy

    engine = RayGenerationEngine(cluster, config.generation.vllm)
    if config.cluster.device_type == "cuda":
        engine.wait_until_ready()
        engine.finish_generation(discard_weights=True)
    policy = start_policy(cluster, config.policy, _keeps_reference(config))
    engine.wait_until_ready()
    engine.finish_generation(discard_weights=True)
    policy.offload_after_refit()
    return policy, engine


def _use_own_devices(config: GrpoConfig, cluster: VirtualCluster) -> tuple[Policy, RayGenerationEngine]:
    """Both start side by side; then rank 0 of the policy and all engine workers meet for refits over NCCL."""
    from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
    from nemo_offload_rl.distributed.policy_group import start_policy

    per_node, num_nodes = config.generation.engine_gpus_per_node, config.generation.engine_num_nodes
    assert per_node is not None and num_nodes is not None, "a rule asks for both"
    on_gpu = config.cluster.device_type == "cuda"
    sizes = {"gpus_per_node": per_node} if on_gpu else {"cpu_workers_per_node": per_node}
    engine_cluster = cluster.beside(replace(config.cluster, num_nodes=num_nodes, **sizes))
    engine = RayGenerationEngine(engine_cluster, config.generation.vllm)
    policy = start_policy(cluster, config.policy, _keeps_reference(config))
    engine.wait_until_ready()
    policy.offload_after_refit()
    if on_gpu:
        host, port = cluster.rendezvous()
        address = RefitGroupAddress(host, port, 1 + engine.num_devices)
        with ThreadPoolExecutor(max_workers=1) as pool:
            joined = pool.submit(policy.join_refit_group, address)
            engine.join_refit_group(address)
            joined.result()
    return policy, engine


def _keeps_reference(config: GrpoConfig) -> bool:
    return config.loss_fn.reference_policy_kl_penalty != 0
