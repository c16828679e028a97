"""One refit, seen from the driver.

1. `offload_before_refit`: the policy gives the device back, except its weights.
2. The engine wakes its weights (its KV cache stays asleep: the room belongs to the policy's weights). Where it has to
   wait for room, the policy hands over memory as what it holds leaves.
3. Buckets: while the engine copies bucket i out of one buffer, the policy fills the other with bucket i + 1; a buffer
   is refilled only after the load of what it held has returned.
4. `finish_refit`: the engine checks that every weight arrived and drops prefixes that the old weights computed.
5. `offload_after_refit`: the policy's weights leave too.
6. The engine wakes its KV cache.

A failure anywhere is raised at once and ends the refit. The engine then refuses to generate until a refit succeeds.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from nemo_offload_rl.generation.interfaces import GenerationEngine
from nemo_offload_rl.weight_sync.errors import RefitError
from nemo_offload_rl.weight_sync.interfaces import WeightBucket

logger = logging.getLogger(__name__)

HAND_OVER_PERIOD_S = 0.01


class RefitSource(Protocol):
    """What a refit asks of the policy (all of its ranks)."""

    def offload_before_refit(self) -> object:
        """Leave only what a refit needs on the device."""
        ...

    def hand_over_memory(self) -> object:
        """Give the driver the memory of what has left by now; does not block."""
        ...

    def offload_after_refit(self) -> object:
        """Leave nothing on the device."""
        ...

    def start_refit(self) -> object:
        """Begin to gather weights; an unfinished refit is dropped."""
        ...

    def next_bucket(self) -> WeightBucket | None:
        """Rank 0's next bucket, or None after the last; every rank takes part."""
        ...


@dataclass(frozen=True)
class RefitReport:
    """What one refit moved. `stream_s` is the part in which buckets were filled and loaded."""

    num_tensors: int
    num_buckets: int
    num_bytes: int
    stream_s: float
    total_s: float


def refit(policy: RefitSource, engine: GenerationEngine) -> RefitReport:
    """Bring the policy's weights into the engine; the file header has the order.

    Raises:
        RefitError: A weight is missing, unexpected or of another shape; the names are in the message.
        WorkerDiedError: A policy or engine process ended.
    """
    begin_s = time.perf_counter()
    policy.offload_before_refit()
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="refit")
    try:
        _wake_weights(policy, engine, pool)
        stream_begin_s = time.perf_counter()
        num_tensors, num_buckets, num_bytes = _stream(policy, engine, pool)
        stream_s = time.perf_counter() - stream_begin_s
    finally:
        # Not waited for: after an interrupt or a dead worker what runs there may never return by itself.
        pool.shutdown(wait=False, cancel_futures=True)
    engine.finish_refit()
    policy.offload_after_refit()
    engine.prepare_for_generation(["kv_cache"])
    report = RefitReport(num_tensors, num_buckets, num_bytes, stream_s, time.perf_counter() - begin_s)
    logger.debug(
        "Refit: %d tensors, %.3f GiB in %d buckets, %.2f s of which %.2f s streaming",
        report.num_tensors,
        report.num_bytes / 2**30,
        report.num_buckets,
        report.total_s,
        report.stream_s,
    )
    return report


def _wake_weights(policy: RefitSource, engine: GenerationEngine, pool: ThreadPoolExecutor) -> None:
    """The policy's copies free nothing unless it looks whether they have finished, and the engine may be waiting."""
    waking = pool.submit(engine.prepare_for_generation, ["weights"])
    while not wait([waking], timeout=HAND_OVER_PERIOD_S).done:
        policy.hand_over_memory()
    waking.result()


def _stream(policy: RefitSource, engine: GenerationEngine, pool: ThreadPoolExecutor) -> tuple[int, int, int]:
    policy.start_refit()
    num_tensors = num_buckets = num_bytes = 0
    ended = False
    bucket = policy.next_bucket()
    while bucket is not None:
        loading = pool.submit(engine.load_bucket, bucket)
        num_tensors += len(bucket.slices)
        num_buckets += 1
        num_bytes += bucket.num_bytes
        ended = bucket.is_last
        bucket = policy.next_bucket()
        loading.result()
    if not ended:
        raise RefitError(f"The policy stopped sending after {num_buckets} buckets, before the last one")
    return num_tensors, num_buckets, num_bytes
