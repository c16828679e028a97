"""Ends a pass on all ranks if it fails on one, and then gives their process groups new communicators.

The ranks of a pass wait for each other in collectives, so a rank that fails has to end those of all ranks:

1. It sets a key in the store of the default group, and aborts its communicators.
2. On every other rank a thread sees the key and aborts those too. The pass then raises, or ends with arbitrary results.
3. At the end of a pass the ranks exchange whether one failed, in a group of its own that is never aborted.
4. After a failure each process group gets a new communicator. The Python objects stay, since meshes, FSDP and
   Megatron-core hold them.
"""

# pyright: reportPrivateUsage=false
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_LOOK_EVERY_S = 0.05
# After this time a rank's main thread waits for the device: NCCL must not be aborted while a thread adds work. All
# ranks then abort at about the same time, before NCCL can report the abort of one as an error of the others.
_SETTLE_S = 1.0
_LEAVING = timedelta(minutes=10)  # limit for the other ranks to leave their pass
# `ProcessGroup.BackendType` is a byte. A group keeps the first backend of each type, so each new one has a type of its
# own; named types end with 6. The type is not read after that: collectives find the backend by the device.
_free_types = iter(range(7, 256))


class LostConnectionError(RuntimeError):
    """The ranks could not leave a pass together, or not be connected again."""


class Peers:
    """The other ranks of this worker's passes. All ranks make the same calls.

    A pass is between `begin_pass` and `end_pass`; after `someone_failed`, call `reconnect`.

    Args:
        device: Device of the passes; its communicators are aborted and made anew.
        groups: Process groups that every training pass communicates in.
    """

    def __init__(self, device: torch.device, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self._device = device
        self._groups = [group for group in groups if group.size() > 1]
        self._is_connected = False
        self._exchange: Any = dist.new_group(backend="gloo")
        # A copy has its own connection: the thread must not wait for others that use the store.
        self._store: Any = distributed_c10d._get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._num_connections = 0
        self._lock = threading.Lock()
        self._has_aborted = False
        self._pass_is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def failed_rank_is_known(self) -> bool:
        """Tell whether a rank has failed in the present pass."""
        return self._store.check([self._key])

    @property
    def has_aborted(self) -> bool:
        """Tell whether this rank's collectives were aborted, so that errors and results mean nothing."""
        return self._has_aborted

    def begin_pass(self) -> None:
        """Begin to watch for the failure of another rank; after a connection, a collective."""
        if not self._is_connected:
            self._connect()
        self._pass_is_over.clear()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def end_pass(self, *, failed: bool) -> None:
        """End the watch. If this rank failed, tell the others and abort: only `someone_failed` may follow."""
        if failed:
            self._store.set(self._key, "failed")
        self._pass_is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if failed:
            self._abort(settles=True)

    def leave_if_aborted(self) -> None:
        """Raise `LostConnectionError` if this rank's collectives were aborted in the present pass."""
        if self._has_aborted:
            raise LostConnectionError("another rank left the pass")

    def someone_failed(self, *, failed: bool) -> bool:
        """Tell whether any rank failed in the pass that has ended; a collective.

        Raises:
            LostConnectionError: Another rank has not left its pass in time.
        """
        mine = torch.tensor(int(failed or self._has_aborted))
        options = self._exchange._get_backend(torch.device("cpu")).options
        usual = options._timeout
        if mine:
            distributed_c10d._set_pg_timeout(_LEAVING, self._exchange)
        try:
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._exchange)
        except RuntimeError as error:
            raise LostConnectionError(f"another rank did not leave its pass ({error})") from error
        distributed_c10d._set_pg_timeout(usual, self._exchange)
        return bool(mine)

    def abort(self) -> None:
        """Abort this rank's communicators, unless that was done, and wait for the device."""
        self._abort(settles=False)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def reconnect(self) -> None:
        """Give each process group a new communicator, after all ranks have aborted; a collective.

        Raises:
            LostConnectionError: A communicator could not be made.
        """
        try:
            kind = dist.ProcessGroup.BackendType(next(_free_types))  # pyright: ignore[reportAttributeAccessIssue]
            for group, old in self._communicators():
                _leave_open_batch(group, old)
                # The prefix of the group is in its store already.
                prefix = f"{self._device.type}/{self._name}/"
                store = dist.PrefixStore(prefix, distributed_c10d._world.pg_map[group][1])  # pyright: ignore
                new = type(old)(store, group.rank(), group.size(), old.options)
                new._set_sequence_number_for_group()
                group._register_backend(self._device, kind, new)
            dist.barrier(group=self._exchange)
        except (RuntimeError, TypeError, StopIteration) as error:
            raise LostConnectionError(f"communicators could not be made anew ({error})") from error
        self._num_connections += 1
        self._has_aborted = self._is_connected = False

    def close(self) -> None:
        """Destroy the group of the exchange."""
        dist.destroy_process_group(self._exchange)

    @property
    def _key(self) -> str:
        return f"a_pass_failed/{self._name}"

    @property
    def _name(self) -> str:
        """Name of the present connections, unique among all of this process."""
        return f"{self._exchange.group_name}/{self._num_connections}"

    def _connect(self) -> None:
        """Have each group of the passes connect before a rank can fail.

        NCCL connects the ranks of a group in its first collective. While a rank waits there for one that has failed,
        it has no communicator yet that could be aborted.
        """
        for group in self._groups:
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        self._is_connected = True

    def _watch(self) -> None:
        while not self._pass_is_over.wait(_LOOK_EVERY_S):
            if self.failed_rank_is_known:
                self._abort(settles=True)
                return

    def _abort(self, *, settles: bool) -> None:
        if settles and self._device.type == "cuda":
            time.sleep(_SETTLE_S)
        with self._lock:
            if self._has_aborted:
                return
            self._has_aborted = True
            # At once, since NCCL's abort of one communicator may wait for kernels of another.
            threads = [threading.Thread(target=backend.abort) for _, backend in self._communicators()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _communicators(self) -> Iterator[tuple[Any, Any]]:
        """Yield each group of several ranks that passes may use, with its communicator; all ranks in the same order."""
        for group in list[Any](distributed_c10d._world.pg_map):
            is_used = group is not self._exchange and group.size() > 1
            if is_used and any(device.type == self._device.type for device in group._device_types):
                yield group, group._get_backend(torch.device(self._device.type))


def _leave_open_batch(group: Any, backend: Any) -> None:
    """Close a batch of sends that an error left open: NCCL would add all later work of this thread to it."""
    if distributed_c10d._world.pg_coalesce_state.pop(group, None) == [] and hasattr(backend, "_group_end"):
        with suppress(RuntimeError):
            backend._group_end()
