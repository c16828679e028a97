"""Runs Python that a model wrote, without files, network, other processes, or more time and memory than it is given.

It needs no rights and no container: limits of resources and a filter of system calls (seccomp), which Linux lets every
process set for itself. Where the filter cannot be set the code is not run. This holds against what a policy in training
comes upon, not against somebody who has a flaw of the kernel at hand.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_offload_rl.environments import sandboxed_process
from nemo_offload_rl.errors import UserError

_MIB = 2**20
_KEPT_VARIABLES = ("LD_LIBRARY_PATH",)  # a Python of a cluster's modules may lie there
_START_S = 30.0  # interpreter and modules, on a busy machine


class SandboxError(UserError):
    """This machine cannot confine a process, or a module that the code was to have is missing."""


@dataclass(frozen=True)
class SandboxResult:
    """What became of the code.

    Attributes:
        output: What it printed, the value of a last line that is an expression, and the error that ended it.
        status: "done"; "failed", it raised an error; "killed", it took too much time or memory, or wrote too much.
    """

    output: str
    status: Literal["done", "failed", "killed"]


def run_python(
    code: str,
    *,
    timeout_s: float = 2.0,
    memory_mib: int = 256,
    max_output_bytes: int = 10_000,
    modules: Sequence[str] = ("math", "fractions", "decimal", "statistics", "itertools", "random", "re", "datetime"),
) -> SandboxResult:
    """Run code in a process of its own that can only compute.

    It cannot open, list or change files, start processes or threads, use the network, or send signals: each raises
    PermissionError or a relative of it. Of the environment it has what the interpreter's libraries are found by.

    Args:
        code: Statements. What a last line that is an expression gives is printed.
        timeout_s: Seconds, once it has started.
        memory_mib: Address space of the process, the interpreter's 30 MiB or so included.
        max_output_bytes: It is killed when it has printed as much.
        modules: Imported before; it can import nothing else, but for what those have imported.

    Raises:
        SandboxError: The machine permits no filter of system calls (another system than Linux on x86-64, or a container
            that forbids it), or a module cannot be imported.
    """
    task = {
        "code": code,
        "path": sys.path,
        "modules": list(modules),
        "memory_bytes": memory_mib * _MIB,
        "cpu_s": math.ceil(timeout_s),
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(sandboxed_process.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
        cwd="/",
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with suppress(BrokenPipeError):  # an interpreter that cannot start says why
            process.stdin.write(json.dumps(task).encode())
        with suppress(BrokenPipeError):
            process.stdin.close()
        output, is_whole = _read(process.stdout.fileno(), max_output_bytes + 1, timeout_s)
        if is_whole:
            status = process.wait()
        else:
            process.kill()
            status = process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    text = output.decode(errors="replace")
    if is_whole and status == sandboxed_process.UNCONFINED:
        raise SandboxError(
            "this machine permits no filter of system calls (seccomp on x86-64 Linux), and without it code of a "
            "model is not run; allow it in the container's profile"
        )
    if not text.startswith(sandboxed_process.BEGINS):
        last = (text.strip().splitlines() or [f"exit status {status}"])[-1]
        raise SandboxError(f"code of a model cannot be run ({last}); correct `modules`, or raise `memory_mib`")
    text = text.removeprefix(sandboxed_process.BEGINS)
    return SandboxResult(text, "killed" if status < 0 else "failed" if status else "done")


def _read(descriptor: int, max_bytes: int, timeout_s: float) -> tuple[bytes, bool]:
    """What comes until the end, and whether that was reached within both limits; time counts from the first byte on."""
    deadline, found = time.monotonic() + _START_S, b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            if selector.select(left_s):
                some = os.read(descriptor, 65536)
                if not some:
                    return found, True
                if not found:
                    deadline = time.monotonic() + timeout_s
                found += some
                if len(found) > max_bytes:
                    return found[:max_bytes], False
    return found, False
