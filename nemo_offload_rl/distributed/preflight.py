"""Checks this machine's environment before a run reads its data, and before Ray starts or is joined.

What would end the run is a `ConfigError`. What would make it slow, or may break it later, is a warning, once in a
process. Each is one line that says what to change.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.run import ClusterConfig, library_without_bytecode
from nemo_offload_rl.utils.gpu_memory import read_gpus
from nemo_offload_rl.utils.sockets import short_folder

logger = logging.getLogger(__name__)

HAS_LOST_RAY = threading.Event()
"""Set where Ray's processes have ended during a run of this process."""

CPU_OBJECT_STORE_BYTES = 256 * 2**20
TOKEN_FILE = Path(".ray/auth_token")  # below the home folder
_CORES_FOR_RAY = 3  # the driver has one
_GPU_SHARED_BYTES = 2**30  # for Ray's object store, NCCL and vLLM; docker gives 64 MiB
_LEAST_FILES = 4096
_LEAST_PROCESSES = 1024
_ANSWER_TIMEOUT_S = 10.0
_OWN_RESOURCES = "RAY_OVERRIDE_RESOURCES"  # replaces what Ray would count on this machine
# Longest path that Ray appends to the folder of its sessions.
_LONGEST_SOCKET = "ray/session_2026-11-27_12-24-53_296993_4194304/sockets/plasma_store.1"
_told: set[str] = set()  # warnings of this process


def cluster_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the address of the running cluster to join, from RAY_ADDRESS; None to start Ray on this machine."""
    address = environment.get("RAY_ADDRESS", "")
    return None if address in ("", "local") else address


def check_start(settings: ClusterConfig, num_more: int = 0) -> None:
    """Check that Ray can start or be joined, unless this process has done so; arguments as of `check_environment`."""
    refuse_lost_ray()
    _keep_bytecode(settings)
    if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
        check_environment(settings, num_more=num_more)


def can_prepare(settings: ClusterConfig, count: int) -> bool:
    """Tell whether `count` processes can import before Ray starts, and become its workers.

    They need a core each, or driver and Ray would start later. Ray must start here, and leave the command of workers to
    us. GPUs must be of one kind: libraries may look at the first one as they are imported, before Ray chooses.
    """
    if len(os.sched_getaffinity(0)) < count + _CORES_FOR_RAY:
        return False
    joins = cluster_address() is not None or ("ray" in sys.modules and sys.modules["ray"].is_initialized())
    if joins or settings.num_nodes > 1 or "RAY_RUNTIME_ENV_HOOK" in os.environ:
        return False
    return settings.device_type == "cpu" or len({use.name for use in read_gpus().values()}) == 1


def refuse_lost_ray() -> None:
    """Refuse another run in a process that has lost its Ray.

    Raises:
        ConfigError: It has.
    """
    if HAS_LOST_RAY.is_set():
        raise ConfigError(
            "Ray's processes ended during an earlier run of this process, which cannot start Ray again; start a new "
            "process (in a notebook, restart the kernel)"
        )


def check_environment(
    settings: ClusterConfig, environment: Mapping[str, str] = os.environ, *, num_more: int = 0
) -> None:
    """Check what Ray and the workers need of this machine; warn of what is only slow or may fail later.

    Args:
        settings: The run's cluster settings.
        environment: Environment variables, which Ray and workers started here inherit.
        num_more: Devices of engines that share none with the policy.

    Raises:
        ConfigError: The run could not start.
    """
    if settings.device_type == "cuda":
        refuse_expandable_segments(environment)
    address = cluster_address(environment)
    if address is not None:
        _check_address(address, environment)
    else:
        _check_folders(environment)
        _check_interfaces(environment)
        warnings = (
            *_proxy_problems(environment),
            *_limit_problems(),
            *_shared_memory_problems(settings),
            *_bytecode_problems(settings),
        )
        for problem in warnings:
            if problem not in _told:
                _told.add(problem)
                logger.warning(problem)
        _check_devices(settings, num_more, environment)


def check_resources(
    settings: ClusterConfig, hosts: Sequence[Mapping[str, float]], owner: str, remedy: str, num_more: int = 0
) -> None:
    """Check that hosts have the devices that a run asks for, and a CPU for each.

    Args:
        settings: The run's cluster settings.
        hosts: Ray's resources of each host: `CPU` and `GPU`.
        owner: Whose hosts they are, for the message.
        remedy: Where to find more devices, for the message.
        num_more: Devices of engines that share none with the policy.

    Raises:
        ConfigError: They have not.
    """
    per_node = "gpus_per_node" if settings.device_type == "cuda" else "cpu_workers_per_node"
    asked = f"cluster.{per_node}={settings.workers_per_node} on cluster.num_nodes={settings.num_nodes}"
    if num_more:
        asked += f" and {num_more} more for engines (policy.generation.colocated.resources)"
    for name in resource_names(settings):
        counts = [int(host.get(name, 0)) for host in hosts]
        needed = settings.world_size + num_more
        if sum(counts) < needed:
            cpu = " (0 runs on CPUs)" if name == "GPU" else ""
            raise ConfigError(
                f"{asked} needs {needed} {name}s, but {owner} has {sum(counts)}; lower cluster.{per_node}{cpu}, or "
                f"{remedy}"
            )
        if sum(count >= settings.workers_per_node for count in counts) < settings.num_nodes:
            raise ConfigError(
                f"{asked} needs {settings.num_nodes} hosts with {settings.workers_per_node} {name}s each, but "
                f"those of {owner} have {', '.join(map(str, sorted(counts, reverse=True)))}; lower either key"
            )


def resource_names(settings: ClusterConfig) -> tuple[str, ...]:
    """Return the names of Ray's resources of which each worker has one."""
    return ("CPU", "GPU") if settings.device_type == "cuda" else ("CPU",)


