"""A shuffled loader that can stop and go on, over one data set or several in fixed proportions.

The order depends on the seed and the epoch's number alone. An epoch of a mixture is as many rows as all data sets have
together. Each data set gives its share of them, spread evenly, and goes on where it stopped in the epoch before: a
small one is gone through several times, newly shuffled each time, before a large one was seen once.
"""

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    again: NotRequired[list[list[int]]]  # epoch and place in its order of items that come before all others


type Place = tuple[int, int]
"""Epoch of an item, and its place in the order of that epoch."""


class BatchLoader[T](Protocol):
    """Batches, and where in them a run stands."""

    def __iter__(self) -> Iterator[list[T]]:
        """The batches that are left."""
        ...

    def draw(self) -> dict[Place, T]:
        """Return the next batch with the place of each item; raise `StopIteration` if none is left."""
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
    """A `BatchLoader` of batches of a fixed size; items that fill no batch at the end of an epoch are skipped.

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
        self._order = self._epoch_order(0)
        self._again: dict[Place, int] = {}  # rows that come before all others

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        return list(self.draw().values())

    def draw(self) -> dict[Place, T]:
        if self.num_batches_left == 0:
            raise StopIteration
        if len(self._again) < self._batch_size:
            self._again |= self._next_rows()
        places = list(self._again)[: self._batch_size]
        return {place: self._items[self._again.pop(place)] for place in places}

    def _next_rows(self) -> dict[Place, int]:
        """Go on by a batch in the epoch's order."""
        if self._position + self._batch_size > len(self._items):
            self._epoch += 1
            self._position = 0
            self._order = self._epoch_order(self._epoch)
        places = range(self._position, self._position + self._batch_size)
        self._position += self._batch_size
        return {(self._epoch, place): self._order[place] for place in places}

    @property
    def num_batches_left(self) -> int:
        if self._num_epochs is None:
            return sys.maxsize
        in_this_epoch = (len(self._items) - self._position) // self._batch_size
        per_epoch = len(self._items) // self._batch_size
        in_order = max(0, in_this_epoch + (self._num_epochs - self._epoch - 1) * per_epoch)
        return in_order + len(self._again) // self._batch_size

    def state_dict(self) -> LoaderState:
        state = LoaderState(
            epoch=self._epoch,
            position=self._position,
            seed=self._seed,
            num_items=len(self._items),
            shuffle=self._shuffle,
            parts=[[part.num_items, part.weight] for part in self._parts],
            digest=self._digest,
        )
        return _with_again(state, self._again)

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
        self._order = self._epoch_order(self._epoch)
        again = state.get("again", ())
        orders = {epoch: self._epoch_order(epoch) for epoch in {epoch for epoch, _ in again}}
        self._again = {(epoch, place): orders[epoch][place] for epoch, place in again}

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._parts:
            return mixture_order(self._parts, epoch=epoch, shuffle=self._shuffle, seed=self._seed)
        order = list(range(len(self._items)))
        if self._shuffle:
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order


class LookaheadLoader[T]:
    """A `BatchLoader` that draws batches early; from its state, drawn items that are not used come again.

    Args:
        loader: Gives out the batches; nobody else draws from it.
    """

    def __init__(self, loader: BatchLoader[T]) -> None:
        self._loader = loader
        self._drawn: deque[_Drawn] = deque()  # batches from the oldest that has unused items

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        return list(self.draw().values())

    def draw(self) -> dict[Place, T]:
        before = self._loader.state_dict()
        batch = self._loader.draw()
        self._drawn.append(_Drawn(before, len(batch), dict.fromkeys(batch)))
        return batch

    def use(self, places: Iterable[Place]) -> None:
        """Note that items of these places are used."""
        for place in places:
            (drawn,) = [drawn for drawn in self._drawn if place in drawn.unused]
            del drawn.unused[place]
        while self._drawn and not self._drawn[0].unused:
            self._drawn.popleft()

    @property
    def num_batches_left(self) -> int:
        """Batches that are not used yet; see `BatchLoader`."""
        left = self._loader.num_batches_left
        if left == sys.maxsize or not self._drawn:
            return left
        return left + sum(len(drawn.unused) for drawn in self._drawn) // self._drawn[0].size

    @property
    def num_batches_to_draw(self) -> int:
        """Batches that are not drawn yet."""
        return self._loader.num_batches_left

    def state_dict(self) -> LoaderState:
        if not self._drawn:
            return self._loader.state_dict()
        if all(len(drawn.unused) == drawn.size for drawn in self._drawn):
            return self._drawn[0].before
        state = self._loader.state_dict()
        left = [(epoch, place) for epoch, place in state.get("again", ())]
        return _with_again(state, [*(place for drawn in self._drawn for place in drawn.unused), *left])

    def load_state_dict(self, state: LoaderState) -> None:
        """See `BatchLoader`; drawn batches are forgotten."""
        self._loader.load_state_dict(state)
        self._drawn.clear()


@dataclass
class _Drawn:
    """A drawn batch: the loader's state before it, its size, and the places of its unused items."""

    before: LoaderState
    size: int
    unused: dict[Place, None]


def _with_again(state: LoaderState, places: Iterable[Place]) -> LoaderState:
    """Return `state` with these places before all others; without any, no key is added."""
    again = [[epoch, place] for epoch, place in places]
    if again:
        state["again"] = again
    return state


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
