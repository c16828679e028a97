import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_offload_rl.data.dynamic_batching import plan_micro_batches, split_to_count
from nemo_offload_rl.errors import ConfigError


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
