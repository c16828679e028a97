"""Rollouts that are collected beside training.

Weights have a version, the number of steps that they were trained for: step s trains weights of version s - 1. The
rollouts of step s are begun as soon as there are weights of version s - 1 - `max_age`, or at the start of the run, and
never twice: each batch of prompts belongs to one step, in the order of the data. So at most `max_age` + 1 steps are
under way or wait, and the age of a step's rollouts, the version that it trains less the version that said them, is at
most `max_age`.

Each step's rollouts are drawn in a thread. What the trainer calls returns or raises in the trainer's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from nemo_offload_rl.data.loader import LookaheadLoader
from nemo_offload_rl.errors import DeviceMemoryError, WorkerDiedError

ENGINE_ERRORS = (WorkerDiedError, DeviceMemoryError)


class Draw[Item, Drawn](Protocol):
    """Draws the rollouts of a step; runs in a thread."""

    def __call__(self, step: int, prompts: Sequence[Item], engine: int, /) -> Drawn:
        """Rollouts of `prompts`, by the engine of this number; raises `WorkerDiedError` once there is another."""
        ...


@dataclass(frozen=True)
class Collected[Drawn]:
    """The rollouts of a step.

    Attributes:
        drawn: What was drawn.
        version: Of the weights with which they began.
        age: Steps that the weights were trained since.
    """

    drawn: Drawn
    version: int
    age: int


class LostRollouts(Exception):
    """The engine has ended while it drew: `error` says so, and `engine` was its number."""

    def __init__(self, error: WorkerDiedError | DeviceMemoryError, engine: int) -> None:
        super().__init__(error, engine)
        self.error = error
        self.engine = engine


@dataclass
class _Entry[Item, Drawn]:
    prompts: Sequence[Item]
    version: int
    engine: int
    drawing: Future[Drawn]


class RolloutCollector[Item, Drawn]:
    """The steps whose rollouts are under way, or wait to be trained on.

    Args:
        draw: Draws the rollouts of a step.
        loader: Gives out the prompts.
        max_age: See the file header.
        first_step: The first step that is trained, from 1.
        last_step: The last one.
    """

    def __init__(
        self,
        draw: Draw[Item, Drawn],
        loader: LookaheadLoader[Item],
        *,
        max_age: int,
        first_step: int,
        last_step: int,
    ) -> None:
        self._draw = draw
        self._loader = loader
        self._max_age = max_age
        self._next_step = first_step
        self._last_step = last_step
        self._entries: dict[int, _Entry[Item, Drawn]] = {}
        self._pool = ThreadPoolExecutor(max_workers=max_age + 1, thread_name_prefix="collector")

    @property
    def num_waiting(self) -> int:
        """Steps whose rollouts have ended and are not trained on yet."""
        return sum(entry.drawing.done() for entry in self._entries.values())

    def begin_due(self, version: int, engine: int) -> None:
        """Begin the rollouts that weights of this version are the first for; and again, those that an engine lost.

        Args:
            version: Of the weights that the engine has.
            engine: Its number: that of an engine which was started again is higher.
        """
        for step, entry in self._entries.items():
            if entry.engine < engine and entry.drawing.done() and isinstance(entry.drawing.exception(), ENGINE_ERRORS):
                self._begin(step, entry.prompts, version, engine)
        last = min(version + 1 + self._max_age, self._last_step)
        while self._next_step <= last and self._loader.num_batches_to_draw:
            self._begin(self._next_step, next(self._loader), version, engine)
            self._next_step += 1

    def take(self, step: int) -> Collected[Drawn]:
        """The rollouts of `step`, once they are there; each step is taken once, in turn.

        Raises:
            LostRollouts: The engine has ended.
            Exception: What kept the rollouts of any step from coming.
        """
        for entry in self._entries.values():
            if entry.drawing.done():
                self._result(entry)
        entry = self._entries[step]
        drawn = self._result(entry)
        del self._entries[step]
        self._loader.use()
        return Collected(drawn, entry.version, step - 1 - entry.version)

    def wait_until_idle(self) -> None:
        """Return when no rollout is under way; raises nothing."""
        wait([entry.drawing for entry in self._entries.values()])

    def close(self) -> None:
        """Begin nothing more. What is under way ends with the engine."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, step: int, prompts: Sequence[Item], version: int, engine: int) -> None:
        drawing = self._pool.submit(self._draw, step, prompts, engine)
        self._entries[step] = _Entry(prompts, version, engine, drawing)

    @staticmethod
    def _result(entry: _Entry[Item, Drawn]) -> Drawn:
        try:
            return entry.drawing.result()
        except ENGINE_ERRORS as error:
            raise LostRollouts(error, entry.engine) from error
