from __future__ import annotations

import gc
import weakref

import pytest

from nemo_offload_rl.utils.garbage import RARELY, collect_garbage, frozen_objects


class Node:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def same_collector():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def full_collections(body) -> int:
    """How many full collections the body ends up in by itself."""
    generations = []
    gc.callbacks.append(lambda phase, about: generations.append(about["generation"]))
    try:
        body()
    finally:
        gc.callbacks.pop()
    return generations.count(2)


def many_objects():
    return [[] for _ in range(400_000)]


def test_after_a_collection_at_a_chosen_time_full_ones_stay_away():
    gc.collect()
    gc.freeze()  # else a quarter of what tests have imported would have to be new
    gc.set_threshold(700, 10, 10)
    assert full_collections(many_objects) > 0
    gone = weakref.ref(Node())
    old = Node()
    gc.collect(1)
    is_old = weakref.ref(old)
    gc.collect(1)  # it is in the last generation now
    del old
    collect_garbage()
    assert gone() is None and is_old() is None
    assert gc.get_threshold() == (700, 10, RARELY)
    assert full_collections(many_objects) == 0


def test_objects_are_frozen_for_the_body_alone():
    before = gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), frozen_objects():
        frozen = gc.get_freeze_count()
        raise ZeroDivisionError
    assert frozen > before + 10_000
    assert gc.get_freeze_count() == 0
