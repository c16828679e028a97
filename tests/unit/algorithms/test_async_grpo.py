"""Rollouts beside training, with a real policy and Hugging Face as the engine; vLLM's is in tests/functional."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from grpo_replay import read_rollouts
from local_grpo import (
    MIXED,
    HuggingFaceEngine,
    KnownRewards,
    PausableEngine,
    collected_ahead,
    colocated_ahead,
    local_grpo,
    make_prompts,
    taken_as_finished,
)
from tiny_models import save_model_folder

from nemo_offload_rl.algorithms.paused_rollouts import Gate
from nemo_offload_rl.environments.interfaces import Response, Score
from nemo_offload_rl.errors import AgreementError, DataError, UserError, WorkerDiedError
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion

STEPS = 6
SHORT = ("grpo.max_num_epochs=100", "policy.optimizer.kwargs.lr=1e-3", "policy.scheduler=null")
OFF = "grpo.async_grpo.enabled=false"
# What is about the buffer, or depends on clocks.
OF_THE_BUFFER = (
    "train/avg_trajectory_age", "train/buffer_size", "train/avg_token_age", "train/max_token_age",
    "train/trained_length_mean", "train/sampled_length_mean",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model_folder(folder, seed=0)
    return folder


def numbers(metrics: Mapping[int, Mapping[str, float]]) -> list[dict[str, float]]:
    """By step, what must be the same wherever rollouts come from."""
    return [
        {
            name: value
            for name, value in record.items()
            if name.startswith(("train/", "validation/")) and "per_s" not in name and name not in OF_THE_BUFFER
        }
        for record in metrics.values()
    ]


def run(folder: Path, model: Path, *overrides: str, steps: int = STEPS, **parts: Any) -> dict[int, dict[str, float]]:
    keys = (*SHORT, f"grpo.max_num_steps={steps}", *overrides)
    return local_grpo(folder, model, [MIXED] * 7, *keys, **parts).run()


def test_with_an_age_of_zero_a_run_is_the_synchronous_run_bit_by_bit(tmp_path, model):
    validated = ("grpo.val_period=2", "grpo.val_at_start=true", "grpo.max_val_samples=3", "grpo.val_batch_size=2")
    parts = {"validation": make_prompts([MIXED] * 3)}
    keys = (*collected_ahead(0), *validated)
    in_turn = run(tmp_path / "in turn", model, *keys, OFF, **parts)
    collected = run(tmp_path / "collected", model, *keys, **parts)
    finished = run(tmp_path / "finished", model, *taken_as_finished(0), *validated, engine=PausableEngine(), **parts)
    assert numbers(collected) == numbers(in_turn)
    assert numbers(finished) == numbers(in_turn)
    colocated = run(tmp_path / "colocated", model, *colocated_ahead(0), *validated, engine=PausableEngine(), **parts)
    assert numbers(colocated) == numbers(in_turn)
    assert len({record["train/loss"] for record in collected.values() if "train/loss" in record}) == STEPS
    assert {record.get("train/avg_trajectory_age", 0) for record in collected.values()} == {0}


def test_ages_grow_to_the_bound_and_change_no_number_while_the_weights_stay_the_same(tmp_path, model):
    max_age = 3
    keys = (*collected_ahead(max_age), "policy.optimizer.kwargs.lr=0.0", "policy.optimizer.kwargs.weight_decay=0.0")
    in_turn = run(tmp_path / "in turn", model, *keys, OFF)
    collected = run(tmp_path / "collected", model, *keys)
    assert numbers(collected) == numbers(in_turn)
    for name in ("avg_trajectory_age", "avg_token_age", "max_token_age"):
        ages = [record[f"train/{name}"] for record in collected.values()]
        assert ages == [min(step, max_age) for step in range(STEPS)]
    assert all(record["train/buffer_size"] in range(0, 2 * max_age + 1, 2) for record in collected.values())
    assert collected[STEPS]["train/buffer_size"] == 0


def test_rollouts_are_those_of_the_weights_that_their_age_says(tmp_path, model):
    log = "grpo.log_rollouts=true"
    in_turn = run(tmp_path / "in turn", model, *collected_ahead(1), OFF, log, steps=2)
    collected = run(tmp_path / "collected", model, *collected_ahead(1), log, steps=2)
    for metrics in (in_turn, collected):
        assert metrics[1]["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    assert in_turn[2]["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    assert collected[2]["train/token_mult_prob_error"] > 1.001
    # The initial weights said those of both steps: a run that does not train has the same.
    still = ("policy.optimizer.kwargs.lr=0.0", "policy.optimizer.kwargs.weight_decay=0.0")
    run(tmp_path / "untrained", model, *collected_ahead(1), OFF, log, *still, steps=2)
    said = [
        [[rollout["token_ids"], rollout["generation_logprobs"]] for rollout in read_rollouts(tmp_path / name)[2]]
        for name in ("collected", "untrained", "in turn")
    ]
    assert said[0] == said[1] != said[2]
    for name, version in (("collected", 0), ("in turn", 1)):
        for rollout in read_rollouts(tmp_path / name)[2]:
            assert rollout["weight_versions"] == [[version, len(rollout["token_ids"])]]


def test_a_run_that_goes_on_draws_the_same_prompts_for_each_step_and_begins_with_the_present_weights(tmp_path, model):
    keys = (*collected_ahead(2), "grpo.log_rollouts=true", "grpo.max_num_epochs=2")
    saving = (*keys, "checkpointing.enabled=true", "checkpointing.save_period=1")
    whole = run(tmp_path / "whole", model, *keys)
    run(tmp_path / "parts", model, *saving, steps=3)
    rest = run(tmp_path / "parts", model, *saving)
    assert [rest[step]["train/avg_trajectory_age"] for step in range(1, STEPS + 1)] == [0, 1, 2, 0, 1, 2]
    assert numbers(rest)[:3] == numbers(whole)[:3]
    prompts = [
        {step: [rollout["prompt"] for rollout in rollouts] for step, rollouts in read_rollouts(tmp_path / name).items()}
        for name in ("whole", "parts")
    ]
    assert prompts[0] == prompts[1]
    assert list(prompts[0]) == [*range(1, STEPS + 1)]  # two epochs of three batches: all of the data
    # The last batch of the data ends the run, also where the steps could go on.
    assert list(run(tmp_path / "ended", model, *keys, steps=100)) == [*range(1, STEPS + 1)]


class WithATail(PausableEngine):
    """Does not answer the first prompt until the second step has been trained, and then perhaps ends the run."""

    def __init__(self, *, ends: bool = False) -> None:
        super().__init__()
        self._ends = ends
        self.num_refits = 0
        self._refitted = threading.Condition()
        self._is_late: Sequence[int] | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        with self._refitted:
            self._is_late = self._is_late or prompts[0]
            if prompts[0] == self._is_late and self.num_refits < 3:
                assert self._refitted.wait_for(lambda: self.num_refits >= 3, 1500)
        return super().generate(prompts, sampling, num_samples)

    def finish_refit(self, version: int = 0) -> None:
        super().finish_refit(version)
        with self._refitted:
            self.num_refits += 1
            self._refitted.notify_all()
            if self._ends and self.num_refits == 3:
                self.resume_generation()  # so that the threads end
                raise DataError("no third refit")


def test_a_slow_group_holds_up_no_other_is_trained_on_once_and_comes_again_after_a_resume(tmp_path, model):
    keys = (*taken_as_finished(2), "grpo.log_rollouts=true", "grpo.max_num_epochs=2")
    saving = (*keys, "checkpointing.enabled=true", "checkpointing.save_period=1")
    whole = run(tmp_path / "whole", model, *keys, engine=WithATail())
    ages = [whole[step]["train/avg_trajectory_age"] for step in range(1, STEPS + 1)]
    assert ages[:2] == [0, 1] and 1 <= ages[2] <= 2  # the third takes the first prompt, and perhaps younger ones
    assert all(0 <= age <= 2 for age in ages)
    with pytest.raises(DataError, match="no third refit"):
        run(tmp_path / "parts", model, *saving, engine=WithATail(ends=True))
    rest = run(tmp_path / "parts", model, *saving, engine=PausableEngine())
    assert [rest[step]["train/avg_trajectory_age"] <= min(step - 3, 2) for step in range(3, STEPS + 1)] == [True] * 4
    in_turn = run(tmp_path / "in turn", model, *keys, OFF, engine=HuggingFaceEngine())
    assert list(in_turn) == list(whole) == list(rest) == [*range(1, STEPS + 1)]
    prompts = [
        [sorted({rollout["prompt"] for rollout in rollouts}) for rollouts in read_rollouts(tmp_path / name).values()]
        for name in ("whole", "parts", "in turn")
    ]
    in_turn_prompts = sorted(prompt for step in prompts.pop() for prompt in step)
    for by_step in prompts:
        assert sorted(prompt for step in by_step for prompt in step) == in_turn_prompts
        first, second = by_step[:2]
        assert len({*first, *second}) == 4
    for record in whole.values():
        assert record["train/trained_length_mean"] == record["train/mean_response_tokens"]
        assert 1 <= record["train/sampled_length_mean"] <= 6


class Stopping(PausableEngine):
    """Begins the answers to the first prompt and is stopped in their middle; asleep, it is not asked."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awake = True
        self.parts: list[Completion] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        assert self.is_awake
        groups = super().generate(prompts, sampling, num_samples)
        self.parts += [one for group in groups for one in group if one.finish_reason == "abort"]
        return groups

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        self.is_awake = True

    def finish_generation(self, discard_weights: bool) -> None:
        self.is_awake = False


