"""One refit, seen from the driver.

1. `offload_before_refit`: the policy gives the device back, except its weights. Beside it the engine wakes its weights
   (its KV cache stays asleep: the room belongs to the policy's weights). While it waits for room, the policy releases
   memory to the driver as what it holds leaves. The engine waits for as much more as sending took before, which the
   policy allocates next: where that is missing, torch's allocator releases all that it has cached, which waits for
   copies. With that room the policy fills the first buckets while the engine maps its memory. No more copies out are
   started meanwhile: mapping waits for every one that runs on the GPU. In the first refit it is not known what sending
   takes, so that it waits for the engine.
2. Buckets: while the engine copies bucket i out of one buffer, the policy fills the other with bucket i + 1; a buffer
   is refilled only after the load of what it held has returned. Bucket i + 2 is requested right then, so that the
   policy goes on to it without waiting for this process. Copies out go on once the engine has mapped both buffers. The
   driver gets no memory back meanwhile, which would hold up the next bucket.
3. `finish_refit`: the engine checks that every weight arrived and drops prefixes that the old weights computed.
4. `offload_after_refit`: the policy's weights leave too, until there is room for the engine's share of the device; what
   is then still leaving goes on beside the generation. Beside it the engine wakes its KV cache, at once where there is
   room for it already, else when the policy has made room. The rest leaves once the engine is awake, or after a second,
   should the engine lack room all the same.

Mapping an engine's memory takes the driver's time: that is why it runs beside what the policy does. Nothing of this
can overshoot the device: who wakes waits for memory that is really free.

A failure anywhere is raised at once and ends the refit. The engine then refuses to generate until a refit succeeds.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

from nemo_offload_rl.protocols.engine import GenerationEngine
from nemo_offload_rl.protocols.refit import WeightBucket
from nemo_offload_rl.utils.timer import PhaseTimer
from nemo_offload_rl.weight_sync.errors import RefitError
from nemo_offload_rl.weight_sync.sender import NUM_BUFFERS

logger = logging.getLogger(__name__)

RELEASE_PERIOD_S = 0.01
RELEASE_LATER_S = 1.0

type Request = Callable[[], WeightBucket | None]
"""Waits for a bucket that was requested; None after the last."""


class RefitSource(Protocol):
    """What a refit asks of the policy (all of its ranks)."""

    def offload_before_refit(self) -> object:
        """Leave only what a refit needs on the device."""
        ...

    def release_memory(self, to_driver: bool = True) -> object:
        """Release the memory of what has left by now; with `to_driver`, to it, and let more leave. Does not block."""
        ...

    def offload_after_refit(self, wait_for_all: bool = True) -> object:
        """Leave nothing on the device; waited for until the engine has room, or until all has left."""
        ...

    def finish_leaving(self) -> object:
        """Let the rest leave, and release it; does not block."""
        ...

    def refit_work_bytes(self) -> int:
        """The most that sending took of a device so far, beside the weights; 0 where that is not known."""
        ...

    def start_refit(self) -> object:
        """Begin to gather weights; an unfinished refit is dropped."""
        ...

    def request_bucket(self, starts_copies: bool = True) -> Request:
        """Have every rank fill its next bucket, and with `starts_copies` let more leave; what this returns waits."""
        ...


@dataclass(frozen=True)
class RefitReport:
    """What one refit moved."""

    num_tensors: int
    num_buckets: int
    num_bytes: int


def refit(policy: RefitSource, engine: GenerationEngine, timer: PhaseTimer | None = None) -> RefitReport:
    """Bring the policy's weights into the engine; the file header has the order.

    Args:
        policy: All of its ranks.
        engine: All engines.
        timer: Told of the parts `wake_weights`, `stream` and `wake_kv_cache`; within the first `enter`, within the last
            `leave`, which are the policy's.

    Raises:
        RefitError: A weight is missing, unexpected or of another shape; the names are in the message.
        DeviceMemoryError: The engine found no room in time.
        WorkerDiedError: A policy or engine process ended.
    """
    timer = timer or PhaseTimer()
    pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="refit")
    try:
        with timer.phase("wake_weights"):
            requested = _wake_weights(policy, engine, pool, timer)
        with timer.phase("stream"):
            report, releasing = _stream(policy, engine, pool, requested or _request_first(policy))
            engine.finish_refit()
        with timer.phase("wake_kv_cache"):
            waking = pool.submit(engine.prepare_for_generation, ["kv_cache"])
            with timer.phase("leave"):
                releasing.result()
                policy.offload_after_refit(wait_for_all=False)
            wait([waking], timeout=RELEASE_LATER_S)
            policy.finish_leaving()
            waking.result()
    finally:
        # Not waited for: after an interrupt or a dead worker what runs there may never return by itself.
        pool.shutdown(wait=False, cancel_futures=True)
    logger.debug(
        "Refit: %d tensors, %.3f GiB in %d buckets", report.num_tensors, report.num_bytes / 2**30, report.num_buckets
    )
    return report


def _wake_weights(
    policy: RefitSource, engine: GenerationEngine, pool: ThreadPoolExecutor, timer: PhaseTimer
) -> deque[Request] | None:
    """Wake the engine's weights, and request the first buckets where there is known to be room for them beside that.

    The policy is called until the engine has room: copies that finish release memory only in a call.
    """
    beside_bytes = policy.refit_work_bytes()
    has_room, is_beside = Event(), False

    def wake() -> None:
        nonlocal is_beside
        is_beside = engine.wait_for_room(["weights"], beside_bytes) and beside_bytes > 0
        has_room.set()
        engine.prepare_for_generation(["weights"])

    waking = pool.submit(wake)
    with timer.phase("enter"):
        policy.offload_before_refit()
    while not (has_room.wait(RELEASE_PERIOD_S) or waking.done()):
        policy.release_memory()
    requested = _request_first(policy) if is_beside else None
    waking.result()
    return requested


def _request_first(policy: RefitSource) -> deque[Request]:
    """Begin to send, and request a bucket for each buffer."""
    policy.start_refit()
    return deque(policy.request_bucket(starts_copies=False) for _ in range(NUM_BUFFERS))


def _stream(
    policy: RefitSource, engine: GenerationEngine, pool: ThreadPoolExecutor, requested: deque[Request]
) -> tuple[RefitReport, Future[object]]:
    """All buckets, the first of which were requested; and the policy's last release of memory, which may still run."""
    loading: Future[Request] | None = None
    num_tensors = num_buckets = num_bytes = 0

    def load(bucket: WeightBucket) -> Request:
        engine.load_bucket(bucket)
        # Mapping a buffer, for its first bucket, waits for copies.
        return policy.request_bucket(starts_copies=bucket.index + 1 >= NUM_BUFFERS)

    while True:
        bucket = requested.popleft()()
        if loading is not None:
            requested.append(_result(loading, policy))
        if bucket is None:
            raise RefitError(f"The policy stopped sending after {num_buckets} buckets, before the last one")
        num_tensors += len(bucket.slices)
        num_buckets += 1
        num_bytes += bucket.num_bytes
        if bucket.is_last:
            break
        loading = pool.submit(load, bucket)
    last = pool.submit(engine.load_bucket, bucket)
    releasing = pool.submit(policy.release_memory, to_driver=False)
    both: list[Future[Any]] = [last, releasing]
    wait(both, return_when=FIRST_COMPLETED)
    if releasing.done():
        releasing.result()  # a policy that died explains an engine that waits for it
    _result(last, policy)
    return RefitReport(num_tensors, num_buckets, num_bytes), releasing


def _result[T](loading: Future[T], policy: RefitSource) -> T:
    """Wait for a load. A policy that has died explains one that failed, for want of its buffer."""
    if loading.exception() is not None:
        policy.release_memory(to_driver=False)
    return loading.result()
