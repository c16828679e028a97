"""Each limit on a model's code holds, for root and for others."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from functools import partial

import pytest

from nemo_offload_rl.environments import sandbox
from nemo_offload_rl.environments.sandbox import SandboxError

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter of system calls is x86-64's"),
]
IMPORTS = "import os, socket, subprocess, threading, resource, signal, ctypes, math\n"
run_python = partial(sandbox.run_python, timeout_s=300.0)
MORE = ("os", "socket", "subprocess", "threading", "resource", "signal", "ctypes", "math")


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("2 + 2", "4\n"),
        ("import math\nmath.comb(5, 2)", "10\n"),
        ("x = 3\nfor _ in range(2):\n    x *= x\nprint('x is', x)", "x is 81\n"),
        ("'a' if 1 else 2", "'a'\n"),
        ("None", ""),
        ("", ""),
    ],
)
def test_what_it_computes_is_its_output(code, output):
    assert run_python(code) == sandbox.SandboxResult(output, "done")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("import numpy", ""),
        ("raise SystemExit(3)", ""),
    ],
)
def test_what_goes_wrong_in_it_is_told(code, error):
    result = run_python(code)
    assert result.status == "failed"
    assert result.output.startswith(error)


@pytest.mark.parametrize(
    "code",
    [
        # files
        "open('/etc/hostname')", "open('/tmp/sandboxed', 'w')", "os.listdir('/')", "os.stat('/')", "os.mkdir('/tmp/x')",
        "os.unlink('/tmp/sandboxed')", "os.chdir('/tmp')", "os.getcwd()", "os.readlink('/proc/self/exe')",
        "os.memfd_create('x')", "os.chmod('/tmp', 0o777)",
        # network
        "socket.socket()", "socket.socketpair()",
        # processes
        "os.fork()", "os.execv('/bin/sh', ['sh'])", "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.run(['/bin/true'])", "os.kill(os.getppid(), 9)", "os.unshare(os.CLONE_NEWUSER)",
        "os.setsid()", "os.pidfd_open(os.getppid())",
        # more than it was given
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "resource.prlimit(0, resource.RLIMIT_CPU)",
        "os.setuid(0)", "os.nice(-5)",
        # without Python's own checks
        "ctypes.CDLL(None, use_errno=True).open(b'/etc/hostname', 0) == -1 and os.listdir('/')",
        "ctypes.CDLL(None).syscall(57) == -1 and os.fork()",
    ],
)  # fmt: skip
def test_files_network_processes_signals_and_limits_are_out_of_reach(code):
    result = run_python(IMPORTS + code, modules=MORE)
    assert result.status == "failed"
    assert "Operation not permitted" in result.output or "not allowed to raise maximum limit" in result.output


def test_a_thread_cannot_be_started():
    result = run_python(f"{IMPORTS}threading.Thread(target=print).start()", modules=MORE)
    assert (result.status, "can't start new thread" in result.output) == ("failed", True)


def test_nothing_of_the_environment_and_no_open_file_of_this_process_is_there(monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    with socket.socketpair()[0] as ours:
        os.set_inheritable(ours.fileno(), True)
        code = f"print(sorted(os.environ))\nos.read({ours.fileno()}, 1)"
        result = run_python(IMPORTS + code, modules=MORE)
    assert "SECRET" not in result.output
    assert "Bad file descriptor" in result.output


def test_a_user_who_is_not_root_and_has_limits_already_can_confine_code_too():
    """Limits that are lower than those asked for may not be raised by such a user."""
    script = (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 * 10**9, 3 * 10**9))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
        "import ctypes\n"  # before rights are given up: root's Python may lie where others cannot look
        "from nemo_offload_rl.environments.sandbox import run_python\n"
        "ctypes.CDLL(None).prctl(24, 24, 0, 0, 0)\n"  # PR_CAPBSET_DROP of CAP_SYS_RESOURCE: not across the next exec
        "print(run_python('2 + 2', memory_mib=8192, timeout_s=90))\n"
        "print(run_python('open(\"/etc/hostname\")', timeout_s=90).status)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["SandboxResult(output='4\\n', status='done')", "failed"]


def test_an_interpreter_that_does_not_start_is_told(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match=r"a model's code cannot be run \(exit status 1\)"):
        run_python("1" * 1_000_000)


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(600)", "9 ** 9 ** 9"])
def test_time_is_limited_whether_it_computes_or_sleeps(code):
    assert run_python(code, timeout_s=1.0, modules=("time",)).status == "killed"


def test_memory_is_limited():
    assert run_python("x = bytearray(10**6)\nlen(x)", memory_mib=128).output == "1000000\n"
    result = run_python("x = bytearray(10**9)", memory_mib=128)
    assert (result.status, result.output) == ("failed", "MemoryError\n")


def test_output_is_limited():
    result = run_python("while True: print('x' * 1000)", max_output_bytes=5000)
    assert result.status == "killed"
    assert len(result.output) == 5000


def test_a_module_that_is_not_there_is_the_callers_mistake():
    with pytest.raises(SandboxError, match="No module named 'no_such_module'"):
        run_python("1", modules=("no_such_module",))


def test_where_there_is_no_filter_nothing_is_run(monkeypatch, tmp_path):
    changed = tmp_path / "process.py"
    text = (sandbox.Path(sandbox.sandboxed_process.__file__)).read_text()
    changed.write_text(text.replace('!= "x86_64"', '!= "another"'))
    monkeypatch.setattr(sandbox.sandboxed_process, "__file__", str(changed))
    with pytest.raises(SandboxError, match="does not permit a filter of system calls"):
        run_python("print('ran')")
