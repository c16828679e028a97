"""Starts the processes of a run with rollouts: policy workers and engines, on shared or separate devices.

On shared devices:
1. The engines start first, since vLLM measures the free memory, and go to sleep. Meanwhile the policy's processes
   import their libraries and compile the layers, in memory that they took before the engines began.
2. The policy is built in the free memory, and leaves the devices.
3. The first refit wakes the engines.
The policy also leaves the devices before engines restart; new engines sleep until the next refit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from nemo_offload_rl.distributed.preflight import can_prepare
from nemo_offload_rl.distributed.prepared import IMPORT_BACKEND, IMPORT_ENGINE, PreparedWorkers
from nemo_offload_rl.errors import DeviceMemoryError, UserError, WorkerDiedError
from nemo_offload_rl.generation.vllm.engine_args import engine_env
from nemo_offload_rl.keys.generation import GenerationConfig
from nemo_offload_rl.keys.master import RolloutConfig
from nemo_offload_rl.keys.run import ClusterConfig
from nemo_offload_rl.keys.worker import TeacherSettings
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.policy.process import policy_env_vars
from nemo_offload_rl.protocols.refit import RefitGroupAddress
from nemo_offload_rl.utils.progress import Starting

if TYPE_CHECKING:
    from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
    from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster

logger = logging.getLogger(__name__)


class GrpoWorkers:
    """Started policy and engines; after the constructor the policy has left the devices and colocated engines sleep.

    Args:
        policy: The policy.
        engine: The engines.
        generation: Settings of the engines.
        cluster: The policy's cluster.
        starting: Shows what is waited for.
        engine_rests: The engines are ready and, if colocated, sleep.
    """

    def __init__(
        self,
        policy: Policy,
        engine: RayGenerationEngine,
        generation: GenerationConfig,
        cluster: VirtualCluster,
        starting: Starting = nullcontext,
        engine_rests: bool = False,
    ) -> None:
        self.policy = policy
        self.engine = engine
        self._colocated = generation.colocated.enabled
        self._num_restarts_left = generation.vllm_cfg.max_restarts
        self._cluster = cluster
        if not engine_rests:
            with starting("engine"):
                _rest(self.engine, sleeps=self._colocated)
        with starting("policy"):
            policy.offload_after_refit()
            self._introduce()

    def owners(self) -> dict[int, str]:
        """Return the owner, `policy` or `engine`, of each worker process on the driver's host, by process id."""
        engines = self.engine.group.local_pids()
        return dict.fromkeys(self.policy.local_pids(), "policy") | dict.fromkeys(engines, "engine")

    def restart_engine(self, error: UserError) -> dict[int, str]:
        """Restart the engines after `error`, at most `max_restarts` times in a run; colocated ones then sleep.

        Returns:
            The result of `owners` after the restart.

        Raises:
            UserError: `error`, if engines did not raise it or no restart is left; or the error of the last restart.
        """
        while True:
            if not self.engine.group.has_raised(error) or not self._num_restarts_left:
                raise error
            self._num_restarts_left -= 1
            cause = str(error).rstrip(".")
            logger.warning("%s; starting the engine again, restarts left: %d", cause, self._num_restarts_left)
            try:
                self.engine.shutdown()  # first: no engine may read the buffers that the policy frees
                self.policy.abandon_refit()
                self.policy.offload_after_refit()
                self.engine.restart()
                _rest(self.engine, sleeps=self._colocated)
                self._introduce()
                return self.owners()
            except (WorkerDiedError, DeviceMemoryError) as failed:
                error = failed

    def _introduce(self) -> None:
        """Give new engines the names of all processes; on separate GPUs, also connect them with the policy's rank 0."""
        if self._cluster.settings.device_type == "cuda" and not self._colocated:
            host, port = self._cluster.rendezvous()
            address = RefitGroupAddress(host, port, 1 + self.engine.num_devices)
            with ThreadPoolExecutor(max_workers=1) as pool:
                joined = pool.submit(self.policy.join_refit_group, address)
                self.engine.join_refit_group(address)
                joined.result()
        names = {pid: f"policy worker {rank}" for rank, pid in enumerate(self.policy.pids())}
        names |= {pid: f"engine {rank}" for rank, pid in enumerate(self.engine.group.pids())}
        self.engine.name_processes(names)


