from __future__ import annotations

import json
import re
from html import unescape

from nemo_offload_rl.report import write_report
from nemo_offload_rl.report.plot import memory_samples, read_samples
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
    assert {sample.step for sample in memory_samples(tmp_path)} == {6, 7, 8}
    write_metrics(tmp_path)
    html = write_report(tmp_path).read_text()
    assert "<figcaption>GPU memory by owner</figcaption>" in html
    assert {">engine<", ">other<", ">training<"} <= set(re.findall(r">\w+<", html)) and ">policy<" not in html


def write_metrics(folder) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1, "timing/total_s": 1.0}\n')


def test_a_run_without_samples_has_no_figure(tmp_path):
    write_metrics(tmp_path)
    assert memory_samples(tmp_path) == []
    write(tmp_path, [(0.0, 1, "training", {})])
    assert memory_samples(tmp_path) == []
    write(tmp_path, [(0.0, 1, "training", {"a": {"engine": 1.0}})])
    assert memory_samples(tmp_path) == []
    assert "GPU memory" not in write_report(tmp_path).read_text()


def test_samples_before_a_resume_are_left_out(tmp_path):
    gib = {"a": {"engine": 1.0}}
    write(tmp_path, [(t, step, "training", gib) for t, step in [(1.0, 7), (90.0, 8), (0.2, 6), (0.4, 7)]])
    assert [(sample.t_s, sample.step) for sample in read_samples(tmp_path)] == [(0.2, 6), (0.4, 7)]


def test_an_owner_that_comes_later_is_drawn(tmp_path):
    write_metrics(tmp_path)
    rows = [(0.0, 1, "refit", {"a": {"policy": 1.0}}), (0.2, 1, "refit", {"a": {"policy": 1.0, "engine": 2.0}})]
    write(tmp_path, rows)
    html = write_report(tmp_path).read_text()
    assert ">engine<" in html and "planned peak" not in html


def test_planned_peaks_are_drawn_over_the_phases_that_they_are_of(tmp_path):
    planned = {"plan/training_gib": 5.0, "plan/optim_step_gib": 6.5, "plan/refit_gib": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "timing/total_s": 1.0, **planned}) + "\n")
    gib = {"a": {"policy": 1.0}}
    write(tmp_path, [(float(i), 1, phase, gib) for i, phase in enumerate(("refit", "between", "training"))])
    values = [
        json.loads(unescape(it)) for it in re.findall('data-values="([^"]*)"', write_report(tmp_path).read_text())
    ]
    (drawn,) = (line for each in values for line in each["lines"] if line["label"] == "planned peak")
    assert drawn["y"] == [2.0, 6.5]
