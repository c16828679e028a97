from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_offload_rl.algorithms import rollout_pool
from nemo_offload_rl.algorithms.rollout_pool import Filling, LostRollouts, RolloutPool
from nemo_offload_rl.data.loader import LookaheadLoader, ShuffledLoader
from nemo_offload_rl.errors import DataError, WorkerDiedError

BATCH = 2


def make_loader(num_items: int, num_epochs: int | None = None) -> ShuffledLoader[int]:
    return ShuffledLoader(range(num_items), batch_size=BATCH, shuffle=True, seed=3, num_epochs=num_epochs)


def make_pool(draw: Any, loader: LookaheadLoader[int], **settings: Any) -> RolloutPool[int, Any]:
    return RolloutPool(draw, loader, **{"order": "data", "first_step": 1, "most_at_once": 9, **settings})


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
    # Drawn at once, since it depends on the threads how many are used.
    waits = itertools.cycle(data.draw(st.lists(st.booleans(), min_size=1, max_size=12)))

    def draw(batch: int, first: int, prompts: Sequence[int], engine: int) -> list[int]:
        under_way.append(batch)
        if batch in dying:
            dying.discard(batch)
            raise WorkerDiedError("an engine died")
        return list(prompts)

    pool = make_pool(draw, ahead, max_age=max_age, first_step=start + 1, last_step=last_step)
    engine = 0
    for step in range(start + 1, last_step + 1):
        # What a step is, is known before anything of it is drawn; and it is what a run without lookahead says.
        assert ahead.num_batches_left == plain.num_batches_left
        assert ahead.state_dict() == plain.state_dict()
        if not plain.num_batches_left:
            break
        expected = next(plain)
        while True:
            pool.begin_due(step - 1, engine)
            if next(waits):
                pool.wait_until_idle()
            try:
                (taken,) = pool.take(step)
            except LostRollouts as lost:
                assert lost.engine <= engine
                engine += lost.engine == engine
                pool.wait_until_idle()
                continue
            break
        assert taken.drawn == expected
        assert 0 <= taken.age <= max_age
        if engine == 0:
            assert taken.age == min(step - 1 - start, max_age)
        assert max(under_way) <= step + max_age
        if engine == 0:
            assert len(set(under_way)) == len(under_way)
    assert pool.num_waiting == 0
    assert ahead.state_dict() == plain.state_dict()
    assert set(under_way) <= set(range(start + 1, last_step + 1))
    pool.close()


class Slow:
    """Draws a prompt once the test lets it; may die first."""

    def __init__(self, dying: set[tuple[int, int]]) -> None:
        self.dying = dying
        self.lock = threading.Condition()
        self.open: dict[tuple[int, int], int] = {}  # the prompt of each part in progress
        self.let_go: set[tuple[int, int]] = set()
        self.is_over = False

    def __call__(self, batch: int, first: int, prompts: Sequence[int], engine: int) -> int:
        (prompt,) = prompts
        with self.lock:
            self.open[batch, first] = prompt
            self.lock.notify_all()
            assert self.lock.wait_for(lambda: self.is_over or (batch, first) in self.let_go, 1500)
            self.let_go.discard((batch, first))
            del self.open[batch, first]
            if (batch, first) in self.dying:
                self.dying.discard((batch, first))
                raise WorkerDiedError("an engine died")
        return prompt

    def close(self) -> None:
        """Let all parts end."""
        with self.lock:
            self.is_over = True
            self.lock.notify_all()

    def finish(self, choose: Any) -> tuple[int, int]:
        """Let one of the parts in progress end."""
        with self.lock:
            assert self.lock.wait_for(lambda: set(self.open) - self.let_go, 1500)
            part: tuple[int, int] = choose(sorted(set(self.open) - self.let_go))
            self.let_go.add(part)
            self.lock.notify_all()
        return part


