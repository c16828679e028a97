"""Faults in the middle of runs: what is saved, how they end, and that going on loses nothing but the step under way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from local_grpo import MIXED, KnownRewards, LocalGrpo, collected_ahead, local_grpo
from tiny_models import save_model_folder

from nemo_offload_rl.algorithms.run_end import STOP_SIGNALS
from nemo_offload_rl.environments.interfaces import Response, Score
from nemo_offload_rl.errors import UserCodeError

NUM_STEPS = 5
BAD_STEP = 4
SAVING = (
    "checkpointing.enabled=true", "checkpointing.save_period=2", "checkpointing.keep_top_k=1",
    "grpo.max_num_epochs=100", f"grpo.max_num_steps={NUM_STEPS}", "policy.scheduler=null",
    "policy.optimizer.kwargs.lr=1e-3",
)  # fmt: skip
LOOPS = {"in turn": (), "ahead": collected_ahead(0)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model_folder(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """Runs without a fault."""
    return {loop: numbers(run(tmp_path_factory.mktemp("whole"), model, *keys).run()) for loop, keys in LOOPS.items()}


def run(folder: Path, model: Path, *overrides: str, **parts: Any) -> LocalGrpo:
    return local_grpo(folder, model, [MIXED] * 7, *SAVING, *overrides, **parts)


def numbers(metrics: Mapping[int, Mapping[str, float]]) -> list[dict[str, float]]:
    """By step, what depends on no clock."""
    return [
        {name: value for name, value in record.items() if name.startswith("train/") and "per_s" not in name}
        for record in metrics.values()
    ]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


class At(KnownRewards):
    """Does something when it is asked for the n-th time."""

    def __init__(self, call: int, act: Callable[[], object]) -> None:
        self._left = call
        self._act = act

    def step(self, responses: Sequence[Response]) -> list[Score]:
        self._left -= 1
        if not self._left:
            self._act()
        return super().step(responses)


def raise_(error: BaseException) -> Callable[[], object]:
    def act() -> object:
        raise error

    return act


ERRORS = {
    "a reward function": UserCodeError("reward.py:3: boom"),
    "Ctrl-C": KeyboardInterrupt(),
    "a bug": ZeroDivisionError(),
}


@pytest.mark.parametrize(
    ("loop", "error", "saves"),
    [
        ("in turn", "a reward function", "in the background"),
        ("in turn", "a bug", "waited for"),
        ("in turn", "Ctrl-C", "in the background"),
        ("ahead", "a reward function", "in the background"),
        ("ahead", "a bug", "waited for"),
    ],
)
def test_an_error_of_rollouts_loses_the_step_under_way_alone(tmp_path, model, whole, loop, error, saves):
    keys = (*LOOPS[loop], f"checkpointing.async_save={str(saves == 'in the background').lower()}")
    broken = run(tmp_path, model, *keys, environment=At(BAD_STEP, raise_(ERRORS[error])))
    with pytest.raises(type(ERRORS[error])) as caught:
        broken.run()
    # The save of step 2 is complete, and that of step 3 has removed no other.
    assert saved(tmp_path) == ["step_2", "step_3"]
    (line,) = caught.value.__notes__[-1:]
    assert line.startswith(f"start the same command again to go on from {tmp_path}/checkpoints/step_3; metrics are in")
    assert numbers(run(tmp_path, model, *keys).run()) == whole[loop]
    assert saved(tmp_path) == ["step_5"]


# -- signals


def stop_and_wait(number: int, times: int = 1) -> Callable[[], object]:
    """Send this process a signal, and go on scoring until it is broken off."""

    def act() -> object:
        for _ in range(times):
            os.kill(os.getpid(), number)
            deadline_s = time.monotonic() + (1.5 if times > 1 else 300)
            while time.monotonic() < deadline_s:
                time.sleep(0.01)
        raise AssertionError("nothing broke it off")

    return act


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_lets_the_step_under_way_end_saves_it_and_gives_the_status(tmp_path, model, whole, number, loop):
    stopped = run(tmp_path, model, *LOOPS[loop], environment=At(3, lambda: os.kill(os.getpid(), number)))
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as caught:
        stopped.run()
    assert number == signal.SIGINT or caught.value.code == 128 + number
    assert "step_3" in saved(tmp_path)
    assert "to go on from" in caught.value.__notes__[-1]
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
    if number == signal.SIGUSR1:
        assert numbers(run(tmp_path, model, *LOOPS[loop]).run()) == whole[loop]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_spot_instance_that_is_taken_in_a_long_step_saves_the_step_before_once_the_grace_is_over(
    tmp_path, model, whole, loop
):
    keys = (*LOOPS[loop], "checkpointing.grace_s=0.1")
    stopped = run(tmp_path, model, *keys, environment=At(BAD_STEP, stop_and_wait(signal.SIGTERM)))
    with pytest.raises(SystemExit) as caught:
        stopped.run()
    assert caught.value.code == 143
    assert saved(tmp_path) == ["step_2", "step_3"]
    assert numbers(run(tmp_path, model, *keys).run()) == whole[loop]


def test_a_second_signal_ends_the_run_at_once(tmp_path, model):
    stopped = run(tmp_path, model, environment=At(BAD_STEP, stop_and_wait(signal.SIGTERM, times=2)))
    with pytest.raises(SystemExit) as caught:
        stopped.run()
    assert caught.value.code == 143
    assert saved(tmp_path) == ["step_2"]
    (line,) = caught.value.__notes__
    assert line.startswith("steps 3 to 3 are not saved: a second signal came; start the same command again to go on")


def test_a_signal_in_the_last_step_and_one_that_the_process_ignores_end_nothing(tmp_path, model):
    last = run(tmp_path / "last", model, environment=At(NUM_STEPS, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert list(last.run()) == [*range(1, NUM_STEPS + 1)]
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        ignored = run(tmp_path / "ignored", model, environment=At(2, lambda: os.kill(os.getpid(), signal.SIGHUP)))
        assert list(ignored.run()) == [*range(1, NUM_STEPS + 1)]
        assert saved(tmp_path / "ignored") == ["step_5"]
        assert f"the last checkpoint is {tmp_path}/ignored/checkpoints/step_5; metrics are in" in ignored.shown
    finally:
        signal.signal(signal.SIGHUP, previous)
