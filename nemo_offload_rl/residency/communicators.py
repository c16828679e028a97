"""NCCL's communicators: device memory outside of torch's allocator, which an engine gets while nothing is communicated.

`ncclCommSuspend` copies what has to be kept to pinned host memory and releases device memory to the driver.
`ncclCommResume` maps new memory at the same addresses. In both, every rank of a communicator waits for the others.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nemo_offload_rl.residency.manager import ResidencyManager
from nemo_offload_rl.residency.table.errors import ResidencyError
from nemo_offload_rl.residency.table.ledger import TransitionReport
from nemo_offload_rl.residency.table.plan import Phase

SUSPENDING_NCCL = (2, 29, 7)
_MEMORY, _LEAVING_BYTES, _INVALID_USAGE = 1, 0, 5  # NCCL_SUSPEND_MEM, ncclStatGpuMemSuspend, ncclInvalidUsage


def loaded_nccl() -> tuple[int, ...] | None:
    """Version of the NCCL that torch calls in this process; None for a torch without it."""
    return tuple(_nccl_groups().get_runtime_nccl_version()) if dist.is_nccl_available() else None


def _nccl_groups() -> Any:
    return dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue]


class Nccl:
    """Calls that torch 2.11 has no names for, made on the NCCL library that it has loaded. Communicators are addresses.

    Args:
        library: Its name, or the path of another.

    Raises:
        ResidencyError: It is not loaded.
    """

    def __init__(self, library: str = "libnccl.so.2") -> None:
        try:
            self._library = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError as error:
            raise ResidencyError(f"torch has not loaded {library}; set policy.suspend_nccl_comms=false") from error
        self._library.ncclGetLastError.restype = ctypes.c_char_p

    def suspend(self, communicator: int) -> None:
        """Release its device memory. A collective of its ranks, and the last until they resume it."""
        self._call("ncclCommSuspend", communicator, _MEMORY)

    def resume(self, communicator: int) -> None:
        """Take the memory again. A collective."""
        self._call("ncclCommResume", communicator)

    def leaving_bytes(self, communicator: int) -> int:
        """Device memory that `suspend` releases, by NCCL's own count."""
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
    """Those of this process's groups on the current device, in the order in which all ranks made the groups.

    A group that has communicated nothing has none, and gets none. Those of pairs (sends without a batch) are not found.
    """
    cuda, groups = torch.device("cuda"), list[Any](distributed_c10d._world.pg_map)
    backends = [group._get_backend(cuda) for group in groups if cuda in group._device_types]
    communicators: list[int] = [it._comm_ptr() for it in backends if isinstance(it, _nccl_groups())]
    return [communicator for communicator in communicators if communicator]


class Communicators:
    """All communicators of this process, suspended and resumed together. Every rank makes the same calls.

    Args:
        nccl: Suspends them; None leaves them as they are, whatever is called.
        device: Of this process.
        find: Gives them, in the same order on all ranks.
    """

    def __init__(
        self, nccl: Nccl | None, device: torch.device, find: Callable[[], Sequence[int]] = process_communicators
    ) -> None:
        self._nccl, self._device, self._find = nccl, device, find
        self._suspended: list[int] = []

    def suspend(self) -> int:
        """Release their device memory, once all work on the device has ended; bytes, 0 where they are suspended."""
        if self._nccl is None or self._suspended:
            return 0
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # in this thread, for `process_communicators`
            torch.cuda.synchronize()
        freed_bytes = 0
        for communicator in self._find():
            freed_bytes += self._nccl.leaving_bytes(communicator)
            self._nccl.suspend(communicator)
            self._suspended.append(communicator)
        return freed_bytes

    def resume(self) -> None:
        """Take their memory again; nothing where they are not suspended."""
        while self._nccl is not None and self._suspended:
            self._nccl.resume(self._suspended[0])
            del self._suspended[0]

    @contextmanager
    def resumed(self) -> Generator[None]:
        """They can be used in the body, in any phase, and are then as they were, also when the body raises."""
        were_suspended = bool(self._suspended)
        self.resume()
        try:
            yield
        finally:
            if were_suspended:
                self.suspend()

    def enter(self, manager: ResidencyManager, phase: Phase, *, waits_for_all: bool = True) -> TransitionReport:
        """`manager.enter`, with the communicators suspended in GENERATION and in no other phase."""
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
