"""Alternates engine and policy on the devices: refit and wake before a generation, sleep and handover after it.

The engine is awake only with the policy's present weights. After the last generation of a step it sleeps and drops its
weights, since the next refit brings new ones, and the policy's parameters come to the device. Both happen in the
background while the driver scores and collates. A dead engine is restarted while restarts are left, and its call is
repeated.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from nemo_offload_rl.errors import DeviceMemoryError, UserError, WorkerDiedError
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.protocols.engine import Completion, GenerationEngine
from nemo_offload_rl.utils.timer import PhaseTimer
from nemo_offload_rl.weight_sync.refit import refit

_HANDOVER_S = 60.0

type Restart = Callable[[UserError], None]
"""Restarts the engine, asleep, after an error; raises the error if no restart is left."""


class RolloutEngine:
    """The engine of a run with rollouts, kept on the policy's weights.

    Args:
        policy: All ranks of the policy.
        engine: All engines.
        takes_turns: Whether engine and policy use the same devices in turn; else the engine never sleeps.
        restart: See `Restart`.
        bring: Moves the policy into its first phase of the step, once the engine sleeps.
        timer: Gets the phases `refit`, `generation/sleep`, `engine_restart`, and the one that a call names.

    Attributes:
        trained_steps: Steps that the policy has been trained: the version of its weights.
        around_refit: Makes the context that surrounds every refit.
        num_restarts: Number of restarts of the engine.
    """

    def __init__(
        self,
        policy: Policy,
        engine: GenerationEngine,
        *,
        takes_turns: bool,
        restart: Restart,
        timer: PhaseTimer,
        bring: Callable[[], object],
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._takes_turns = takes_turns
        self._restart = restart
        self._bring = bring
        self._timer = timer
        self._is_awake = False
        self._handover: _Handover | None = None
        self.trained_steps = 0
        self.around_refit: Callable[[], AbstractContextManager[None]] = nullcontext
        self.num_restarts = 0
        self._sent_bytes = 0

    def bring_weights(self) -> None:
        """Wake the engine with the policy's present weights."""
        self._with_restarts(self._wake)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int, *, phase: str
    ) -> list[list[Completion]]:
        """Generate `num_samples` completions of each prompt with the policy's present weights; timed as `phase`."""
        return self.serve(lambda: self._engine.generate(prompts, sampling, num_samples), phase=phase)

    def serve[Result](self, work: Callable[[], Result], *, phase: str) -> Result:
        """Run `work` with the engine awake on the policy's present weights, and return its result.

        `work` is repeated after an engine has died; its time counts as `phase`.
        """

        def call() -> Result:
            self._wake()
            with self._timer.phase(phase):
                return work()

        return self._with_restarts(call)

    def start_handover(self) -> None:
        """Put an engine that takes turns to sleep and bring the policy, in the background; further calls do nothing."""
        if self._handover is None:
            self._is_awake = False
            self._handover = _start_handover(self._bring, self._engine if self._takes_turns else None)

    def wait_for_sleep(self) -> None:
        """Wait until the engine of a started handover sleeps; restart it if it died."""
        assert self._handover is not None, "no handover was started"
        with self._timer.phase("generation"), self._timer.phase("sleep"):
            try:
                self._handover.engine_asleep.result()
            except (WorkerDiedError, DeviceMemoryError) as error:
                self.restart(error)
                self._handover = _start_handover(self._bring, None)

    def wait_for_policy(self) -> None:
        """Wait until the policy has entered its first phase, which ends the handover."""
        handover, self._handover = self._handover, None
        assert handover is not None, "no handover was started"
        handover.policy_ready.result()

    def sleep(self) -> None:
        """Put the engine to sleep if it is awake and takes turns."""
        if self._is_awake and self._takes_turns:
            self._is_awake = False
            self._with_restarts(lambda: self._engine.finish_generation(discard_weights=True))

    def take_sent_bytes(self) -> int:
        """Return the bytes of all refits since the last call."""
        taken, self._sent_bytes = self._sent_bytes, 0
        return taken

    def start_trace(self) -> None:
        self._with_restarts(self._engine.start_trace)

    def stop_trace(self, prefix: str) -> list[str]:
        """See `Traced`; an engine that was restarted meanwhile writes none."""
        return self._with_restarts(lambda: self._engine.stop_trace(prefix))

    def make_room(self, on_devices: bool) -> None:
        """Wait at most `_HANDOVER_S` for a handover, whatever its outcome; with `on_devices` end the engines."""
        handover, self._handover = self._handover, None
        if handover is not None:
            wait([handover.engine_asleep, handover.policy_ready], timeout=_HANDOVER_S)
        if on_devices:
            self._is_awake = False
            self._engine.shutdown()

    def restart(self, error: UserError) -> None:
        """Start the engine again after `error`, or raise it: see `Restart`."""
        self._is_awake = False
        self.num_restarts += 1  # first, so that other threads see that the engine is a new one
        with self._timer.phase("engine_restart"):
            self._restart(error)

    def _wake(self) -> None:
        """Refit and wake the engine unless it is awake already."""
        if not self._is_awake:
            with self.around_refit(), self._timer.phase("refit"):
                report = refit(self._policy, self._engine, self._timer, version=self.trained_steps)
            self._sent_bytes += report.num_bytes
            self._is_awake = True

    def _with_restarts[Result](self, call: Callable[[], Result]) -> Result:
        while True:
            try:
                return call()
            except (WorkerDiedError, DeviceMemoryError) as error:
                self.restart(error)


@dataclass(frozen=True)
class _Handover:
    """Futures that end when the engine sleeps, and then when the policy is ready; each raises its own failure."""

    engine_asleep: Future[None]
    policy_ready: Future[None]


def _start_handover(bring: Callable[[], object], engine: GenerationEngine | None) -> _Handover:
    """Start a handover; `engine` is None if no engine has to sleep."""

    def bring_policy() -> None:
        engine_asleep.result()  # the policy must not use a device that the engine has not left
        bring()

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="handover")
    engine_asleep = pool.submit(lambda: engine.finish_generation(discard_weights=True) if engine is not None else None)
    policy_ready = pool.submit(bring_policy)
    # Not waited for: after an interrupt or a worker's death, these tasks end only with the workers.
    pool.shutdown(wait=False)
    return _Handover(engine_asleep, policy_ready)
