"""A GRPO run whose policy and engine live in its own process, without Ray; run by tests as a process of its own.

`one_process_grpo.py ARGUMENTS`: those of examples/run_grpo.py. Policy, engine, refit and everything above
them are the real ones; only the processes are missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch._dynamo
import ways
from engine_process import engine_here

from nemo_offload_rl.distributed.generation_engine import EngineLoads, RayGenerationEngine
from nemo_offload_rl.distributed.local import LocalWorkerGroup, start_local_policy
from nemo_offload_rl.generation.vllm.engine_args import vllm_env
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.master import RolloutConfig
from nemo_offload_rl.keys.worker import TeacherSettings
from nemo_offload_rl.runs import rollouts as grpo_setup
from nemo_offload_rl.runs.workers import GrpoWorkers
from nemo_offload_rl.utils.progress import Starting

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from run_grpo import main

from nemo_offload_rl.utils.cli import ending_process


class LocalEngine(RayGenerationEngine):
    """One real engine, without a group of processes."""

    def __init__(self, settings: VllmSettings) -> None:
        self._group = LocalWorkerGroup(engine_here(settings))
        self._tp_size, self._loads = 1, EngineLoads(1)

    def wait_until_ready(self) -> None:
        """It is."""


@contextmanager
def local_workers(
    config: RolloutConfig, keep_reference: bool, teacher: TeacherSettings | None, starting: Starting, prepared: None
) -> Iterator[GrpoWorkers]:
    """In place of `grpo_workers`."""
    os.environ.update(vllm_env("cpu"))
    torch._dynamo.config.disable = True  # what TORCHDYNAMO_DISABLE does where torch is not imported yet
    torch.set_num_threads(1)
    engine = LocalEngine(config.engine)
    policy = start_local_policy(config.worker, keep_reference, teacher=teacher)
    try:
        yield GrpoWorkers(policy, engine, config.policy.generation, SimpleNamespace(settings=config.cluster), starting)
    finally:
        policy.shutdown()
        engine.shutdown()


def run_in_this_process(main: Callable[[], None] = main) -> None:
    """Do what a launch script does, without other processes; ways go to the file that `WAYS_FILE` names."""
    grpo_setup.grpo_workers = local_workers
    if "WAYS_FILE" in os.environ:
        ways.record(Path(os.environ["WAYS_FILE"]))
    with ending_process():
        main()


if __name__ == "__main__":
    run_in_this_process()
