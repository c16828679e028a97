"""A GRPO run whose engine dies three times; run by a test as a process of its own.

`dying_engine.py ARGUMENTS`: those of examples/run_grpo.py. Each time a line `dead engine: PID` is printed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import nemo_offload_rl.distributed.generation_engine as engines
from nemo_offload_rl.generation.vllm.engine import VllmEngine

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from run_grpo import main

from nemo_offload_rl.utils.cli import ending_process

GENERATION = 2  # the call of the second step
# The third step's and the fifth's; beside one call a step there are one of the start and one of each restart.
SLEEPS = (5, 8)


def die_in_next_generation() -> None:
    """In the engine's process: it will die when three tokens of each response are there."""
    from vllm.v1.engine.llm_engine import LLMEngine

    step, num_steps = LLMEngine.step, 0

    def last_steps(engine: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(engine)

    LLMEngine.step = last_steps


class DyingEngine(engines.RayGenerationEngine):
    """The real engine, whose process is killed in one generation and as it goes to sleep twice."""

    num_generations = 0
    num_sleeps = 0

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See `RayGenerationEngine`."""
        self.num_generations += 1
        if self.num_generations == GENERATION:
            self._print_pid()
            self.group.run_all(VllmEngine.__setattr__, "die_in_next_generation", die_in_next_generation)
            self.group.run_all(die_in_next_generation)
        return super().generate(*args, **kwargs)

    def finish_generation(self, discard_weights: bool) -> None:
        """See `RayGenerationEngine`."""
        self.num_sleeps += 1
        if self.num_sleeps in SLEEPS:
            os.kill(self._print_pid(), signal.SIGKILL)
        super().finish_generation(discard_weights)

    def _print_pid(self) -> int:
        (pid,) = self.group.local_pids()
        sys.stdout.write(f"dead engine: {pid}\n")
        sys.stdout.flush()
        return pid


if __name__ == "__main__":
    engines.RayGenerationEngine = DyingEngine
    with ending_process():
        main()
