"""Plain classes for worker groups, importable in Ray's worker processes; what takes long to import is left out.

As a script: a driver, `run_until_stopped`, with a second argument under `ending_process`. With a third, the name of a
signal, it stops itself while Ray starts.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.errors import DataError, WorkerDiedError
from nemo_offload_rl.keys.run import ClusterConfig
from nemo_offload_rl.utils.cli import ending_process

if TYPE_CHECKING:
    from torch import Tensor


def cpu_cluster(num_workers: int = 1) -> ClusterConfig:
    """This machine, without GPUs."""
    return ClusterConfig(
        gpus_per_node=0,
        cpu_workers_per_node=num_workers,
        num_nodes=1,
        master_port_range_low=21000,
        master_port_range_high=21999,
        call_warning_s=30.0,
        call_timeout_s=None,
    )


class TwoArgumentError(Exception):
    """An exception that does not survive pickling by its message alone."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


def remember(greeting: str, **others: object) -> None:
    os.environ["LOADED_FOR"] = greeting


def prepare(settings: str) -> None:
    os.environ["PREPARED_FOR"] = settings
    assert find_spec("ray") is None  # it must be imported with the worker's environment


def tell(greeting: str, more: int, **others: object) -> tuple[str, int]:
    logging.getLogger("nemo_offload_rl.echo").warning("told before it was built")
    return greeting, more


def hang(**others: object) -> None:
    time.sleep(600)


class EchoWorker:
    """Does what tests need a worker to do."""

    def __init__(self, greeting: str, fail: bool = False) -> None:
        if fail:
            raise DataError(f"{greeting}: cannot start")
        self._greeting = greeting

    def environment(self, names: list[str]) -> dict[str, str]:
        return {name: os.environ[name] for name in names}

    def is_collected(self) -> bool:
        """Whether Python's garbage collections go through this object."""
        return any(some is self for some in gc.get_objects())

    def start_orphan(self) -> int:
        """Start a process that does not end with this worker, and return its number."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def greet(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self._greeting, os.environ["RANK"], args, kwargs

    def total(self, tensor: Tensor) -> float:
        return float(tensor.sum())

    def all_reduce(self) -> float:
        import torch

        torch.distributed.init_process_group("gloo")
        value = torch.tensor([float(os.environ["RANK"]) + 1.0])
        torch.distributed.all_reduce(value)
        torch.distributed.destroy_process_group()
        return value.item()

    def raise_on(self, rank: int, kind: str) -> None:
        if os.environ["RANK"] != str(rank):
            time.sleep(600)
        if kind == "user":
            raise DataError("row 7 has no answer")
        if kind == "memory":
            import torch

            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB.")
        if kind == "died":
            raise WorkerDiedError("a process of this worker has ended")
        raise TwoArgumentError(3, "bug")

    def die_on(self, rank: int) -> None:
        if os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        raise ConnectionError("connection closed by peer")

    def leave_on(self, rank: int) -> None:
        import torch

        torch.distributed.init_process_group("gloo")
        if os.environ["RANK"] == str(rank):
            torch.distributed.destroy_process_group()
            time.sleep(0.5)
            raise ArithmeticError("a bug")
        torch.distributed.all_reduce(torch.ones(1))

    def miss_a_collective(self, rank: int) -> None:
        """One rank is stuck in native code with the interpreter's lock, the others wait for it."""
        import torch

        torch.distributed.init_process_group("gloo")
        while os.environ["RANK"] == str(rank):
            ctypes.PyDLL(None).pause()
        torch.distributed.all_reduce(torch.ones(1))

    def warn(self, *ranks: str) -> None:
        if os.environ["RANK"] in ranks:
            logging.getLogger("nemo_offload_rl.anything").warning("%d bytes are slow", 7)

    def warn_and_raise(self) -> None:
        self.warn(os.environ["RANK"])
        raise ArithmeticError("a bug")

    def crash(self, depth: int = 50) -> None:
        """From so deep that what the stack is of is far above its end."""
        if depth:
            self.crash(depth - 1)
        ctypes.string_at(0)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def run_until_stopped(ready_file: str) -> None:
    """A driver with a busy worker; writes the ids of all processes it caused, then waits to be stopped."""
    import psutil

    from nemo_offload_rl.distributed.virtual_cluster import cluster_session
    from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec

    with cluster_session(cpu_cluster()) as cluster:
        group = RayWorkerGroup(
            cluster, WorkerSpec(name="echo", factory="echo_workers:EchoWorker", kwargs={"greeting": "hi"})
        )
        wait_for_call = group.start_all(EchoWorker.sleep, 600.0)
        pids = [child.pid for child in psutil.Process().children(recursive=True)]
        assert set(group.pids()) <= set(pids)
        write_pids(ready_file, pids)
        wait_for_call()


def write_pids(path: str, pids: list[int]) -> None:
    """Make a file of process ids that is never seen unfinished."""
    unfinished = Path(path + ".partial")
    unfinished.write_text(json.dumps(pids))
    unfinished.rename(path)


def stop_this_start(pids_file: str, name: str, *, is_pending: bool) -> None:
    """Send a signal to this process while Ray starts, after the ids of its processes are written.

    SIGHUP comes as soon as the first process of Ray runs, SIGTERM once the raylet has started its agents.

    Args:
        pids_file: Gets the ids of all processes that this one has caused.
        name: The signal.
        is_pending: This thread does not take the signal either, so it waits for the main thread.
    """
    import psutil

    if is_pending:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.Signals[name]])
    is_early = name == "SIGHUP"
    while not any(
        child.name() == "gcs_server" if is_early else child.name() == "raylet" and child.children()
        for child in psutil.Process().children()
    ):
        time.sleep(0.01)
    write_pids(pids_file, [child.pid for child in psutil.Process().children(recursive=True)])
    os.kill(os.getpid(), signal.Signals[name])


if __name__ == "__main__":
    if sys.argv[2:]:
        if sys.argv[3:]:
            stopping = partial(stop_this_start, sys.argv[1], sys.argv[3], is_pending=sys.argv[2] == "pending")
            threading.Thread(target=stopping, daemon=True).start()
        with ending_process():
            run_until_stopped(sys.argv[1])
    else:
        run_until_stopped(sys.argv[1])
