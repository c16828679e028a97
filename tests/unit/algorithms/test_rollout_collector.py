from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_offload_rl.algorithms.rollout_collector import LostRollouts, RolloutCollector
from nemo_offload_rl.data.loader import LookaheadLoader, ShuffledLoader
from nemo_offload_rl.errors import DataError, WorkerDiedError

BATCH = 2


def make_loader(num_items: int, num_epochs: int | None = None) -> ShuffledLoader[int]:
    return ShuffledLoader(range(num_items), batch_size=BATCH, shuffle=True, seed=3, num_epochs=num_epochs)


@given(
    st.integers(0, 4),
    st.integers(2, 9),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(0, 11),
    st.sets(st.integers(1, 12)),
    st.data(),
)
def test_every_batch_of_the_data_is_trained_on_once_in_order_by_weights_that_are_not_too_old(
    max_age: int, num_items: int, num_epochs: int, last_step: int, start: int, dying: set[int], data: st.DataObject
) -> None:
    start = min(start, last_step - 1)
    plain, given_out = make_loader(num_items, num_epochs), make_loader(num_items, num_epochs)
    for loader in (plain, given_out):  # a run that goes on after `start`
        for _, _ in zip(range(start), loader, strict=False):
            pass
    ahead = LookaheadLoader(given_out)
    under_way: list[int] = []
    dying = set(dying)

    def draw(step: int, prompts: Sequence[int], engine: int) -> list[int]:
        under_way.append(step)
        if step in dying:
            dying.discard(step)
            raise WorkerDiedError("an engine died")
        return list(prompts)

    collector = RolloutCollector(draw, ahead, max_age=max_age, first_step=start + 1, last_step=last_step)
    engine = 0
    for step in range(start + 1, last_step + 1):
        # What a step is, is known before anything of it is drawn; and it is what a run without lookahead says.
        assert ahead.num_batches_left == plain.num_batches_left
        assert ahead.state_dict() == plain.state_dict()
        if not plain.num_batches_left:
            break
        expected, version = next(plain), step - 1
        while True:
            collector.begin_due(version, engine)
            if data.draw(st.booleans()):
                collector.wait_until_idle()
            try:
                taken = collector.take(step)
            except LostRollouts as lost:
                assert lost.engine <= engine
                engine += lost.engine == engine
                collector.wait_until_idle()
                continue
            break
        assert taken.drawn == expected
        assert 0 <= taken.age == version - taken.version <= max_age
        if engine == 0:
            assert taken.age == min(step - 1 - start, max_age)
        assert max(under_way) <= step + max_age
        if engine == 0:
            assert len(set(under_way)) == len(under_way)
    assert collector.num_waiting == 0
    assert ahead.state_dict() == plain.state_dict()
    assert set(under_way) <= set(range(start + 1, last_step + 1))
    collector.close()


def test_steps_ahead_are_drawn_while_the_trainer_is_elsewhere_and_no_more_of_them_than_may_be() -> None:
    begun = [threading.Event() for _ in range(5)]
    may_end = threading.Event()

    def draw(step: int, prompts: Sequence[int], engine: int) -> int:
        begun[step].set()
        assert step == 1 or may_end.wait(1500)
        return step

    collector = RolloutCollector(draw, LookaheadLoader(make_loader(8)), max_age=2, first_step=1, last_step=4)
    collector.begin_due(0, 0)
    assert all(event.wait(1500) for event in begun[1:4])
    assert collector.take(1).drawn == 1
    assert not begun[4].wait(0.05)
    may_end.set()
    collector.wait_until_idle()
    assert collector.num_waiting == 2
    collector.begin_due(1, 0)
    assert [collector.take(step).drawn for step in (2, 3, 4)] == [2, 3, 4]
    collector.close()


def test_what_ends_the_rollouts_of_a_later_step_is_told_before_an_earlier_one_is_trained() -> None:
    def draw(step: int, prompts: Sequence[int], engine: int) -> int:
        if step == 3:
            raise DataError("a prompt is empty")
        return step

    collector = RolloutCollector(draw, LookaheadLoader(make_loader(8)), max_age=2, first_step=1, last_step=4)
    collector.begin_due(0, 0)
    collector.wait_until_idle()
    with pytest.raises(DataError, match="a prompt is empty"):
        collector.take(1)
    collector.close()


def test_a_collector_that_is_closed_begins_nothing_more_and_does_not_wait() -> None:
    may_end = threading.Event()
    begun: list[int] = []

    def draw(step: int, prompts: Sequence[int], engine: int) -> None:
        begun.append(step)
        assert may_end.wait(1500)

    collector = RolloutCollector(draw, LookaheadLoader(make_loader(8)), max_age=0, first_step=1, last_step=4)
    collector.begin_due(0, 0)
    while not begun:
        time.sleep(0.001)
    collector.close()
    may_end.set()
    with pytest.raises(RuntimeError):
        collector.begin_due(1, 0)
    assert begun == [1]


def test_rollouts_whose_engine_was_started_again_before_their_thread_ran_are_lost_and_begun_anew() -> None:
    may_run, now = threading.Event(), 3

    def draw(step: int, prompts: Sequence[int], engine: int) -> int:
        if engine != now:
            raise WorkerDiedError("the engine was started again")
        return engine

    collector = RolloutCollector(draw, LookaheadLoader(make_loader(8)), max_age=0, first_step=1, last_step=1)
    collector._pool.submit(may_run.wait)  # the only thread
    collector.begin_due(0, now)
    now = 4
    may_run.set()
    with pytest.raises(LostRollouts) as lost:
        collector.take(1)
    assert lost.value.engine == 3
    collector.begin_due(0, now)
    assert collector.take(1).drawn == 4
    collector.close()
