from __future__ import annotations

import pytest

from nemo_offload_rl.utils.timer import PhaseTimer, shares, timing_metrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_and_other_is_the_rest() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    for seconds in (2.0, 3.0):
        with timer.phase("generation"):
            clock.now += seconds
    with timer.phase("training"):
        clock.now += 4.0
    clock.now += 1.0
    assert timer.seconds() == {"generation": 5.0, "training": 4.0, "total": 10.0}
    assert shares(timer.seconds()) == {"generation": 0.5, "training": 0.4, "other": pytest.approx(0.1)}


def test_an_inner_phase_is_named_under_its_outer_one_and_not_counted_twice() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("training"):
        clock.now += 1.0
        with timer.phase("optimizer"):
            clock.now += 3.0
    seconds = timer.seconds()
    assert seconds == {"training/optimizer": 3.0, "training": 4.0, "total": 4.0}
    assert shares(seconds) == {"training": 1.0, "other": 0.0}


def test_a_phase_that_raises_is_timed_and_closed() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with pytest.raises(ZeroDivisionError), timer.phase("reward"):
        clock.now += 2.0
        _ = 1 / 0
    with timer.phase("refit"):
        clock.now += 1.0
    assert timer.seconds() == {"reward": 2.0, "refit": 1.0, "total": 3.0}


def test_drain_begins_anew() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("a"):
        clock.now += 1.0
    assert timer.drain() == {"a": 1.0, "total": 1.0}
    clock.now += 2.0
    assert timer.drain() == {"total": 2.0}


def test_timing_metrics_carry_their_unit() -> None:
    assert timing_metrics({"generation": 1.5, "total": 2.0}) == {"generation_s": 1.5, "total_s": 2.0}
