"""Joins a running Ray cluster or starts one on this machine, and watches Ray's daemons."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from nemo_offload_rl.distributed.preflight import (
    CPU_OBJECT_STORE_BYTES,
    TOKEN_FILE,
    check_environment,
    chosen_folder,
    cluster_address,
    connection_error,
    session_folder,
)
from nemo_offload_rl.errors import ConfigError, WorkerDiedError, first_line
from nemo_offload_rl.keys.run import ClusterConfig
from nemo_offload_rl.memory.limits import as_started_here, killed_by_kernel
from nemo_offload_rl.utils.cli import BY_SIGNAL

logger = logging.getLogger(__name__)

_CHECK_PERIOD_S = 1.0  # for processes of this host; a GCS on another host is checked less often
_GCS_CHECK_PERIOD_S = 10.0
_AGENTS_OF_RAYLET = 2  # of the dashboard and of runtime environments
_GCS_TIMEOUT_S = 2.0
_TOKEN_BYTES = 32


class Daemons:
    """Watches Ray's own processes, whose loss ends a run sooner or later.

    1. If an agent ends, the raylet of its host ends, and with it all workers of the host.
    2. If the GCS ends, Ray ends every process of the cluster after a minute, including this one.

    Args:
        started: Child processes that form a local cluster; empty if a cluster was joined.
    """

    def __init__(self, started: list[psutil.Process]) -> None:
        self._processes: list[tuple[str, psutil.Process]] = []
        self._gcs_address = "" if started else ray.get_runtime_context().gcs_address
        self._period_s = _CHECK_PERIOD_S if started else _GCS_CHECK_PERIOD_S
        self._checked_s = time.monotonic()
        self._is_told = False
        self._agents: dict[int, tuple[str, psutil.Process]] = {}  # by process number
        for process in started:
            with suppress(psutil.NoSuchProcess):
                if process.name() in ("raylet", "gcs_server"):
                    self._processes.append((process.name(), process))
        self._look_for_agents()

    def _look_for_agents(self) -> None:
        """Find the agents of each raylet; on a busy host they start, and get their names, some time after it."""
        raylets = [process for name, process in self._processes if name == "raylet"]
        named = [name for name, _ in self._agents.values() if name.startswith("ray::")]
        if len(named) >= _AGENTS_OF_RAYLET * len(raylets):
            return
        for raylet in raylets:
            with suppress(psutil.NoSuchProcess):
                for child in raylet.children():
                    if _is_agent(child):
                        self._agents[child.pid] = (child.name(), child)

    def ended(self) -> str | None:
        """Return the first daemon that has ended, causes before consequences; None while all run."""
        self._look_for_agents()
        for name, process in [*self._agents.values(), *self._processes]:
            if not _runs(process):
                return f"Ray's {name} (process {process.pid})"
        if self._gcs_address and not _listens(self._gcs_address):
            return f"Ray's GCS at {self._gcs_address}"
        return None

    def error(self) -> WorkerDiedError | None:
        """Return the error that explains all others if a daemon has ended, else None."""
        ended = self.ended()
        if ended is None:
            return None
        self._is_told = True
        why = killed_by_kernel() or "it was killed, or its host ran out of memory"
        return WorkerDiedError(f"{ended} has ended, and Ray does not work without it: {why}; start the run again")

    def check(self) -> None:
        """Check the daemons once in a period; raise `error` only once, so that the run can still save."""
        now_s = time.monotonic()
        if self._is_told or now_s - self._checked_s < self._period_s:
            return
        self._checked_s = now_s
        error = self.error()
        if error is not None:
            raise error


def start_ray(settings: ClusterConfig) -> list[psutil.Process]:
    """Check the environment; then join the cluster of RAY_ADDRESS, or start Ray on this machine.

    Args:
        settings: The run's cluster settings.

    Returns:
        The started processes.

    Raises:
        ConfigError: The environment, RAY_ADDRESS among it, prevents a start, or Ray does not start here.
    """
    check_environment(settings)
    # Ray's hook for `uv run` would build a new environment for every worker.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    # Ray 2.60 announces a change of this default; workers without GPUs must not see any.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"
    # This logger reports at every start that the local cluster is protected by a token.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    address = cluster_address()
    if address is not None:
        _join(address, common)
        return []
    if settings.device_type == "cpu":
        common |= {"object_store_memory": CPU_OBJECT_STORE_BYTES, "num_gpus": 0}
    os.environ.update(as_started_here())
    # Ray would serve metrics to everybody on all interfaces; nobody knows the port of a cluster that ends with its run.
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    # Two of Ray's processes serve theirs on all interfaces even so, unless their port cannot be opened.
    for variable in ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT"):
        os.environ.setdefault(variable, "-1")
    # At 15, Ray's default, other programs of the machine go first. With two busy loops on 2 CPUs the engine was ready
    # after 464 s and three steps took 17.0 s; at 0 after 60 s, and they took 5.1 s.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Keeps Ray from starting one idle process a core, of 45 MiB each. No run can use them: workers of a run need other
    # environment variables, so Ray starts processes of their own for them.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray gives up a host that does not answer for 15 s, as a busy one may. `Daemons` sees here whether a process ended.
    os.environ.setdefault("RAY_health_check_failure_threshold", "100")
    _write_token()
    try:
        return _start_here(common)
    except Exception as error:
        # If its processes are slow, Ray raises plain exceptions, or OSErrors of these two kinds.
        is_slow = isinstance(error, (TimeoutError, ConnectionError))
        if isinstance(error, (OSError, ValueError, TypeError)) and not is_slow:
            raise _not_started(error) from error
        logger.warning("Ray did not start, and is started once more: %s", " ".join(str(error).split()))
    try:
        return _start_here(common)
    except Exception as error:  # as above
        raise _not_started(error) from error


def _start_here(options: Mapping[str, Any]) -> list[psutil.Process]:
    """Start Ray on this machine; if that fails, none of its processes is left."""
    others = set(psutil.Process().children())
    folder = None  # Ray's default, which its other tools know too
    if session_folder() != chosen_folder()[1]:
        folder = f"{session_folder()}/ray"
        logger.info("Ray's files are in %s: paths of sockets in %s would be too long", folder, chosen_folder()[1])
    try:
        # "local" never joins another user's cluster on this machine.
        ray.init(address="local", include_dashboard=False, _temp_dir=folder, **options)
    except BaseException as error:
        started = set(psutil.Process().children()) - others
        for process in started:  # so that it starts no others meanwhile
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        # The raylet's agents would notice its end late, and not at all while they start.
        for process in [*started, *(child for each in started for child in descendants_of(each))]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        ray.shutdown()
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:  # raised by Ray's handler
            error.code = BY_SIGNAL + signal.SIGTERM
        raise
    return [child for child in psutil.Process().children() if child not in others]


def descendants_of(process: psutil.Process) -> list[psutil.Process]:
    """List all processes that a process has started, and theirs; none once it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _not_started(error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()).rstrip(".")
    return ConfigError(
        f"Ray does not start on this machine: {reason}. If the machine is overloaded, try again; "
        f"Ray's logs are in {session_folder()}/ray/session_latest/logs"
    )


