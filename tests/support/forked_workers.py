"""Ray's workers for tests, forked from a process that has imported the libraries.

Ray starts a worker by the runtime environment's `py_executable`. Here that is `forked_worker_client.py`: it hands its
arguments, environment, working directory and standard streams to the server of this module, and ends. The server forks
a process that goes on as the worker. Ray knows a worker by the token among its arguments, not by who started it.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from functools import cache
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

import psutil
from forked import become, context, has_vllm_for_cpus
from forked_worker_client import HEADER, NUM_STREAMS

_SOCKET = "FORKED_WORKERS_SOCKET"
_PARENT_CHECK_S = 1.0


@cache
def variables() -> dict[str, str]:
    """Environment variables with which `ray.init` has its workers forked; the first call starts the server.

    Empty on a machine with GPUs: see `forked.context`.
    """
    if not has_vllm_for_cpus():
        return {}
    folder = tempfile.mkdtemp(prefix="workers")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = str(Path(folder) / "socket")  # short: a socket's path has 107 bytes at most
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    context(with_vllm=True).Process(target=_serve, args=(listener,), daemon=True).start()
    listener.close()
    return {_SOCKET: path, "RAY_RUNTIME_ENV_HOOK": f"{__name__}.with_forked_workers"}


def environment_of(process: psutil.Process) -> dict[str, str]:
    """The environment that a process was started with, or one that was forked here began with."""
    if variables() and (kept := Path(variables()[_SOCKET]).with_name(f"{process.pid}.json")).exists():
        return json.loads(kept.read_text())
    return process.environ()


def with_forked_workers(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """What `ray.init` makes of the runtime environment of a job."""
    client = Path(__file__).with_name("forked_worker_client.py")
    return {**(runtime_env or {}), "py_executable": f"{sys.executable} -I -S {client} {os.environ[_SOCKET]}"}


def _serve(listener: socket.socket) -> None:
    """Fork a worker for each client, until the tests have ended."""
    parent, folder = os.getppid(), Path(listener.getsockname()).parent
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener.settimeout(_PARENT_CHECK_S)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            request, streams = _receive(connection)
        if os.fork() == 0:
            listener.close()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            current_process()._config["daemon"] = False  # a worker may have children
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            (folder / f"{os.getpid()}.json").write_text(json.dumps(request["env"]))
            become(request["argv"], request["cwd"], request["env"])
        for stream in streams:
            os.close(stream)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    connection.settimeout(None)
    header, streams, _, _ = socket.recv_fds(connection, HEADER.size, NUM_STREAMS)
    (size,) = HEADER.unpack(header)
    text = b""
    while len(text) < size:
        text += connection.recv(size - len(text))
    return json.loads(text), streams
