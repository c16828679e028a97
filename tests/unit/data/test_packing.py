from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_offload_rl.data.packing import pack_rows
from nemo_offload_rl.errors import ConfigError


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), round_to=st.integers(1, 8))
def test_every_row_is_packed_once_within_the_budget_and_no_two_bins_could_be_one(lengths, round_to):
    bins = pack_rows(lengths, max_tokens=64, round_to=round_to)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    sizes = [sum(-(-lengths[row] // round_to) * round_to for row in rows) for rows in bins]
    assert max(sizes) <= 64
    assert all(a + b > 64 for i, a in enumerate(sizes) for b in sizes[:i])


def fewest_bins(sizes: list[int], capacity: int) -> int:
    """By trying: each size, the largest first, into every bin that holds it or a new one."""

    def search(index: int, rooms: tuple[int, ...], best: int) -> int:
        if index == len(sizes) or len(rooms) >= best:
            return min(best, len(rooms))
        size = ordered[index]
        for place in {rooms.index(room) for room in rooms if room >= size}:
            rest = (*rooms[:place], rooms[place] - size, *rooms[place + 1 :])
            best = min(best, search(index + 1, rest, best))
        return min(best, search(index + 1, (*rooms, capacity - size), best))

    ordered = sorted(sizes, reverse=True)
    return search(0, (), len(sizes))


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_few_bins_more_than_the_fewest_possible(lengths):
    assert 60 * len(pack_rows(lengths, max_tokens=60, round_to=1)) <= 71 * fewest_bins(lengths, 60) + 60


def test_a_row_of_more_than_half_a_bin_is_paired_first_with_those_that_fill_it():
    # Unmodified, the row of 20 comes to the one of 31, and the last finds no room.
    assert pack_rows([31, 30, 20, 15, 14, 10], max_tokens=60, round_to=1) == [[0, 4, 3], [1, 2, 5]]


def test_long_rows_are_filled_up_with_short_ones():
    assert pack_rows([3, 7, 5, 6, 4], max_tokens=10, round_to=1) == [[1, 0], [3, 4], [2]]


def test_a_row_over_the_budget_is_refused_with_the_key_to_raise():
    with pytest.raises(ConfigError, match=r"row of 9 tokens \(12 rounded up .* raise policy\.sequence_packing"):
        pack_rows([9], max_tokens=10, round_to=4)
