"""Runs one refit from the process that drives policy and engine; docs/design/refit.md has the reasons.

1. `offload_before_refit`: the policy's state leaves the device, except its weights and what the plan keeps there, and
   its memory is released as copies finish. Meanwhile the engine waits for room for its weights, plus the memory that
   sending took in earlier refits. With that room, the policy fills the first buckets while the engine maps its memory.
   It starts no more copies out then, because mapping waits for running ones.
2. Buckets: while the engine copies bucket i out of one buffer, the policy fills the other with bucket i + 1. A buffer
   is refilled only after the load of its bucket has returned. Bucket i + 2 is requested right then. Copies out continue
   once the engine has mapped both buffers. No memory is released to the CUDA driver, because that would delay buckets.
3. `finish_refit`: the engine checks that every weight arrived and drops prefixes computed with the old weights.
4. `offload_after_refit`: the policy's weights leave too, until there is room for the engine's share. Meanwhile the
   engine wakes its KV cache. The rest leaves during generation, once the engine is awake or after a second.

An engine waits for memory that is really free, so it cannot exceed the device's. A failure anywhere is raised at once
and ends the refit. The engine then refuses to generate until a refit succeeds.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

from nemo_offload_rl.protocols.engine import GenerationEngine
from nemo_offload_rl.protocols.refit import RefitError, WeightBucket
from nemo_offload_rl.utils.timer import PhaseTimer
from nemo_offload_rl.weight_sync.sender import NUM_BUFFERS

logger = logging.getLogger(__name__)

RELEASE_PERIOD_S = 0.01
RELEASE_LATER_S = 1.0

type Request = Callable[[], WeightBucket | None]
"""Waits for the requested bucket; returns None after the last."""


class RefitSource(Protocol):
    """All ranks of the policy, as a refit uses them."""

    def offload_before_refit(self) -> object:
        """Offload state, but keep the weights on the device."""
        ...

    def release_memory(self, to_driver: bool = True) -> object:
        """Release the memory of finished copies. With `to_driver`, also release it to the driver and start more."""
        ...

    def offload_after_refit(self, wait_for_all: bool = True) -> object:
        """Offload all state; wait until the engine has room or, with `wait_for_all`, until all has left."""
        ...

    def finish_leaving(self) -> object:
        """Have every rank finish the remaining copies and release their memory; returns without waiting for them."""
        ...

    def refit_work_bytes(self) -> int:
        """Peak bytes of a device that sending took so far in addition to the weights; 0 if unknown."""
        ...

    def start_refit(self) -> object:
        """Start to gather weights; an unfinished refit is dropped."""
        ...

    def request_bucket(self, starts_copies: bool = True) -> Request:
        """Have every rank fill its next bucket; with `starts_copies`, also start more copies out. Does not wait."""
        ...


@dataclass(frozen=True)
class RefitReport:
    """Totals of one refit."""

    num_tensors: int
    num_buckets: int
    num_bytes: int


def refit(
    policy: RefitSource, engine: GenerationEngine, timer: PhaseTimer | None = None, *, version: int = 0
) -> RefitReport:
    """Bring the policy's weights into the engine, in the order of the module docstring.

    Args:
        policy: All ranks of the policy.
        engine: All engines.
        timer: Times `wake_weights` (with `enter`, the policy's part), `stream` and `wake_kv_cache` (with `leave`).
        version: Number of the weights, see `GenerationEngine.finish_refit`.

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
            engine.finish_refit(version)
        with timer.phase("wake_kv_cache"):
            waking = pool.submit(engine.prepare_for_generation, ["kv_cache"])
            with timer.phase("leave"):
                releasing.result()
                policy.offload_after_refit(wait_for_all=False)
            wait([waking], timeout=RELEASE_LATER_S)
            policy.finish_leaving()
            waking.result()
    finally:
        # Does not wait: after an interrupt or the death of a worker, calls in the pool may never return.
        pool.shutdown(wait=False, cancel_futures=True)
    logger.debug(
        "Refit: %d tensors, %.3f GiB in %d buckets", report.num_tensors, report.num_bytes / 2**30, report.num_buckets
    )
    return report


def _wake_weights(
    policy: RefitSource, engine: GenerationEngine, pool: ThreadPoolExecutor, timer: PhaseTimer
) -> deque[Request] | None:
    """Wake the engine's weights; meanwhile request the first buckets if the device is known to have room for them.

    Calls the policy until the engine has room, because finished copies release their memory only during a call.
    """
    extra_bytes = policy.refit_work_bytes()
    has_room, has_extra = Event(), False

    def wake() -> None:
        nonlocal has_extra
        has_extra = engine.wait_for_room(["weights"], extra_bytes) and extra_bytes > 0
        has_room.set()
        engine.prepare_for_generation(["weights"])

    waking = pool.submit(wake)
    with timer.phase("enter"):
        policy.offload_before_refit()
    while not (has_room.wait(RELEASE_PERIOD_S) or waking.done()):
        policy.release_memory()
    requested = _request_first(policy) if has_extra else None
    waking.result()
    return requested


def _request_first(policy: RefitSource) -> deque[Request]:
    policy.start_refit()
    return deque(policy.request_bucket(starts_copies=False) for _ in range(NUM_BUFFERS))


def _stream(
    policy: RefitSource, engine: GenerationEngine, pool: ThreadPoolExecutor, requested: deque[Request]
) -> tuple[RefitReport, Future[object]]:
    """Load all buckets; also return the policy's last release of memory, which may still be running."""
    loading: Future[Request] | None = None
    num_tensors = num_buckets = num_bytes = 0

    def load(bucket: WeightBucket) -> Request:
        engine.load_bucket(bucket)
        # Loading a buffer's first bucket maps the buffer, which waits for running copies.
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
        releasing.result()  # raises if the policy died and the engine waits for it
    _result(last, policy)
    return RefitReport(num_tensors, num_buckets, num_bytes), releasing


def _result[T](loading: Future[T], policy: RefitSource) -> T:
    """Wait for a load. If it failed because the policy died, raise the policy's error."""
    if loading.exception() is not None:
        policy.release_memory(to_driver=False)
    return loading.result()