def session_folder(environment: Mapping[str, str] = os.environ) -> str:
    """Return the folder for Ray's sessions: RAY_TMPDIR, TMPDIR or /tmp, or /tmp if paths of sockets were too long."""
    return short_folder(chosen_folder(environment)[1], _LONGEST_SOCKET)


def connection_error(host: str, port: int, timeout_s: float) -> OSError | None:
    """Try to connect; return the error, None if something listens."""
    try:
        socket.create_connection((host.strip("[]"), port), timeout=timeout_s).close()
    except OSError as error:
        return error
    return None


def refuse_expandable_segments(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse an allocator of PyTorch under which neither vLLM's sleep mode nor a refit works."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").lower():
            raise ConfigError(
                f"{name}={environment[name]}, but expandable segments break the memory pool of vLLM's sleep mode and "
                "cannot be shared with the engine for a refit; unset it"
            )


def _check_address(address: str, environment: Mapping[str, str]) -> None:
    """Refuse an address where no cluster answers; Ray itself would try for minutes."""
    kind, separator, rest = address.partition("://")
    if separator:
        kinds = {"ray": "Ray Client's, whose driver is outside of the cluster", "http": "the dashboard's"}
        whose = kinds.get(kind.removesuffix("s"), "not a cluster's")
        host = rest.partition("/")[0].rpartition(":")[0] or rest
        raise ConfigError(
            f"RAY_ADDRESS={address} is {whose}; start the run on a node "
            f"of the cluster with RAY_ADDRESS={host}:6379, or submit it with `ray job submit --address "
            f"http://{host}:8265`"
        )
    if address == "auto":
        return  # Ray looks it up
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and int(port) < 2**16):
        raise ConfigError(f"RAY_ADDRESS={address} has no port; write HOST:PORT, as in HOST:6379, or unset it")
    if (error := connection_error(host, int(port), _ANSWER_TIMEOUT_S)) is not None:
        raise ConfigError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({error.strerror or error}); start it, or unset "
            "RAY_ADDRESS to use this machine"
        ) from error
    if environment.get("RAY_USE_TLS") != "1" and not _speaks_grpc(address):
        raise ConfigError(
            f"what answers at RAY_ADDRESS={address} is not Ray's GCS; use the port of `ray start --head`, 6379 "
            "unless --port changes it, or unset RAY_ADDRESS to use this machine"
        )


def _speaks_grpc(address: str) -> bool:
    import grpc  # takes a second

    channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
    try:
        grpc.channel_ready_future(channel).result(timeout=_ANSWER_TIMEOUT_S)
    except grpc.FutureTimeoutError:
        return False
    finally:
        channel.close()
    return True


