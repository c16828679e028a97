"""Suspends NCCL's communicators during generation, so that an engine can use their device memory.

Their memory is outside of torch's allocator. `ncclCommSuspend` copies what must be kept to pinned host memory and
releases device memory to the driver. `ncclCommResume` maps new memory at the same addresses. Both are collectives.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.worker import PolicySettings
from nemo_offload_rl.residency import Phase, ResidencyError, ResidencyManager, TransitionReport

SUSPENDING_NCCL = (2, 29, 7)
_MEMORY, _LEAVING_BYTES, _INVALID_USAGE = 1, 0, 5  # NCCL_SUSPEND_MEM, ncclStatGpuMemSuspend, ncclInvalidUsage
_KEY = "policy.suspend_nccl_comms is true, but"
_OFF = "set policy.suspend_nccl_comms=false"


def make_communicators(settings: PolicySettings, device: torch.device) -> Communicators:
    """Make the object that suspends and resumes a worker's communicators, if that is on.

    Raises:
        ConfigError: Suspending is on, but would fail or gain nothing.
    """
    if not settings.suspend_nccl_comms:
        return Communicators(None, device)
    problem = placement_problem(on_gpu=device.type == "cuda", shares_device=settings.colocated) or nccl_problem()
    if problem is not None:
        raise ConfigError(problem)
    return Communicators(Nccl(), device)


def placement_problem(*, on_gpu: bool, shares_device: bool) -> str | None:
    """Return the reason why suspending would gain nothing; None if an engine can use the memory.

    Args:
        on_gpu: The policy's workers are on GPUs.
        shares_device: An engine on the same devices sleeps while the workers compute.
    """
    if not on_gpu:
        return f"{_KEY} workers on a CPU have no NCCL communicators; {_OFF}"
    if not shares_device:
        return (
            f"{_KEY} no engine on the same GPUs sleeps and wakes, so nothing would use the memory; {_OFF}, or "
            "policy.generation.colocated.enabled=true with policy.generation.vllm_cfg.enable_sleep_mode=true"
        )
    return None


def nccl_problem(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the reason why the NCCL of this process cannot suspend communicators; None if it can.

    Args:
        environment: Variables that NCCL reads.
    """
    loaded = loaded_nccl()
    if loaded is None:
        return f"{_KEY} this torch has no NCCL; {_OFF}"
    needed = ".".join(map(str, SUSPENDING_NCCL))
    if loaded < SUSPENDING_NCCL:
        package = f"nvidia-nccl-cu{(torch.version.cuda or '13').partition('.')[0]}"
        return (
            f"{_KEY} it needs NCCL {needed} or later, and NCCL {'.'.join(map(str, loaded))} is loaded; install it over "
            f"torch's (pip install --no-deps {package}=={needed}), start with LD_PRELOAD=PATH/libnccl.so.2 of that "
            f"package, or {_OFF}"
        )
    if environment.get("NCCL_CUMEM_ENABLE") == "0":
        return f"{_KEY} with NCCL_CUMEM_ENABLE=0 NCCL cannot release its memory; unset that variable, or {_OFF}"
    return None


def loaded_nccl() -> tuple[int, ...] | None:
    """Version of the NCCL that torch calls in this process; None for a torch without NCCL."""
    return tuple(_nccl_groups().get_runtime_nccl_version()) if dist.is_nccl_available() else None


def _nccl_groups() -> Any:
    return dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue]


