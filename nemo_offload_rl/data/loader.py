"""A shuffled loader that can stop and go on, over one data set or several in fixed proportions.

The order depends on the seed and the epoch's number alone. An epoch of a mixture is as many rows as all data sets have
together. Each data set gives its share of them, spread evenly, and goes on where it stopped in the epoch before: a
small one is gone through several times, newly shuffled each time, before a large one was seen once.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NotRequired, Protocol, TypedDict

from nemo_offload_rl.data.records import Part
from nemo_offload_rl.errors import DataError

_START_ANEW = "or another checkpointing.checkpoint_dir to start anew"


class LoaderState(TypedDict):
    """Position of a loader; plain numbers, so that any checkpoint format can hold it."""

    epoch: int
    position: int
    seed: int
    num_items: int
    shuffle: NotRequired[bool]
    parts: NotRequired[list[list[float]]]  # of a mixture: rows and weight of each data set
    digest: NotRequired[str]


class BatchLoader[T](Protocol):
    """Batches, and where in them a run stands."""

    def __iter__(self) -> Iterator[list[T]]:
        """The batches that are left."""
        ...

    @property
    def num_batches_left(self) -> int:
        """Batches to come; `sys.maxsize` if there is no last one."""
        ...

    def state_dict(self) -> LoaderState:
        """The position, from which `load_state_dict` goes on."""
        ...

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on where `state` was taken."""
        ...


