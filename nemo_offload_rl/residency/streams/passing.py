"""Passes parameters and gradients through the device part by part, in forward and backward passes.

A part is a layer, the embedding or the output layer. Its parameters (`params/part.<index>`) come to the device while
the part before it computes, and are there while they are read. Its gradients (`grads/part.<index>`) are there while
they are added to. In the update (`stream.py`) both are there with its optimizer states (`optimizer/part.<index>`). The
parts that are updated first get their gradients last. If there is room, they stay for the update, and their states come
while the backward pass goes on.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from nemo_offload_rl.residency.device.device import Room
from nemo_offload_rl.residency.state.frozen_copy import FrozenCopy
from nemo_offload_rl.residency.state.group_set import GroupSet, Mover
from nemo_offload_rl.residency.state.group_state import GroupState
from nemo_offload_rl.residency.streams.work_memory import WorkMemory
from nemo_offload_rl.residency.table.errors import ResidencyError
from nemo_offload_rl.residency.table.groups import local_tensor, storage_bytes, storage_key
from nemo_offload_rl.residency.table.ledger import TransitionReport
from nemo_offload_rl.residency.table.plan import Phase, Placement


class PassingParts:
    """Moves one rank's parts, on one thread; a backend says when it reads and writes each.

    Args:
        groups: All groups of the worker.
        parts: The optimizer's states, parameters and gradients of each part, in the order of a forward pass.
        work: Memory needs of the phases' work.
        limit_parts: Returns the bytes that parts may hold in addition to the work of a phase and the step.

    Attributes:
        phase: Phase that passes are charged to.
    """

    def __init__(
        self,
        groups: GroupSet,
        parts: Sequence[tuple[GroupState, GroupState, GroupState]],
        work: WorkMemory,
        limit_parts: Callable[[Phase], int],
    ) -> None:
        self.phase = Phase.TRAINING
        self._groups = groups
        self._parts = parts
        self._params = [params for _, params, _ in parts]
        self._grads = [grads for _, _, grads in parts]
        self._device = groups.device
        self._overlap = groups.overlap  # bring the next part while the present one computes
        self._work = work
        self._limit_parts = limit_parts
        self._mover = self._new_mover()
        self._narrow: set[int] = set()  # parts copied from `_shown` that are not widened yet
        self._shown: FrozenCopy | None = None
        self._leaving: list[GroupState] = []
        self._kept: dict[int, int] = {}  # bytes of the parts that stay for the update, by index
        self._limit_bytes = 0  # limit of their sum

    def __len__(self) -> int:
        return len(self._parts)

    def free_bytes(self) -> int:
        """Device memory that could be allocated once all leaving groups have left."""
        return self._device.free_bytes() + self._leaving_bytes()

    def allocated_bytes(self) -> int:
        """Device memory of this process, without leaving groups; 0 if unknown."""
        return max(0, self._device.allocated_bytes() - self._leaving_bytes())

    def restart_peak(self) -> int:
        """Most device memory that this process had at a time since the last call; 0 if unknown."""
        return self._work.restart_peak()

    # -- passes

    @contextmanager
    def charged(self) -> Generator[None]:
        """Charge all moves in the body, a pass, to one entry of the ledger.

        Parts that were kept before leave first. After the body all parameters leave, except those of kept parts.
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
            self._groups.ledger.add_if_moved(self._mover.report)

    def bring(self, index: int) -> None:
        """Bring a part's parameters to the device for later work of the current stream.

        Raises:
            DeviceOutOfMemoryError: There is no room; they stay on the host.
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
        """Bring the sums of a part's gradients to the device, if there are any yet."""
        with self._mover.held_up():
            # Gradients of two parts ago have had the time of a part to leave.
            for state in self._leaving[:-1]:
                state.settle()
            self._leaving = self._leaving[-1:]
        self._arrive(self._grads[index])

    def has_read(self, index: int, following: int | None = None, *, with_gradients: int | None = None) -> None:
        """Let a part's parameters leave, since no later work reads them, and start bringing what comes next.

        Args:
            index: The part.
            following: Part whose parameters are read next.
            with_gradients: Part whose gradients are added to next.
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
        """Let a part's gradients leave; the current stream already waits for the work that added to them."""
        state = self._grads[index]
        state.version += 1
        with self._mover.held_up():
            self._mover.leave(state)
        self._leaving.append(state)

    def keep(self, index: int, reserve_bytes: int) -> bool:
        """Keep all that a part's update needs on the device, or start bringing it; replaces `has_gradients`.

        Args:
            index: The part.
            reserve_bytes: Memory that must be free in addition.

        Returns:
            False, with nothing changed, if there is no room after the parts that are updated earlier, if copies do not
            overlap, or before the first update.
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
        grads.mirror.cover(self._mover.records(grads))  # sets the mirror's size, which `held_bytes` reads
        self._work.add(sizes_bytes[index])
        self._kept[index] = sizes_bytes[index]
        return True

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        self._leaving = []
        for state in self._grads:
            if state.location is not Placement.FREED:
                state.leave(Placement.FREED, self._mover.records(state), self._mover.report)

    # -- other uses of the parameters

    @contextmanager
    def on_device(self, index: int) -> Generator[None]:
        """Have a part's parameters on the device for the body, to be read outside of passes; adds a ledger entry.

        Parameters that are there already stay there.
        """
        was_there = self._params[index].location is Placement.DEVICE
        mover = self._mover = self._new_mover()
        self.bring(index)
        try:
            yield
        finally:
            if not was_there:
                mover.leave(self._params[index])
            self._groups.ledger.add_if_moved(mover.report)

    @contextmanager
    def filled(self, index: int) -> Generator[None]:
        """Have a part without contents on the device for the body, which writes them.

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
        """Keep all parts' present contents in a frozen copy, in the type that passes read."""
        for index, state in enumerate(self._params):
            with self.on_device(index):
                copy.keep(self._device, state.group, self._mover.records(state))

    @contextmanager
    def showing(self, copy: FrozenCopy) -> Generator[None]:
        """Have passes in the body read a frozen copy instead of the parameters, which nothing may write.

        Raises:
            ResidencyError: A part is on the device.
        """
        self._let_go()
        present = [state.group.name for state in self._params if state.location is Placement.DEVICE]
        if present:
            raise ResidencyError(
                f"passes cannot read a frozen copy while {present[0]!r} is on the device; offload it first"
            )
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
        """Let parts leave that were kept for an update that has not come."""
        with self._mover.held_up():
            for index, num_bytes in self._kept.items():
                if self._params[index].location is Placement.DEVICE:  # no update came since
                    self._work.add(-num_bytes)
                for state in self._parts[index]:
                    self._mover.leave(state)
        self._kept = {}

    def _leaving_bytes(self) -> int:
        return sum(state.held_bytes for state in self._groups.states.values() if state.is_leaving)
