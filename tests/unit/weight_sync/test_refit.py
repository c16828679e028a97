from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nemo_offload_rl.errors import DeviceMemoryError
from nemo_offload_rl.protocols.backend import WeightSpec
from nemo_offload_rl.protocols.refit import RefitError, WeightBucket
from nemo_offload_rl.utils.timer import PhaseTimer
from nemo_offload_rl.weight_sync.refit import RELEASE_PERIOD_S, refit
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender

TENSORS = {str(i): torch.full((100,), float(i)) for i in range(5)}


class Policy:
    """Sends `TENSORS` one by one and writes down what happened."""

    def __init__(self, events: list[str], fail_at: int | None = None, stop_at: int | None = None) -> None:
        specs = [WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]
        self._sender = SharedMemorySender(specs, 400)
        self._events = events
        self._fail_at = fail_at
        self._stop_at = stop_at
        self.filled = [threading.Event() for _ in TENSORS]
        self.released = threading.Semaphore(0)
        self.released_after: set[int] = set()  # so many buckets
        self.released_to_driver: list[bool] = []
        self.released_at_the_end = threading.Event()
        self._index = 0
        self.num_requested = 0
        self.starts_copies: list[bool] = []
        self.work_bytes = 0
        self._thread = ThreadPoolExecutor(max_workers=1)  # one bucket after the other, as a worker fills them

    def offload_before_refit(self) -> None:
        self._events.append("offload_before_refit")

    def release_memory(self, to_driver: bool = True) -> None:
        self.released.release()
        self.released_after.add(self._index)
        self.released_to_driver.append(to_driver)
        if self._index == len(TENSORS):
            self.released_at_the_end.set()

    def offload_after_refit(self, wait_for_all: bool = True) -> None:
        self._events.append("offload_after_refit" + ", all" * wait_for_all)

    def finish_leaving(self) -> None:
        self._events.append("finish_leaving")

    def refit_work_bytes(self) -> int:
        return self.work_bytes

    def start_refit(self) -> None:
        self._events.append("start_refit")
        self._index = self.num_requested = 0
        self._sender.start(iter(TENSORS.items()))

    def request_bucket(self, starts_copies: bool = True) -> Callable[[], WeightBucket | None]:
        self.num_requested += 1
        self.starts_copies.append(starts_copies)
        return self._thread.submit(self.fill).result

    def fill(self) -> WeightBucket | None:
        if self._index == self._fail_at:
            raise ZeroDivisionError("policy")
        if self._index == self._stop_at:
            return None
        if (bucket := self._sender.next_bucket()) is None:
            return None
        self.filled[self._index].set()
        self._index += 1
        return bucket


class Engine:
    """Copies buckets, each only after the policy has filled the next one; the last after it has handed over memory."""

    def __init__(self, events: list[str], policy: Policy, fail_at: int | None = None) -> None:
        self._events = events
        self._policy = policy
        self._fail_at = fail_at
        self._receiver = SharedMemoryReceiver()
        self.loaded: dict[str, torch.Tensor] = {}

    def wait_for_room(self, tags: Sequence[str], extra_bytes: int = 0) -> bool:
        return True

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        self._events.append(f"wake {tags}")

    def load_bucket(self, bucket: WeightBucket) -> None:
        if bucket.index == self._fail_at:
            raise ConnectionError("engine")
        if bucket.is_last:
            assert self._policy.released_at_the_end.wait(1500), "memory was not released during the last load"
        else:
            assert self._policy.filled[bucket.index + 1].wait(1500), "the next bucket was not filled during the load"
        self.loaded |= {name: tensor.clone() for name, tensor in self._receiver.tensors(bucket)}

    def finish_refit(self, version: int = 0) -> None:
        self._events.append("finish_refit")


def test_a_refit_has_one_order_and_fills_the_next_bucket_while_the_engine_copies_the_present_one() -> None:
    events: list[str] = []
    policy = Policy(events)
    engine = Engine(events, policy)
    report = refit(policy, engine)  # type: ignore[arg-type]
    assert set(events[:2]) == {"offload_before_refit", "wake ['weights']"}
    assert events[2:4] == ["start_refit", "finish_refit"]
    assert set(events[4:6]) == {"offload_after_refit", "wake ['kv_cache']"}
    assert events[6:] == ["finish_leaving"]
    assert {name: tensor.tolist() for name, tensor in engine.loaded.items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }
    assert (report.num_tensors, report.num_buckets, report.num_bytes) == (5, 5, 2000)
    # Giving memory back holds up the policy, and a bucket that is not filled the engine.
    assert policy.released_after <= {0, 5}