@given(
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(2, 9),
    st.integers(1, 8),
    st.sets(st.tuples(st.integers(1, 8), st.integers(0, 1)), max_size=3),
    st.integers(0, 99),
)
def test_finished_groups_are_trained_on_in_any_order_once_none_is_lost_and_none_is_too_old(
    max_age: int, most: int, num_items: int, last_step: int, dying: set[tuple[int, int]], seed: int
) -> None:
    """A run that stops at some step and goes on from its state trains on exactly the data of a plain run."""
    chance = random.Random(seed)
    plain = make_loader(num_items, num_epochs=2)
    num_steps = min(last_step, plain.num_batches_left)
    expected = sorted(item for _, batch in zip(range(num_steps), plain, strict=False) for item in batch)
    stops_after = chance.randrange(num_steps)
    trained: list[int] = []
    ages: list[int] = []
    state = None
    for first_step, end in ((1, stops_after), (stops_after + 1, num_steps)):
        loader = LookaheadLoader(make_loader(num_items, num_epochs=2))
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        assert loader.num_batches_left == plain.num_batches_left + num_steps - first_step + 1
        slow = Slow(dying)
        settings = {"order": "finished", "max_age": max_age, "first_step": first_step, "most_at_once": most}
        pool = make_pool(slow, loader, last_step=last_step, **settings)
        engine = 0
        for step in range(first_step, end + 1):
            taken: list[Any] = []
            while not taken:
                pool.begin_due(step - 1, engine)
                result: list[Any] = []
                thread = threading.Thread(target=lambda: result.append(take(pool, step)), daemon=True)  # noqa: B023
                thread.start()
                while thread.is_alive():  # any part may end at any time
                    with slow.lock:
                        ready = set(slow.open) - slow.let_go
                    if ready:
                        slow.finish(chance.choice)
                    thread.join(0.002)
                if isinstance(result[0], LostRollouts):
                    engine += result[0].engine == engine
                else:
                    taken = result[0]
            assert len(taken) == BATCH
            trained += [one.drawn for one in taken]
            ages += [one.age for one in taken]
        pool.close()
        slow.close()
        state = loader.state_dict()
    assert sorted(trained) == expected
    assert all(0 <= age <= max_age for age in ages)


def take(pool: RolloutPool[int, Any], step: int) -> Any:
    try:
        return pool.take(step)
    except LostRollouts as lost:
        return lost


def test_a_long_group_is_passed_by_others_until_it_reaches_the_age_and_is_then_waited_for() -> None:
    slow = Slow(set())
    pool = make_pool(slow, LookaheadLoader(make_loader(20)), order="finished", max_age=1, last_step=9)
    pool.begin_due(0, 0)
    for part in ((1, 1), (2, 0)):  # of (1, 0), (1, 1), (2, 0), (2, 1)
        slow.finish(lambda parts, part=part: part)
    assert [one.age for one in pool.take(1)] == [0, 0]
    pool.begin_due(1, 0)
    for part in ((3, 0), (3, 1), (2, 1)):
        slow.finish(lambda parts, part=part: part)
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(pool.take(2)))
    thread.start()
    thread.join(0.05)
    assert not result  # three are finished, but (1, 0) has no later step
    slow.finish(lambda parts: (1, 0))
    thread.join(1500)
    assert [one.age for one in result[0]] == [1, 1]
    assert pool.num_waiting == 2
    pool.begin_due(2, 0)
    assert [one.age for one in pool.take(3)] == [1, 1]
    pool.close()
    slow.close()


def test_more_groups_begin_while_a_step_waits_as_far_as_the_responses_of_those_in_progress_leave_room() -> None:
    slow, num_ended = Slow(set()), 0

    def num_in_progress() -> int:
        return 4 * len(slow.open) - num_ended

    filling = Filling(num_in_progress, most_responses=8, responses_per_part=4, most_parts=4)
    pool = make_pool(
        slow,
        LookaheadLoader(make_loader(20)),
        order="finished",
        max_age=2,
        last_step=9,
        most_at_once=2,
        filling=filling,
        engines_stop=True,
    )
    pool.begin_due(0, 0)
    with slow.lock:
        assert slow.lock.wait_for(lambda: len(slow.open) == 2, 1500)
    thread = threading.Thread(target=pool.take, args=(1,), daemon=True)
    thread.start()
    for num_ended, most in ((5, 3), (16, 4)):  # noqa: B007 (read by `num_in_progress`)
        with slow.lock:
            assert slow.lock.wait_for(lambda: len(slow.open) == most, 1500)  # noqa: B023
    assert set(slow.open) == {(1, 0), (1, 1), (2, 0), (2, 1)}
    slow.finish(lambda parts: (1, 0))
    slow.finish(lambda parts: (1, 1))
    thread.join(1500)
    # While the engines stop, groups end that were being scored. What takes their place begins with the next weights.
    slow.finish(lambda parts: (2, 0))
    while pool.num_waiting != 1:
        time.sleep(0.001)
    pool.begin_due(1, 0)
    for part in ((2, 1), (3, 0)):
        slow.finish(lambda parts, part=part: part)
        if part == (2, 1):
            assert [one.age for one in pool.take(2)] == [1, 1]
            pool.begin_due(2, 0)
    slow.finish(lambda parts: (3, 1))
    assert [one.age for one in pool.take(3)] == [1, 0]
    pool.close()
    slow.close()


