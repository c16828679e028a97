"""Faults in the middle of runs: what is saved, how they end, and that going on loses nothing but the step under way."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from local_grpo import MIXED, HuggingFaceEngine, KnownRewards, LocalGrpo, collected_ahead, local_grpo
from supervised_cases import dpo, results, sft, write_model, write_rows
from tiny_models import save_model_folder

from nemo_offload_rl.environments.interfaces import Response, Score
from nemo_offload_rl.errors import (
    CheckpointError,
    DataError,
    DeviceMemoryError,
    UserCodeError,
    UserError,
    WorkerDiedError,
)
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.keys.master import SupervisedConfig
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.engine import Completion
from nemo_offload_rl.residency import local_tensor
from nemo_offload_rl.runs.supervised import StartPolicy, local_policy
from nemo_offload_rl.utils.cli import STOP_SIGNALS
from nemo_offload_rl.utils.progress import shown_python

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


@pytest.fixture(autouse=True)
def signals_as_python_sets_them() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and `nohup` ignores SIGHUP; these tests need the defaults."""
    defaults = dict.fromkeys(STOP_SIGNALS, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
        ("in turn", "Ctrl-C", "in the background"),
        ("in turn", "a bug", "waited for"),
        ("ahead", "a reward function", "in the background"),
    ],
)
def test_an_error_of_rollouts_loses_the_step_under_way_alone(tmp_path, model, whole, loop, error, saves):
    keys = (*LOOPS[loop], f"checkpointing.async_save={str(saves == 'in the background').lower()}")
    broken = run(tmp_path, model, *keys, environment=At(BAD_STEP, raise_(ERRORS[error])))
    with pytest.raises(type(ERRORS[error])) as caught:
        broken.run()
    # The save of step 2 is complete, and that of step 3 has removed no other.
    assert saved(tmp_path) == ["step_2", "step_3"]
    assert caught.value.__notes__[-1] == (
        f"  checkpoint  {tmp_path}/checkpoints/step_3\n"
        f"  logs        {tmp_path}\n"
        f"  report      {shown_python()} -m nemo_offload_rl.report {tmp_path}\n"
        "  go on       start the same command again"
    )
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


@pytest.mark.parametrize(("number", "loop"), list(zip(STOP_SIGNALS, itertools.cycle(LOOPS))))
def test_a_signal_lets_the_step_under_way_end_saves_it_and_gives_the_status(tmp_path, model, whole, number, loop):
    stopped = run(tmp_path, model, *LOOPS[loop], environment=At(3, lambda: os.kill(os.getpid(), number)))
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as caught:
        stopped.run()
    assert number == signal.SIGINT or caught.value.code == 128 + number
    assert "step_3" in saved(tmp_path)
    assert caught.value.__notes__[-1].endswith("  go on       start the same command again")
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
    if number == STOP_SIGNALS[-1]:
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


def test_a_second_signal_ends_the_run_at_once_whatever_a_library_makes_of_it(tmp_path, model):
    wait = stop_and_wait(signal.SIGTERM, times=2)

    def in_library() -> None:
        try:
            wait()
        except KeyboardInterrupt:
            raise TypeError("'NoneType' object is not callable") from None

    stopped = run(tmp_path, model, environment=At(BAD_STEP, in_library))
    with pytest.raises(SystemExit) as caught:
        stopped.run()
    assert caught.value.code == 143
    assert saved(tmp_path) == ["step_2"]
    (lines,) = caught.value.__notes__
    assert lines.startswith("  not saved   step 3: a second signal came\n")


