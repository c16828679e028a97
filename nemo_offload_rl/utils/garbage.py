"""Python's garbage collector in processes with many objects, where a full collection stops everything for a moment.

It visits all objects that refer to others: 0.1 s in a policy worker of 30 B parameters, even without the objects of
imported libraries (docs/measurements/two-gpus.md#a-mixture-of-experts-of-30-b-parameters-on-two-gpus).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 1000  # collections of the second generation before a full one; 10 by default


def freeze_objects() -> None:
    """Collect garbage, and exclude all present objects, mostly of imported libraries, from later collections."""
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
    """Collect all garbage at an idle moment, and make full collections at other times rare."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, RARELY)
    gc.collect()