def test_groups_begin_while_nobody_waits_where_engines_never_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_pool, "_LOOK_S", 0.0)
    slow = Slow(set())
    filling = Filling(lambda: 4 * len(slow.open) - 6, most_responses=8, responses_per_part=4, most_parts=4)
    settings = {"order": "finished", "max_age": 2, "last_step": 9, "most_at_once": 2, "filling": filling}
    pool = make_pool(slow, LookaheadLoader(make_loader(20)), **settings)
    pool.begin_due(0, 0)
    slow.finish(lambda parts: (1, 0))  # one of two parts ends, and of the other one only 2 responses are left
    with slow.lock:
        assert slow.lock.wait_for(lambda: len(slow.open) >= 3, 1500)
    slow.finish(lambda parts: (1, 1))
    assert [one.age for one in pool.take(1)] == [0, 0]
    pool.close()
    slow.close()


def test_steps_ahead_are_drawn_while_the_trainer_is_elsewhere_and_no_more_of_them_than_may_be() -> None:
    begun = [threading.Event() for _ in range(5)]
    may_end = threading.Event()

    def draw(batch: int, first: int, prompts: Sequence[int], engine: int) -> int:
        begun[batch].set()
        assert batch == 1 or may_end.wait(1500)
        return batch

    pool = make_pool(draw, LookaheadLoader(make_loader(8)), max_age=2, last_step=4)
    pool.begin_due(0, 0)
    assert all(event.wait(1500) for event in begun[1:4])
    assert pool.take(1)[0].drawn == 1
    assert not begun[4].wait(0.05)
    may_end.set()
    pool.wait_until_idle()
    assert pool.num_waiting == 2 * BATCH
    pool.begin_due(1, 0)
    assert [pool.take(step)[0].drawn for step in (2, 3, 4)] == [2, 3, 4]
    pool.close()


def test_what_ends_the_rollouts_of_a_later_step_is_told_before_an_earlier_one_is_trained() -> None:
    def draw(batch: int, first: int, prompts: Sequence[int], engine: int) -> int:
        if batch == 3:
            raise DataError("a prompt is empty")
        return batch

    pool = make_pool(draw, LookaheadLoader(make_loader(8)), max_age=2, last_step=4)
    pool.begin_due(0, 0)
    pool.wait_until_idle()
    with pytest.raises(DataError, match="a prompt is empty"):
        pool.take(1)
    pool.close()


def test_a_pool_that_is_closed_begins_nothing_more_and_does_not_wait() -> None:
    may_end = threading.Event()
    begun: list[int] = []

    def draw(batch: int, first: int, prompts: Sequence[int], engine: int) -> None:
        begun.append(batch)
        assert may_end.wait(1500)

    pool = make_pool(draw, LookaheadLoader(make_loader(8)), max_age=0, last_step=4)
    pool.begin_due(0, 0)
    while not begun:
        time.sleep(0.001)
    pool.close()
    may_end.set()
    pool.begin_due(1, 0)
    assert begun == [1]
    assert not any(part.has_begun for part in pool._parts if part.batch > 1)


def test_rollouts_whose_engine_was_started_again_before_their_thread_ran_are_lost_and_begun_anew() -> None:
    may_run, now = threading.Event(), 3

    def draw(batch: int, first: int, prompts: Sequence[int], engine: int) -> int:
        assert may_run.wait(1500)  # as if this thread began late
        if engine != now:
            raise WorkerDiedError("the engine was started again")
        return engine

    pool = make_pool(draw, LookaheadLoader(make_loader(8)), max_age=0, last_step=1, most_at_once=1)
    pool.begin_due(0, now)
    now = 4
    may_run.set()
    with pytest.raises(LostRollouts) as lost:
        pool.take(1)
    assert lost.value.engine == 3
    assert not pool.has_ready(1)
    pool.begin_due(0, now)
    assert pool.take(1)[0].drawn == 4
    pool.close()
