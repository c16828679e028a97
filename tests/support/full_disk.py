"""Training with checkpoints into a folder that gets full; run by a test as a process of its own.

`full_disk.py MODEL CHECKPOINTS BACKGROUND LIMIT COPY`: saves after every step, in the background with
BACKGROUND 1. From the second step on no file may be larger than LIMIT bytes. With LIMIT 0 CHECKPOINTS is a file system
of its own, which holds one checkpoint and not two; it ends with the process, and what it held is copied to COPY.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from policy_cases import NLL, make_batch, make_settings

from nemo_offload_rl.algorithms.checkpoints import CheckpointKeeper
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.distributed.local import LocalWorkerGroup
from nemo_offload_rl.keys.run import CheckpointingConfig
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.utils.cli import ending_process

NUM_STEPS = 8
SMALL = ("-t", "tmpfs", "-o", "size=600k", "tmpfs")


def main() -> None:
    """Train until a save fails."""
    model, folder, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[4])
    if not limit:
        mount(folder)  # while this process has one thread
    settings = make_settings(model)
    worker = PolicyWorker(settings, ProcessInfo(rank=0, world_size=1, init_method="", device="cpu"), False)
    policy = Policy(LocalWorkerGroup(worker), settings)
    loader = ShuffledLoader(range(8), batch_size=1, shuffle=True, seed=0)
    keeper = CheckpointKeeper(
        CheckpointingConfig(
            enabled=True,
            checkpoint_dir=str(folder),
            metric_name=None,
            higher_is_better=True,
            keep_top_k=None,
            save_period=1,
            save_optimizer=True,
            save_consolidated=False,
            checkpoint_must_save_by=None,
            grace_s=30,
            save_at_end=True,
            async_save=sys.argv[3] == "1",
        )
    )
    assert keeper.newest() is None
    try:
        train(policy, loader, keeper, limit)
    finally:
        policy.shutdown()
        if not limit:
            shutil.copytree(folder, sys.argv[5])


def mount(folder: Path) -> None:
    """Mount a small file system that this process and its children alone can see."""
    user, group = os.getuid(), os.getgid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    subprocess.run(["mount", *SMALL, folder], check=True)


def train(policy: Policy, loader: ShuffledLoader[int], keeper: CheckpointKeeper, limit: int) -> None:
    """Save after each step."""
    policy.prepare_for_training()
    for step in range(1, NUM_STEPS + 1):
        policy.train(make_batch(seed=step), NLL())
        keeper.save(step, policy, loader.state_dict(), {"train": {"total_tokens": 0.0}, "val": {}})
        keeper.poll()
        if step == 1:
            keeper.finish()
            if limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    keeper.finish()


if __name__ == "__main__":
    with ending_process():
        main()
