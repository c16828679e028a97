import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_offload_rl.data.loader import ShuffledLoader, mixture_order, share_out
from nemo_offload_rl.data.records import Part
from nemo_offload_rl.errors import DataError


def make_loader(num_items=10, batch_size=3, shuffle=True, seed=5) -> ShuffledLoader[int]:
    return ShuffledLoader(range(num_items), batch_size=batch_size, shuffle=shuffle, seed=seed)


def test_an_epoch_gives_no_item_twice_and_the_next_epoch_has_another_order():
    loader = make_loader(num_items=9)
    first = [item for _ in range(3) for item in next(loader)]
    assert sorted(first) == list(range(9))
    second = [item for _ in range(3) for item in next(loader)]
    assert loader.state_dict()["epoch"] == 1
    assert sorted(second) == list(range(9))
    assert first != second


def test_without_shuffling_every_epoch_keeps_the_order_and_skips_the_incomplete_batch():
    loader = make_loader(shuffle=False)
    assert [next(loader) for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]


@settings(max_examples=50)
@given(
    num_items=st.integers(3, 14), batch_size=st.integers(1, 3), num_epochs=st.integers(1, 4), taken=st.integers(0, 9)
)
def test_batches_end_with_the_last_epoch_also_where_the_batch_size_changes_on_the_way(
    num_items, batch_size, num_epochs, taken
):
    def make(size: int, epochs: int | None) -> ShuffledLoader[int]:
        return ShuffledLoader(range(num_items), batch_size=size, shuffle=True, seed=1, num_epochs=epochs)

    whole = make(batch_size, num_epochs)
    assert whole.num_batches_left == num_epochs * (num_items // batch_size)
    first = make(batch_size, None)
    for _ in range(taken):
        next(first)
    rest = make(1, num_epochs)
    rest.load_state_dict(first.state_dict())
    expected = rest.num_batches_left
    items = [batch[0] for batch in rest]
    assert len(items) == expected == max(0, num_epochs * num_items - num_drawn(first, num_items))
    assert rest.num_batches_left == 0


def num_drawn(loader: ShuffledLoader[int], num_items: int) -> int:
    state = loader.state_dict()
    return state["epoch"] * num_items + state["position"]


@settings(max_examples=50)
@given(num_before=st.integers(0, 12), num_after=st.integers(1, 8), seed=st.integers(0, 9))
def test_a_loader_restored_from_its_state_goes_on_with_the_same_batches(num_before, num_after, seed):
    loader = make_loader(seed=seed)
    for _ in range(num_before):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    restored = make_loader(seed=seed)
    restored.load_state_dict(state)
    assert [next(restored) for _ in range(num_after)] == [next(loader) for _ in range(num_after)]
    assert restored.state_dict() == loader.state_dict()


def test_a_state_of_other_data_is_refused():
    state = make_loader(num_items=11).state_dict()
    with pytest.raises(DataError, match="11 rows shuffled with seed 5, this one has 10 rows"):
        make_loader().load_state_dict(state)
    state = make_loader(shuffle=False).state_dict()
    with pytest.raises(DataError, match=r"data\.shuffle=false, and this run has true, so that rows would be repeated"):
        make_loader().load_state_dict(state)

    def mixture(*sizes: int) -> ShuffledLoader[int]:
        parts = [Part(size, 1.0) for size in sizes]
        return ShuffledLoader(range(10), batch_size=3, shuffle=True, seed=5, parts=parts)

    with pytest.raises(DataError, match=r"a mixture of data sets of \[4, 6\] rows, this one has \[5, 5\]"):
        mixture(5, 5).load_state_dict(mixture(4, 6).state_dict())


@pytest.mark.parametrize("num_items", [0, 2])
def test_fewer_items_than_a_batch_are_an_error(num_items):
    with pytest.raises(DataError, match=f"has {num_items} rows to train on and one batch needs 3"):
        make_loader(num_items=num_items)


PARTS = (Part(30, 1.0), Part(10, 3.0))


def sources(order):
    return ["a" if row < 30 else "b" for row in order]


def test_proportions_hold_in_an_epoch_and_in_every_beginning_of_it():
    order = mixture_order(PARTS, epoch=0, shuffle=True, seed=1)
    assert Counter(sources(order)) == {"a": 10, "b": 30}
    for length in range(1, 41):
        assert abs(sources(order)[:length].count("b") - 0.75 * length) <= 1


def test_a_small_part_is_gone_through_again_before_a_large_one_is_through():
    first = mixture_order(PARTS, epoch=0, shuffle=True, seed=1)
    assert Counter(row for row in first if row >= 30) == dict.fromkeys(range(30, 40), 3)
    three = [row for epoch in range(3) for row in mixture_order(PARTS, epoch=epoch, shuffle=True, seed=1)]
    assert sorted(row for row in three if row < 30) == list(range(30))
    assert [row for row in three if row < 30] != list(range(30))


def test_without_shuffling_each_part_keeps_its_order():
    order = mixture_order(PARTS, epoch=1, shuffle=False, seed=1)
    assert [row for row in order if row < 30] == list(range(10, 20))


@settings(max_examples=100)
@given(total=st.integers(0, 50), weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_shares_are_whole_add_up_and_are_less_than_one_from_exact(total, weights):
    counts = share_out(total, weights)
    assert sum(counts) == total
    assert all(abs(count - total * weight / sum(weights)) < 1 for count, weight in zip(counts, weights, strict=True))


def test_a_mixed_loader_restored_from_its_state_goes_on_with_the_same_batches():
    def make():
        return ShuffledLoader(range(40), batch_size=7, shuffle=True, seed=2, parts=PARTS)

    loader = make()
    for _ in range(8):
        next(loader)
    restored = make()
    restored.load_state_dict(loader.state_dict())
    assert [next(restored) for _ in range(9)] == [next(loader) for _ in range(9)]
