from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.data.mixture import mixture_order, share_out
from nemo_offload_rl.data.records import Part

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
