"""Processes that import a worker's libraries before Ray starts, and go on as Ray's workers afterwards.

1. The driver starts them once it knows a run's keys. They import while it checks model and data, and while Ray starts.
2. Ray starts a worker by the command `py_executable` of its runtime environment. Here that is this file, as a script:
   it hands its arguments, environment and standard streams to a process that is ready, and ends.
3. That process goes on as the worker. Ray knows a worker by a token among its arguments, not by who started it.
If no process is ready in time, or none is left, as for an engine that is started again, the script becomes the worker.
Ray gives a worker its GPU after this. A process whose libraries have started CUDA sees all GPUs for good, so it ends.

Each process has a file whose suffix tells its state: `.imports`, `.ready`, `.taken`. Renaming the file changes the
state, so that of several scripts only one gets a process. This file imports the standard library only, since Ray waits
for the script.
"""

import ctypes
import importlib
import json
import os
import pickle
import runpy
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

IMPORT_BACKEND = "nemo_offload_rl.backends.factory:import_backend"
"""Imports what a policy worker needs."""

IMPORT_ENGINE = "nemo_offload_rl.generation.vllm.base:import_engine"
"""Imports what an engine needs."""

_IMPORTS, _READY, _TAKEN = ".imports", ".ready", ".taken"
_HEADER = struct.Struct("!Q")
_STREAMS = range(3)
_WAIT_S = 30.0  # Ray gives a worker up that does not answer within 60 s
_LOOK_S = 0.05
_PARENT_CHECK_S = 1.0
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class PreparedWorkers:
    """The processes that a driver has started; `close` ends those that no worker group has taken."""

    def __init__(self) -> None:
        chosen = tempfile.gettempdir()
        # The path of a socket has 107 bytes at most.
        self._folder = Path(tempfile.mkdtemp(prefix="workers", dir=chosen if len(chosen) < 64 else "/tmp"))
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, count: int, env_vars: Mapping[str, str], imports: str, settings: Any) -> None:
        """Start the processes of a worker group.

        Args:
            name: Name of the group.
            count: Number of its workers.
            env_vars: Environment variables that its workers get from the group, as far as imports read them.
            imports: `"package.module:function"`, called with `settings` to import the libraries.
            settings: Settings of the workers.
        """
        from nemo_offload_rl.utils.cli import stop_signals_blocked  # the script cannot import the package

        task, none = pickle.dumps((os.getpid(), imports, settings)), subprocess.DEVNULL
        # Ray sets OMP_NUM_THREADS for its workers, but later; torch reads it as it is imported. Torch starts CUDA to
        # tell whether it is available, unless the other variable is set. The worker is without.
        variables = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ, **env_vars}
        for number in range(count):
            path = self._folder / f"{name}.{number}"
            Path(f"{path}{_IMPORTS}").touch()
            command = [sys.executable, "-P", __file__, str(path)]
            with stop_signals_blocked():  # as Ray's workers, which the driver ends
                process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=none, stderr=none)
            self._processes.append(process)
            threading.Thread(target=_feed, args=(process, task, path), daemon=True).start()

    def executable(self, name: str) -> str:
        """Return Ray's `py_executable` for the workers of a group."""
        return shlex.join([sys.executable, "-I", "-S", __file__, str(self._folder / name)])

    def close(self) -> None:
        """End all processes; those that became workers have ended with Ray."""
        for process in self._processes:
            process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _feed(process: subprocess.Popen[bytes], task: bytes, path: Path) -> None:
    """Tell a process what to import, and wait for its end, so that it does not stay as a zombie."""
    with suppress(OSError):
        process.communicate(task)
    for suffix in (_IMPORTS, _READY):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def wait_for_work(path: Path) -> None:
    """Import the libraries of a worker, wait for its arguments, and go on as this worker."""
    before = dict(os.environ)
    driver, imports, settings = pickle.load(sys.stdin.buffer)
    module, _, function = imports.partition(":")
    # Libraries do without Ray, which reads the environment of its worker as it is imported.
    sys.modules["ray"] = None  # pyright: ignore[reportArgumentType]
    getattr(importlib.import_module(module), function)(settings=settings)
    del sys.modules["ray"]
    if _sees_several_gpus():
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(_PARENT_CHECK_S)
        try:
            os.rename(f"{path}{_IMPORTS}", f"{path}{_READY}")
        except FileNotFoundError:
            return  # nobody waited for so long
        connection = None
        while connection is None:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
            if os.getppid() != driver:
                shutil.rmtree(path.parent, ignore_errors=True)  # the driver was killed, and could not
                return
    with connection:
        given, streams = _receive(connection)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    of_libraries = {name: value for name, value in os.environ.items() if before.get(name) != value}
    os.environ.clear()
    os.environ.update(given["env"] | of_libraries)
    os.chdir(given["cwd"])
    with suppress(OSError):
        _OOM_SCORE.write_text(given["oom_score"])  # the kernel ends workers first
    os.nice(given["nice"] - os.nice(0))
    sys.argv = given["argv"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _sees_several_gpus() -> bool:
    """Tell whether CUDA has started in this process and sees more than one GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 1  # an error before CUDA has started


def hand_over(group: Path, argv: list[str]) -> bool:
    """Hand this process's arguments and surroundings to a process of the group; return whether one took them."""
    until_s = time.monotonic() + _WAIT_S
    text = json.dumps(
        {
            "argv": argv,
            "cwd": os.getcwd(),
            "env": dict(os.environ),
            "oom_score": _OOM_SCORE.read_text(),
            "nice": os.nice(0),
        }
    ).encode()
    while True:
        names = sorted(group.parent.glob(f"{group.name}.*"))
        for path in (path for path in names if path.suffix == _READY):
            with suppress(OSError):  # another script was faster, or the process has ended
                path.rename(path.with_suffix(_TAKEN))
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(str(path.with_suffix("")))
                    socket.send_fds(connection, [_HEADER.pack(len(text))], _STREAMS)
                    connection.sendall(text)
                return True
        importing = [path for path in names if path.suffix == _IMPORTS]
        if not importing:
            return False
        if time.monotonic() >= until_s:
            with suppress(FileNotFoundError):  # it is ready now, or another script was faster
                importing[0].unlink()
                return False
        time.sleep(_LOOK_S)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    header, streams, _, _ = socket.recv_fds(connection, _HEADER.size, len(_STREAMS))
    (size,) = _HEADER.unpack(header)
    text = b""
    while len(text) < size and (part := connection.recv(size - len(text))):
        text += part
    return json.loads(text), streams


def main() -> None:
    """Wait for work, or hand over what Ray has given to this script."""
    path, *argv = sys.argv[1:]
    if not argv:
        wait_for_work(Path(path))
    elif not hand_over(Path(path), argv):
        os.execv(sys.executable, [sys.executable, *argv])


if __name__ == "__main__":
    main()
