"""A disk that gets full ends a run in one line and status 2, and harms no checkpoint that was complete."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from forked import Script
from tiny_models import qwen3_config, save_model_folder

from nemo_offload_rl.algorithms.checkpoints import CheckpointKeeper
from nemo_offload_rl.keys.run import CheckpointingConfig

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests/support"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model_folder(folder, 0, qwen3_config(tied=True, num_layers=1, hidden_size=32))
    return folder


def can_mount() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("background", ["0", "1"], ids=["waited for", "in the background"])
@pytest.mark.parametrize("kind", ["full disk", "file too large"])
def test_a_save_without_room_is_one_line_and_status_2_and_the_one_before_it_is_whole(tmp_path, model, kind, background):
    folder, left = tmp_path / "checkpoints", tmp_path / "left"
    folder.mkdir()
    limit = "0" if kind == "full disk" else "100000"
    if kind == "full disk" and not can_mount():
        pytest.skip("this machine lets no process mount a file system of its own")
    argv = [SUPPORT / "full_disk.py", model, folder, background, limit, left]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])}
    done = Script(argv, tmp_path, cwd=ROOT, env=environment).wait(1500)

    assert done.status == 2, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"error: checkpoint {folder}/step_2 was not saved: ")
    assert ("No space left on device" if kind == "full disk" else "File too large") in line
    assert "checkpointing.checkpoint_dir" in line and line.endswith("step_1 is complete and was not touched")
    assert "Traceback" not in done.stderr

    remains = left if kind == "full disk" else folder
    assert [path.name for path in remains.iterdir()] == ["step_1"]
    settings = CheckpointingConfig(
        enabled=True,
        checkpoint_dir=str(remains),
        metric_name=None,
        higher_is_better=True,
        keep_top_k=None,
        save_period=1,
        save_optimizer=True,
        save_consolidated=False,
        async_save=False,
        checkpoint_must_save_by=None,
        grace_s=30,
        save_at_end=True,
    )
    newest = CheckpointKeeper(settings).newest()  # every file has its size
    assert newest is not None and newest.step == 1
