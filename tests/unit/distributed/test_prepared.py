"""As a script: a driver that prints a prepared process and its folder, and waits to be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from echo_workers import EchoWorker, cpu_cluster

from nemo_offload_rl.distributed import prepared as module
from nemo_offload_rl.distributed.prepared import PreparedWorkers, hand_over
from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster
from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec

SUPPORT = Path(__file__).parents[2] / "support"
PREPARE = "echo_workers:prepare"
SPEC = WorkerSpec(
    name="echo", factory="echo_workers:EchoWorker", kwargs={"greeting": "hi"}, env_vars={"NUMBER": "of the group"}
)


@pytest.fixture(autouse=True)
def path_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)]))


def test_a_prepared_process_becomes_a_worker_and_further_ones_start_as_usual(cluster: VirtualCluster) -> None:
    with closing(PreparedWorkers()) as prepared:
        prepared.start("echo", 1, {"NUMBER": "earlier", "OMP_NUM_THREADS": "3"}, PREPARE, "a library")
        (process,) = prepared._processes
        session = VirtualCluster(cpu_cluster(2), num_colocated_groups=1, prepared=prepared)
        try:
            group = RayWorkerGroup(session, SPEC)
            pids = group.pids()
            assert pids.count(process.pid) == 1
            number = pids.index(process.pid)
            found = group.run_on(number, EchoWorker.environment, ["PREPARED_FOR", "NUMBER", "RANK"])
            assert found == {"PREPARED_FOR": "a library", "NUMBER": "of the group", "RANK": str(number)}
            with pytest.raises(KeyError):
                group.run_on(1 - number, EchoWorker.environment, ["PREPARED_FOR"])
            (worker,) = [worker for worker in group._local_processes() if worker.pid == process.pid]
            # What it prints is in Ray's log file, and the kernel ends it before the driver.
            assert "worker-" in group.locations()[number].stderr_path
            assert int(Path(f"/proc/{process.pid}/oom_score_adj").read_text()) == 1000
            group.shutdown()
            assert not worker.is_running()
            assert process.wait(60) is not None
            again = RayWorkerGroup(session, SPEC)
            assert process.pid not in again.pids()
        finally:
            session.shutdown()
    assert not prepared._folder.exists()


def test_processes_that_nobody_takes_end_with_the_run() -> None:
    with closing(PreparedWorkers()) as prepared:
        prepared.start("echo", 2, {}, PREPARE, "")
        processes = [psutil.Process(process.pid) for process in prepared._processes]
    assert psutil.wait_procs(processes, timeout=600)[1] == []


def test_processes_end_with_a_driver_that_is_killed_and_remove_its_folder() -> None:
    with subprocess.Popen([sys.executable, __file__, PREPARE], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid, folder = driver.stdout.readline().split()
        process = psutil.Process(int(pid))
        driver.kill()
    assert psutil.wait_procs([process], timeout=600)[1] == []
    assert not Path(folder).exists()


def test_a_worker_waits_for_imports_only_for_a_time_and_the_late_process_ends(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_WAIT_S", 0.0)
    with closing(PreparedWorkers()) as prepared:
        prepared._folder.joinpath("echo.7.imports").touch()
        assert not hand_over(prepared._folder / "echo", ["worker.py"])
        assert not list(prepared._folder.iterdir())
        prepared.start("echo", 1, {}, PREPARE, "")
        prepared._folder.joinpath("echo.0.imports").unlink()
        assert prepared._processes[0].wait(600) == 0
    with closing(PreparedWorkers()) as prepared:
        prepared.start("echo", 1, {}, "echo_workers:not_there", "")
        assert prepared._processes[0].wait(600) == 1
        while list(prepared._folder.iterdir()):
            pass
        assert not hand_over(prepared._folder / "echo", ["worker.py"])


@pytest.mark.parametrize(("num_gpus", "is_used"), [(1, True), (2, False)])
def test_a_process_whose_libraries_chose_among_several_gpus_is_not_used(tmp_path, num_gpus: int, is_used: bool) -> None:
    source = f"int cuDeviceGetCount(int *count) {{ *count = {num_gpus}; return 0; }}"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, input=source, text=True, check=True)
    with closing(PreparedWorkers()) as prepared:
        prepared.start("echo", 1, {"LD_LIBRARY_PATH": str(tmp_path)}, PREPARE, "")
        (process,), ready = prepared._processes, prepared._folder / "echo.0.ready"
        while process.poll() is None and not ready.exists():
            time.sleep(0.05)
        assert (process.returncode, ready.exists()) == ((None, True) if is_used else (0, False))


if __name__ == "__main__":
    mine = PreparedWorkers()
    mine.start("echo", 1, {}, sys.argv[1], "")
    while not list(mine._folder.glob("*.ready")):
        time.sleep(0.1)
    sys.stdout.write(f"{mine._processes[0].pid} {mine._folder}\n")
    sys.stdout.flush()
    time.sleep(600)
