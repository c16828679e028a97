"""vLLM engines and a policy that sends weights, each in its own process, with one cluster for a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_models import make_tokenizer, qwen3_config

from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster, cluster_session
from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec
from nemo_offload_rl.generation.settings import VllmSettings
from nemo_offload_rl.weight_sync.interfaces import WeightBucket

TESTS = str(Path(__file__).parents[2])
ROOT = str(Path(__file__).parents[3])


class RemotePolicy:
    """What a refit asks of the policy, answered by `ray_workers.RefitPolicy` in another process."""

    def __init__(self, group: RayWorkerGroup) -> None:
        self._group = group

    def set_weights(self, seed: int, **kwargs: object) -> None:
        self._group.run_all("set_weights", seed, **kwargs)

    def set_buffer(self, buffer_bytes: int) -> None:
        self._group.run_all("set_buffer", buffer_bytes)

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
def cluster(request: pytest.FixtureRequest) -> Iterator[VirtualCluster]:
    """One slot for everything, or as many as the module's NUM_SLOTS says."""
    from ray_workers import cpu_cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([ROOT, TESTS]))
        with cluster_session(cpu_cluster(getattr(request.module, "NUM_SLOTS", 1)), num_colocated_groups=5) as session:
            yield session


@pytest.fixture(scope="module")
def start_engine(
    cluster: VirtualCluster, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RayGenerationEngine]:
    """Start an engine on a folder that holds a configuration and a tokenizer but no weights."""

    def start(*, tied: bool = False, async_engine: bool = False, **overrides: object) -> RayGenerationEngine:
        folder = tmp_path_factory.mktemp("model")
        qwen3_config(tied=tied).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        settings: dict[str, object] = {
            "model_name": str(folder),
            "seed": 0,
            "async_engine": async_engine,
            "precision": "float32",
            "kv_cache_dtype": "auto",
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.5,
            "kv_cache_memory_gib": 0.0625,
            "enable_sleep_mode": True,
            "max_model_len": 400,
            "enforce_eager": True,
            "per_request_seeds": True,
            "max_restarts": 0,
            "vllm_kwargs": {},
        }
        return RayGenerationEngine(cluster, VllmSettings(**(settings | overrides)))  # type: ignore[arg-type]

    return start


@pytest.fixture(scope="module")
def start_policy(cluster: VirtualCluster) -> Callable[..., RemotePolicy]:
    """Start the sending side."""

    def start(*, tied: bool = False) -> RemotePolicy:
        kwargs = {"tied": tied, "buffer_bytes": 2**20}
        spec = WorkerSpec(name="policy", factory="ray_workers:RefitPolicy", kwargs=kwargs, num_workers=1)
        return RemotePolicy(RayWorkerGroup(cluster, spec))

    return start
