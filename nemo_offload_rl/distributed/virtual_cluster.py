"""Reserves slots for workers: one bundle of a Ray placement group for each device, shared by the worker groups.

1. `cluster_session` joins the cluster of RAY_ADDRESS, or starts Ray on this machine.
2. `VirtualCluster` reserves a bundle {CPU: 1, and GPU: 1 if there are GPUs} for each device, in one placement group for
   each host. With a single placement group, Ray might put the bundles of two hosts onto one large host, or spread one
   host's bundles over several.
3. Worker groups place rank i into bundle i, each with an equal share of the bundle.
4. When the `with` block ends, however it ends, every worker is killed and Ray is shut down.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any, Protocol

import psutil
import ray
from ray.exceptions import GetTimeoutError, RaySystemError, TaskUnschedulableError, WorkerCrashedError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from nemo_offload_rl.distributed.preflight import (
    HAS_LOST_RAY,
    check_resources,
    refuse_expandable_segments,
    refuse_lost_ray,
    resource_names,
)
from nemo_offload_rl.distributed.prepared import PreparedWorkers
from nemo_offload_rl.distributed.ray_start import Daemons, descendants_of, start_ray
from nemo_offload_rl.distributed.watch import Workers
from nemo_offload_rl.errors import ConfigError, UserError, WorkerDiedError
from nemo_offload_rl.keys.run import ClusterConfig
from nemo_offload_rl.utils.cli import BY_SIGNAL, EXIT_USER_ERROR, STOP_SIGNALS, stop_signals_blocked
from nemo_offload_rl.utils.liveness import dump_stacks_on_signal

logger = logging.getLogger(__name__)

_DAEMON_END_S = 1.0
_SHUTDOWN_S = 60.0
_HOST_TIMEOUT_S = 120.0


class Group(Workers, Protocol):
    """The part of a worker group that its cluster needs."""

    def shutdown(self) -> None:
        """End every worker process; safe to call twice."""
        ...


class VirtualCluster:
    """Reserved slots, and the worker groups in them.

    Args:
        settings: The numbers of devices and hosts.
        num_colocated_groups: Number of worker groups that share each slot.
        started: Ray's processes that this process has started; None if it has joined a cluster.
        prepared: Processes that become workers; None if there are none.

    Attributes:
        daemons: Ray's processes that the run needs.

    Raises:
        ConfigError: The cluster has fewer devices than requested.
    """

    def __init__(
        self,
        settings: ClusterConfig,
        num_colocated_groups: int = 2,
        started: list[psutil.Process] | None = None,
        prepared: PreparedWorkers | None = None,
    ) -> None:
        self.settings = settings
        self._prepared = prepared
        self._num_colocated_groups = num_colocated_groups
        self._groups: list[Group] = []
        self._others: list[VirtualCluster] = []
        self._run_groups: list[Group] = []
        self.daemons = Daemons(started or [])
        self._given_ports: set[int] = set()
        self._slots = reserve_slots(settings)

    @property
    def groups(self) -> Sequence[Group]:
        """All worker groups of the run, including those in further slots."""
        return self._run_groups

    @property
    def world_size(self) -> int:
        """Number of slots."""
        return len(self._slots)

    def local_rank(self, slot: int) -> int:
        """Return the position of a slot on its host."""
        return slot % self.settings.workers_per_node

    def actor_options(
        self, slot: int, env_vars: dict[str, str], num_slots: int = 1, group: str | None = None
    ) -> dict[str, Any]:
        """Return Ray options of a worker, which sees only the GPUs of its `num_slots` slots, from `cuda:0` on.

        With the name of its group, a prepared process becomes the worker if there is one.
        """
        if num_slots > 1 and self.settings.device_type == "cuda":
            # Ray would show the worker only the GPU of its first bundle.
            env_vars = {
                **env_vars,
                "CUDA_VISIBLE_DEVICES": ",".join(self._gpu_ids[slot : slot + num_slots]),
                "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            }
        options: dict[str, Any] = {
            "num_cpus": 1.0 / self._num_colocated_groups,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._slots[slot].group, self._slots[slot].bundle_index
            ),
            "runtime_env": {"env_vars": {**self.settings.compile_cache_env, **env_vars}},
        }
        if self._prepared is not None and group is not None:
            options["runtime_env"]["py_executable"] = self._prepared.executable(group)
        if self.settings.device_type == "cuda":
            options["num_gpus"] = 1.0 / self._num_colocated_groups
        return options

    @cached_property
    def _gpu_ids(self) -> list[str]:
        """Index of each slot's GPU on its host; all slots are asked at once, since each starts a process to answer."""
        ask = ray.remote(lambda: str(ray.get_gpu_ids()[0]))
        slots = range(self.world_size)
        return _answers_of_hosts([ask.options(**self.actor_options(slot, {})).remote() for slot in slots])

    def rendezvous(self) -> tuple[str, int]:
        """Return the address of slot 0's host and a free port on it, a different one at each call."""
        search = (self.settings.master_port_range_low, self.settings.master_port_range_high, set(self._given_ports))
        if self._slots[0].node_id == ray.get_runtime_context().get_node_id():
            address, port = ray.util.get_node_ip_address(), find_free_port(*search)
        else:
            # On the slot's host but outside of the slot, which workers may use up.
            there = NodeAffinitySchedulingStrategy(self._slots[0].node_id, soft=False)
            find = ray.remote(lambda: (ray.util.get_node_ip_address(), find_free_port(*search)))
            ((address, port),) = _answers_of_hosts([find.options(num_cpus=0, scheduling_strategy=there).remote()])
        self._given_ports.add(port)
        return address, port

    def register(self, group: Group) -> None:
        """Add a worker group, which is shut down with the cluster, latest group first.

        Raises:
            RuntimeError: All shares of the slots are taken; in Ray the group would wait forever.
        """
        if len(self._groups) == self._num_colocated_groups:
            raise RuntimeError(f"Each slot is shared by {self._num_colocated_groups} worker groups at most")
        self._groups.append(group)
        self._run_groups.append(group)

    def unregister(self, group: Group) -> None:
        """Remove a group that has ended, so that another one can take its place."""
        if group in self._groups:
            self._groups.remove(group)
            self._run_groups.remove(group)

    def reserve_more(self, settings: ClusterConfig) -> VirtualCluster:
        """Reserve further slots of the same Ray cluster, each for one worker group; they end with this cluster."""
        other = VirtualCluster(settings, num_colocated_groups=1, prepared=self._prepared)
        other._run_groups, other.daemons = self._run_groups, self.daemons
        self._others.append(other)
        return other

    def shutdown(self) -> None:
        """End every worker and release the slots; safe to call twice."""
        for other in self._others:
            other.shutdown()
        for group in reversed(self._groups.copy()):
            group.shutdown()
        release_groups({slot.group.id: slot.group for slot in self._slots}.values())


