"""Rollouts that stop and go on: while the policy trains on their devices, and while engines are restarted.

A gate is open while the engines generate. When a step has its rollouts, the gate shuts. Then there are two ways
(`grpo.async_grpo.paused_kv`), and with both tokens keep the logprobs with which they were sampled:
- The engines give back all responses, unfinished ones as far as they have come. Once the gate opens again, each of
  these is continued: prompt and tokens so far are the new prompt.
- The engines keep the responses through their sleep and go on with them by themselves; their callers wait meanwhile.

When an engine dies, all are restarted: on separate GPUs they share one communicator for refits, and a call to all of
them may have been left half done. The other engines give back their responses first, which go on afterwards; those that
engines keep through a sleep are lost if an engine dies in it.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from nemo_offload_rl.algorithms.rollout_sampler import AwakeEngine
from nemo_offload_rl.errors import DeviceMemoryError, WorkerDiedError, WorkerHungError
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion, OneEngine, PausingEngine
from nemo_offload_rl.utils.timer import PhaseTimer

_ABORTED = "abort"
_ASK_AGAIN_S = 0.2
_GIVE_BACK_S = 20.0


class Gate:
    """Lets calls to the engines pass while it is open, and counts them; it is shut at first.

    Args:
        keeps: The engines keep their responses while the gate is shut.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._changed = threading.Condition()
        self._keeps = keeps
        self._is_open = False
        self._is_over = False
        self._num_inside = 0
        self._open_s = 0.0  # until the gate opened last
        self._opened_s = 0.0

    def clock(self) -> float:
        """Return seconds since a fixed time; with `keeps`, only those in which the gate was open."""
        now_s = time.perf_counter()
        if not self._keeps:
            return now_s
        with self._changed:
            return self._open_s + (now_s - self._opened_s if self._is_open else 0.0)

    @contextmanager
    def passing(self) -> Generator[None]:
        """Wait until the gate is open, then be inside.

        Raises:
            WorkerDiedError: The run has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._is_over)
            if self._is_over:
                raise WorkerDiedError("the run ends before these rollouts")
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def open(self) -> None:
        """Let calls pass."""
        self._set(is_open=True)

    def stop(self, engines: PausingEngine, error: Exception) -> None:
        """Shut the gate, since an engine has ended with `error`; have the others give back what they generate.

        Waits at most `_GIVE_BACK_S`. Asks nothing of an engine that hangs.
        """
        self._set(is_open=False)
        until_s = time.monotonic() + _GIVE_BACK_S
        is_empty = isinstance(error, WorkerHungError)
        while not is_empty and time.monotonic() < until_s:
            with suppress(WorkerDiedError, DeviceMemoryError):
                engines.abort_generation()
            with self._changed:
                is_empty = self._changed.wait_for(lambda: self._num_inside == 0, _ASK_AGAIN_S)

    @contextmanager
    def open_for(self, engines: PausingEngine) -> Generator[None]:
        """Open the gate; afterwards shut it and have the engines give back what they generate, unless they keep it.

        Raises:
            WorkerDiedError: An engine has ended.
        """
        self.open()
        try:
            yield
        finally:  # also after an error, whose engine may be dead
            self._set(is_open=False)
        is_empty = self._keeps
        while not is_empty:  # a call may reach its engine after the others were aborted
            engines.abort_generation()
            with self._changed:
                is_empty = self._changed.wait_for(lambda: self._num_inside == 0, _ASK_AGAIN_S)

    def end(self) -> None:
        """Refuse all later calls, and end the calls that wait."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _set(self, *, is_open: bool) -> None:
        with self._changed:
            now_s = time.perf_counter()
            if self._is_open:
                self._open_s += now_s - self._opened_s
            self._is_open, self._opened_s = is_open, now_s
            self._changed.notify_all()


class ContinuingEngine:
    """A `ServingEngine` that continues aborted responses once its gate is open again, if necessary after a restart.

    Args:
        engine: Generates.
        timer: Gets the phases.
        num_restarts: Returns the number of restarts so far.
        gate: See `Gate`.
    """

    def __init__(self, engine: OneEngine, timer: PhaseTimer, num_restarts: Callable[[], int], gate: Gate) -> None:
        self._engine = engine
        self._timer = timer
        self._num_restarts = num_restarts
        self._gate = gate

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int, *, phase: str
    ) -> list[list[Completion]]:
        groups = self.serve(lambda: self._engine.generate(prompts, sampling, num_samples), phase=phase)
        found = [completion for group in groups for completion in group]
        while rows := [row for row, one in enumerate(found) if one.finish_reason == _ABORTED]:
            kept = [_kept(found[row], sampling) for row in rows]
            asked = [[*prompts[row // num_samples], *said.token_ids] for row, said in zip(rows, kept, strict=True)]
            samplings = [_rest_of(sampling, row, said) for row, said in zip(rows, kept, strict=True)]
            more = self.serve(lambda: self._engine.generate_each(asked, samplings), phase=phase)  # noqa: B023
            for row, said, rest in zip(rows, kept, more, strict=True):
                found[row] = said.continued_by(rest)
        return [found[start : start + num_samples] for start in range(0, len(found), num_samples)]

    def serve[Result](self, work: Callable[[], Result], *, phase: str) -> Result:
        """See `ServingEngine`; the time until the gate is open does not count."""
        with self._gate.passing():
            number = self._num_restarts()
            awake = AwakeEngine(self._engine, self._timer, lambda: self._num_restarts() == number)
            return awake.serve(work, phase=phase)


def _kept(aborted: Completion, sampling: SamplingSettings) -> Completion:
    """Leave out the last tokens if a stop string may have begun in them, since the engine looks at new tokens only."""
    overlap = max((len(stop) for stop in sampling.stop_strings), default=0)
    return aborted.cut(max(0, min(len(aborted.token_ids) - overlap, sampling.max_new_tokens - 1)))


def _rest_of(sampling: SamplingSettings, row: int, said: Completion) -> SamplingSettings:
    """Return the sampling for the rest of a response, with a seed of its own."""
    size = len(said.token_ids)
    seed = sampling.seed
    if seed is not None:
        digest = hashlib.blake2b(f"{seed}:{row}:{size}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
    return replace(sampling, max_new_tokens=sampling.max_new_tokens - size, seed=seed)
