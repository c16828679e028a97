from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from nemo_offload_rl.utils.progress import RunProgress

SECONDS = {"generation": 2.0, "training": 1.0, "training/optimizer": 0.5, "total": 4.0}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    stream, clock = io.StringIO(), Clock()
    with RunProgress(10, console=Console(file=stream, width=40), clock=clock) as progress:
        clock.now = 4.0
        progress.step_done(1, {"reward": "0.500", "accuracy": "25.0%"}, SECONDS)
        clock.now = 8.0
        progress.step_done(2, {"reward": "0.750"}, SECONDS)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "step 1/10  reward 0.500  accuracy 25.0%  4.0 s (generation 50%, training 25%, other 25%)  36 s left",
        "step 2/10  reward 0.750  4.0 s (generation 50%, training 25%, other 25%)  32 s left",
    ]


def test_what_a_validation_found_stands_with_its_step_until_the_next_one() -> None:
    stream, clock = io.StringIO(), Clock()
    with RunProgress(10, console=Console(file=stream), clock=clock) as progress:
        progress.validated(0, {"loss": "2.0", "accuracy": "1.0%"})
        progress.step_done(1, {"accuracy": "3.0%"}, SECONDS)
        progress.validated(2, {"accuracy": "100.0%"})
        progress.step_done(2, {"accuracy": "4.0%"}, SECONDS)
        progress.step_done(3, {"accuracy": "5.0%"}, SECONDS)
    shown = [line.partition("  4.0 s")[0] for line in stream.getvalue().splitlines()]
    assert shown == [
        "before training: held-out loss 2.0, accuracy 1.0%",
        "step 1/10  accuracy 3.0%  held-out loss 2.0, accuracy 1.0% (step 0)",
        "step 2/10  accuracy 4.0%  held-out accuracy 100.0% (step 2)",
        "step 3/10  accuracy 5.0%  held-out accuracy 100.0% (step 2)",
    ]


FIGURES = {"reward": "-0.758", "accuracy": "100.0%", "length": "1234.5", "cut off": "100.0%", "KL": "0.0012"}


@pytest.mark.parametrize("width", [80, 120])
def test_on_a_terminal_no_line_is_wider_than_it_and_a_bar_says_what_is_done_now(width: int) -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=True, width=width)
    with RunProgress(1000, console=console, clock=clock) as progress:
        with progress.starting("engine"):
            clock.now = 12.0
            assert progress.activity() == "starting engine, 12 s"
        progress.follow(lambda: "reference_logprobs")
        assert progress.activity() == "reference_logprobs"
        progress.validated(500, {"accuracy": "100.0%"})
        clock.now = 5012.0
        progress.step_done(500, FIGURES, {"reference_logprobs": 2.0, "generation": 1.5, "training": 1.0, "total": 5.0})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n")
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "engine is ready after 12.0 s" in lines
    shown = " ".join(line.strip() for line in lines if "reward" in line or line.startswith("    "))
    phases = "reference_logprobs 40%, generation 30%" + (", training 20%" if width == 120 else "")
    assert re.sub(" +", " ", shown).endswith(
        "step 500/1000 reward -0.758 accuracy 100.0% length 1234.5 cut off 100.0% KL 0.0012 "
        f"held-out accuracy 100.0% (step 500) 5.0 s ({phases})"
    )
    assert re.search(r"reference_logprobs .* 500/1000 +83 min left", text)


def test_without_a_terminal_the_start_is_a_line_a_part() -> None:
    stream, clock = io.StringIO(), Clock()
    with RunProgress(10, console=Console(file=stream), clock=clock) as progress:
        progress.begin("GRPO, 10 steps", {"model": "m", "logs": "runs/x"})
        for name in ("Ray", "engine"):
            with progress.starting(name):
                clock.now += 2.5
    assert stream.getvalue().splitlines() == [
        "GRPO, 10 steps",
        "  model  m",
        "  logs   runs/x",
        "Ray is ready after 2.5 s",
        "engine is ready after 2.5 s",
    ]


def test_time_left_comes_from_the_steps_of_this_run_only() -> None:
    clock = Clock()
    progress = RunProgress(10, first_step=5, console=Console(file=io.StringIO()), clock=clock)
    assert progress.seconds_left(5) is None
    clock.now = 6.0
    assert progress.seconds_left(7) == pytest.approx(9.0)


def test_brackets_in_a_note_are_shown_as_they_are() -> None:
    stream = io.StringIO()
    with RunProgress(1, console=Console(file=stream)) as progress:
        progress.note("answer [bold]7[/bold]")
    assert stream.getvalue() == "answer [bold]7[/bold]\n"


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_stream_that_takes_nothing_more_costs_a_warning_and_not_the_run(
    terminal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with RunProgress(3, console=Console(file=_Full(), force_terminal=terminal)) as progress:
        for step in (1, 2, 3):
            progress.step_done(step, {"reward": "0.5"}, SECONDS)
    assert (
        caplog.text.count("progress is no longer shown, and the run goes on: [Errno 28] No space left on device") == 1
    )


def test_what_a_stream_cannot_encode_is_shown_by_its_code() -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    with RunProgress(3, console=Console(file=stream)) as progress:
        progress.note("\u00e9 \ud800 done")
    assert written.getvalue() == b"\\xe9 \\ud800 done\n"


SHOWS_STEPS = """
import os, sys, time
from nemo_offload_rl.utils.cli import ending_process, set_up_logging
from nemo_offload_rl.utils.progress import RunProgress

def main():
    set_up_logging()
    sys.stdin.read()  # until the reader of standard output has ended
    with RunProgress(2) as progress:
        for step in (1, 2):
            progress.step_done(step, {}, {"total": 1.0})
    os.write(2, b"both steps done\\n")

with ending_process():
    main()
"""


def test_a_pipe_that_is_closed_at_its_other_end_leaves_the_run_and_its_status_alone() -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", SHOWS_STEPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stdin and run.stdout and run.stderr
    run.stdout.close()
    run.stdin.close()
    told = run.stderr.read().decode()
    assert run.wait(1500) == 0, told
    run.stderr.close()
    assert told.count("progress is no longer shown, and the run goes on") == 1
    assert told.endswith("both steps done\n")
