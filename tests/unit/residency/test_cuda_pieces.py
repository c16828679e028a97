"""How copies to and from a GPU are grouped; needs no GPU."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_offload_rl.residency import HostArena
from nemo_offload_rl.residency.cuda import STAGED_BELOW_BYTES, STAGING_BYTES, pieces_of
from nemo_offload_rl.residency.device import Copy

SIZES = st.lists(
    st.one_of(st.integers(1, 2000), st.sampled_from([STAGED_BELOW_BYTES - 1, STAGED_BELOW_BYTES, 3 << 20])),
    min_size=1,
    max_size=24,
)


@settings(max_examples=40)
@given(sizes=SIZES, holes=st.sets(st.integers(0, 23), max_size=4))
def test_every_copy_crosses_once_in_order_and_small_neighbours_cross_together(sizes, holes):
    arena = HostArena()
    arena.reserve(sum(size + 512 for size in sizes) + len(holes) * 4096)
    copies = []
    for index, size in enumerate(sizes):
        copies.append(Copy(torch.empty(0), arena.alloc(size, "test").buffer))
        if index in holes:
            arena.alloc(4096, "somebody else")
    pieces = list(pieces_of(copies))
    assert [id(copy) for piece in pieces for copy in piece.copies] == [id(copy) for copy in copies]
    for piece in pieces:
        first, last = piece.copies[0].host, piece.copies[-1].host
        assert piece.host.data_ptr() == first.data_ptr()
        assert piece.host.numel() == last.data_ptr() + last.numel() - first.data_ptr()
        if piece.staged:
            assert piece.host.numel() <= STAGING_BYTES
            assert all(copy.host.numel() < STAGED_BELOW_BYTES for copy in piece.copies)
            # Bytes of others are never carried along: between neighbours there is alignment only.
            assert piece.host.numel() < sum(copy.host.numel() + 512 for copy in piece.copies)


def test_many_small_neighbours_fill_staging_buffers_instead_of_crossing_one_by_one():
    arena = HostArena()
    size = 1 << 20
    arena.reserve(100 * size)
    copies = [Copy(torch.empty(0), arena.alloc(size, "test").buffer) for _ in range(100)]
    assert [len(piece.copies) for piece in pieces_of(copies)] == [32, 32, 32, 4]
