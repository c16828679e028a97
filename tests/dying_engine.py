"""A GRPO run whose engine dies as it is told to sleep, twice; run by a test as a process of its own.

`python tests/dying_engine.py ARGUMENTS`: those of examples/run_grpo.py.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import nemo_offload_rl.distributed.generation_engine as engines

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from run_grpo import main

from nemo_offload_rl.utils.cli import run_main

DIES_AT = (3, 7)  # in the second step and the fifth: one call is the start's, and one the restart's


class DyingEngine(engines.RayGenerationEngine):
    """The real engine, killed twice."""

    num_calls = 0

    def finish_generation(self, discard_weights: bool) -> None:
        """See `RayGenerationEngine`."""
        DyingEngine.num_calls += 1
        if DyingEngine.num_calls in DIES_AT:
            (pid,) = self.group.local_pids()
            os.kill(pid, signal.SIGKILL)
        super().finish_generation(discard_weights)


if __name__ == "__main__":
    engines.RayGenerationEngine = DyingEngine
    run_main(main)
