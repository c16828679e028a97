"""Runs Python that a model wrote, without files, network, other processes, or more time and memory than it is given.

It needs no rights and no container: every process may set limits, Landlock and a filter of system calls (seccomp) for
itself. The filter lists the allowed calls, so it is required; the other layers are added if the machine has them
(`docs/guides/your-own-reward.md` describes each). This protects against code that a policy finds in training, not
against somebody who exploits a flaw of the kernel.

The code is sent only after the kernel's own record of the process shows that it is confined, so the code cannot cause
an error of the sandbox.
"""

import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_offload_rl.environments import sandboxed_process
from nemo_offload_rl.errors import UserError

_LOG = logging.getLogger(__name__)

_MIB = 2**20
_KEPT_VARIABLES = ("LD_LIBRARY_PATH",)  # Python from a cluster's environment modules may need it
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
_START_S = 120.0  # interpreter and modules, on a busy machine
_MAX_START_OUTPUT_BYTES = 65536
_CONFINED = {"Seccomp": "2", "NoNewPrivs": "1", "Threads": "1"}  # in /proc/PID/status
_told_missing: set[str] = set()


class SandboxError(UserError):
    """This machine cannot confine a process, or a module for the code is missing."""


@dataclass(frozen=True)
class SandboxResult:
    """Result of running the code.

    Attributes:
        output: Printed text, the value of a last line that is an expression, and the error that ended the code.
        status: "done"; "failed": it raised an error or exited with a status other than 0; "killed": it took too much
            time or memory, or wrote too much. Code can choose between the first two, so reward its output, not its
            status.
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
    PermissionError or a subclass. Its environment has only the variables by which the interpreter finds its libraries.

    Args:
        code: Statements. The value of a last line that is an expression is printed.
        timeout_s: Seconds from sending the code until its process has ended.
        memory_mib: Address space of the process. The interpreter takes 30 MiB of it, NumPy 100 MiB, PyTorch 3 GiB.
        max_output_bytes: The process is killed when it prints more.
        modules: Modules imported beforehand; the code can import only these and those that they have imported. NumPy
            and the like get one thread. Modules that start threads or processes on import are refused.

    Raises:
        SandboxError: The machine permits no filter of system calls (another system than Linux on x86-64, or a container
            that forbids it), or a module cannot be used. The error does not depend on the code.
    """
    settings = {
        "path": sys.path,
        "modules": list(modules),
        "memory_bytes": memory_mib * _MIB,
        "cpu_s": math.ceil(timeout_s),
        "parent": os.getpid(),
    }
    with _started() as (process, control):
        assert process.stdin is not None and process.stdout is not None
        _send(process, json.dumps(settings).encode() + b"\n")
        _wait_until_confined(process, control)
        deadline = time.monotonic() + timeout_s
        _send(process, json.dumps(code).encode())
        with suppress(BrokenPipeError):
            process.stdin.close()
        output, is_within = _read_until_exit(process, max_output_bytes, deadline)
    # The block above has killed all processes and waited for them.
    status = process.returncode
    text = output.decode(errors="replace")
    return SandboxResult(text, "killed" if status < 0 or not is_within else "failed" if status else "done")


@contextmanager
def _started() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start the process; yield it and the read end of its control pipe. After the block it is dead in any case."""
    with ExitStack() as stack:
        control, theirs = os.pipe()
        stack.callback(os.close, control)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", sandboxed_process.__file__, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
                env=_ONE_THREAD | {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        assert process.stdin is not None and process.stdout is not None
        stack.callback(process.stdout.close)
        stack.callback(_close, process.stdin)
        stack.callback(process.wait)
        stack.callback(_kill_group, process)
        os.set_blocking(process.stdout.fileno(), False)
        yield process, control


def _close(file: Any) -> None:
    with suppress(BrokenPipeError):
        file.close()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, and processes of its group that modules have started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _send(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the process has ended and has reported why
        process.stdin.write(data)
        process.stdin.flush()


def _wait_until_confined(process: subprocess.Popen[bytes], control: int) -> None:
    """Return when the process is confined, by its own report and by the kernel's record.

    Raises:
        SandboxError: The process is not confined.
    """
    assert process.stdout is not None
    stdout, printed, report = process.stdout.fileno(), b"", b""
    deadline = time.monotonic() + _START_S
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(stdout, selectors.EVENT_READ)
        while not report.endswith(b"\n") and control in selector.get_map():
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                some = os.read(key.fd, 65536)
                if not some:
                    selector.unregister(key.fd)
                elif key.fd == control:
                    report += some
                else:
                    printed = (printed + some)[-_MAX_START_OUTPUT_BYTES:]
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"the interpreter for a model's code did not start within {_START_S:.0f} s: the machine is "
                    "overloaded; lower num_workers of the environment"
                )
    if not report:
        status = process.wait()
        lines = (printed + _rest_of(stdout)).decode(errors="replace").strip().splitlines()
        last = (lines or [f"exit status {status}"])[-1]
        raise SandboxError(f"a model's code cannot be run ({last}); correct `modules`, or raise `memory_mib`")
    _rest_of(stdout)  # printed by modules, not by the code
    told = json.loads(report)
    if "refused" in told:
        raise SandboxError(told["refused"])
    _check_record(process.pid)
    for layer in set(told["missing"]) - _told_missing:
        _told_missing.add(layer)
        _LOG.warning(
            "a model's code is confined by the filter of system calls and by limits, but not by %s, which this machine "
            "does not offer (docs/guides/your-own-reward.md)",
            layer,
        )


def _check_record(pid: int) -> None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise SandboxError(f"/proc/{pid}/status cannot be read, so a model's code is not run; mount /proc") from error
    record = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    found = {name: record.get(name, "nothing") for name in _CONFINED}
    if found != _CONFINED:
        raise SandboxError(f"the kernel shows {found} for a process that must have {_CONFINED}; report this as a bug")


def _rest_of(descriptor: int) -> bytes:
    """Read everything that is in a pipe now."""
    found = b""
    with suppress(BlockingIOError):
        while some := os.read(descriptor, 65536):
            found += some
    return found


def _read_until_exit(process: subprocess.Popen[bytes], max_bytes: int, deadline: float) -> tuple[bytes, bool]:
    """Return the output, and whether the process ended within both limits; a closed pipe is not an end."""
    assert process.stdout is not None
    stdout, found = process.stdout.fileno(), b""
    exited = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(exited, selectors.EVENT_READ)
            selector.register(stdout, selectors.EVENT_READ)
            while (left_s := deadline - time.monotonic()) > 0:
                ready = {key.fd for key, _ in selector.select(left_s)}
                if stdout in ready:
                    some = os.read(stdout, 65536)
                    found += some
                    if not some:
                        selector.unregister(stdout)
                elif exited in ready:  # nothing is left in the pipe
                    return found, True
                if len(found) > max_bytes:
                    return found[:max_bytes], False
    finally:
        os.close(exited)
    return found, False
