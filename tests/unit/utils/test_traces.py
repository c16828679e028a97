"""Traces of steps: who writes them, what cannot be written, and which steps a run has."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.run import LoggerConfig
from nemo_offload_rl.runs.checks import check_profile_steps
from nemo_offload_rl.utils.timer import PhaseTimer
from nemo_offload_rl.utils.traces import ProcessTrace, StepTraces, named_range


class Worker:
    """What `StepTraces` traces, in this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._trace = ProcessTrace()

    def start_trace(self) -> None:
        self._trace.start()

    def stop_trace(self, prefix: str) -> list[str]:
        problem = self._trace.stop(f"{prefix}_{self._name}")
        return [] if problem is None else [problem]


def test_of_several_workers_in_a_process_the_first_writes_for_all_and_other_steps_leave_nothing(tmp_path):
    timer, said = PhaseTimer(), []
    traces = StepTraces([2], tmp_path, [Worker("policy"), Worker("engine")], timer, said.append)
    for step in (1, 2, 3):
        traces.begin(step)
        with named_range(f"step {step}"):
            torch.ones(2, 2) @ torch.ones(2, 2)
        traces.end(step)
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "step_2_policy.json.gz"
    names = {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names
    assert {name for name in names if name.startswith("step ")} == {"step 2"}
    assert len(said) == 1
    assert timer.seconds()["profile"] > 0


def test_a_trace_that_cannot_be_written_costs_a_warning_and_the_next_one_is_written(tmp_path, caplog):
    (tmp_path / "traces").touch()
    traces = StepTraces([1, 2], tmp_path, [Worker("policy")], PhaseTimer(), lambda text: None)
    traces.begin(1)
    traces.end(1)
    (warning,) = caplog.records
    assert "step 1: traces could not be written" in warning.getMessage()
    assert "File exists" in warning.getMessage()
    (tmp_path / "traces").unlink()
    traces.begin(2)
    traces.end(2)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["step_2_policy.json.gz"]


@pytest.mark.parametrize("steps", [(0,), (-1,), (1, 6)])
def test_a_step_that_the_run_does_not_have_is_refused(steps):
    with pytest.raises(ConfigError, match=rf"profile_steps names step {steps[-1]}, but the run has steps 1 to 5"):
        check_profile_steps(LoggerConfig(log_dir="logs", profile_steps=steps), 5)


def test_steps_that_the_run_has_are_accepted():
    check_profile_steps(LoggerConfig(log_dir="logs", profile_steps=(1, 5)), 5)
