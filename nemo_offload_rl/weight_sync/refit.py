"""One refit, seen from the driver.

1. `offload_before_refit`: the policy gives the device back, except its weights. Beside it the engine wakes its weights
   (its KV cache stays asleep: the room belongs to the policy's weights). While it waits for room, the policy releases
   memory to the driver as what it holds leaves. While it maps its own, no more copies out are started: mapping waits
   for every one that runs on the GPU.
2. Buckets: while the engine copies bucket i out of one buffer, the policy fills the other with bucket i + 1; a buffer
   is refilled only after the load of what it held has returned. Bucket i + 2 is requested right then, so that the
   policy goes on to it without waiting for this process. The driver gets no memory back meanwhile, which would hold up
   the next bucket.
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

from nemo_offload_rl.generation.interfaces import GenerationEngine
from nemo_offload_rl.utils.timer import PhaseTimer
from nemo_offload_rl.weight_sync.errors import RefitError
from nemo_offload_rl.weight_sync.interfaces import WeightBucket

logger = logging.getLogger(__name__)

RELEASE_PERIOD_S = 0.01
RELEASE_LATER_S = 1.0


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

    def start_refit(self) -> object:
        """Begin to gather weights; an unfinished refit is dropped."""
        ...

    def request_bucket(self) -> Callable[[], WeightBucket | None]:
        """Have every rank fill its next bucket; what this returns waits for rank 0's, None after the last."""
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
            _wake_weights(policy, engine, pool, timer)
        with timer.phase("stream"):
            report, releasing = _stream(policy, engine, pool)
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


def _wake_weights(policy: RefitSource, engine: GenerationEngine, pool: ThreadPoolExecutor, timer: PhaseTimer) -> None:
    """Call the policy until the engine is awake: copies that finish release memory only in a call."""
    has_room = Event()

    def wake() -> None:
        engine.wait_for_room(["weights"])
        has_room.set()
        engine.prepare_for_generation(["weights"])

    waking = pool.submit(wake)
    with timer.phase("enter"):
        policy.offload_before_refit()
    while not wait([waking], timeout=RELEASE_PERIOD_S).done:
        if not has_room.is_set():
            policy.release_memory()
    waking.result()


def _stream(
    policy: RefitSource, engine: GenerationEngine, pool: ThreadPoolExecutor
) -> tuple[RefitReport, Future[object]]:
    """All buckets; and the policy's last release of memory, which may still run."""
    policy.start_refit()
    requested = deque(policy.request_bucket() for _ in range(2))  # as many as there are buffers
    loading: Future[Callable[[], WeightBucket | None]] | None = None
    num_tensors = num_buckets = num_bytes = 0

    def load(bucket: WeightBucket) -> Callable[[], WeightBucket | None]:
        engine.load_bucket(bucket)
        return policy.request_bucket()

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
