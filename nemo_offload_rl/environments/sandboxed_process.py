"""What `sandbox.py` starts: a Python that gives up nearly everything and then runs code that a model wrote.

It imports nothing of the package. After `confine` the kernel refuses every system call that is not in `_ALLOWED`: no
file can be opened, no process or thread started, no socket made, no signal sent, no limit raised. Numbers of system
calls and layouts are those of x86-64: linux/seccomp.h, linux/filter.h, asm/unistd_64.h.
"""

import ast
import builtins
import ctypes
import importlib
import json
import platform
import resource
import struct
import sys

UNCONFINED = 99  # exit status where the kernel takes no filter
BEGINS = "\0"  # what is written when the code has its turn

_ALLOWED = {
    "read": 0, "write": 1, "close": 3, "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12,
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "select": 23, "sched_yield": 24, "mremap": 25,
    "madvise": 28, "nanosleep": 35, "getpid": 39, "exit": 60, "uname": 63, "gettimeofday": 96, "getrusage": 98,
    "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131,
    "gettid": 186, "time": 201, "futex": 202, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229,
    "clock_nanosleep": 230, "exit_group": 231, "getrandom": 318,
}  # fmt: skip
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_AUDIT_ARCH_X86_64 = 0xC000003E
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050001  # the last with EPERM
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH = 0, 4


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def confine(memory_bytes: int, cpu_s: int) -> bool:
    """Limit this process for good; False where the kernel takes no filter."""
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 8), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(limit)[1]
        # One that is lower already may be raised by root only.
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if platform.machine() != "x86_64":
        return False
    numbers = sorted(_ALLOWED.values())
    steps = [
        (_LOAD, 0, 0, _OFFSET_ARCH), (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH_X86_64), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
        *((_JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # Without it only root may set a filter; with it nothing that is executed later could gain rights.
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0


def run(code: str) -> None:
    """Execute statements; the value of a last line that is an expression is printed."""
    tree = ast.parse(code, "<code>")
    last = None
    if tree.body and isinstance(end := tree.body[-1], ast.Expr):
        last = end.value
        tree.body.pop()
    names = {"__name__": "__main__", "__builtins__": builtins}
    exec(compile(tree, "<code>", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last), "<code>", "eval"), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


def main() -> int:
    """Read the task, confine, run; the exit status is 1 where the code failed."""
    task = json.loads(sys.stdin.buffer.read())
    sys.path[:] = task["path"]
    for name in task["modules"]:
        importlib.import_module(name)
    if not confine(task["memory_bytes"], task["cpu_s"]):
        return UNCONFINED
    sys.stdout.write(BEGINS)
    sys.stdout.flush()
    try:
        run(task["code"])
    except MemoryError:
        sys.stdout.write("MemoryError\n")
        return 1
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return 1
    finally:
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