def chosen_folder(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the variable that names the folder of temporary files, and the folder."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if folder := environment.get(name):
            return name, folder
    return "TMPDIR", "/tmp"


def _check_folders(environment: Mapping[str, str]) -> None:
    name, chosen = chosen_folder(environment)
    folder = session_folder(environment)
    if (reason := _unwritable(Path(folder) / "ray")) is not None:
        also = "" if folder == chosen else f" (paths of sockets in {name}={chosen} would be too long)"
        raise ConfigError(
            f"{folder}/ray cannot be written: {reason}{also}, but Ray keeps its sockets and logs there; set {name} to "
            "a short path on a local disk that you may write to"
        )
    if environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH"):
        return
    try:
        token = Path.home() / TOKEN_FILE
    except RuntimeError as error:
        raise ConfigError("this user has no home folder, where Ray keeps its token; set HOME") from error
    reason = None if os.access(token, os.R_OK) else _unwritable(token.parent)
    if reason is not None:
        raise ConfigError(
            f"{token.parent} cannot be written: {reason}, but the token of Ray's cluster is kept there; set HOME to a "
            "folder that you may write to"
        )


def _unwritable(folder: Path) -> str | None:
    """Make a folder, and a file in it; return the reason if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _check_interfaces(environment: Mapping[str, str]) -> None:
    """Refuse names of network interfaces that this machine does not have, with which no process group can be made."""
    known = sorted(psutil.net_if_addrs())
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(name, "")
        if not value or value.startswith("^"):  # a list to leave out
            continue
        is_exact = name.startswith("GLOO") or value.startswith("=")
        wanted = value.removeprefix("=").split(",")
        found = [one for one in known for start in wanted if one == start or (not is_exact and one.startswith(start))]
        if not found:
            raise ConfigError(
                f"{name}={value} is no network interface of this machine, which has {', '.join(known)}; set it to one "
                "of these, or unset it"
            )


def _check_devices(settings: ClusterConfig, num_more: int, environment: Mapping[str, str]) -> None:
    """Refuse what this machine alone cannot have; Ray may count fewer CPUs, by a container's limit."""
    if settings.num_nodes > 1:
        raise ConfigError(
            f"cluster.num_nodes={settings.num_nodes}, but without RAY_ADDRESS a run has this machine alone; set "
            f"RAY_ADDRESS to a Ray cluster of {settings.num_nodes} hosts (docs/guides/clusters.md), or "
            "cluster.num_nodes=1"
        )
    # Of a GPU that is divided into slices (MIG) torch counts one slice at most, and Ray counts all.
    if _OWN_RESOURCES in environment or "MIG-" in environment.get("CUDA_VISIBLE_DEVICES", ""):
        return
    here = {"CPU": float(os.cpu_count() or 1)}
    if settings.device_type == "cuda":
        import torch  # heavy

        here["GPU"] = float(torch.cuda.device_count())
    check_resources(settings, [here], "this machine", "set RAY_ADDRESS to a larger Ray cluster", num_more)


def _proxy_problems(environment: Mapping[str, str]) -> Iterator[str]:
    proxies = {name: environment[name] for name in environment if re.fullmatch("(?i)(https?|all)_proxy", name)}
    used = {name: value for name, value in proxies.items() if value}
    excluded = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    if used and not {"*", "127.0.0.1"} & {name.strip() for name in excluded}:
        yield (
            f"{min(used)} is set and no_proxy does not name 127.0.0.1, so rewards, agents and loggers ask the proxy "
            "for services of this machine; export no_proxy=localhost,127.0.0.1 with the hosts that you reach directly"
        )


def _limit_problems() -> Iterator[str]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # Ray raises the soft limit to this one
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        yield (
            f"this process may open {files} files (ulimit -Hn), and Ray needs {_LEAST_FILES} or more; raise it in "
            "/etc/security/limits.conf, or with `docker run --ulimit nofile=65536`"
        )
    left: dict[str, int] = {}
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if processes != resource.RLIM_INFINITY and os.geteuid() != 0:  # it does not bind root
        left["ulimit -u"] = processes - _num_threads_of_user()
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no such file, or "max"
        limit, used = (int((group / f"pids.{name}").read_text()) for name in ("max", "current"))
        left["the container's --pids-limit"] = limit - used
    for name, number in left.items():
        if number < _LEAST_PROCESSES:
            yield (
                f"only {max(0, number)} more processes and threads may start ({name}), and a run starts hundreds of "
                f"them; raise that limit so that {_LEAST_PROCESSES} or more are left"
            )


def _num_threads_of_user() -> int:
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid():
                count += process.num_threads()
    return count


def _shared_memory_problems(settings: ClusterConfig) -> Iterator[str]:
    needed = CPU_OBJECT_STORE_BYTES if settings.device_type == "cpu" else _GPU_SHARED_BYTES
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        free = 0
    if free < needed:
        yield (
            f"/dev/shm has {free / 2**20:.0f} MiB free, and {needed / 2**20:.0f} are needed for Ray's objects"
            f"{'' if settings.device_type == 'cpu' else ', NCCL and vLLM'}: Ray uses the disk instead, which is slow; "
            "free space there, or give a container more (`docker run --shm-size 64g`)"
        )


def _keep_bytecode(settings: ClusterConfig) -> None:
    """Let this process and those that it starts, such as Ray's, keep bytecode as workers do."""
    if variables := settings.bytecode_env:
        os.environ |= variables
        sys.pycache_prefix, sys.dont_write_bytecode = variables["PYTHONPYCACHEPREFIX"], False


def _bytecode_problems(settings: ClusterConfig) -> Iterator[str]:
    library = None if settings.compile_cache_dir is not None or sys.pycache_prefix else library_without_bytecode()
    if library is not None and (sys.dont_write_bytecode or not os.access(library, os.W_OK)):
        why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "that folder cannot be written"
        yield (
            f"{library} has no bytecode and {why}, so each process compiles the library's modules again, and its "
            f"imports take more than twice as long; run `python -m compileall -q {library.parent}` when the image is "
            "made, or set cluster.compile_cache_dir"
        )
