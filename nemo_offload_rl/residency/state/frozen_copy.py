"""Frozen host copies of parameters, and exchanges of a group's contents with a copy's.

A copy is taken once, in the type to which passes cast the parameters, and read many times. One narrower than its group
crosses the link as it is, to the last bytes of its place, and is widened there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nemo_offload_rl.residency.device.device import Copy, Device, Room, Transfer
from nemo_offload_rl.residency.host.arena import HostArena, HostMirror, aligned
from nemo_offload_rl.residency.table.errors import ResidencyError
from nemo_offload_rl.residency.table.groups import (
    StateGroup,
    StorageRecord,
    local_tensor,
    storage_bytes,
    storage_key,
    unique_storages,
)

CAST_AT_ONCE_BYTES = 256 << 20
PIECE_BYTES = 64 << 20  # exchanged at once; large enough for the speed of the link
_NUM_BUFFERS = 2  # a piece arrives while the one before it leaves
EXCHANGE_BYTES = _NUM_BUFFERS * PIECE_BYTES  # of the device that an exchange takes at most

type Pairs = list[tuple[Tensor, Tensor]]
"""Pairs of [N] tensors; the first is on the device and at least as wide as the second."""

type Moved = Callable[[Transfer, bool], None]
"""Called with each copy over the link and whether it came to the device."""


@dataclass(frozen=True)
class Form:
    """Types and size of a storage with contents.

    Attributes:
        own: Element type in the group; uint8 if the bytes are kept as they are.
        kept: Element type in the copy.
        num_bytes: Size of the storage.
    """

    own: torch.dtype
    kept: torch.dtype
    num_bytes: int

    @property
    def kept_bytes(self) -> int:
        return self.num_bytes // self.own.itemsize * self.kept.itemsize

    @property
    def is_cast(self) -> bool:
        return self.kept_bytes < self.num_bytes


class FrozenCopy(HostMirror):
    """Storages of one or more groups, each kept once; arguments as of `HostMirror`."""

    def __init__(self, owner: str, arena: HostArena, *, pinned: bool = True) -> None:
        super().__init__(owner, arena, pinned=pinned)
        self._forms: dict[int, Form] = {}

    def keep(self, device: Device, group: StateGroup, records: Mapping[int, StorageRecord]) -> dict[int, Form]:
        """Add a group's storages, which are on the device and not being written; return their forms.

        Raises:
            HostBudgetError: There is no host memory for them.
        """
        forms = forms_of(group, records)
        self.cover({key: records[key] for key in forms}, {key: form.kept_bytes for key, form in forms.items()})
        pairs = (
            (storage_bytes(records[key].storage, form.num_bytes).view(form.own), self.bytes_of(key).view(form.kept))
            for key, form in forms.items()
        )
        for batch in in_batches(pairs, CAST_AT_ONCE_BYTES):
            kept = [(own.to(host.dtype), host) for own, host in batch]
            device.copy_out(Copy(a.view(torch.uint8), b.view(torch.uint8)) for a, b in kept).wait_host()
        self.mark_clean(forms, 0)
        self._forms |= forms
        return forms

    def copies_to(self, places: Mapping[int, Tensor]) -> Iterator[Copy]:
        """Yield copies that bring storages to the last bytes of their places, [N] uint8 on the device by key."""
        for key, place in places.items():
            host = self.bytes_of(key)
            yield Copy(place[place.numel() - host.numel() :], host)

    def widen(self, places: Mapping[int, Tensor]) -> None:
        """Widen what `copies_to` brought, from the front, to fill its places. Reads each element before overwriting it.

        The first i of n wide elements end at byte `own * i`. The narrow elements after them begin at `(own - kept) * n
        + kept * i`, which is no less.
        """
        pairs = (
            (place.view(form.own), place[form.num_bytes - form.kept_bytes :].view(form.kept))
            for key, place in places.items()
            if (form := self._forms[key]).is_cast
        )
        for batch in in_batches(pairs, CAST_AT_ONCE_BYTES):
            copy_at_once([wide for wide, _ in batch], [narrow.clone() for _, narrow in batch])


def forms_of(group: StateGroup, records: Mapping[int, StorageRecord]) -> dict[int, Form]:
    """Choose how a copy keeps each storage with contents: narrower if all of its tensors are wider parameters."""
    read_dtype = group.read_dtype
    types: dict[int, set[torch.dtype | None]] = {}
    for _, tensor in group.tensors():
        is_cast = read_dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        key = storage_key(local_tensor(tensor).untyped_storage())
        types.setdefault(key, set()).add(tensor.dtype if is_cast else None)
    forms: dict[int, Form] = {}
    for key, record in records.items():
        num_bytes, (own, *others) = record.storage.nbytes(), types[key]
        if own is None or others or read_dtype is None or own.itemsize <= read_dtype.itemsize:
            forms[key] = Form(torch.uint8, torch.uint8, num_bytes)
        else:
            forms[key] = Form(own, read_dtype, num_bytes)
    return {key: form for key, form in forms.items() if form.num_bytes}


def snapshot_bytes(group: StateGroup) -> int:
    """Host bytes of a copy of a group that is on the device, alignment included."""
    return sum(aligned(form.kept_bytes) for form in forms_of(group, unique_storages(group.tensors())).values())


def snapshot_is_cast(group: StateGroup) -> bool:
    """Tell whether a copy of a group that is on the device takes fewer bytes than the group."""
    return any(form.is_cast for form in forms_of(group, unique_storages(group.tensors())).values())


def part_copy_bytes(group: StateGroup) -> int:
    """Host bytes of a copy of a group of parameters that may have no contents yet, alignment included."""
    sizes: dict[int, int] = {}
    for _, tensor in group.tensors():
        local = local_tensor(tensor)
        kept_bytes = min(local.itemsize, group.read_dtype.itemsize if group.read_dtype is not None else local.itemsize)
        sizes[storage_key(local.untyped_storage())] = aligned(local.numel() * kept_bytes)
    return sum(sizes.values())


class Exchange:
    """One exchange and its reversal. Takes no host memory; an exchange with the host uses both directions of the link.

    Args:
        device: Device of the first tensors.
        where: The same device, as torch names it.
        num_bytes: Size of all pairs; if below `PIECE_BYTES`, less device memory is taken.
        with_host: The second tensors are on the host.

    Raises:
        DeviceOutOfMemoryError: There is no room for two pieces; none is taken.
    """

    def __init__(self, device: Device, where: torch.device, num_bytes: int, *, with_host: bool) -> None:
        self._device = device
        self._with_host = with_host
        self._piece_bytes = min(PIECE_BYTES, num_bytes)
        self._done: list[Pairs] = []
        self._is_torn = False
        storages = [torch.empty(0, dtype=torch.uint8, device=where).untyped_storage() for _ in range(_NUM_BUFFERS)]
        try:
            device.allocate([Room(storage, self._piece_bytes) for storage in storages])
        except BaseException:
            for storage in storages:
                if storage.nbytes():
                    device.release(storage)
            raise
        self._buffers = [storage_bytes(storage, self._piece_bytes) for storage in storages]

    def run(self, pairs: Iterable[tuple[Tensor, Tensor]], moved: Moved) -> None:
        """Exchange the uint8 contents of each pair. If it raises, `undo` reverses what was exchanged."""
        self._through(in_batches(pairs, self._piece_bytes), moved)

    def undo(self, moved: Moved) -> None:
        """Reverse what `run` exchanged.

        Raises:
            ResidencyError: `run` broke off in the middle of a piece, whose contents are lost.
        """
        was_torn, batches, self._done = self._is_torn, self._done, []
        self._through(batches, moved)
        if was_torn:
            raise ResidencyError("an exchange of device contents failed in the middle of a piece, which is lost")

    def close(self) -> None:
        """Free the device memory."""
        for buffer in self._buffers:
            self._device.release(buffer.untyped_storage())
        self._buffers = []

    def _through(self, batches: Iterable[Pairs], moved: Moved) -> None:
        """Exchange batches. Each is fetched while the one before it leaves."""
        fetched: tuple[Pairs, list[Tensor], Transfer | None] | None = None
        try:
            for index, batch in enumerate(batches):
                kept = _parts_of(self._buffers[index % _NUM_BUFFERS], batch)
                before, fetched = fetched, (batch, kept, self._fetch(kept, batch))
                if before is not None:
                    self._finish(*before, moved)
            if fetched is not None:
                self._finish(*fetched, moved)
        except BaseException:
            if fetched is not None and fetched[2] is not None:
                fetched[2].wait_host()  # its memory is released next
            raise

    def _fetch(self, kept: list[Tensor], batch: Pairs) -> Transfer | None:
        """Bring the second contents to `kept`, or start to."""
        if self._with_host:
            return self._device.copy_in(Copy(new, host) for new, (_, host) in zip(kept, batch, strict=True))
        copy_at_once(kept, [other for _, other in batch])
        return None

    def _finish(self, batch: Pairs, kept: list[Tensor], coming: Transfer | None, moved: Moved) -> None:
        """Write a batch's first contents over the second, and `kept`, a copy of the second, over the first."""
        own, others = (list(side) for side in zip(*batch, strict=True))
        if coming is not None:
            coming.wait_device()
            moved(coming, True)
        self._is_torn = True
        if coming is None:
            copy_at_once(others, own)
        else:
            moved(self._send(own, others, kept), False)
        copy_at_once(own, kept)
        self._done.append(batch)
        self._is_torn = False

    def _send(self, own: list[Tensor], hosts: list[Tensor], kept: list[Tensor]) -> Transfer:
        """Copy to the host. If that cannot start, restore the host's contents from `kept`."""
        try:
            going = self._device.copy_out(map(Copy, own, hosts))
        except BaseException:
            for host, new in zip(hosts, kept, strict=True):
                host.copy_(new)
            self._is_torn = False
            raise
        going.wait_device()
        return going


def in_batches(pairs: Iterable[tuple[Tensor, Tensor]], num_bytes: int) -> Iterator[Pairs]:
    """Yield all elements in order, in lists whose first tensors have at most `num_bytes` together."""
    batch: Pairs = []
    held_bytes = 0
    for left, right in pairs:
        count = max(1, num_bytes // left.element_size())
        for pair in zip(torch.split(left, count), torch.split(right, count), strict=True):
            if batch and held_bytes + pair[0].nbytes > num_bytes:
                yield batch
                batch, held_bytes = [], 0
            batch.append(pair)
            held_bytes += pair[0].nbytes
    if batch:
        yield batch


@torch.no_grad()
def copy_at_once(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy in few kernels: launching one for each tensor would take the host longer than the device."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def _parts_of(buffer: Tensor, batch: Pairs) -> list[Tensor]:
    """Split a [N] uint8 buffer into a part for each pair of a batch of at most N bytes."""
    sizes = [own.numel() for own, _ in batch]
    return list(torch.split(buffer[: sum(sizes)], sizes))
