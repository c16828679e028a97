"""Slots for workers: one bundle of a Ray placement group for each device, shared by the worker groups in turn.

1. `cluster_session` joins the cluster of RAY_ADDRESS, or starts Ray on this machine.
2. `VirtualCluster` reserves a bundle {CPU: 1, and GPU: 1 if there are GPUs} for each device, host by host.
3. Worker groups place rank i into bundle i, each with an equal share of the bundle.
4. When the `with` block ends, however it ends, every worker is killed and Ray is shut down.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_offload_rl.distributed.ports import find_free_port
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.utils.settings import ClusterSettings

logger = logging.getLogger(__name__)

_CPU_OBJECT_STORE_BYTES = 256 * 2**20
_RESERVE_TIMEOUT_S = 120.0
_DAEMON_END_S = 1.0


class VirtualCluster:
    """Reserved slots, and the worker groups that live in them.

    Args:
        settings: How many devices on how many hosts.
        num_colocated_groups: How many worker groups share each slot.

    Raises:
        ConfigError: The cluster has fewer devices than asked for.
    """

    def __init__(self, settings: ClusterSettings, num_colocated_groups: int = 2) -> None:
        self.settings = settings
        self._num_colocated_groups = num_colocated_groups
        self._groups: list[Callable[[], None]] = []
        self._next_port = settings.master_port_range_low
        self._placement_group = _reserve(settings)
        self._bundles = _bundles_by_host(self._placement_group)
        per_host = settings.workers_per_node
        hosts = [self._bundles[start][1] for start in range(0, len(self._bundles), per_host)]
        for slot, (_, host) in enumerate(self._bundles):
            if host != hosts[slot // per_host]:
                self._remove_placement_group()
                raise ConfigError(
                    f"cluster.num_nodes={settings.num_nodes} hosts with {per_host} devices each are not free: Ray "
                    "spread the devices otherwise; free whole hosts or ask for fewer devices"
                )

    @property
    def world_size(self) -> int:
        """Number of slots."""
        return len(self._bundles)

    def local_rank(self, slot: int) -> int:
        """Position of a slot on its host."""
        return slot % self.settings.workers_per_node

    def actor_options(self, slot: int, env_vars: dict[str, str]) -> dict[str, Any]:
        """Ray options of a worker in `slot`; with GPUs it sees only its slot's one, as `cuda:0`."""
        options: dict[str, Any] = {
            "num_cpus": 1.0 / self._num_colocated_groups,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement_group, self._bundles[slot][0]),
            "runtime_env": {"env_vars": env_vars},
        }
        if self.settings.device_type == "cuda":
            options["num_gpus"] = 1.0 / self._num_colocated_groups
        return options

    def rendezvous(self) -> tuple[str, int]:
        """Address and free port on slot 0's host, another port at each call."""
        low, high = self._next_port, self.settings.master_port_range_high
        if self._bundles[0][1] == ray.get_runtime_context().get_node_id():
            address, port = ray.util.get_node_ip_address(), find_free_port(low, high)
        else:
            options = self.actor_options(0, {})
            find = ray.remote(lambda: (ray.util.get_node_ip_address(), find_free_port(low, high)))
            address, port = ray.get(find.options(**options).remote())
        self._next_port = port + 1
        return address, port

    def register(self, shutdown: Callable[[], None]) -> None:
        """Admit a worker group; `shutdown` is called when the cluster ends, latest group first.

        Raises:
            RuntimeError: All shares of the slots are taken; Ray would let the group wait forever.
        """
        if len(self._groups) == self._num_colocated_groups:
            raise RuntimeError(f"Each slot is shared by {self._num_colocated_groups} worker groups at most")
        self._groups.append(shutdown)

    def unregister(self, shutdown: Callable[[], None]) -> None:
        """Let another group take the place of one that has ended."""
        if shutdown in self._groups:
            self._groups.remove(shutdown)

    def shutdown(self) -> None:
        """End every worker and give the slots back; safe to call twice."""
        for shutdown in reversed(self._groups.copy()):
            shutdown()
        self._remove_placement_group()

    def _remove_placement_group(self) -> None:
        if ray.is_initialized():
            remove_placement_group(self._placement_group)


