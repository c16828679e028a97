from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_offload_rl.data.batching import group_lengths, pack_rows, plan_micro_batches, rows_of_groups, split_to_count
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
    assert 9 * len(pack_rows(lengths, max_tokens=60, round_to=1)) <= 11 * fewest_bins(lengths, 60) + 6


def test_long_rows_are_filled_up_with_short_ones():
    assert pack_rows([3, 7, 5, 6, 4], max_tokens=10, round_to=1) == [[1, 0], [3, 4], [2]]


def test_a_row_over_the_budget_is_refused_with_the_key_to_raise():
    with pytest.raises(ConfigError, match=r"row of 9 tokens \(12 rounded up .* raise policy\.sequence_packing"):
        pack_rows([9], max_tokens=10, round_to=4)


def test_rows_of_like_length_share_a_micro_batch_within_the_budget():
    assert plan_micro_batches([3, 10, 4, 9, 1], max_tokens=20, round_to=1) == [[1, 3], [2, 0, 4]]


def test_rounding_counts_towards_the_budget():
    assert plan_micro_batches([5, 5], max_tokens=15, round_to=1) == [[0, 1]]
    assert plan_micro_batches([5, 5], max_tokens=15, round_to=8) == [[0], [1]]


def test_a_row_above_the_budget_is_refused():
    with pytest.raises(ConfigError, match="12 tokens"):
        plan_micro_batches([3, 12], max_tokens=10, round_to=1)


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(64, 300), st.sampled_from([1, 8, 16]), st.data()
)
def test_every_row_is_in_one_micro_batch_of_bounded_size_also_after_splitting(lengths, max_tokens, round_to, data):
    plan = plan_micro_batches(lengths, max_tokens, round_to)
    count = data.draw(st.integers(len(plan), len(lengths)))
    for batches in (plan, split_to_count(plan, count)):
        assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
        for rows in batches:
            width = -(-max(lengths[row] for row in rows) // round_to) * round_to
            assert len(rows) * width <= max_tokens
    assert len(split_to_count(plan, count)) == count


def test_more_micro_batches_than_rows_are_refused():
    with pytest.raises(ValueError, match="cannot be split"):
        split_to_count([[0, 1]], 3)


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=20)


@given(LENGTHS)
def test_pairs_stay_together_and_packed_ones_fit_the_budget(pairs):
    lengths = [length for pair in pairs for length in pair]
    plan = rows_of_groups(pack_rows(group_lengths(lengths, 2, round_to=4, packed=True), 48, 4), 2)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        assert all(right == left + 1 and left % 2 == 0 for left, right in zip(rows[::2], rows[1::2], strict=True))
        assert sum(-(-lengths[row] // 4) * 4 for row in rows) <= 48


@given(LENGTHS)
def test_padded_pairs_fit_the_budget_too(pairs):
    lengths = [length for pair in pairs for length in pair]
    plan = rows_of_groups(plan_micro_batches(group_lengths(lengths, 2, round_to=4, packed=False), 48 // 2, 4), 2)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        assert len(rows) * max(-(-lengths[row] // 4) * 4 for row in rows) <= 48
