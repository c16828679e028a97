"""Parameters and gradients that pass through the device part by part, in forward and backward passes.

A part is what is read together: a layer, the embedding, the output layer. Its parameters (`params/part.<index>`) are on
the device from just before they are read until they have been, while the part before computes at the earliest; its
gradients (`grads/part.<index>`) while they are added to. The states of its optimizer (`optimizer/part.<index>`) join
both in the update (`stream.py`). The parts that are updated first get their gradients last: where there is room, they
stay for the update, and their states come while the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from nemo_offload_rl.residency.device.device import Room
from nemo_offload_rl.residency.state.frozen_copy import FrozenCopy
from nemo_offload_rl.residency.state.group_state import GroupState
from nemo_offload_rl.residency.state.transaction import GroupSet
from nemo_offload_rl.residency.streams.stream import Mover
from nemo_offload_rl.residency.streams.work_memory import WorkMemory
from nemo_offload_rl.residency.table.errors import ResidencyError
from nemo_offload_rl.residency.table.groups import local_tensor, storage_bytes, storage_key
from nemo_offload_rl.residency.table.ledger import Ledger, TransitionReport
from nemo_offload_rl.residency.table.plan import Phase, Placement


class PassingParts:
    """Moves the parts of one worker; a backend says when it reads and writes what. One rank's, on one thread.

    Args:
        groups: All groups of the worker.
        parts: The optimizer's states, parameters and gradients of each part, in the order of a forward pass.
        overlap: Bring what is read next while the present part computes.
        ledger: Gets the report of each pass.
        work: What the phases' work needs.
        limit_parts: What parts may hold of the device in addition to the work of a phase and the step, in bytes.

    Attributes:
        phase: What passes are charged to.
    """

    def __init__(
        self,
        groups: GroupSet,
        parts: Sequence[tuple[GroupState, GroupState, GroupState]],
        overlap: bool,
        ledger: Ledger,
        work: WorkMemory,
        limit_parts: Callable[[Phase], int],
    ) -> None:
        self.phase = Phase.TRAINING
        self._groups = groups
        self._parts = parts
        self._params = [params for _, params, _ in parts]
        self._grads = [grads for _, _, grads in parts]
        self._device = groups.device
        self._overlap = overlap
        self._ledger = ledger
        self._work = work
        self._limit_parts = limit_parts
        self._mover = self._new_mover()
        self._narrow: set[int] = set()  # parts that have come from a copy as it is kept
        self._shown: FrozenCopy | None = None
        self._leaving: list[GroupState] = []
        self._kept: dict[int, int] = {}  # parts that stay for the update, and their bytes
        self._limit_bytes = 0  # of them

    def __len__(self) -> int:
        return len(self._parts)

    def free_bytes(self) -> int:
        """Memory of the device that could be allocated once everything has left that is leaving."""
        return self._device.free_bytes() + self._leaving_bytes()

    def allocated_bytes(self) -> int:
        """Device memory of this process, without what is leaving; 0 where that is not known."""
        return max(0, self._device.allocated_bytes() - self._leaving_bytes())

    def restart_peak(self) -> int:
        """Most device memory that this process had at a time since the last call; 0 where that is not known."""
        return self._work.restart_peak()

    # -- passes

    @contextmanager
    def charged(self) -> Generator[None]:
        """Charge what comes and goes in the body, a pass, to one entry of the ledger.

        Parameters are away after it, but of parts that are kept. What was kept before leaves first.
        """
        self._mover = self._new_mover()
        self._let_go()
        may_keep = self._overlap and self.phase is Phase.TRAINING
        self._limit_bytes = self._limit_parts(self.phase) if may_keep else 0
        try:
            yield
        except BaseException:
            self._let_go()
            raise
        finally:
            with self._mover.held_up():
                for index, state in enumerate(self._params):
                    if index not in self._kept:
                        self._mover.leave(state)
            self._ledger.add_if_moved(self._mover.report)

    def bring(self, index: int) -> None:
        """Have a part's parameters on the device for what the current stream does from now on.

        Raises:
            DeviceOutOfMemoryError: There is no room; they are on the host as before.
        """
        with self._work.releasing():
            self._groups.release_finished(release_cache=False)
        state = self._params[index]
        if state.location is not Placement.DEVICE:
            self._narrow.add(index)
        self._arrive(state, self._shown)
        if self._shown is not None and index in self._narrow:
            storages = ((key, record.storage) for key, record in self._mover.records(state).items())
            self._shown.widen({key: storage_bytes(it, it.nbytes()) for key, it in storages if self._shown.has(key)})
        self._narrow.discard(index)

    def bring_gradients(self, index: int) -> None:
        """Have what a part's gradients are so far on the device; nothing where there are none yet."""
        with self._mover.held_up():
            # What is two parts behind has had the time of a part to leave.
            for state in self._leaving[:-1]:
                state.settle()
            self._leaving = self._leaving[-1:]
        self._arrive(self._grads[index])

    def has_read(self, index: int, following: int | None = None, *, with_gradients: int | None = None) -> None:
        """Have a part's parameters leave, which nothing that starts from now on reads; others may come.

        Args:
            index: The part.
            following: Whose parameters are read next.
            with_gradients: Whose gradients are added to next.
        """
        with self._mover.held_up():
            self._mover.leave(self._params[index])
            if self._overlap and following is not None:
                was_away = self._params[following].location is not Placement.DEVICE
                if self._mover.try_bring(self._params[following], self._shown) and was_away:
                    self._narrow.add(following)
            if self._overlap and with_gradients is not None:
                self._mover.try_bring(self._grads[with_gradients])

    def has_gradients(self, index: int) -> None:
        """Have a part's gradients leave, which have been added to by what the current stream waits for."""
        state = self._grads[index]
        state.version += 1
        with self._mover.held_up():
            self._mover.leave(state)
        self._leaving.append(state)

    def keep(self, index: int, reserve_bytes: int) -> bool:
        """In the place of `has_gradients`: have all of a part that its update needs stay, or begin to come.

        Args:
            index: The part.
            reserve_bytes: What must be free in addition.

        Returns:
            False with nothing changed where it has no room after the parts that are updated before it, where copies do
            not overlap, and before the first update.
        """
        states, params, grads = self._parts[index]
        # Gradients have the parameters' size, and no host copy where they have always stayed.
        sizes_bytes = [2 * p.mirror.num_bytes + s.mirror.num_bytes for s, p, _ in self._parts[: index + 1]]
        coming = [state for state in (params, states) if state.location is Placement.HOST]
        coming_bytes = sum(state.mirror.num_bytes for state in coming)
        if sum(sizes_bytes) > self._limit_bytes or self.free_bytes() < coming_bytes + reserve_bytes:
            return False
        with self._mover.held_up():
            if not all(self._mover.try_bring(state) for state in coming):
                for state in coming:
                    self._mover.leave(state)
                return False
        grads.version += 1
        grads.mirror.cover(self._mover.records(grads))  # its size is read as that of the group
        self._work.add(sizes_bytes[index])
        self._kept[index] = sizes_bytes[index]
        return True

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self._leaving = []
        for state in self._grads:
            if state.location is not Placement.FREED:
                state.leave(Placement.FREED, self._mover.records(state), self._mover.report)

    # -- other uses of the parameters

    @contextmanager
    def on_device(self, index: int) -> Generator[None]:
        """Have a part's parameters on the device inside the body, to be read outside of passes; an entry of the ledger.

        Where they are already they stay.
        """
        was_there = self._params[index].location is Placement.DEVICE
        mover = self._mover = self._new_mover()
        self.bring(index)
        try:
            yield
        finally:
            if not was_there:
                mover.leave(self._params[index])
            self._ledger.add_if_moved(mover.report)

    @contextmanager
    def filled(self, index: int) -> Generator[None]:
        """Have a part that has had no contents yet on the device inside the body, which writes them.

        Raises:
            DeviceOutOfMemoryError: There is no room for it.
        """
        state = self._params[index]
        locals_ = [local_tensor(tensor.detach()) for _, tensor in state.group.tensors()]
        sizes = {storage_key(local.untyped_storage()): local.nbytes for local in locals_}
        records = self._mover.records(state)
        self._device.allocate([Room(r.storage, sizes[key]) for key, r in records.items() if not r.storage.nbytes()])
        yield
        state.version += 1
        self._mover.leave(state)
        state.settle()

    def keep_in(self, copy: FrozenCopy) -> None:
        """Keep all parts in a frozen copy as passes read them now."""
        for index, state in enumerate(self._params):
            with self.on_device(index):
                copy.keep(self._device, state.group, self._mover.records(state))

    @contextmanager
    def showing(self, copy: FrozenCopy) -> Generator[None]:
        """Have passes inside the body read a frozen copy in the place of the parameters, which nothing may write.

        Raises:
            ResidencyError: A part is on the device.
        """
        self._let_go()
        present = [state.group.name for state in self._params if state.location is Placement.DEVICE]
        if present:
            raise ResidencyError(f"cannot show a frozen copy while {present[0]!r} is on the device; leave it first")
        self._shown = copy
        try:
            yield
        finally:
            self._shown = None
            for state in self._params:
                self._mover.leave(state)

    # -- inside

    def _new_mover(self) -> Mover:
        return Mover(self._device, TransitionReport(self.phase, self.phase))

    def _arrive(self, state: GroupState, source: FrozenCopy | None = None) -> None:
        with self._mover.held_up():
            self._mover.bring(state, source)
        state.wait_arrival()

    def _let_go(self) -> None:
        """Have what was kept for an update that has not come leave."""
        with self._mover.held_up():
            for index, num_bytes in self._kept.items():
                if self._params[index].location is Placement.DEVICE:  # no update came since
                    self._work.add(-num_bytes)
                for state in self._parts[index]:
                    self._mover.leave(state)
        self._kept = {}

    def _leaving_bytes(self) -> int:
        return sum(state.held_bytes for state in self._groups.states.values() if state.is_leaving)
