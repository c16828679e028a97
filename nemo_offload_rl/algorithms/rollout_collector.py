"""Collects rollouts during training.

The version of weights is the number of steps that they were trained for: step s trains weights of version s - 1. The
rollouts of step s begin once there are weights of version s - 1 - `max_age`, or at the start of the run. Each batch of
prompts belongs to one step, in the order of the data. So at most `max_age` + 1 steps are under way or waiting. The age
of a step's rollouts is the version being trained minus the version that generated them; it is at most `max_age`.

Each step's rollouts are drawn in a thread. The trainer's calls return or raise in the trainer's thread.
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
        """Draw rollouts of `prompts` from engine number `engine`; raise `WorkerDiedError` once it was replaced."""
        ...


@dataclass(frozen=True)
class Collected[Drawn]:
    """The rollouts of a step.

    Attributes:
        drawn: The result of `Draw`.
        version: Version of the weights with which it began.
        age: Steps that the weights were trained since.
    """

    drawn: Drawn
    version: int
    age: int


class LostRollouts(Exception):
    """Engine number `engine` ended with `error` while it drew rollouts."""

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
    """Holds the steps whose rollouts are under way or wait to be trained on.

    Args:
        draw: Draws the rollouts of a step.
        loader: Gives out the prompts.
        max_age: Greatest age of a step's rollouts.
        first_step: First step to train, from 1.
        last_step: Last step to train.
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
        """Number of steps whose rollouts have ended and are not trained on yet."""
        return sum(entry.drawing.done() for entry in self._entries.values())

    def begin_due(self, version: int, engine: int) -> None:
        """Begin the rollouts that are due with weights of this version, and redo those that a dead engine lost.

        Args:
            version: Version of the engine's weights.
            engine: The engine's number, which rises with each restart.
        """
        for step, entry in self._entries.items():
            if entry.engine < engine and entry.drawing.done() and isinstance(entry.drawing.exception(), ENGINE_ERRORS):
                self._begin(step, entry.prompts, version, engine)
        last = min(version + 1 + self._max_age, self._last_step)
        while self._next_step <= last and self._loader.num_batches_to_draw:
            self._begin(self._next_step, next(self._loader), version, engine)
            self._next_step += 1

    def take(self, step: int) -> Collected[Drawn]:
        """Wait for the rollouts of `step` and return them; each step is taken once, in turn.

        Raises:
            LostRollouts: The engine has ended.
            Exception: The error of any step's rollouts.
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
        """Wait until no rollout is under way; raise nothing."""
        wait([entry.drawing for entry in self._entries.values()])

    def close(self) -> None:
        """Begin no more rollouts. Those under way end with the engine."""
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
