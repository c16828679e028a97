"""A worker's passes over micro-batches, beside the copies that residency has under way."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nemo_offload_rl.data.batch import TokenBatch
from nemo_offload_rl.policy.memory_history import explain_out_of_memory
from nemo_offload_rl.residency import DeviceOutOfMemoryError, Phase, ResidencyManager

logger = logging.getLogger(__name__)

MANY_MICRO_BATCHES = 8


class Passes:
    """Runs passes so that what was prefetched takes no memory that a pass needs.

    Before a pass of more tokens than any before it, prefetched state is evicted if there may be no room for both. A
    single rank that runs out of memory anyway runs the pass once more without that state. Several ranks cannot: the
    others wait in a collective of the pass that failed.

    Args:
        residency: The rank's state.
        is_alone: Passes have no collectives with other ranks.
    """

    def __init__(self, residency: ResidencyManager, *, is_alone: bool) -> None:
        self._residency = residency
        self._is_alone = is_alone

    def run[Batch: TokenBatch, Result](
        self,
        micro_batches: Sequence[Batch],
        run: Callable[[Sequence[Batch]], Result],
        after_failure: Callable[[], None] = lambda: None,
    ) -> Result:
        """`run(micro_batches)`, perhaps twice.

        Args:
            micro_batches: What the pass goes over.
            run: The pass.
            after_failure: Undoes what a failed pass has left behind, before it is run again.
        """
        self._residency.expect_work(max((batch.input_ids.numel() for batch in micro_batches), default=0))
        try:
            with explain_out_of_memory(self._residency):
                return run(micro_batches)
        except (torch.OutOfMemoryError, DeviceOutOfMemoryError) as error:
            if not self._is_alone:
                raise
            after_failure()
            num_bytes = self._residency.evict()
            if not num_bytes:
                raise
            phase = self._residency.phase.value if self._residency.phase else "start"
            logger.warning(
                "out of memory in a pass of phase %s (%s); it is run again without %.2f GiB on the device that it does "
                "not read",
                phase,
                " ".join(str(error).split())[:200],
                num_bytes / 2**30,
            )
        # Outside of the handler: the error's traceback holds the failed pass's tensors.
        gc.collect()
        with explain_out_of_memory(self._residency):
            return run(micro_batches)


@dataclass(frozen=True)
class TrainingPace:
    """What residency does between the micro-batches of a training pass.

    Attributes:
        residency: The rank's state.
        num_micro_batches: Of the pass.
    """

    residency: ResidencyManager
    num_micro_batches: int

    def before_micro_batch(self, index: int) -> None:
        """Release what has left by now, and prefetch what the optimizer step needs. Does not block.

        The first micro-batch leaves most time for the copies. But the device has no work then, and waits while the host
        allocates their memory (0.25 s for 76 GiB on an H200): of many micro-batches the second is early enough. What
        has no room beside copies that are still leaving comes before the last.
        """
        first = 1 if self.num_micro_batches >= MANY_MICRO_BATCHES else 0
        if index in (first, self.num_micro_batches - 1):
            # First: what is still there need not come again.
            self.residency.prefetch(Phase.OPTIM_STEP)
        self.residency.release_finished()
