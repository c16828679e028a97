from __future__ import annotations

import threading
from typing import Any

import pytest

from nemo_offload_rl.algorithms.rollout_engine import RolloutEngine
from nemo_offload_rl.errors import DeviceMemoryError, UserError
from nemo_offload_rl.utils.timer import PhaseTimer


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
        assert self.is_free.wait(1500)
        if self._error is not None:
            raise self._error
        self._events.append(f"engine, weights {'dropped' if discard_weights else 'kept'}")


def in_turn(
    policy: Any, engine: Any, *, takes_turns: bool = True, restarts: list[UserError] | None = None
) -> RolloutEngine:
    """With `restarts` any number of restarts is left, and each is noted there."""

    def restart(error: UserError) -> None:
        if restarts is None:
            raise error
        restarts.append(error)

    def bring() -> None:
        policy.prepare_for_lp_inference()

    return RolloutEngine(policy, engine, takes_turns=takes_turns, restart=restart, timer=PhaseTimer(), bring=bring)


def test_engine_and_policy_change_places_in_this_order_beside_the_caller() -> None:
    events: list[str] = []
    engine = Engine(events)
    both = in_turn(Policy(events), engine)
    both.start_handover()
    both.start_handover()  # once in a step
    events.append("caller")  # the engine cannot be done: its memory is not free yet
    engine.is_free.set()
    both.wait_for_sleep()
    both.wait_for_policy()
    assert events == ["caller", "engine, weights dropped", "policy"]


def test_without_an_engine_that_shares_the_device_the_policy_comes_at_once() -> None:
    events: list[str] = []
    both = in_turn(Policy(events), Engine(events), takes_turns=False)
    both.start_handover()
    both.wait_for_sleep()
    both.wait_for_policy()
    assert events == ["policy"]


def test_an_engine_that_does_not_sleep_raises_while_no_restart_is_left_and_the_policy_does_not_come() -> None:
    events: list[str] = []
    engine = Engine(events, DeviceMemoryError("no room"))
    both = in_turn(Policy(events), engine)
    both.start_handover()
    engine.is_free.set()
    with pytest.raises(DeviceMemoryError, match="no room"):
        both.wait_for_sleep()
    with pytest.raises(DeviceMemoryError, match="no room"):
        both.wait_for_policy()
    assert events == []


def test_the_policy_comes_after_the_restart_of_an_engine_that_did_not_sleep() -> None:
    events: list[str] = []
    restarts: list[UserError] = []
    engine = Engine(events, DeviceMemoryError("no room"))
    both = in_turn(Policy(events), engine, restarts=restarts)
    both.start_handover()
    engine.is_free.set()
    both.wait_for_sleep()
    both.wait_for_policy()
    assert [str(error) for error in restarts] == ["no room"]
    assert events == ["policy"]


def test_what_keeps_the_policy_away_is_raised_when_the_policy_is_waited_for() -> None:
    events: list[str] = []
    both = in_turn(Policy(events, ZeroDivisionError("policy")), Engine(events), takes_turns=False)
    both.start_handover()
    both.wait_for_sleep()
    with pytest.raises(ZeroDivisionError, match="policy"):
        both.wait_for_policy()
