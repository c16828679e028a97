"""Training with checkpoints that is killed at random moments, again and again; run by a test as a process of its own.

`killed_saves.py FOLDER NUM_KILLS`; more kills follow until one has hit a save. Each life is forked from
this process, so that none pays for imports. It resumes by the keeper's rules, then trains and saves until it is killed,
and notes what it did: where it resumed, and a digest of its weights after each step. Some lives keep all state on the
device and some none, whose updates a kill breaks off between two parts of the model. A last life without checkpoints
does all the steps in one go.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from policy_cases import NLL, make_batch, make_settings
from resume_cases import weights_of
from tiny_models import qwen3_config, save_model_folder

from nemo_offload_rl.algorithms.checkpoints import CheckpointKeeper
from nemo_offload_rl.backends.factory import build_backend  # noqa: F401 (imported once, here)
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.distributed.local import LocalWorkerGroup
from nemo_offload_rl.keys.run import CheckpointingConfig
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo

MOST_STEPS = 10  # of a life before its end is drawn
FURTHER_S = 0.2  # at most, from there to the kill


def live(
    folder: Path, log: Path, *, async_save: bool, checkpoints: bool, last_step: int, in_parts: bool = False
) -> None:
    """One life of a run; `in_parts` with `cpu_offload`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(**facts: object) -> None:
        os.write(descriptor, (json.dumps(facts) + "\n").encode())

    parts: dict[str, Any] = {"cpu_offload": True, "activation_checkpointing": True} if in_parts else {}
    settings = make_settings(folder / "model", residency_verify=False, train_micro_batch_size=8, **parts)
    process = ProcessInfo(rank=0, world_size=1, init_method="", device="cpu")
    worker = PolicyWorker(settings, process, keep_reference=False)
    policy = Policy(LocalWorkerGroup(worker), settings)
    loader = ShuffledLoader(range(64), batch_size=1, shuffle=True, seed=5)
    keeper = CheckpointKeeper(
        CheckpointingConfig(
            enabled=checkpoints,
            checkpoint_dir=str(folder / "checkpoints"),
            metric_name="train:loss",
            higher_is_better=False,
            keep_top_k=2,
            save_period=2,
            save_optimizer=True,
            save_consolidated=False,
            checkpoint_must_save_by=None,
            grace_s=30,
            save_at_end=True,
            async_save=async_save,
        )
    )
    stack = ExitStack()
    stack.enter_context(keeper.locked())
    newest = keeper.newest()
    step = 0
    if newest is not None:
        keeper.load(newest, policy, loader)
        step = newest.step
    note(resumed=step)
    while step < last_step:
        step += 1
        (seed,) = next(loader)
        policy.prepare_for_training()
        loss = policy.train(make_batch(seed=seed), NLL()).loss[0]
        policy.offload_after_refit()
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in weights_of(worker).values())).hexdigest()
        note(step=step, digest=digest)
        if keeper.is_due(step, is_last=False):
            keeper.save(step, policy, loader.state_dict(), {"train": {"loss": loss, "total_tokens": 0.0}, "val": {}})
        keeper.poll()
    keeper.finish()
    stack.close()


def forked(target: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # Here, while there is one thread: torch's first check after a fork is not safe in two at once.
            torch.set_num_threads(1)
            target()
            status = 0
        finally:
            os._exit(status)
    return pid


def main(folder: Path, num_kills: int) -> None:
    """Write killed.jsonl, one line a life, and whole.jsonl into `folder`."""
    torch.set_num_threads(1)
    save_model_folder(folder / "model", 0, qwen3_config(tied=True, num_layers=1, hidden_size=32))
    draw = random.Random(0)
    lives: list[dict[str, Any]] = []
    while len(lives) < num_kills or not any(is_interrupted(life) for life in lives):
        life = len(lives)
        log = folder / f"life_{life}.jsonl"
        asynchronous, in_parts = life % 2 == 0, life % 4 >= 2
        pid = forked(
            lambda log=log, asynchronous=asynchronous, in_parts=in_parts: live(
                folder, log, async_save=asynchronous, checkpoints=True, last_step=10_000, in_parts=in_parts
            )
        )
        num_notes = 1 + draw.randint(0, MOST_STEPS)
        while not log.exists() or len(read_notes(log)) < num_notes:
            if os.waitpid(pid, os.WNOHANG)[0]:
                sys.exit(f"life {life} ended by itself")
            time.sleep(0.001)
        time.sleep(draw.uniform(0, FURTHER_S))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(f"life {life} ended by itself")
        lives.append({"notes": read_notes(log), "left": sorted(path.name for path in folder.glob("checkpoints/*"))})
    (folder / "killed.json").write_text(json.dumps(lives))
    last = max(note["step"] for life in lives for note in life["notes"] if "step" in note)
    whole = folder / "whole.jsonl"
    pid = forked(lambda: live(folder, whole, async_save=False, checkpoints=False, last_step=last))
    if os.waitpid(pid, 0)[1]:
        sys.exit("the run in one go failed")


def is_interrupted(life: dict[str, Any]) -> bool:
    """Whether the kill hit a save."""
    return any(name.endswith(".partial") for name in life["left"])


def read_notes(path: Path) -> list[dict[str, object]]:
    """Whole lines of a life's notes; a kill may cut the last one."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