def test_a_signal_in_the_last_step_and_one_that_the_process_ignores_end_nothing(tmp_path, model):
    last = run(tmp_path / "last", model, environment=At(NUM_STEPS, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert list(last.run()) == [*range(1, NUM_STEPS + 1)]
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        ignored = run(tmp_path / "ignored", model, environment=At(2, lambda: os.kill(os.getpid(), signal.SIGHUP)))
        assert list(ignored.run()) == [*range(1, NUM_STEPS + 1)]
        assert saved(tmp_path / "ignored") == ["step_5"]
        assert f"the run is complete\n  checkpoint  {tmp_path}/ignored/checkpoints/step_5\n" in ignored.shown
    finally:
        signal.signal(signal.SIGHUP, previous)


# -- other errors of GRPO


class Learned(KnownRewards):
    """From the third step on every response is right, so that no group is left to train on."""

    num_calls = 0

    def step(self, responses: Sequence[Response]) -> list[Score]:
        self.num_calls += 1
        scores = super().step(responses)
        return scores if self.num_calls < 3 else [Score(reward=1.0, correct=True) for _ in scores]


class Dying(HuggingFaceEngine):
    """Dies in its third call."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        if len(self.calls) == 2:
            raise WorkerDiedError("vllm worker 0 died during generate: process 7: gone")
        return super().generate(prompts, sampling, num_samples)


@pytest.mark.parametrize(
    ("keys", "parts", "error"),
    [
        (
            ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=2"),
            {"environment": Learned()},
            "dynamic sampling found 0 of 2 groups",
        ),
        (("checkpointing.save_consolidated=true",), {"engine": Dying()}, "vllm worker 0 died during generate"),
        (LOOPS["ahead"], {"engine": Dying()}, "vllm worker 0 died during generate"),
    ],
    ids=["dynamic sampling that has used its budget", "an engine without restarts", "the same, ahead"],
)
def test_what_else_ends_rollouts_saves_first(tmp_path, model, keys, parts, error):
    with pytest.raises(UserError, match=error):
        run(tmp_path, model, *keys, "checkpointing.save_period=1000", **parts).run()
    assert saved(tmp_path) == ["step_2"]
    assert (tmp_path / "checkpoints/step_2/hf").is_dir() is ("checkpointing.save_consolidated=true" in keys)


def test_a_key_says_that_nothing_is_saved_at_an_early_end(tmp_path, model):
    with pytest.raises(DataError) as caught:
        environment = At(BAD_STEP, raise_(DataError("row 5 has no answer; add one")))
        run(tmp_path, model, "checkpointing.save_at_end=false", environment=environment).run()
    assert saved(tmp_path) == ["step_2"]
    assert caught.value.__notes__[-1].startswith("  not saved   step 3: checkpointing.save_at_end is false\n")


def test_a_checkpoint_folder_that_is_gone_hides_no_error(tmp_path, model):
    def break_off() -> None:
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "checkpoints").touch()
        raise DataError("row 5 has no answer; add one")

    with pytest.raises(DataError, match="row 5") as caught:
        run(tmp_path, model, environment=At(BAD_STEP, break_off)).run()
    assert caught.value.__notes__[-1].startswith("  not saved  step 3: ")


# -- SFT and DPO

EVERY_SECOND = ("checkpointing.save_period=2", "checkpointing.metric_name=null", "checkpointing.async_save=true")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    return folder


def starting(act: Callable[[PolicyWorker], object]) -> StartPolicy:
    """Starts a policy in this process, whose worker `act` changes."""

    @contextmanager
    def start(config: SupervisedConfig, keep_reference: bool) -> Iterator[Policy]:
        with local_policy(config, keep_reference) as policy:
            act(policy._group._worker)  # type: ignore[attr-defined]
            yield policy

    return start


def in_call(number: int, name: str, act: Callable[[], object], *, after: bool = False) -> Callable[[Any], object]:
    """In the n-th call of a method something happens, before it begins or after it has done its work."""
    num_calls = 0

    def change(owner: Any) -> None:
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            result = method(*args, **kwargs) if after else None
            if num_calls == number:
                act()
            return result if after else method(*args, **kwargs)

        setattr(owner, name, call)

    return change


def test_dpo_loses_the_step_under_way_alone_and_nothing_where_a_signal_lets_it_end(rows):
    """SFT has the same loop."""
    folder = rows / "broken"
    whole = dpo(rows, "whole", *EVERY_SECOND)
    no_room = DeviceMemoryError("out of memory in a training pass; lower policy.train_micro_batch_size")
    with pytest.raises(DeviceMemoryError) as caught:
        start = starting(in_call(2, "forward_backward", raise_(no_room)))
        dpo(rows, folder.name, *EVERY_SECOND, start=start)
    assert saved(folder) == ["step_1"]
    assert caught.value.__notes__[-1].startswith(f"  checkpoint  {folder}/checkpoints/step_1\n  logs        {folder}\n")
    with pytest.raises(SystemExit) as stopped:  # in the update of step 2
        start = starting(in_call(1, "optim_step", lambda: os.kill(os.getpid(), signal.SIGTERM)))
        dpo(rows, folder.name, *EVERY_SECOND, start=start)
    assert stopped.value.code == 143
    assert saved(folder) == ["step_1", "step_2"]
    with pytest.raises(SystemExit) as stopped:  # in the save of step 4
        start = starting(in_call(1, "start_save", lambda: os.kill(os.getpid(), signal.SIGUSR1), after=True))
        dpo(rows, folder.name, *EVERY_SECOND, "dpo.max_num_steps=5", start=start)
    assert stopped.value.code == 138
    assert "step_4" in saved(folder)
    later = dpo(rows, folder.name, *EVERY_SECOND, "dpo.max_num_steps=5")
    assert results(later)[: len(whole)] == results(whole)


def test_the_last_save_of_a_run_that_fails_in_the_background_is_its_error(rows):
    full = CheckpointError("step_4 cannot be written (No space left on device); free space there")
    with pytest.raises(CheckpointError, match="No space left") as caught:
        start = starting(in_call(2, "finish_save", raise_(full)))
        sft(rows, "full", *EVERY_SECOND, start=start)
    assert saved(rows / "full") == ["step_2"]
    assert caught.value.__notes__[-1].startswith("  not saved   steps 3 to 4: the save failed\n")


def test_a_state_between_two_steps_is_not_saved(rows):
    broken = DeviceMemoryError("out of memory in the update")
    with pytest.raises(DeviceMemoryError) as caught:
        start = starting(lambda worker: in_call(3, "optim_step", raise_(broken), after=True)(worker._backend))
        sft(rows, "between", *EVERY_SECOND, "checkpointing.save_period=1000", start=start)
    assert saved(rows / "between") == []
    lines = caught.value.__notes__[-1]
    assert lines.startswith("  not saved  steps 1 to 2: an update broke off in the middle, or not all updates of the")


def test_weights_that_are_not_finite_are_not_saved_nor_is_a_state_that_no_update_has_changed(rows, caplog):
    def poison(worker: PolicyWorker) -> None:
        (params,) = (group for group in worker._backend.state_groups() if group.name == "params")
        tensor = next(tensor for _, tensor in params.tensors() if tensor.dim() > 1)
        with torch.no_grad():
            local_tensor(tensor).fill_(math.nan)

    keys = (*EVERY_SECOND, "checkpointing.save_period=1", "policy.max_skipped_updates=100", "sft.max_num_steps=3")
    sft(rows, "skipped", *keys, start=starting(poison))
    assert saved(rows / "skipped") == []
    assert "step 3 is not saved: every update since the last save was skipped" in caplog.text

    def poison_after_two(worker: PolicyWorker) -> None:
        in_call(2, "optim_step", lambda: poison(worker), after=True)(worker)

    sft(rows, "poisoned", *keys, start=starting(poison_after_two))
    assert saved(rows / "poisoned") == ["step_1"]
    assert "step 2 is not saved: 1 parameters are not finite, " in caplog.text
