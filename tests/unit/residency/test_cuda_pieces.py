"""How copies to and from a GPU are grouped; needs no GPU."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_offload_rl.residency import HostArena
from nemo_offload_rl.residency.device.cuda_copies import CHUNK_BYTES, STAGED_BELOW_BYTES, STAGING_BYTES, pieces_of
from nemo_offload_rl.residency.device.device import Copy

SIZES = st.lists(
    st.one_of(st.integers(1, 2000), st.sampled_from([STAGED_BELOW_BYTES - 1, STAGED_BELOW_BYTES, 3 << 20, 9 << 20])),
    min_size=1,
    max_size=24,
)
PLACES = st.sets(st.integers(0, 23), max_size=4)


class Memory:
    """Two allocations of a driver, one behind the other, of which tensors are parts as torch's allocator has them.

    Args:
        sizes: Of the tensors.
        holes: Behind which of them something else is.
        boundary: The first tensor in the second allocation.
    """

    def __init__(self, sizes, holes, boundary):
        places = [0]
        for index, size in enumerate(sizes):
            places.append(places[-1] + -(-size // 512) * 512 + 4096 * (index in holes))
        self._bytes = torch.empty(places[-1] + 1, dtype=torch.uint8)
        self._boundary = self._bytes.data_ptr() + places[min(boundary, len(sizes))]
        self.tensors = [self._bytes[place : place + size] for place, size in zip(places, sizes, strict=False)]

    def end_of(self, address: int) -> int:
        end = self._bytes.data_ptr() + self._bytes.numel()
        return self._boundary if address < self._boundary else end


def make_copies(sizes, host_holes, device_holes, boundary):
    """Copies of some sizes, with something of others behind those whose places are given; the device's memory."""
    arena = HostArena()
    arena.reserve(sum(size + 512 for size in sizes) + len(host_holes) * 4096)
    device = Memory(sizes, device_holes, boundary)
    copies = []
    for index, tensor in enumerate(device.tensors):
        copies.append(Copy(tensor, arena.alloc(tensor.numel(), "test").buffer))
        if index in host_holes:
            arena.alloc(4096, "somebody else")
    return copies, device


def span(tensors):
    first, last = tensors[0], tensors[-1]
    return first.data_ptr(), last.data_ptr() + last.numel() - first.data_ptr()


@settings(max_examples=80, deadline=None)
@given(sizes=SIZES, host_holes=PLACES, device_holes=PLACES, boundary=st.integers(0, 24))
def test_every_copy_crosses_once_in_order_and_only_neighbours_cross_together(sizes, host_holes, device_holes, boundary):
    copies, device = make_copies(sizes, host_holes, device_holes, boundary)
    pieces = list(pieces_of(copies, device.end_of))
    assert [id(copy) for piece in pieces for copy in piece.copies] == [id(copy) for copy in copies]
    for piece in pieces:
        host, num_bytes = span([copy.host for copy in piece.copies])
        assert (piece.host.data_ptr(), piece.host.numel()) == (host, num_bytes)
        # Bytes of others are never carried along: between neighbours there is alignment only.
        assert num_bytes < sum(copy.host.numel() + 512 for copy in piece.copies)
        if piece.device is None:
            assert len(piece.copies) > 1
            assert num_bytes <= STAGING_BYTES
            assert all(copy.host.numel() < STAGED_BELOW_BYTES for copy in piece.copies)
            continue
        address, device_bytes = span([copy.device for copy in piece.copies])
        assert (piece.device.data_ptr(), piece.device.numel()) == (address, num_bytes) == (address, device_bytes)
        assert len(piece.copies) == 1 or num_bytes <= CHUNK_BYTES
        assert device.end_of(address) >= address + num_bytes
        for copy in piece.copies:
            assert copy.device.data_ptr() - address == copy.host.data_ptr() - host


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES)
def test_a_joined_piece_carries_the_bytes_of_each_of_its_copies(sizes):
    copies, device = make_copies(sizes, set(), set(), 24)
    for index, copy in enumerate(copies):
        copy.device.fill_(index)
    for piece in pieces_of(copies, device.end_of):
        assert piece.device is not None
        piece.host.copy_(piece.device)
    for index, copy in enumerate(copies):
        assert torch.equal(copy.host, torch.full_like(copy.host, index))


def test_many_neighbours_fill_chunks_and_where_they_are_apart_on_the_device_small_ones_fill_staging_buffers():
    size = 1 << 20
    for device_holes, expected in ((set(), [64, 36]), (set(range(100)), [32, 32, 32, 4])):
        copies, device = make_copies([size] * 100, set(), device_holes, 100)
        assert [len(piece.copies) for piece in pieces_of(copies, device.end_of)] == expected