def _rest(engine: RayGenerationEngine, *, sleeps: bool) -> None:
    """Wait until the engines are ready, and put them to sleep."""
    engine.wait_until_ready()
    if sleeps:
        engine.finish_generation(discard_weights=True)


@contextmanager
def prepared_workers(config: RolloutConfig) -> Iterator[PreparedWorkers | None]:
    """Let processes import the libraries of the run's workers in the `with` block; yield None where none can."""
    workers, engine, device_type = config.cluster.workers_per_node, config.engine, config.cluster.device_type
    num_engines = (num_engine_devices(config) or workers) // engine.tensor_parallel_size
    if not can_prepare(config.cluster, workers + num_engines):
        yield None
        return
    cpu_workers = None if device_type == "cuda" else workers
    caches = config.cluster.compile_cache_env
    with closing(PreparedWorkers()) as prepared:
        env_vars = caches | engine_env(engine, device_type)
        prepared.start("vllm", num_engines, env_vars, IMPORT_ENGINE, engine)
        env_vars = caches | policy_env_vars(config.worker, cpu_workers)
        prepared.start("policy", workers, env_vars, IMPORT_BACKEND, config.worker)
        yield prepared


@contextmanager
def grpo_workers(
    config: RolloutConfig,
    keep_reference: bool,
    teacher: TeacherSettings | None,
    starting: Starting,
    prepared: PreparedWorkers | None = None,
) -> Iterator[GrpoWorkers]:
    """Start policy and engines for the `with` block.

    Args:
        config: The run.
        keep_reference: Each policy worker keeps the initial parameters.
        teacher: A frozen model in each policy worker; None for none.
        starting: Shows what is waited for.
        prepared: See `prepared_workers`.
    """
    # Imported late, since Ray takes seconds to import and bad input should be refused first.
    from nemo_offload_rl.distributed.generation_engine import RayGenerationEngine
    from nemo_offload_rl.distributed.policy_group import EngineStart, start_policy
    from nemo_offload_rl.distributed.virtual_cluster import cluster_session

    colocated = config.policy.generation.colocated.enabled
    with ExitStack() as stack:
        with starting("Ray"):
            num_groups = 2 if colocated else 1
            session = cluster_session(config.cluster, num_colocated_groups=num_groups, prepared=prepared)
            cluster = stack.enter_context(session)
        engine_cluster = cluster if colocated else cluster.reserve_more(_engine_devices(config))
        shares_gpus = colocated and config.cluster.device_type == "cuda"
        engine = RayGenerationEngine(engine_cluster, config.engine, begins=not shares_gpus)
        start = EngineStart(engine.begin, partial(_rest, engine, sleeps=True)) if shares_gpus else EngineStart()
        with starting("engine") if shares_gpus else nullcontext():
            policy = start_policy(cluster, config.worker, keep_reference, teacher, start)
        yield GrpoWorkers(policy, engine, config.policy.generation, cluster, starting, shares_gpus)


def num_engine_devices(config: RolloutConfig) -> int:
    """Return the number of devices that engines have for themselves."""
    return 0 if config.policy.generation.colocated.enabled else _engine_devices(config).world_size


def _engine_devices(config: RolloutConfig) -> ClusterConfig:
    """Return the cluster of engines with separate devices."""
    resources = config.policy.generation.colocated.resources
    per_node, num_nodes = resources.gpus_per_node, resources.num_nodes
    assert per_node is not None and num_nodes is not None, "a rule asks for both"
    sizes = {"gpus_per_node": per_node} if config.cluster.device_type == "cuda" else {"cpu_workers_per_node": per_node}
    return replace(config.cluster, num_nodes=num_nodes, **sizes)