def test_responses_that_share_the_device_stop_while_the_policy_trains_and_go_on_with_its_new_weights(tmp_path, model):
    engine = Stopping()
    keys = (*colocated_ahead(2), "grpo.log_rollouts=true", "grpo.val_period=2", "grpo.max_val_samples=2")
    metrics = run(tmp_path, model, *keys, engine=engine, validation=make_prompts([MIXED] * 2))
    assert list(metrics) == [*range(1, STEPS + 1)]
    assert all(0 <= record["train/avg_trajectory_age"] <= 2 for record in metrics.values())
    assert metrics[1]["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    rollouts = [rollout for step in read_rollouts(tmp_path).values() for rollout in step]
    assert len(rollouts) == STEPS * 2 * 4
    begun = [part for part in engine.parts if part.token_ids]
    assert begun and engine.parts  # some were stopped in the middle, some before their first token
    for part in begun:  # some were stopped a second time
        size = len(part.token_ids)
        goes_on = [
            rollout for rollout in rollouts
            if any(
                rollout["token_ids"][at : at + size] == part.token_ids
                and rollout["generation_logprobs"][at : at + size] == part.logprobs
                for at in range(len(rollout["token_ids"]) - size)
            )
        ]  # fmt: skip
        assert goes_on and all(size < len(rollout["token_ids"]) <= 6 for rollout in goes_on)
    of_several = False
    for step, logged in read_rollouts(tmp_path).items():
        ages = [
            step - 1 - version
            for rollout in logged
            for version, count in rollout["weight_versions"]
            for _ in range(count)
        ]
        assert len(ages) == sum(len(rollout["token_ids"]) for rollout in logged)
        assert metrics[step]["train/avg_token_age"] == pytest.approx(sum(ages) / len(ages))
        assert metrics[step]["train/max_token_age"] == max(ages) <= 2 and min(ages) >= 0
        began = [step - 1 - rollout["weight_versions"][0][0] for rollout in logged]
        assert metrics[step]["train/avg_trajectory_age"] == sum(began) / len(began)
        of_several = of_several or any(len(rollout["weight_versions"]) > 1 for rollout in logged)
    assert of_several


class Keeping(PausableEngine):
    """Takes calls while it sleeps, and answers them with the weights that it has when it wakes."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awake = True
        self.num_sleeps = 0

    def abort_generation(self) -> None:
        raise AssertionError("it keeps its responses")

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        if not self.is_awake and (tags is None or "kv_cache" in tags):
            self.is_awake = True
            self.resume_generation()

    def finish_generation(self, discard_weights: bool) -> None:
        if self.is_awake:
            self.pause_generation(recompute_kv_cache=False)
            self.is_awake = False
            self.num_sleeps += 1


def test_an_engine_that_never_sleeps_goes_on_while_the_policy_trains_and_stops_for_new_weights_only(tmp_path, model):
    engine = Keeping()
    keys = (*colocated_ahead(2), "policy.generation.vllm_cfg.enable_sleep_mode=false")
    metrics = run(tmp_path, model, *keys, engine=engine)
    assert list(metrics) == [*range(1, STEPS + 1)] and engine.num_sleeps == 0
    assert all(0 <= record["train/avg_trajectory_age"] <= 2 for record in metrics.values())
    assert metrics[1]["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)


def test_an_engine_that_keeps_its_responses_while_it_sleeps_is_asked_to_give_none_back(tmp_path, model):
    engine = Keeping()
    keys = (*colocated_ahead(2), "grpo.async_grpo.paused_kv=host", "grpo.val_period=2", "grpo.max_val_samples=2")
    metrics = run(tmp_path, model, *keys, engine=engine, validation=make_prompts([MIXED] * 2))
    assert list(metrics) == [*range(1, STEPS + 1)] and engine.num_sleeps > 1
    assert all(0 <= record["train/avg_trajectory_age"] <= 2 for record in metrics.values())
    assert metrics[1]["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    gate = Gate(keeps=True)
    began_s = gate.clock()
    with gate.open_for(engine):
        assert gate.clock() > began_s
    assert gate.clock() == gate.clock()  # the seconds of training are none of a call's


class Slow(PausableEngine):
    """Waits in the middle of each response until it is aborted, while `is_slow`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_slow = True
        self.is_in_the_middle = threading.Event()
        self._aborted = threading.Condition()
        self._model.register_forward_pre_hook(self._wait, with_kwargs=True)

    def _wait(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not self.is_slow or kwargs["input_ids"].shape[1] < 5:  # prompts have up to 4 tokens
            return
        with self._aborted:
            self.is_in_the_middle.set()
            assert self._aborted.wait_for(lambda: self.aborts, 1500)

    def abort_generation(self) -> None:
        with self._aborted:
            self.aborts = True
            self._aborted.notify_all()
        super().abort_generation()


class Pair(PausableEngine):
    """Two engines: this one answers at once, and dies; the other one is slow until both are started again."""

    most_callers = 4

    def __init__(self, dies: str) -> None:
        super().__init__()
        self.other = Slow()
        self.dies = dies
        self.given_back: list[Completion] = []
        self._turn = itertools.chain([self.other], itertools.repeat(self))

    def reserve(self) -> Any:
        return nullcontext(next(self._turn))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        if self.dies == "at work":
            assert self.other.is_in_the_middle.wait(1500)
            raise WorkerDiedError("the engine died")
        return super().generate(prompts, sampling, num_samples)

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        if self.dies == "asleep" and self.other.is_in_the_middle.is_set():
            raise WorkerDiedError("the engine died")

    def abort_generation(self) -> None:
        self.other.abort_generation()
        super().abort_generation()
        if self.dies == "at work":
            raise WorkerDiedError("the engine died")

    def load_bucket(self, bucket: Any) -> None:
        self.other.load_bucket(bucket)
        super().load_bucket(bucket)

    def finish_refit(self, version: int = 0) -> None:
        self.other.finish_refit(version)
        super().finish_refit(version)

    def pause_generation(self, recompute_kv_cache: bool) -> None:
        self.other.pause_generation(recompute_kv_cache)
        super().pause_generation(recompute_kv_cache)

    def resume_generation(self) -> None:
        self.other.resume_generation()
        super().resume_generation()

    def shutdown(self) -> None:
        self.other.shutdown()
        super().shutdown()

    def restart(self, error: UserError) -> Mapping[int, str]:
        assert str(error) == "the engine died"
        assert self.dies
        self.dies, self.other.is_slow = "", False
        self.given_back = [one for _, groups in self.other.calls for group in groups for one in group]
        return {}


@pytest.fixture(scope="module")
def prompts_in_turn(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prompts of all rollouts of two epochs."""
    folder = tmp_path_factory.mktemp("in turn")
    run(folder, model, *collected_ahead(1), OFF, "grpo.log_rollouts=true", "grpo.max_num_epochs=2")
    return sorted(rollout["prompt"] for rollouts in read_rollouts(folder).values() for rollout in rollouts)


@pytest.mark.parametrize(
    ("dies", "keys"),
    [("at work", colocated_ahead(1)), ("asleep", colocated_ahead(1)), ("at work", taken_as_finished(1))],
)
def test_what_a_living_engine_has_sampled_goes_on_after_the_death_of_another(
    tmp_path, model, prompts_in_turn, dies, keys
):
    engine = Pair(dies)
    keys = (*keys, "grpo.log_rollouts=true", "grpo.max_num_epochs=2")
    metrics = run(tmp_path, model, *keys, engine=engine, restart=engine.restart)
    assert list(metrics) == [*range(1, STEPS + 1)] and engine.dies == ""
    logged = [rollout for rollouts in read_rollouts(tmp_path).values() for rollout in rollouts]
    assert sorted(rollout["prompt"] for rollout in logged) == prompts_in_turn
    begun = [one for one in engine.given_back if one.token_ids and one.finish_reason == "abort"]
    assert begun
    for part in begun:
        size = len(part.token_ids)
        assert any(
            rollout["token_ids"][:size] == part.token_ids
            and rollout["generation_logprobs"][:size] == part.logprobs
            and len(rollout["token_ids"]) > size
            for rollout in logged
        )


class Failing(KnownRewards):
    """Cannot score the third batch."""

    num_calls = 0

    def step(self, responses: Sequence[Response]) -> list[Score]:
        self.num_calls += 1
        if self.num_calls == 3:
            raise DataError("row 5 has no answer; add one")
        return super().step(responses)


def test_what_goes_wrong_beside_training_ends_the_run_as_it_would_otherwise(tmp_path, model):
    with pytest.raises(DataError, match=r"(?m)^row 5 has no answer; add one$"):
        run(tmp_path, model, *collected_ahead(1), environment=Failing())
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} <= {1, 2}


class Dying(HuggingFaceEngine):
    """Dies in its calls of these numbers, until it is started again."""

    def __init__(self, dies_at: Sequence[int]) -> None:
        super().__init__()
        self._dies_at = set(dies_at)
        self._lock = threading.Lock()
        self.num_calls = 0
        self.is_dead = False

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, num_samples: int = 1
    ) -> list[list[Completion]]:
        with self._lock:
            self.num_calls += 1
            self.is_dead = self.is_dead or self.num_calls in self._dies_at
            if self.is_dead:
                raise WorkerDiedError("the engine died")
        return super().generate(prompts, sampling, num_samples)


def test_what_an_engine_that_died_had_begun_is_generated_again_and_no_batch_is_lost(tmp_path, model):
    engine, restarts = Dying([2, 5, 6]), []

    def restart(error: UserError) -> Mapping[int, str]:
        restarts.append(str(error))
        engine.is_dead = False
        return {}

    still = ("policy.optimizer.kwargs.lr=0.0", "policy.optimizer.kwargs.weight_decay=0.0")
    undisturbed = run(tmp_path / "undisturbed", model, *collected_ahead(2), *still)
    metrics = run(tmp_path / "dying", model, *collected_ahead(2), *still, engine=engine, restart=restart)
    assert numbers(metrics) == numbers(undisturbed)
    assert 2 <= len(restarts) <= 3
    assert all(metrics[step]["train/avg_trajectory_age"] <= min(step - 1, 2) for step in metrics)
    with pytest.raises(WorkerDiedError, match=r"(?m)^the engine died$"):
        run(tmp_path / "dead", model, *collected_ahead(2), engine=Dying([3]))


def test_another_model_is_found_in_the_first_step_and_older_weights_are_not_taken_for_one(tmp_path, model):
    keys = (*collected_ahead(1), "policy.optimizer.kwargs.lr=3e-2", "grpo.max_token_mult_prob_error=1.05")
    metrics = run(tmp_path / "trained", model, *keys, steps=3)
    assert metrics[1]["train/token_mult_prob_error"] < 1.05 < metrics[2]["train/token_mult_prob_error"]
    engine = HuggingFaceEngine()
    engine.temperature_error = 3.0
    with pytest.raises(AgreementError, match=r"^step 1: "):
        run(tmp_path / "other", model, *keys, engine=engine)


def test_a_deadline_ends_the_run_though_rollouts_are_under_way(tmp_path, model):
    saving = ("checkpointing.enabled=true", "checkpointing.save_period=1000")
    deadline = "checkpointing.checkpoint_must_save_by='00:00:00:01'"
    (*_, last) = run(tmp_path, model, *collected_ahead(2), *saving, deadline, "grpo.max_num_epochs=9999", steps=5000)
    assert last < 5000
    (*_, again) = run(tmp_path, model, *collected_ahead(2), *saving, "grpo.max_num_epochs=9999", steps=last + 2)
    assert again == last + 2


def test_more_than_one_step_ahead_is_warned_of_where_every_update_waits_for_all_rollouts(tmp_path, model, caplog):
    run(tmp_path / "two", model, *collected_ahead(2), steps=1)
    assert "max_trajectory_age_steps=2 makes rollouts older but nothing faster" in caplog.text
    caplog.clear()
    run(tmp_path / "one", model, *collected_ahead(1), steps=1)
    assert "makes rollouts older" not in caplog.text
