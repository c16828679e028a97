from __future__ import annotations

import threading

import pytest

from nemo_offload_rl.algorithms.hand_back import HandBack
from nemo_offload_rl.errors import DeviceMemoryError


class Policy:
    """Writes down that it came; may fail."""

    def __init__(self, events: list[str], error: Exception | None = None) -> None:
        self._events = events
        self._error = error

    def prepare_for_lp_inference(self) -> None:
        self._events.append("policy")
        if self._error is not None:
            raise self._error


class Engine:
    """Sleeps once it is told that its memory is free; may fail instead."""

    def __init__(self, events: list[str], error: Exception | None = None) -> None:
        self._events = events
        self._error = error
        self.is_free = threading.Event()

    def finish_generation(self, discard_weights: bool) -> None:
        assert self.is_free.wait(60)
        if self._error is not None:
            raise self._error
        self._events.append(f"engine, weights {'dropped' if discard_weights else 'kept'}")


def test_engine_and_policy_change_places_in_this_order_beside_the_caller() -> None:
    events: list[str] = []
    engine = Engine(events)
    hand_back = HandBack(Policy(events), engine)  # pyright: ignore[reportArgumentType]
    events.append("caller")  # the engine cannot be done: nobody has told it
    engine.is_free.set()
    hand_back.wait_for_engine()
    hand_back.wait_for_policy()
    assert events == ["caller", "engine, weights dropped", "policy"]


def test_without_an_engine_that_shares_the_device_the_policy_comes_at_once() -> None:
    events: list[str] = []
    hand_back = HandBack(Policy(events), None)
    hand_back.wait_for_engine()
    hand_back.wait_for_policy()
    assert events == ["policy"]


def test_an_engine_that_does_not_sleep_is_told_of_and_the_policy_does_not_come() -> None:
    events: list[str] = []
    engine = Engine(events, DeviceMemoryError("no room"))
    hand_back = HandBack(Policy(events), engine)  # pyright: ignore[reportArgumentType]
    engine.is_free.set()
    with pytest.raises(DeviceMemoryError, match="no room"):
        hand_back.wait_for_engine()
    with pytest.raises(DeviceMemoryError, match="no room"):
        hand_back.wait_for_policy()
    assert events == []


def test_what_keeps_the_policy_away_is_told_when_the_policy_is_waited_for() -> None:
    events: list[str] = []
    hand_back = HandBack(Policy(events, ZeroDivisionError("policy")), None)
    hand_back.wait_for_engine()
    with pytest.raises(ZeroDivisionError, match="policy"):
        hand_back.wait_for_policy()