def _join(address: str, common: dict[str, Any]) -> None:
    try:
        ray.init(address="auto", **common)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster was found at RAY_ADDRESS={address} ({first_line(error)}); start one with "
            "`ray start --head`, or unset RAY_ADDRESS to use this machine"
        ) from error


def _write_token() -> None:
    """Create the token of local clusters before Ray does, because every user could read Ray's file."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / TOKEN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        mine = path.with_name(f"{path.name}.{os.getpid()}")
        mine.touch(mode=0o600)
        mine.write_text(secrets.token_hex(_TOKEN_BYTES))
        with suppress(FileExistsError):  # another run was faster
            os.link(mine, path)
        mine.unlink()
    if path.stat().st_mode & 0o077 and path.stat().st_uid == os.getuid():
        path.chmod(0o600)


def _is_agent(process: psutil.Process) -> bool:
    """Tell whether a child of the raylet is an agent, not a worker."""
    try:
        return "agent" in " ".join(process.cmdline()).lower()
    except psutil.NoSuchProcess:
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _listens(address: str) -> bool:
    """Return False only if the connection to an address is refused; a slow host counts as listening."""
    host, _, port = address.rpartition(":")
    error = connection_error(host, int(port), _GCS_TIMEOUT_S)
    return not isinstance(error, ConnectionRefusedError)