@contextmanager
def cluster_session(
    settings: ClusterSettings, *, num_colocated_groups: int = 2, log_to_driver: bool = False
) -> Iterator[VirtualCluster]:
    """A cluster for the `with` block; afterwards no worker is left, whatever happened inside.

    SIGTERM ends the block like Ctrl-C does, with exit status 143. Ray is left running if it ran before.

    Args:
        settings: How many devices on how many hosts.
        num_colocated_groups: How many worker groups share each device.
        log_to_driver: Show the workers' output in this process; it is in Ray's session folder in any case.

    Raises:
        ConfigError: The cluster has fewer devices than asked for.
    """
    started_here = not ray.is_initialized()
    cluster: VirtualCluster | None = None
    daemons: list[psutil.Process] = []
    try:
        if started_here:
            others = set(psutil.Process().children())
            _init_ray(settings, log_to_driver)
            daemons = [child for child in psutil.Process().children() if child not in others]
        # Inside, because ray.init installs a handler of its own, under which the driver aborts.
        with _sigterm_as_exit():
            cluster = VirtualCluster(settings, num_colocated_groups)
            yield cluster
    finally:
        with _deaf_to_stop_signals():
            if sys.exception() is not None and _any_ended(daemons):
                _end_without_ray()
            else:
                if cluster is not None:
                    cluster.shutdown()
                if started_here:
                    ray.shutdown()


def _init_ray(settings: ClusterSettings, log_to_driver: bool) -> None:
    # The hook of `uv run` would build a new environment for every worker.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    # Ray 2.60 announces a change of this default; workers without GPUs must not see any.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"
    # Tells at every start that the local cluster is protected by a token.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    common: dict[str, Any] = {"log_to_driver": log_to_driver, "logging_level": logging.WARNING}
    if "RAY_ADDRESS" in os.environ:
        ray.init(address="auto", **common)
        return
    if settings.device_type == "cpu":
        common |= {"object_store_memory": _CPU_OBJECT_STORE_BYTES, "num_gpus": 0}
    # "local": never the cluster that somebody else runs on this machine.
    ray.init(address="local", include_dashboard=False, **common)


def _reserve(settings: ClusterSettings) -> PlacementGroup:
    _check_resources(settings)
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if settings.device_type == "cuda" else {})
    strategy = "STRICT_PACK" if settings.num_nodes == 1 else "PACK"
    group = placement_group([bundle] * settings.world_size, strategy=strategy)
    try:
        ray.get(group.ready(), timeout=_RESERVE_TIMEOUT_S)
    except GetTimeoutError:
        remove_placement_group(group)
        raise ConfigError(
            f"The Ray cluster has {settings.world_size} devices, but they were not free within "
            f"{_RESERVE_TIMEOUT_S:.0f} s; end the other job on it or ask for fewer devices"
        ) from None
    return group


def _check_resources(settings: ClusterSettings) -> None:
    needed = {"CPU": settings.world_size}
    if settings.device_type == "cuda":
        needed["GPU"] = settings.world_size
    present = ray.cluster_resources()
    on_gpu = settings.device_type == "cuda"
    for resource, count in needed.items():
        found = int(present[resource]) if resource in present else 0
        if found < count:
            per_node = "gpus_per_node" if on_gpu else "cpu_workers_per_node"
            raise ConfigError(
                f"cluster.{per_node}={settings.workers_per_node} on cluster.num_nodes={settings.num_nodes} needs "
                f"{count} {resource}s, but the Ray cluster has {found}; lower cluster.{per_node} or join a larger one"
            )


def _bundles_by_host(group: PlacementGroup) -> list[tuple[int, str]]:
    """(bundle index, node id), the driver's host first, then host by host."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    return sorted(nodes.items(), key=lambda item: (item[1] != here, item[1], item[0]))


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    status: list[int] = []

    def leave(signum: int, frame: FrameType | None) -> None:
        status.append(128 + signum)
        raise SystemExit(status[0])

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except SystemExit:
        # A wait inside Ray turns every SystemExit into one of status 1.
        if status:
            raise SystemExit(status[0]) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _any_ended(daemons: list[psutil.Process]) -> bool:
    """Whether Ray's daemons end too: `timeout` and batch systems send their signal to all processes of a job.

    Some end at once, others then wait for each other for minutes.
    """
    ended, _ = psutil.wait_procs(daemons, timeout=_DAEMON_END_S)
    return bool(ended)


def _end_without_ray() -> None:
    """Kill what is left of the local cluster. Without its daemons each call of Ray waits a minute for them.

    Ray's library crashes at the end of a process that did not call `ray.shutdown`, so that end is cut short.
    """
    atexit.register(_exit_as_terminated)
    processes = psutil.Process().children(recursive=True)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_DAEMON_END_S)


def _exit_as_terminated() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signal.SIGTERM)


@contextmanager
def _deaf_to_stop_signals() -> Iterator[None]:
    """Cleaning up takes seconds; a second Ctrl-C in it would leave workers behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
