"""The engine and the policy in turn: refit and wake before a generation, sleep and hand over after it.

The engine is awake only with the policy's present weights. After the last generation of a step it sleeps and drops its
weights (a refit brings others), and the policy's parameters come to the device; both run in the background while the
driver scores and collates. An engine that dies is restarted while restarts are left, and its call is made again.
"""

from __future__ import annotations

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
"""Takes the error after which the engine is needed again, asleep; raises it if no restart is left."""


class RolloutEngine:
    """The engine of a GRPO run, and the policy whose weights it has.

    Args:
        policy: All of its ranks.
        engine: All engines.
        colocated: Whether they share devices; else the engine never sleeps.
        restart: See `Restart`.
        bring: Has the policy enter the phase that it computes in first, once the engine sleeps.
        timer: Gets the phases `refit`, `generation/sleep`, `engine_restart`, and the one that a call names.

    Attributes:
        around_refit: Makes the context that every refit is in.
        num_restarts: How often the engine was started again.
    """

    def __init__(
        self,
        policy: Policy,
        engine: GenerationEngine,
        *,
        colocated: bool,
        restart: Restart,
        timer: PhaseTimer,
        bring: Callable[[], object],
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._colocated = colocated
        self._restart = restart
        self._bring = bring
        self._timer = timer
        self._is_awake = False
        self._handover: _Handover | None = None
        self.around_refit: Callable[[], AbstractContextManager[None]] = nullcontext
        self.num_restarts = 0

    def bring_weights(self) -> None:
        """Have the engine awake with the policy's present weights."""
        self._with_restarts(self._wake)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int, *, phase: str
    ) -> list[list[Completion]]:
        """Completions by the policy's present weights, `num_samples` of each prompt; their seconds count as `phase`."""
        return self.serve(lambda: self._engine.generate(prompts, sampling, num_samples), phase=phase)

    def serve[Result](self, work: Callable[[], Result], *, phase: str) -> Result:
        """What `work` returns, for which the engine is awake with the policy's present weights.

        It begins again after an engine has died; its seconds count as `phase`.
        """

        def call() -> Result:
            self._wake()
            with self._timer.phase(phase):
                return work()

        return self._with_restarts(call)

    def start_handover(self) -> None:
        """Have the engine sleep, if it shares devices, and the policy come, in the background; once in a step."""
        if self._handover is None:
            self._is_awake = False
            self._handover = _start_handover(self._bring, self._engine if self._colocated else None)

    def wait_for_sleep(self) -> None:
        """Return when the engine of a started handover sleeps; one that died is restarted first."""
        assert self._handover is not None, "no handover was started"
        with self._timer.phase("generation"), self._timer.phase("sleep"):
            try:
                self._handover.engine_asleep.result()
            except (WorkerDiedError, DeviceMemoryError) as error:
                self.restart(error)
                self._handover = _start_handover(self._bring, None)

    def wait_for_policy(self) -> None:
        """Return when the policy has entered its first phase, which ends the handover."""
        handover, self._handover = self._handover, None
        assert handover is not None, "no handover was started"
        handover.policy_ready.result()

    def sleep(self) -> None:
        """Put an engine to sleep that is awake and shares devices."""
        if self._is_awake and self._colocated:
            self._is_awake = False
            self._with_restarts(lambda: self._engine.finish_generation(discard_weights=True))

    def make_room(self, on_devices: bool) -> None:
        """Wait for a handover under way, however it ends; with `on_devices` end the engines, which are of no more use.

        An engine that does not go to sleep is waited for no longer than `_HANDOVER_S`.
        """
        handover, self._handover = self._handover, None
        if handover is not None:
            wait([handover.engine_asleep, handover.policy_ready], timeout=_HANDOVER_S)
        if on_devices:
            self._is_awake = False
            self._engine.shutdown()

    def restart(self, error: UserError) -> None:
        """Start the engine again after `error`, or raise it: see `Restart`."""
        self._is_awake = False
        self.num_restarts += 1  # first: other threads see by it that what they meet is another engine
        with self._timer.phase("engine_restart"):
            self._restart(error)

    def _wake(self) -> None:
        """Have the engine awake with the policy's weights; generating again at once moves nothing."""
        if not self._is_awake:
            with self.around_refit(), self._timer.phase("refit"):
                refit(self._policy, self._engine, self._timer)
            self._is_awake = True

    def _with_restarts[Result](self, call: Callable[[], Result]) -> Result:
        while True:
            try:
                return call()
            except (WorkerDiedError, DeviceMemoryError) as error:
                self.restart(error)


@dataclass(frozen=True)
class _Handover:
    """What ends when the engine sleeps, and when the policy is ready after it; each raises what kept it from that."""

    engine_asleep: Future[None]
    policy_ready: Future[None]


def _start_handover(bring: Callable[[], object], engine: GenerationEngine | None) -> _Handover:
    """Start one; None for an engine that need not sleep."""

    def bring_policy() -> None:
        engine_asleep.result()  # the policy stays away from a device that the engine has not left
        bring()

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="handover")
    engine_asleep = pool.submit(lambda: engine.finish_generation(discard_weights=True) if engine is not None else None)
    policy_ready = pool.submit(bring_policy)
    # Not waited for: after an interrupt or a dead worker, what runs there ends with the workers only.
    pool.shutdown(wait=False)
    return _Handover(engine_asleep, policy_ready)