class ShuffledLoader[T]:
    """Batches of a fixed size; items that are left at the end of an epoch, fewer than a batch, are skipped in it.

    Args:
        items: Kept, not copied.
        batch_size: Items of a batch.
        shuffle: False keeps the order of `items` in every epoch.
        seed: Seed of the order.
        parts: Of a mixture: its runs of `items`; () draws every item once an epoch.
        num_epochs: Epochs after which the batches end; None for no end.
        digest: Of the items, as `digest_of_lengths` gives it, for the state; "" if unused.
        batch_size_key: The key that sets `batch_size`, for messages.

    Raises:
        DataError: There are fewer items than one batch.
    """

    def __init__(
        self,
        items: Sequence[T],
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        parts: Sequence[Part] = (),
        num_epochs: int | None = None,
        digest: str = "",
        batch_size_key: str = "batch_size",
    ) -> None:
        if len(items) < batch_size:
            raise DataError(
                f"data.train has {len(items)} rows to train on and one batch needs {batch_size}; add rows, or lower "
                f"{batch_size_key}"
            )
        self._items = items
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._parts = parts
        self._num_epochs = num_epochs
        self._digest = digest
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        if self.num_batches_left == 0:
            raise StopIteration
        if self._position + self._batch_size > len(self._items):
            self._epoch += 1
            self._position = 0
            self._order = self._epoch_order()
        rows = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return [self._items[row] for row in rows]

    @property
    def num_batches_left(self) -> int:
        """See `BatchLoader`."""
        if self._num_epochs is None:
            return sys.maxsize
        in_this_epoch = (len(self._items) - self._position) // self._batch_size
        per_epoch = len(self._items) // self._batch_size
        return max(0, in_this_epoch + (self._num_epochs - self._epoch - 1) * per_epoch)

    def state_dict(self) -> LoaderState:
        """See `BatchLoader`."""
        return LoaderState(
            epoch=self._epoch,
            position=self._position,
            seed=self._seed,
            num_items=len(self._items),
            shuffle=self._shuffle,
            parts=[[part.num_items, part.weight] for part in self._parts],
            digest=self._digest,
        )

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on where `state` was taken; the batch size and the weights of a mixture may differ.

        Raises:
            DataError: The state was taken from data of another size, seed, order or other parts.
        """
        if state["num_items"] != len(self._items) or state["seed"] != self._seed:
            raise DataError(
                f"the checkpoint stopped in a data set of {state['num_items']} rows shuffled with seed "
                f"{state['seed']}, this one has {len(self._items)} rows and seed {self._seed}; use the same data, "
                f"{_START_ANEW}"
            )
        if state.get("shuffle", self._shuffle) != self._shuffle:
            raise DataError(
                f"the checkpoint stopped in data of data.shuffle={str(not self._shuffle).lower()}, and this run has "
                f"{str(self._shuffle).lower()}, so that rows would be repeated and others left out; set it as it was, "
                f"{_START_ANEW}"
            )
        my_sizes = [part.num_items for part in self._parts]
        sizes = [size for size, _ in state["parts"]] if "parts" in state else my_sizes
        if sizes != my_sizes:
            raise DataError(
                f"the checkpoint stopped in a mixture of data sets of {sizes} rows, this one has {my_sizes}; use the "
                f"same data, {_START_ANEW}"
            )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        if self._parts:
            return mixture_order(self._parts, epoch=self._epoch, shuffle=self._shuffle, seed=self._seed)
        order = list(range(len(self._items)))
        if self._shuffle:
            random.Random(f"{self._seed}:{self._epoch}").shuffle(order)
        return order


class LookaheadLoader[T]:
    """Batches that are drawn before they are used; it stands at the oldest batch that is not used.

    Args:
        loader: Gives out the batches; nobody else draws from it.
    """

    def __init__(self, loader: BatchLoader[T]) -> None:
        self._loader = loader
        self._began: deque[LoaderState] = deque()  # where each batch begins that is drawn and not used

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        """Draw one more."""
        began = self._loader.state_dict()
        batch = next(iter(self._loader))
        self._began.append(began)
        return batch

    def use(self) -> None:
        """Note that the oldest drawn batch is used."""
        self._began.popleft()

    @property
    def num_batches_left(self) -> int:
        """Batches that are not used yet; see `BatchLoader`."""
        left = self._loader.num_batches_left
        return left if left == sys.maxsize else left + len(self._began)

    @property
    def num_batches_to_draw(self) -> int:
        """Batches that are not drawn yet."""
        return self._loader.num_batches_left

    def state_dict(self) -> LoaderState:
        """See `BatchLoader`: a drawn batch that is not used comes again after a resume."""
        return self._began[0] if self._began else self._loader.state_dict()

    def load_state_dict(self, state: LoaderState) -> None:
        """See `BatchLoader`; drawn batches are forgotten."""
        self._loader.load_state_dict(state)
        self._began.clear()


def mixture_order(parts: Sequence[Part], *, epoch: int, shuffle: bool, seed: int) -> list[int]:
    """Indices of one epoch, from 0, into the rows of all parts, one part after the other."""
    counts = share_out(sum(part.num_items for part in parts), [part.weight for part in parts])
    first = [sum(part.num_items for part in parts[:index]) for index in range(len(parts))]
    streams = [
        _stream(part.num_items, start=epoch * count, shuffle=shuffle, seed=f"{seed}:{index}")
        for index, (part, count) in enumerate(zip(parts, counts, strict=True))
    ]
    return [first[source] + next(streams[source]) for source in _interleave(counts)]


def share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `weights` that add up to `total`, by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def _interleave(counts: Sequence[int]) -> Iterator[int]:
    """Order of the parts in which each is never more than about one row away from its share so far."""
    total = sum(counts)
    taken = [0] * len(counts)
    for position in range(1, total + 1):
        source = max(range(len(counts)), key=lambda index: counts[index] * position - taken[index] * total)
        taken[source] += 1
        yield source


def _stream(size: int, *, start: int, shuffle: bool, seed: str) -> Iterator[int]:
    """Rows of one part from the `start`-th drawn on, pass after pass."""
    passes, position = divmod(start, size)
    while True:
        order = list(range(size))
        if shuffle:
            random.Random(f"{seed}:{passes}").shuffle(order)
        yield from order[position:]
        passes, position = passes + 1, 0