def test_the_bucket_after_next_is_requested_once_a_load_has_returned_and_before_the_next_is_filled() -> None:
    requested = threading.Semaphore(0)
    num_loaded = 0

    class AskedPolicy(Policy):
        def request_bucket(self, starts_copies: bool = True) -> Callable[[], WeightBucket | None]:
            assert self.num_requested < 2 + num_loaded, "a buffer was to be filled before its load had returned"
            wait_for_it = super().request_bucket(starts_copies)
            requested.release()
            return wait_for_it

        def fill(self) -> WeightBucket | None:
            # Bucket i is filled while i + 1 has been requested, by a load that returned before bucket i was told of.
            index = self._index
            if index < len(TENSORS) - 1:
                assert self.wait_for_requests(index + 2), f"bucket {index + 1} was not requested beside bucket {index}"
            return super().fill()

        def wait_for_requests(self, num: int) -> bool:
            while self.num_requested < num:
                if not requested.acquire(timeout=1500):
                    return False
            return True

    class QuickEngine(Engine):
        def load_bucket(self, bucket: WeightBucket) -> None:
            nonlocal num_loaded
            self.loaded |= {name: tensor.clone() for name, tensor in self._receiver.tensors(bucket)}
            num_loaded += 1

    policy = AskedPolicy([])
    engine = QuickEngine([], policy)
    assert refit(policy, engine).num_buckets == len(TENSORS)  # type: ignore[arg-type]
    assert set(engine.loaded) == set(TENSORS)


def test_the_policy_leaves_while_the_engine_wakes_and_the_parts_are_timed() -> None:
    both = threading.Barrier(2)  # passed by two at a time, or not at all

    class LeavingPolicy(Policy):
        def offload_before_refit(self) -> None:
            both.wait(1500)

        def offload_after_refit(self, wait_for_all: bool = True) -> None:
            both.wait(1500)

    class WakingEngine(Engine):
        def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
            both.wait(1500)

    policy = LeavingPolicy([])
    timer = PhaseTimer()
    refit(policy, WakingEngine([], policy), timer)  # type: ignore[arg-type]
    assert set(timer.seconds()) == {
        "wake_weights",
        "wake_weights/enter",
        "stream",
        "wake_kv_cache",
        "wake_kv_cache/leave",
        "total",
    }


def test_the_first_buckets_are_filled_while_the_engine_maps_its_weights_and_its_wait_counts_what_they_take() -> None:
    class MappingEngine(Engine):
        extra_bytes: int | None = None

        def wait_for_room(self, tags: Sequence[str], extra_bytes: int = 0) -> bool:
            self.extra_bytes = extra_bytes
            return super().wait_for_room(tags, extra_bytes)

        def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
            if tags == ["weights"]:
                assert all(filled.wait(1500) for filled in self._policy.filled[:2]), "no bucket was filled beside it"
            super().prepare_for_generation(tags)

    events: list[str] = []
    policy = Policy(events)
    policy.work_bytes = 100
    engine = MappingEngine(events, policy)
    assert refit(policy, engine).num_buckets == len(TENSORS)  # type: ignore[arg-type]
    assert engine.extra_bytes == 100
    assert set(engine.loaded) == set(TENSORS)
    assert events[:3] == ["offload_before_refit", "start_refit", "wake ['weights']"]
    assert events.count("start_refit") == 1


def test_no_bucket_is_filled_before_the_engine_is_awake_where_there_is_no_room_for_both() -> None:
    class CrowdedEngine(Engine):
        def wait_for_room(self, tags: Sequence[str], extra_bytes: int = 0) -> bool:
            return False

    events: list[str] = []
    policy = Policy(events)
    policy.work_bytes = 100
    assert refit(policy, CrowdedEngine(events, policy)).num_buckets == len(TENSORS)  # type: ignore[arg-type]
    assert events.index("wake ['weights']") < events.index("start_refit")


@pytest.mark.parametrize("work_bytes", [0, 100])
def test_copies_out_start_again_once_the_engine_has_loaded_from_both_buffers(work_bytes: int) -> None:
    policy = Policy([])
    policy.work_bytes = work_bytes
    refit(policy, Engine([], policy))  # type: ignore[arg-type]
    # The third bucket is requested after the first load. The last request finds that there are no more.
    assert policy.starts_copies == [False] * 3 + [True] * (len(TENSORS) + 1 - 3)


class WaitingEngine(Engine):
    """Its weights find room once the policy has released memory three times; mapping them takes a while."""

    num_when_mapped = 0

    def wait_for_room(self, tags: Sequence[str], extra_bytes: int = 0) -> bool:
        for _ in range(3):
            assert self._policy.released.acquire(timeout=1500), "no memory was released"
        return True

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        if tags == ["weights"]:
            time.sleep(10 * RELEASE_PERIOD_S)
            self.num_when_mapped = len(self._policy.released_to_driver)
        super().prepare_for_generation(tags)


def test_the_policy_lets_more_leave_while_the_engine_waits_for_room_and_not_while_it_maps_its_own() -> None:
    events: list[str] = []
    policy = Policy(events)
    engine = WaitingEngine(events, policy)
    refit(policy, engine)  # type: ignore[arg-type]
    assert events.index("wake ['weights']") < events.index("start_refit")
    assert engine.num_when_mapped in (3, 4)  # the fourth may have been asked for before there was room
    assert all(policy.released_to_driver[: engine.num_when_mapped])
    assert policy.released_to_driver[engine.num_when_mapped :] == [False]  # beside the last load
    assert set(engine.loaded) == set(TENSORS)


