"""Python's garbage collector in processes with many objects: a full collection holds everything up for a moment.

It goes through all objects that refer to others: without those of imported libraries still 0.1 s, in a policy worker of
30 B parameters (docs/measurements/large-models.md#a-mixture-of-experts-of-30-b-parameters-on-two-gpus).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 1000  # collections of the second generation before a full one; 10 by default


def freeze_objects() -> None:
    """Collect garbage, and let no later collection look at what is there now: imported libraries, mostly."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_objects() -> Iterator[None]:
    """`freeze_objects` for the body alone."""
    freeze_objects()
    try:
        yield
    finally:
        gc.unfreeze()


def collect_garbage() -> None:
    """Collect all garbage now, when nobody waits for this process; full collections at other times become rare."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, RARELY)
    gc.collect()
