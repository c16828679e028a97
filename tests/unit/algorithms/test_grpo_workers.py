"""When engines are started again, and in which order; whole runs with real ones are in tests/functional."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_offload_rl.errors import DeviceMemoryError, WorkerDiedError
from nemo_offload_rl.runs.workers import GrpoWorkers


class Engine:
    """Fails to start as often as it is told to."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._pid = 100
        self.start_errors: list[Exception] = []
        self._raised: list[Exception] = []
        self.group = SimpleNamespace(
            has_raised=lambda error: any(error is each for each in self._raised),
            pids=lambda: [self._pid],
            local_pids=lambda: [self._pid],
        )

    def fail(self, error: Exception) -> Exception:
        self._raised.append(error)
        return error

    def shutdown(self) -> None:
        self._events.append("engine.shutdown")

    def restart(self) -> None:
        self._events.append("engine.restart")
        self._pid += 1

    def wait_until_ready(self) -> None:
        if self.start_errors:
            raise self.fail(self.start_errors.pop(0))

    def finish_generation(self, discard_weights: bool) -> None:
        self._events.append(f"engine.finish_generation {discard_weights}")

    def name_processes(self, names: dict[int, str]) -> None:
        self._events.append(f"engine.name_processes {names}")


class Policy:
    """Writes down what it is asked for."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def pids(self) -> list[int]:
        return [7]

    local_pids = pids

    def abandon_refit(self) -> None:
        self._events.append("policy.abandon_refit")

    def offload_after_refit(self) -> None:
        self._events.append("policy.offload_after_refit")


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def start(events):
    def workers(max_restarts: int) -> Any:
        colocated, vllm_cfg = SimpleNamespace(enabled=True), SimpleNamespace(max_restarts=max_restarts)
        generation = SimpleNamespace(colocated=colocated, vllm_cfg=vllm_cfg)
        cluster = SimpleNamespace(settings=SimpleNamespace(device_type="cpu"))
        made = GrpoWorkers(Policy(events), Engine(events), generation, cluster)  # type: ignore[arg-type]
        events.clear()
        return made

    return workers


def test_the_policy_leaves_the_device_between_the_end_and_the_start_of_the_engine(start, events, caplog):
    workers = start(1)
    no_room = workers.engine.fail(DeviceMemoryError("The engine's weights need 60 GiB to wake, but 40 were free"))
    assert workers.restart_engine(no_room) == {7: "policy", 101: "engine"}
    assert events == [
        "engine.shutdown",
        "policy.abandon_refit",
        "policy.offload_after_refit",
        "engine.restart",
        "engine.finish_generation True",
        "engine.name_processes {7: 'policy worker 0', 101: 'engine 0'}",
    ]
    (warning,) = caplog.messages
    assert re.fullmatch(rf"{no_room}; .* restarts left: 0", warning)


def test_the_error_itself_ends_the_run_once_no_restart_is_left(start, events):
    workers = start(1)
    workers.restart_engine(workers.engine.fail(WorkerDiedError("first")))
    events.clear()
    second = workers.engine.fail(WorkerDiedError("second"))
    with pytest.raises(WorkerDiedError) as raised:
        workers.restart_engine(second)
    assert raised.value is second
    assert not events


def test_a_policy_worker_that_died_is_no_reason_to_start_the_engine_again(start, events):
    workers = start(5)
    workers.engine.fail(WorkerDiedError("vllm worker 0 died"))
    with pytest.raises(WorkerDiedError, match="policy worker 0 died"):
        workers.restart_engine(WorkerDiedError("policy worker 0 died"))
    assert not events


def test_an_engine_that_dies_as_it_starts_takes_another_restart_and_other_errors_end_the_run(start, events):
    workers = start(3)
    workers.engine.start_errors = [WorkerDiedError("died again")]
    workers.restart_engine(workers.engine.fail(WorkerDiedError("died")))
    assert events.count("engine.restart") == 2
    workers.engine.start_errors = [ValueError("no such model")]
    with pytest.raises(ValueError, match="no such model"):
        workers.restart_engine(workers.engine.fail(WorkerDiedError("and again")))
