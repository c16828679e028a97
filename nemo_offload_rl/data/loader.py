"""A shuffled loader that can stop and go on."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NotRequired, Protocol, TypedDict

from nemo_offload_rl.data.mixture import mixture_order
from nemo_offload_rl.data.records import Part
from nemo_offload_rl.errors import DataError


class LoaderState(TypedDict):
    """Where a loader stands; plain numbers, so that any checkpoint format can hold it."""

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
        """Batches from where it stands."""
        ...

    @property
    def num_batches_left(self) -> int:
        """Batches to come; `sys.maxsize` where there is no last one."""
        ...

    def state_dict(self) -> LoaderState:
        """Where it stands."""
        ...

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on where `state` was taken."""
        ...


class ShuffledLoader[T]:
    """Batches of a fixed size; each epoch has its own order, given by the seed and the epoch's number.

    The items that are left when an epoch has fewer than a batch of them are skipped in that epoch.

    Args:
        items: What to draw from; kept, not copied.
        batch_size: Items of a batch.
        shuffle: False keeps the order of `items` in every epoch.
        seed: Seed of the order.
        parts: Of a mixture: its runs of `items` (see `data/mixture.py`); () draws every item once an epoch.
        num_epochs: Epochs after which the batches end; None for no end.
        digest: Of the items, as `digest_of_lengths` gives it, for the state; "" where nobody asks.
        batch_size_key: What sets `batch_size`, for messages.

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
    def epoch(self) -> int:
        """The epoch of the batch given out last, from 0."""
        return self._epoch

    @property
    def is_epoch_end(self) -> bool:
        """Whether the next batch starts a new epoch."""
        return self._position + self._batch_size > len(self._items)

    @property
    def batches_per_epoch(self) -> int:
        """Full batches of one epoch."""
        return len(self._items) // self._batch_size

    @property
    def num_batches_left(self) -> int:
        """Batches to come until the last epoch is over; `sys.maxsize` where there is no last one."""
        if self._num_epochs is None:
            return sys.maxsize
        in_this_epoch = (len(self._items) - self._position) // self._batch_size
        return max(0, in_this_epoch + (self._num_epochs - self._epoch - 1) * self.batches_per_epoch)

    def state_dict(self) -> LoaderState:
        """Where the loader stands: the next batch after `load_state_dict` is the one that would come next here."""
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
            DataError: The data set has another size, seed, order or other parts than the one the state was taken from.
        """
        if state["num_items"] != len(self._items) or state["seed"] != self._seed:
            raise DataError(
                f"the checkpoint stopped in a data set of {state['num_items']} rows shuffled with seed "
                f"{state['seed']}, this one has {len(self._items)} rows and seed {self._seed}; use the same data, or "
                "another checkpointing.checkpoint_dir to start anew"
            )
        if state.get("shuffle", self._shuffle) != self._shuffle:
            raise DataError(
                f"the checkpoint stopped in data of data.shuffle={_yaml(not self._shuffle)}, and this run has "
                f"{_yaml(self._shuffle)}, so that rows would be repeated and others left out; set it as it was, or "
                "use another checkpointing.checkpoint_dir to start anew"
            )
        my_sizes = [part.num_items for part in self._parts]
        sizes = [size for size, _ in state["parts"]] if "parts" in state else my_sizes
        if sizes != my_sizes:
            raise DataError(
                f"the checkpoint stopped in a mixture of data sets of {sizes} rows, this one has {my_sizes}; use the "
                "same data, or another checkpointing.checkpoint_dir to start anew"
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


def _yaml(value: bool) -> str:
    return str(value).lower()


class LookaheadLoader[T]:
    """Batches that are drawn before they are used: it stands where the oldest begins that is not used.

    Args:
        loader: What gives out the batches; nobody else draws from it.
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
        """The oldest batch that was drawn is used."""
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
        """See `BatchLoader`: what is drawn and not used comes again after a resume."""
        return self._began[0] if self._began else self._loader.state_dict()

    def load_state_dict(self, state: LoaderState) -> None:
        """See `BatchLoader`; what was drawn is forgotten."""
        self._loader.load_state_dict(state)
        self._began.clear()