@contextmanager
def cluster_session(
    settings: ClusterConfig,
    *,
    num_colocated_groups: int = 2,
    prepared: PreparedWorkers | None = None,
) -> Iterator[VirtualCluster]:
    """Open a cluster for the `with` block; afterwards no worker is left, whatever happened inside.

    SIGTERM, SIGHUP and SIGUSR1 end the block like Ctrl-C does, with exit status 128 + their number. If Ray is started
    here, its processes and workers ignore these signals and SIGINT, which a terminal or a batch system sends to all
    processes of a job: the driver decides when they end. A Ray that ran before is left running.

    Args:
        settings: The numbers of devices and hosts.
        num_colocated_groups: Number of worker groups that share each device.
        prepared: Processes of this host that become workers; None if there are none.

    Raises:
        ConfigError: The cluster has fewer devices than requested, or the environment asks for expandable segments.
    """
    if settings.device_type == "cuda":
        refuse_expandable_segments()
    refuse_lost_ray()
    dump_stacks_on_signal()  # else the signal that asks workers for their stacks would end this process
    started_here = not ray.is_initialized()
    cluster: VirtualCluster | None = None
    started: list[psutil.Process] = []
    try:
        with ExitStack() as handling:
            handling.enter_context(_signals_as_exit())  # other threads may take signals, and this one handles them
            with stop_signals_blocked():  # children inherit the signal mask
                if started_here:
                    started = start_ray(settings)
                # Again after ray.init, which sets a handler of its own, and before a signal that came meanwhile.
                handling.enter_context(_signals_as_exit())
            cluster = VirtualCluster(settings, num_colocated_groups, started, prepared)
            yield cluster
    finally:
        # Cleaning up takes seconds; a second Ctrl-C would leave workers behind.
        with _handling(STOP_SIGNALS, signal.SIG_IGN):
            error = sys.exception()
            has_lost_ray = started_here and cluster is not None and cluster.daemons.ended() is not None
            if has_lost_ray or (error is not None and _any_ended(started)):
                _end_without_ray(_exit_status(error))
            else:
                if cluster is not None:
                    cluster.shutdown()
                if started_here:
                    _shut_ray_down(started)


def _answers_of_hosts(tasks: list[Any]) -> list[Any]:
    """Wait for the results of short tasks on hosts of the cluster."""
    try:
        return ray.get(tasks, timeout=_HOST_TIMEOUT_S)
    except (GetTimeoutError, RaySystemError, WorkerCrashedError, TaskUnschedulableError) as error:
        raise WorkerDiedError(
            f"a host of the Ray cluster does not answer: {' '.join(str(error).split())}; see `ray status`"
        ) from error


