from __future__ import annotations

import json
import os
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path

import forked_workers
import psutil
import pytest
from echo_workers import EchoWorker, cpu_cluster
from forked import Script

from nemo_offload_rl.distributed.virtual_cluster import (
    VirtualCluster,
    _exit_status,
    _signals_as_exit,
    cluster_session,
    find_free_port,
)
from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.generation.vllm.engine_args import vllm_env
from nemo_offload_rl.utils.sockets import short_folder

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests/support"


def test_a_cluster_that_is_too_small_says_how_many_devices_it_has(cluster: VirtualCluster) -> None:
    with (
        pytest.raises(ConfigError, match=r"cpu_workers_per_node=999 .* needs 999 CPUs, but .* has \d+; lower"),
        cluster_session(cpu_cluster(999)),
    ):
        pass


def test_each_worker_group_gets_another_port(cluster: VirtualCluster) -> None:
    assert len({cluster.rendezvous() for _ in range(20)}) == 20


def test_every_free_port_of_a_range_is_found_once() -> None:
    port = find_free_port(22000, 22498)
    with socket.socket() as taken:
        taken.bind(("", port))
        found = {find_free_port(port, port + 1) for _ in range(8)}
    assert found == {port + 1}
    with pytest.raises(ConfigError, match="is free"):
        find_free_port(port + 1, port + 1, given=[port + 1])


def test_more_groups_than_shares_are_refused_instead_of_waiting_forever(cluster: VirtualCluster) -> None:
    spec = WorkerSpec(name="echo", factory="echo_workers:EchoWorker", kwargs={"greeting": "hi"}, num_workers=1)
    groups = [RayWorkerGroup(cluster, spec) for _ in range(4)]
    with pytest.raises(RuntimeError, match="shared by 4 worker groups at most"):
        RayWorkerGroup(cluster, spec)
    groups.pop().shutdown()
    groups.append(RayWorkerGroup(cluster, spec))
    for group in groups:
        group.shutdown()
    with pytest.raises(RuntimeError, match="echo workers were shut down"):
        groups[0].run_all(EchoWorker.greet)


def test_a_range_without_a_free_port_names_the_keys() -> None:
    with pytest.raises(ConfigError, match=r"No port from 5 to 4 is free.*master_port_range_low"):
        find_free_port(5, 4)


def test_an_exception_in_the_driver_leaves_no_worker(cluster: VirtualCluster) -> None:
    pids: list[int] = []
    cluster.shutdown()  # its slots are needed here; nothing else of this module uses them afterwards
    with pytest.raises(ZeroDivisionError), cluster_session(cpu_cluster(1)) as session:
        spec = WorkerSpec(name="echo", factory="echo_workers:EchoWorker", kwargs={"greeting": "hi"})
        workers = RayWorkerGroup(session, spec)
        pids = workers.pids()
        raise ZeroDivisionError
    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def start_driver(tmp_path: Path, *arguments: str) -> tuple[Script, list[psutil.Process]]:
    """A driver of a busy worker, and all processes of its local cluster; its folders are below `tmp_path`."""
    ready, temp = tmp_path / "ready", tmp_path / ("x" * 85)
    temp.mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]),
        "HOME": str(tmp_path),
        "TMPDIR": str(temp),  # longer than the path of a socket may be with what Ray appends
    }
    for name in ("RAY_ADDRESS", *forked_workers.variables()):  # Ray starts this driver's workers itself
        environment.pop(name, None)
    driver = Script([SUPPORT / "echo_workers.py", ready, *arguments], tmp_path, cwd=ROOT, env=environment)
    while not ready.exists():
        assert driver.is_running(), driver.stderr.read_text()
        time.sleep(0.1)
    return driver, [psutil.Process(pid) for pid in json.loads(ready.read_text())]


def check_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=1500)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_stopped_driver_leaves_no_process(tmp_path: Path) -> None:
    driver, processes = start_driver(tmp_path)
    assert stat.S_IMODE((tmp_path / ".ray/auth_token").stat().st_mode) == 0o600
    # Ray's other ports, which ask for the token, listen on "::".
    assert "0.0.0.0" not in {each.laddr.ip for process in processes for each in process.net_connections()}
    assert max(process.nice() for process in processes) <= max(0, os.nice(0)), "other programs would go before the run"
    os.kill(driver.pid, signal.SIGINT)
    done = driver.wait(1500)
    assert done.status == -signal.SIGINT
    assert done.stderr.strip().endswith("KeyboardInterrupt")
    check_all_end(processes)


@pytest.mark.parametrize(
    ("taken", "stop", "status"), [("at once", "SIGTERM", 143), ("at once", "SIGHUP", 129), ("pending", "SIGTERM", 143)]
)
def test_a_signal_while_ray_starts_ends_the_process_by_its_status_and_leaves_no_process(
    tmp_path: Path, taken: str, stop: str, status: int
) -> None:
    """The main thread does not take the signal; if another one does, a handler, Ray's too, interrupts Ray's start."""
    driver, processes = start_driver(tmp_path, taken, stop)
    done = driver.wait(1500)
    assert (done.status, done.stderr.splitlines()[-1]) == (status, f"ended by {stop}")
    _, alive = psutil.wait_procs(processes, timeout=10)  # by themselves, Ray's agents take longer
    assert alive == []


@pytest.mark.parametrize("daemon", ["gcs_server", "ray::DashboardAgent"])
def test_a_daemon_that_dies_ends_the_run_with_one_line(tmp_path: Path, daemon: str) -> None:
    driver, processes = start_driver(tmp_path, "main")
    (victim,) = [process for process in processes if process.name() == daemon]
    victim.kill()
    done = driver.wait(1500)
    assert done.stderr.splitlines()[-1].startswith(f"error: Ray's {daemon} (process {victim.pid}) has ended")
    assert done.status == 2
    check_all_end(processes)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 0),
        (ConfigError(""), 2),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit("a reason"), 1),
        (ArithmeticError(), 1),
    ],
)
def test_without_ray_a_run_ends_with_the_status_that_it_would_have(error: BaseException | None, status: int) -> None:
    assert _exit_status(error) == status


def test_a_signal_decides_the_status_and_keeps_what_the_run_says_last() -> None:
    with pytest.raises(SystemExit) as left, _signals_as_exit():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit as error:
            error.add_note("how to go on")
            error.code = 1  # as a wait inside Ray makes it
            raise
    assert (left.value.code, left.value.__notes__) == (143, ["how to go on"])


def test_sockets_are_in_tmp_if_their_paths_would_be_too_long_elsewhere() -> None:
    assert short_folder("/" + "x" * 96, "y" * 9) == "/" + "x" * 96
    assert short_folder("/" + "x" * 96, "y" * 10) == "/tmp"
    assert short_folder("/" + "ä" * 50, "y" * 9) == "/tmp"


def test_vllm_has_its_sockets_in_tmp_if_tmpdir_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 69)
    assert "VLLM_RPC_BASE_PATH" not in vllm_env("cpu")
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 70)
    assert vllm_env("cpu")["VLLM_RPC_BASE_PATH"] == "/tmp"