def test_an_engine_that_lacks_room_for_its_kv_cache_all_the_same_gets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_offload_rl.weight_sync.refit.RELEASE_LATER_S", 0.05)
    released = threading.Event()

    class LastPolicy(Policy):
        def finish_leaving(self) -> None:
            released.set()

    class CrowdedEngine(Engine):
        def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
            assert tags == ["weights"] or released.wait(1500), "the rest was not released"

    policy = LastPolicy([])
    assert refit(policy, CrowdedEngine([], policy)).num_buckets == len(TENSORS)  # type: ignore[arg-type]


def test_an_engine_that_finds_no_room_for_its_weights_ends_the_refit_before_it_begins() -> None:
    class FullEngine(Engine):
        def wait_for_room(self, tags: Sequence[str], extra_bytes: int = 0) -> bool:
            raise DeviceMemoryError("no room")

    events: list[str] = []
    policy = Policy(events)
    with pytest.raises(DeviceMemoryError, match="no room"):
        refit(policy, FullEngine(events, policy))  # type: ignore[arg-type]
    assert events == ["offload_before_refit"]


@pytest.mark.parametrize("index", [0, 2, 4])
def test_a_failure_of_the_engine_ends_the_refit_before_it_is_finished(index: int) -> None:
    events: list[str] = []
    policy = Policy(events)
    with pytest.raises(ConnectionError, match="engine"):
        refit(policy, Engine(events, policy, fail_at=index))  # type: ignore[arg-type]
    assert events[-1] == "start_refit"


@pytest.mark.parametrize("index", [0, 2])
def test_a_failure_of_the_policy_ends_the_refit_before_it_is_finished(index: int) -> None:
    events: list[str] = []
    policy = Policy(events, fail_at=index)
    for event in policy.filled:
        event.set()
    with pytest.raises(ZeroDivisionError, match="policy"):
        refit(policy, Engine(events, policy))  # type: ignore[arg-type]
    assert events[-1] == "start_refit"


def test_a_failure_to_release_memory_beside_the_last_load_is_not_kept_for_after_it() -> None:
    told = threading.Event()

    class WaitingForThePolicy(Engine):
        def load_bucket(self, bucket: WeightBucket) -> None:
            super().load_bucket(bucket)
            assert not bucket.is_last or told.wait(1500), "the load had to end first"

    class KeepingPolicy(Policy):
        def release_memory(self, to_driver: bool = True) -> None:
            super().release_memory(to_driver)
            if self._index == len(TENSORS):
                raise ZeroDivisionError("policy")

    events: list[str] = []
    policy = KeepingPolicy(events)
    with pytest.raises(ZeroDivisionError, match="policy"):
        refit(policy, WaitingForThePolicy(events, policy))  # type: ignore[arg-type]
    told.set()
    assert events[-1] == "start_refit"


def test_a_policy_that_died_explains_a_last_load_that_failed_before_its_death_was_known() -> None:
    load_failed = threading.Event()

    class DyingPolicy(Policy):
        def release_memory(self, to_driver: bool = True) -> None:
            super().release_memory(to_driver)
            if self._index == len(TENSORS):
                assert load_failed.wait(1500)
                raise ZeroDivisionError("policy")

    class FailingEngine(Engine):
        def load_bucket(self, bucket: WeightBucket) -> None:
            super().load_bucket(bucket)
            if bucket.is_last:
                threading.Timer(0.2, load_failed.set).start()
                raise RefitError("no buffer")

    events: list[str] = []
    policy = DyingPolicy(events)
    with pytest.raises(ZeroDivisionError, match="policy"):
        refit(policy, FailingEngine(events, policy))  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [1, len(TENSORS) - 1])
def test_a_policy_that_died_after_all_its_calls_explains_a_load_that_failed(index: int) -> None:
    class DeadPolicy(Policy):
        is_dead = False

        def release_memory(self, to_driver: bool = True) -> None:
            if self.is_dead:
                raise ZeroDivisionError("policy")
            super().release_memory(to_driver)

    class FailingEngine(Engine):
        def load_bucket(self, bucket: WeightBucket) -> None:
            super().load_bucket(bucket)
            if bucket.index == index:
                self._policy.is_dead = True  # type: ignore[attr-defined]
                raise RefitError("no buffer")

    events: list[str] = []
    policy = DeadPolicy(events)
    with pytest.raises(ZeroDivisionError, match="policy"):
        refit(policy, FailingEngine(events, policy))  # type: ignore[arg-type]


def test_a_policy_that_stops_early_is_not_taken_for_a_refit() -> None:
    events: list[str] = []
    policy = Policy(events, stop_at=3)
    for event in policy.filled:
        event.set()
    with pytest.raises(RefitError, match="stopped sending after 3 buckets"):
        refit(policy, Engine(events, policy))  # type: ignore[arg-type]
    assert events[-1] == "start_refit"