@contextmanager
def _handling(numbers: Sequence[int], handler: Any) -> Iterator[None]:
    """Handle signals in the block; do nothing outside of the main thread, where Python cannot set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextmanager
def _signals_as_exit() -> Iterator[None]:
    status: list[int] = []

    def leave(signum: int, frame: FrameType | None) -> None:
        status.append(BY_SIGNAL + signum)
        raise SystemExit(status[0])

    numbers = [number for number in STOP_SIGNALS if number != signal.SIGINT]
    # SIGHUP stays ignored under `nohup`.
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    try:
        with _handling(heard, leave):
            yield
    except SystemExit as left:
        # A wait inside Ray turns every SystemExit into one of status 1.
        if status:
            left.code = status[0]  # its notes say how to go on
        raise


def _shut_ray_down(daemons: list[psutil.Process]) -> None:
    """Shut Ray down, killing all its processes as soon as the first daemon has ended.

    By itself, Ray sends SIGTERM to one daemon after the other, which they ignore here, and kills each a second later.
    Processes that they have started, such as the raylet's agents, would end even later.
    """
    processes = [*daemons, *(child for daemon in daemons for child in descendants_of(daemon))]

    def kill_all(ended: psutil.Process) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    follower = threading.Thread(target=psutil.wait_procs, args=(daemons, _SHUTDOWN_S, kill_all), daemon=True)
    follower.start()
    ray.shutdown()
    follower.join(_SHUTDOWN_S)


def _any_ended(daemons: list[psutil.Process]) -> bool:
    """Tell whether one of Ray's daemons has ended; the others would then wait for each other for minutes."""
    ended, _ = psutil.wait_procs(daemons, timeout=_DAEMON_END_S)
    return bool(ended)


def _end_without_ray(status: int) -> None:
    """Kill the rest of the local cluster, because each call of Ray would wait a minute for its lost daemons.

    Ray's library crashes at the end of a process that did not call `ray.shutdown`, so `os._exit` ends this one first.

    Args:
        status: Exit status of this process.
    """
    HAS_LOST_RAY.set()
    atexit.register(_exit_at_once, status)
    processes = psutil.Process().children(recursive=True)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_DAEMON_END_S)


def _exit_at_once(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _exit_status(error: BaseException | None) -> int:
    """Return the status with which `utils/cli.py` ends a process after `error`."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return BY_SIGNAL + signal.SIGINT
    return EXIT_USER_ERROR if isinstance(error, UserError) else int(error is not None)


def find_free_port(low: int, high: int, given: Collection[int] = ()) -> int:
    """Find a port from `low` to `high`, both included, without those `given`, that nothing on this host listens on.

    The search starts at a random port. So jobs that start on one host at the same moment seldom get the same port,
    although a port is used only seconds after it was found.

    Raises:
        ConfigError: All ports are taken.
    """
    size = high - low + 1
    first = secrets.randbelow(size) if size > 0 else 0
    for offset in range(size):
        port = low + (first + offset) % size
        if port in given:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise ConfigError(
        f"No port from {low} to {high} is free; change cluster.master_port_range_low or cluster.master_port_range_high"
    )


_TIMEOUT_S = 120.0
_NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Slot:
    """One reserved device: a bundle of its host's placement group."""

    group: PlacementGroup
    bundle_index: int
    node_id: str


def reserve_slots(settings: ClusterConfig) -> list[Slot]:
    """Reserve a slot for each device, host by host, the driver's host first.

    Raises:
        ConfigError: Too few hosts of the cluster have enough devices, or the devices are not free.
    """
    hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    check_resources(settings, hosts, "the Ray cluster", "join a larger Ray cluster")
    deadline_s = time.monotonic() + _TIMEOUT_S
    groups: dict[str, PlacementGroup] = {}
    try:
        for _ in range(settings.num_nodes):
            group = _host_group(settings, taken=list(groups))
            try:
                ray.get(group.ready(), timeout=max(0.0, deadline_s - time.monotonic()))
            except GetTimeoutError:
                remove_placement_group(group)
                raise ConfigError(
                    f"The Ray cluster has {settings.world_size} devices on {settings.num_nodes} hosts, but they were "
                    f"not free within {_TIMEOUT_S:.0f} s; end the other job on it or ask for fewer devices"
                ) from None
            groups[placement_group_table(group)["bundles_to_node_id"][0]] = group
    except BaseException:
        release_groups(groups.values())
        raise
    here = ray.get_runtime_context().get_node_id()
    return [
        Slot(groups[node_id], bundle_index, node_id)
        for node_id in sorted(groups, key=lambda node_id: (node_id != here, node_id))
        for bundle_index in range(settings.workers_per_node)
    ]


def release_groups(groups: Iterable[PlacementGroup]) -> None:
    """Remove placement groups."""
    if ray.is_initialized():
        for group in groups:
            remove_placement_group(group)


def _host_group(settings: ClusterConfig, taken: Sequence[str]) -> PlacementGroup:
    """Reserve all devices of one host that is not taken."""
    bundles = [dict.fromkeys(resource_names(settings), 1.0)] * settings.workers_per_node
    if not taken:
        return placement_group(bundles, strategy="STRICT_PACK")
    others = {_NODE_LABEL: f"!in({','.join(taken)})"}
    return placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=[others] * len(bundles))
