"""vLLM engines and a policy that sends weights, each in its own process, with one cluster for a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from echo_workers import cpu_cluster
from engine_process import engine_settings
from model_families import save_family_folder

from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster, cluster_session
from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec
from nemo_offload_rl.weight_sync.interfaces import WeightBucket


class RemotePolicy:
    """What a refit asks of the policy, answered by `ray_workers.RefitPolicy` in another process."""

    def __init__(self, group: RayWorkerGroup) -> None:
        self._group = group

    def set_weights(self, seed: int, **kwargs: object) -> None:
        self._group.run_all("set_weights", seed, **kwargs)

    def offload_before_refit(self) -> None:
        self._group.run_all("offload_before_refit")

    def hand_over_memory(self) -> None:
        self._group.run_all("hand_over_memory")

    def offload_after_refit(self) -> None:
        self._group.run_all("offload_after_refit")

    def start_refit(self) -> None:
        self._group.run_all("start_refit")

    def next_bucket(self) -> WeightBucket | None:
        return self._group.run_all("next_bucket")[0]


@pytest.fixture(scope="module")
def cluster(ray_here: Callable[[], None], request: pytest.FixtureRequest) -> Iterator[VirtualCluster]:
    """One slot for everything, or as many as the module's NUM_SLOTS says."""
    ray_here()
    with cluster_session(cpu_cluster(getattr(request.module, "NUM_SLOTS", 1)), num_colocated_groups=5) as session:
        yield session


@pytest.fixture(scope="module")
def start_engine(
    cluster: VirtualCluster, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RayGenerationEngine]:
    """Start an engine on a folder of a family of `model_families.py`."""

    def start(family: str, **changes: object) -> RayGenerationEngine:
        folder = tmp_path_factory.mktemp("model")
        save_family_folder(folder, family)
        return RayGenerationEngine(cluster, engine_settings(folder, **changes))

    return start


@pytest.fixture(scope="module")
def start_policy(cluster: VirtualCluster) -> Callable[[str], RemotePolicy]:
    """Start the sending side."""

    def start(family: str) -> RemotePolicy:
        spec = WorkerSpec(name="policy", factory="ray_workers:RefitPolicy", kwargs={"family": family}, num_workers=1)
        return RemotePolicy(RayWorkerGroup(cluster, spec))

    return start
