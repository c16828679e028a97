from hypothesis import given
from hypothesis import strategies as st

from nemo_offload_rl.data.dynamic_batching import plan_micro_batches
from nemo_offload_rl.data.grouping import group_lengths, rows_of_groups
from nemo_offload_rl.data.packing import pack_rows

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
