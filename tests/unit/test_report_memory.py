from __future__ import annotations

import json

from nemo_offload_rl.report_memory import last_steps, memory_picture, read_samples
from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE


def write(folder, rows) -> None:
    lines = [json.dumps({"t_s": t, "step": step, "phase": phase, "gib": gib}) for t, step, phase, gib in rows]
    (folder / MEMORY_FILE).write_text("\n".join(lines) + "\n{cut sh")


def test_the_fullest_gpu_is_shown_and_a_line_that_was_cut_is_left_out(tmp_path):
    low, high = {"engine": 1.0, "policy": 0.5, "other": 0.0}, {"engine": 1.0, "policy": 7.0, "other": 0.0}
    write(tmp_path, [(0.0, 1, "training", {"a": low, "b": high}), (0.2, 1, "refit", {"a": low, "b": low})])
    assert [(s.phase, s.gib["policy"]) for s in read_samples(tmp_path)] == [("training", 7.0), ("refit", 0.5)]


def test_only_the_last_steps_are_drawn(tmp_path):
    gib = {"a": {"engine": 1.0, "other": 0.0}}
    write(tmp_path, [(float(i), i, "training", gib) for i in range(1, 9)])
    assert {sample.step for sample in last_steps(read_samples(tmp_path))} == {6, 7, 8}
    picture = memory_picture(tmp_path)
    assert picture is not None
    assert picture.startswith(b"\x89PNG")


def test_a_run_without_samples_has_no_picture(tmp_path):
    assert memory_picture(tmp_path) is None
    write(tmp_path, [(0.0, 1, "training", {})])
    assert memory_picture(tmp_path) is None
