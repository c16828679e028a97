"""A run that is killed at any moment goes on from its last complete checkpoint, and nothing is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from forked import Script
from killed_saves import is_interrupted

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests/support"
NUM_KILLS = 10


def test_a_run_killed_again_and_again_at_random_goes_on_each_time_from_its_last_complete_checkpoint(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]), "OMP_NUM_THREADS": "1"}
    (output := tmp_path / "output").mkdir()
    command = [SUPPORT / "killed_saves.py", tmp_path, str(NUM_KILLS)]
    done = Script(command, output, cwd=ROOT, env=environment).wait(1500)
    assert done.status == 0, done.stderr[-3000:]

    lives = json.loads((tmp_path / "killed.json").read_text())
    notes = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    expected = {note["step"]: note["digest"] for note in notes if "step" in note}
    complete = 0
    for number, life in enumerate(lives):
        assert life["notes"][0] == {"resumed": complete}
        steps = [note["step"] for note in life["notes"] if "step" in note]
        assert steps == list(range(complete + 1, complete + 1 + len(steps)))
        assert all(note["digest"] == expected[note["step"]] for note in life["notes"] if "step" in note)
        # A name without an ending is a complete checkpoint.
        names = {name.removeprefix("step_") for name in life["left"]}
        complete = max((int(name) for name in names if name.isdigit()), default=0)
        if steps:
            # Every second step is saved: a save that was waited for is there by the next step, and one in the
            # background by the next save.
            is_background = number % 2 == 0
            assert complete >= (steps[-1] - 1) // 2 * 2 - (2 if is_background else 0)
    assert len(lives) >= NUM_KILLS
    assert complete > 10  # the run got on
    assert any(is_interrupted(life) for life in lives)
