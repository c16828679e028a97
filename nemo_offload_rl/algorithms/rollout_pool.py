"""The pool of rollouts that are in progress, or finished and not trained on yet, while the policy trains.

The version of weights is the number of steps that they were trained for: step s trains weights of version s - 1. The
age of rollouts is the version being trained minus the version with which they began; it is at most `max_age`.

- A *part* is what one thread draws: all prompts of a step (order `data`), or one prompt (order `finished`).
- Batch s of the data begins once the engines have version s - 1 - `max_age`, or at the start of the run. So the pool
  never holds more than `max_age` + 1 batches, and each of its parts finds a place in a step before it is too old.
- Order `data`: step s takes batch s.
- Order `finished`: a step takes as many parts as a batch has, the oldest of those that have finished. It waits for
  older ones only if too few steps are left for them, see `_enough`. No part is lost.
- A part begins when the engines have room for it: one that waited in them would be older when a step takes it. Most
  responses of a part have ended while its longest is in progress, so `Filling` begins more than a fixed number.

The trainer's calls return or raise in the trainer's thread.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol, cast

from nemo_offload_rl.data.loader import LookaheadLoader, Place
from nemo_offload_rl.errors import DeviceMemoryError, WorkerDiedError
from nemo_offload_rl.utils.threads import in_thread

ENGINE_ERRORS = (WorkerDiedError, DeviceMemoryError)
_LOOK_S = 0.25


class Draw[Item, Drawn](Protocol):
    """Draws the rollouts of a part; runs in a thread."""

    def __call__(self, batch: int, first: int, prompts: Sequence[Item], engine: int, /) -> Drawn:
        """Draw rollouts of `prompts` from engine number `engine`; raise `WorkerDiedError` once it was replaced.

        Args:
            batch: Number of the prompts' batch in the data; the first step's is the number of that step.
            first: Place of the first prompt in its batch.
            prompts: The prompts.
            engine: See `RolloutPool.begin_due`.
        """
        ...


@dataclass(frozen=True)
class Taken[Drawn]:
    """A part that a step trains on.

    Attributes:
        drawn: The result of `Draw`.
        age: Steps that the policy was trained since the part began.
    """

    drawn: Drawn
    age: int


class LostRollouts(Exception):
    """Engine number `engine` ended with `error` while it drew rollouts."""

    def __init__(self, error: WorkerDiedError | DeviceMemoryError, engine: int) -> None:
        super().__init__(error, engine)
        self.error = error
        self.engine = engine


@dataclass(frozen=True)
class Filling:
    """Lets engines begin more parts than `RolloutPool.most_at_once`, while they have room.

    Attributes:
        num_in_progress: Returns the number of responses that the engines have in progress.
        most_responses: Number of responses up to which they are filled.
        responses_per_part: Number of responses of a part.
        most_parts: Parts that may be drawn at the same time.
    """

    num_in_progress: Callable[[], int]
    most_responses: int
    responses_per_part: int
    most_parts: int


@dataclass(eq=False)
class _Part[Item, Drawn]:
    batch: int
    first: int
    prompts: dict[Place, Item]
    version: int = -1  # of the engines' weights when it begins
    engine: int = -1
    has_begun: bool = False
    is_finished: bool = False
    drawn: Drawn | None = None  # of a finished part without an error
    error: BaseException | None = None


class RolloutPool[Item, Drawn]:
    """Holds the parts that are in progress or wait to be trained on.

    Args:
        draw: Draws the rollouts of a part.
        loader: Gives out the prompts.
        order: See the module's docstring.
        max_age: Greatest age of a part.
        first_step: First step to train, from 1.
        last_step: Last step to train.
        most_at_once: Parts that may be drawn at the same time. Others wait, and begin with newer weights if a refit
            comes meanwhile.
        filling: See `Filling`; None never begins more than `most_at_once`.
        engines_stop: The engines stop once a step has its parts. No part begins then: it would get later weights than
            its `version`.
    """

    def __init__(
        self,
        draw: Draw[Item, Drawn],
        loader: LookaheadLoader[Item],
        *,
        order: Literal["data", "finished"],
        max_age: int,
        first_step: int,
        last_step: int,
        most_at_once: int,
        filling: Filling | None = None,
        engines_stop: bool = False,
    ) -> None:
        self._draw = draw
        self._loader = loader
        self._in_order = order == "data"
        self._max_age = max_age
        self._next_batch = first_step
        self._last_step = last_step
        self._parts: list[_Part[Item, Drawn]] = []  # in the order of the data
        self._parts_per_step = 1
        self._changed = threading.Condition()  # guards what the parts' threads read and write
        self._is_closed = False
        self._most_at_once = most_at_once
        self._filling = filling
        self._engines_stop = engines_stop
        self._awaited: int | None = None  # the step for which parts are due and that has not been taken
        self._next_look_s = 0.0  # at the engines' room; what has just begun is not in progress there yet

    @property
    def num_waiting(self) -> int:
        """Number of prompts whose rollouts have finished and are not trained on yet."""
        return sum(len(part.prompts) for part in self._parts if part.is_finished)

    def begin_due(self, version: int, engine: int) -> None:
        """Begin the batches that are due with weights of this version, and redo the parts that a dead engine lost.

        Args:
            version: Version of the engines' weights.
            engine: Number of the engines, which rises with each restart.
        """
        last = min(version + 1 + self._max_age, self._last_step)
        with self._changed:
            self._awaited = version + 1
            self._next_look_s = time.monotonic() + _LOOK_S
            while self._next_batch <= last and self._loader.num_batches_to_draw:
                prompts = self._loader.draw()
                shares = [prompts] if self._in_order else [{place: prompt} for place, prompt in prompts.items()]
                self._parts_per_step = len(shares)
                self._parts += [_Part(self._next_batch, first, share) for first, share in enumerate(shares)]
                self._next_batch += 1
            for part in self._parts:
                if part.engine < engine and isinstance(part.error, ENGINE_ERRORS):
                    part.has_begun, part.is_finished, part.error = False, False, None
                if not part.has_begun:
                    part.version, part.engine = version, engine
            self._begin_more()

    def has_ready(self, step: int) -> bool:
        """Tell whether `take` would return at once, without an error."""
        with self._changed:
            return self._chosen(step) is not None and all(part.error is None for part in self._parts)

    def take(self, step: int) -> list[Taken[Drawn]]:
        """Wait for the parts that a step trains on, and return them in the order of the data.

        Raises:
            LostRollouts: The engines have ended.
            Exception: The error of any part.
        """
        while True:
            with self._changed:
                for part in self._parts:
                    if part.error is not None:
                        _raise(part.error, part.engine)
                chosen = self._chosen(step)
                if chosen is not None:
                    self._parts = [part for part in self._parts if part not in chosen]
                    self._awaited = None
                    break
                self._changed.wait(max(0.0, self._next_look_s - time.monotonic()) if self._may_fill else None)
            self._fill()
        for part in chosen:
            self._loader.use(part.prompts)
        return [Taken(cast(Drawn, part.drawn), step - 1 - part.version) for part in chosen]

    def wait_until_idle(self) -> None:
        """Wait until no part is in progress; raise nothing."""
        with self._changed:
            self._changed.wait_for(lambda: all(part.is_finished for part in self._parts))

    def close(self) -> None:
        """Begin no more parts. Those in progress end with the engine, or with the process if a user's code hangs."""
        with self._changed:
            self._is_closed = True

    # -- inside

    def _chosen(self, step: int) -> list[_Part[Item, Drawn]] | None:
        """Return the parts that a step takes, in the order of the data; None if some are still to be waited for."""
        if self._in_order:
            parts = [part for part in self._parts if part.batch == step]
            return parts if parts and all(part.is_finished for part in parts) else None
        finished = sorted((part for part in self._parts if part.is_finished), key=lambda part: part.version)
        if len(finished) < self._parts_per_step or not self._enough(step):
            return None
        chosen = finished[: self._parts_per_step]
        return [part for part in self._parts if part in chosen]

    def _enough(self, step: int) -> bool:
        """Tell whether the steps after `step` have room for all unfinished parts before these are too old.

        Some parts must be trained on at most `later` steps after `step`. The steps after `step` can take `later` times
        a step's number of these; the rest must be finished now.
        """
        for later in range(self._max_age):
            due = [part for part in self._parts if part.version + 1 + self._max_age <= step + later]
            if sum(part.is_finished for part in due) < len(due) - later * self._parts_per_step:
                return False
        return True

    @property
    def _may_begin(self) -> bool:
        has_all = self._awaited is None or self._chosen(self._awaited) is not None
        return not self._is_closed and not (self._engines_stop and has_all)

    @property
    def _may_fill(self) -> bool:
        return self._filling is not None and self._may_begin and any(not part.has_begun for part in self._parts)

    def _fill(self) -> None:
        """Begin waiting parts as far as the engines have room for their responses; look at it now and then only."""
        with self._changed:
            if not self._may_fill or time.monotonic() < self._next_look_s:
                return
            self._next_look_s = time.monotonic() + _LOOK_S
        assert self._filling is not None
        try:
            num_missing = self._filling.most_responses - self._filling.num_in_progress()
        except ENGINE_ERRORS:
            return  # the parts of that engine end with an error
        with self._changed:
            most = self._num_in_progress + num_missing // self._filling.responses_per_part
            self._begin_more(min(most, self._filling.most_parts))

    @property
    def _num_in_progress(self) -> int:
        return sum(part.has_begun and not part.is_finished for part in self._parts)

    def _begin_more(self, most: int = 0) -> None:
        """Begin parts while fewer than `most_at_once`, or `most`, are in progress; the caller holds the lock."""
        if not self._may_begin:
            return
        waiting = [part for part in self._parts if not part.has_begun]
        for part in waiting[: max(0, max(self._most_at_once, most) - self._num_in_progress)]:
            part.has_begun = True
            in_thread(self._run, part)

    def _run(self, part: _Part[Item, Drawn]) -> None:
        drawn, error = None, None
        try:
            drawn = self._draw(part.batch, part.first, list(part.prompts.values()), part.engine)
        except BaseException as raised:  # for the trainer's thread
            error = raised
        with self._changed:
            part.drawn, part.error, part.is_finished = drawn, error, True
            self._begin_more()
            self._changed.notify_all()
        self._fill()


def _raise(error: BaseException, engine: int) -> NoReturn:
    if isinstance(error, ENGINE_ERRORS):
        raise LostRollouts(error, engine) from error
    raise error
