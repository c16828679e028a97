"""Program of the process that `sandbox.py` starts: gives up its rights for good, then runs code that a model wrote.

1. It ends with the thread that started it (PR_SET_PDEATHSIG).
2. It reads its settings and imports the modules that the code may use.
3. `confine` closes every other file, refuses to go on with a second thread or a child, and has the kernel take away
   files, network, signals, rights and memory.
4. It reports the result on the control pipe. The parent checks the kernel's record of this process and sends the code.

It imports nothing of the package, because the code could reach every imported module. Numbers of system calls and
layouts are for x86-64: linux/seccomp.h, linux/filter.h, linux/landlock.h, linux/capability.h, asm/unistd_64.h.
"""

import ast
import builtins
import ctypes
import importlib
import json
import os
import platform
import resource
import signal
import struct
import sys

_CONTROL = 3  # descriptor of the control pipe once all others are closed

_ALLOWED = {
    "read": 0, "write": 1, "close": 3, "poll": 7, "lseek": 8, "munmap": 11, "brk": 12, "rt_sigaction": 13,
    "rt_sigprocmask": 14, "rt_sigreturn": 15, "select": 23, "sched_yield": 24, "mremap": 25, "nanosleep": 35,
    "getpid": 39, "exit": 60, "uname": 63, "gettimeofday": 96, "getrusage": 98, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201,
    "futex": 202, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "getrandom": 318,
}  # fmt: skip
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Allowed unless the third argument passes the test: executable memory, and advice that takes pages from the machine.
_ALLOWED_UNLESS = (
    (9, _JUMP_IF_ANY_BIT, 0x4),  # mmap, PROT_EXEC
    (10, _JUMP_IF_ANY_BIT, 0x4),  # mprotect, PROT_EXEC
    (28, _JUMP_IF_AT_LEAST, 100),  # madvise, MADV_HWPOISON and MADV_SOFT_OFFLINE
)
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_THIRD_ARGUMENT = 0, 4, 32
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050001  # refuse with EPERM
_AUDIT_ARCH_X86_64 = 0xC000003E
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SYS_CAPSET, _SYS_SECCOMP, _SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_RESTRICT = 126, 317, 444, 446
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1
_LANDLOCK_CREATE_RULESET_VERSION = 1
_CAPABILITY_VERSION_3 = 0x20080522
_NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


class _Refused(Exception):
    """This process cannot be confined; the message is for the user."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def confine(memory_bytes: int, cpu_s: int, parent: int) -> list[str]:
    """Give up permanently every right that a model's code must not have.

    Args:
        memory_bytes: Address space of the process.
        cpu_s: Seconds of a processor.
        parent: Process id of the parent.

    Returns:
        Names of the layers that this machine lacks. The filter of system calls is never one: without it nothing runs.
    """
    os.closerange(_CONTROL + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _check_alone()
    held_bytes = int(_text_of("/proc/self/statm").split()[0]) * resource.getpagesize()
    if held_bytes > memory_bytes:
        raise _Refused(f"the modules take {held_bytes / 2**20:.0f} MiB of address space; raise `memory_mib` above that")
    # PR_SET_NO_NEW_PRIVS lets users other than root set a filter, and keeps later programs from gaining rights.
    if platform.machine() != "x86_64" or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _Refused(_NO_FILTER)
    missing = [] if _restrict_by_landlock() else ["Landlock"]
    if not _drop_rights():
        missing.append("an unprivileged user")
    die_with_parent(parent)  # again, because a change of the user clears it
    _limit(memory_bytes, cpu_s)
    if not _filter_system_calls():
        raise _Refused(_NO_FILTER)
    return missing


_NO_FILTER = (
    "this machine does not permit a filter of system calls (seccomp on x86-64 Linux), and a model's code is not run "
    "without one; allow it in the container's profile"
)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _check_alone() -> None:
    """Raise if a module has started a thread or a process, which would not be confined."""
    tasks = os.listdir("/proc/self/task")
    children = f"/proc/self/task/{tasks[0]}/children"  # not every kernel has it
    if len(tasks) > 1 or (os.path.exists(children) and _text_of(children).strip()):
        raise _Refused("a module has started a thread or a process, which could not be confined; leave it out")


def _text_of(path: str) -> str:
    with open(path) as file:
        return file.read()


def _restrict_by_landlock() -> bool:
    """Forbid files by name, TCP, and other processes' signals and abstract sockets; return False before Linux 5.13."""
    version = _libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_CREATE_RULESET_VERSION)
    if version < 1:
        return False
    num_file_rights = 13 if version == 1 else 14 if version == 2 else 15 if version < 5 else 16
    rights = struct.pack(
        "QQQ", 2**num_file_rights - 1, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0
    )  # files; TCP bind and connect; abstract sockets and signals
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _libc.syscall(_SYS_LANDLOCK_CREATE, rights, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return False
    try:
        return _libc.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _drop_rights() -> bool:
    """Become nobody if this is root, and drop every capability; return False if the process stays root."""
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        except OSError:  # a container without the right, or without that user
            pass
    _libc.syscall(_SYS_CAPSET, struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24))
    return os.geteuid() != 0


def _limit(memory_bytes: int, cpu_s: int) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, 0),
        # Whatever needs a new descriptor fails: sockets, files in memory, rings, events.
        (resource.RLIMIT_NOFILE, _CONTROL), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(limit)[1]
        # Only root may raise a limit that is already lower.
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _filter_system_calls() -> bool:
    """Refuse all calls but the allowed ones, in all threads at once; return False if the kernel takes no filter."""
    steps = [
        (_LOAD, 0, 0, _OFFSET_ARCH), (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH_X86_64), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]  # fmt: skip
    for number, test, value in _ALLOWED_UNLESS:
        steps += [
            (_JUMP_IF_EQUAL, 0, 4, number), (_LOAD, 0, 0, _OFFSET_THIRD_ARGUMENT), (test, 0, 1, value),
            (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW),
        ]  # fmt: skip
    numbers = sorted(_ALLOWED.values())
    steps += [(_JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    steps += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    return _libc.syscall(_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(program)) == 0


def run(code: str) -> None:
    """Execute statements; print the value of the last one if it is an expression."""
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


def run_to_the_end(code: bytes) -> int:
    """Run the code, print the error that ends it, and return its exit status."""
    try:
        run(json.loads(code))
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return int(bool(left.code))
        sys.stdout.write(f"{left.code}\n")
        return 1
    except MemoryError:
        sys.stdout.write("MemoryError\n")
        return 1
    except BaseException as error:  # a model's code may raise anything
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def main() -> None:
    """Read the settings, import, confine, report on the control pipe, run."""
    os.dup2(int(sys.argv[1]), _CONTROL)
    task = json.loads(sys.stdin.buffer.readline())
    die_with_parent(task["parent"])
    sys.path[:] = task["path"]
    for name in task["modules"]:
        importlib.import_module(name)
    sys.stdout.flush()
    try:
        report = {"missing": confine(task["memory_bytes"], task["cpu_s"], task["parent"])}
    except _Refused as error:
        report = {"refused": str(error)}
    os.write(_CONTROL, json.dumps(report).encode() + b"\n")
    os.close(_CONTROL)
    if "refused" in report:
        return
    status = 1
    try:
        result = run_to_the_end(sys.stdin.buffer.read())
        sys.stdout.flush()
        status = result
    finally:
        os._exit(status)  # without running exit handlers of the code


if __name__ == "__main__":
    main()
