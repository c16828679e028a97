"""An evaluation whose engine lives in its own process, without Ray; run by tests as a process of its own.

`python tests/support/one_process_eval.py ARGUMENTS`: those of examples/run_eval.py, whose engine is the real one. It
yields what has finished after each of its steps. With IS_KILLED=1, the process is killed after the first of these.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from one_process_grpo import LocalEngine

from nemo_offload_rl.distributed import generation_engine
from nemo_offload_rl.generation.vllm.engine_args import vllm_env
from nemo_offload_rl.keys.master import EvalConfig
from nemo_offload_rl.protocols.engine import Finished
from nemo_offload_rl.runs import evaluation
from nemo_offload_rl.utils.cli import ending_process
from nemo_offload_rl.utils.progress import Starting

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from run_eval import main


class KilledEngine(LocalEngine):
    """It kills its process with IS_KILLED=1."""

    def generate_as_finished(self, *args: Any) -> Iterator[list[Finished]]:
        """See `RayGenerationEngine`."""
        for finished in super().generate_as_finished(*args):
            yield finished
            if finished and os.environ.get("IS_KILLED") == "1":
                os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def local_engine(config: EvalConfig, starting: Starting) -> Iterator[KilledEngine]:
    """In place of `evaluation_engine`."""
    os.environ.update(vllm_env("cpu"))
    torch._dynamo.config.disable = True  # what TORCHDYNAMO_DISABLE does where torch is not imported yet
    torch.set_num_threads(1)
    engine = KilledEngine(config.engine)
    try:
        yield engine
    finally:
        engine.shutdown()


if __name__ == "__main__":
    evaluation.evaluation_engine = local_engine
    generation_engine._WAIT_S = 0.0
    with ending_process():
        main()