class Nccl:
    """Calls functions of the loaded NCCL library that torch 2.11 does not wrap. Communicators are addresses.

    Args:
        library: File name or path of the library.

    Raises:
        ResidencyError: torch has not loaded the library.
    """

    def __init__(self, library: str = "libnccl.so.2") -> None:
        try:
            self._library = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError as error:
            raise ResidencyError(f"torch has not loaded {library}; set policy.suspend_nccl_comms=false") from error
        self._library.ncclGetLastError.restype = ctypes.c_char_p

    def suspend(self, communicator: int) -> None:
        """Release a communicator's device memory. A collective; no other may follow before `resume`."""
        self._call("ncclCommSuspend", communicator, _MEMORY)

    def resume(self, communicator: int) -> None:
        """Map a communicator's device memory again. A collective."""
        self._call("ncclCommResume", communicator)

    def leaving_bytes(self, communicator: int) -> int:
        """Device memory that `suspend` releases, as NCCL counts it."""
        num_bytes = ctypes.c_uint64()
        self._call("ncclCommMemStats", communicator, _LEAVING_BYTES, ctypes.byref(num_bytes))
        return num_bytes.value

    def _call(self, name: str, communicator: int, *args: Any) -> None:
        if (result := self._library[name](ctypes.c_void_p(communicator), *args)) == 0:
            return
        reason = (self._library.ncclGetLastError(None) or b"").decode(errors="replace").strip() or "no reason given"
        if result == _INVALID_USAGE:
            reason += "; NCCL does not suspend communicators that share resources since a split"
        raise ResidencyError(f"{name} failed with {result} ({reason}); set policy.suspend_nccl_comms=false")


def process_communicators() -> list[int]:
    """List this process's communicators on the current device, in the order in which all ranks made the groups.

    A group that has not communicated yet has none. Communicators of pairs (sends without a batch) are not found.
    """
    cuda, groups = torch.device("cuda"), list[Any](distributed_c10d._world.pg_map)
    backends = [group._get_backend(cuda) for group in groups if cuda in group._device_types]
    communicators: list[int] = [it._comm_ptr() for it in backends if isinstance(it, _nccl_groups())]
    return [communicator for communicator in communicators if communicator]


class Communicators:
    """All communicators of this process, suspended and resumed together. Every rank makes the same calls.

    Args:
        nccl: Library that suspends them; None leaves them as they are.
        device: Device of this process.
        find: Lists the communicators, in the same order on all ranks.
    """

    def __init__(
        self, nccl: Nccl | None, device: torch.device, find: Callable[[], Sequence[int]] = process_communicators
    ) -> None:
        self._nccl, self._device, self._find = nccl, device, find
        self._suspended: list[int] = []

    def suspend(self) -> int:
        """Wait for the device, then release the communicators' memory; return its bytes, 0 if already suspended."""
        if self._nccl is None or self._suspended:
            return 0
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # `process_communicators` reads this thread's current device
            torch.cuda.synchronize()
        freed_bytes = 0
        for communicator in self._find():
            freed_bytes += self._nccl.leaving_bytes(communicator)
            self._nccl.suspend(communicator)
            self._suspended.append(communicator)
        return freed_bytes

    def resume(self) -> None:
        """Map the memory of suspended communicators again."""
        while self._nccl is not None and self._suspended:
            self._nccl.resume(self._suspended[0])
            del self._suspended[0]

    @contextmanager
    def resumed(self) -> Generator[None]:
        """Resume the communicators for the body, in any phase; restore their state after it, even if it raises."""
        were_suspended = bool(self._suspended)
        self.resume()
        try:
            yield
        finally:
            if were_suspended:
                self.suspend()

    def enter(self, manager: ResidencyManager, phase: Phase, *, waits_for_all: bool = True) -> TransitionReport:
        """Enter a phase, with the communicators suspended in GENERATION only."""
        start = time.perf_counter()
        if phase is not Phase.GENERATION:
            self.resume()
        took_s = time.perf_counter() - start
        report = manager.enter(phase, waits_for_all=waits_for_all)
        start = time.perf_counter()
        if phase is Phase.GENERATION and (freed_bytes := self.suspend()):
            report.group("communicators").bytes_freed += freed_bytes
        if self._nccl is not None:
            took_s += time.perf_counter() - start
            report.exposed_s += took_s
            report.give_back_s += took_s
        return report
