"""From generation back to the policy, beside what the driver does with the responses.

The engine goes to sleep and drops its weights (a refit brings others), and when its memory is free the policy's
parameters come. Neither needs the driver, which scores and collates meanwhile.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from nemo_offload_rl.generation.interfaces import GenerationEngine


class ReturningPolicy(Protocol):
    """What the way back asks of the policy (all of its ranks)."""

    def prepare_for_lp_inference(self) -> object:
        """Bring the parameters to the device."""
        ...


class HandBack:
    """One way back, which begins at once.

    Args:
        policy: All of its ranks.
        engine: All engines; None where nothing is to sleep.
    """

    def __init__(self, policy: ReturningPolicy, engine: GenerationEngine | None) -> None:
        self._policy = policy
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hand_back")
        self._resting = None if engine is None else pool.submit(engine.finish_generation, discard_weights=True)
        self._returning = pool.submit(self._return)
        # Not waited for: after an interrupt or a dead worker what runs there ends with the workers only.
        pool.shutdown(wait=False)

    def wait_for_engine(self) -> None:
        """Return when the engine sleeps; raises what kept it from doing so, and the policy has not moved then."""
        if self._resting is not None:
            self._resting.result()

    def wait_for_policy(self) -> None:
        """Return when the policy may be asked for logprobs; raises what kept engine or policy from it."""
        self._returning.result()

    def _return(self) -> None:
        self.wait_for_engine()
        self._policy.prepare_for_lp_inference()
