"""Rewards and environments from outside of the package."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from nemo_offload_rl.environments.custom import custom_environment
from nemo_offload_rl.environments.interfaces import Observation, Response, Score, Unscored
from nemo_offload_rl.errors import UserCodeError
from nemo_offload_rl.targets import UserCode

COLUMNS = {"level": 3, "tags": ["a"]}


def response(text: str, **about) -> Response:
    return Response(
        prompt_text="<user>q<assistant>", text=text, truncated=False, reference_answer="4", metadata=COLUMNS,
        question="q", **about,
    )  # fmt: skip


def open_one(
    *values, num_workers: int = 0, weights=None, timeout_s: float = 20.0, columns=COLUMNS, on_error=None, **kwargs
):
    parts = [UserCode("env.mine.target", value, kwargs=kwargs) for value in values]
    return custom_environment(
        "mine", parts, weights=weights, columns=columns, num_workers=num_workers, timeout_s=timeout_s,
        on_error=on_error,
    )  # fmt: skip


def scores(*values, texts=("4", "5"), **settings):
    environment = open_one(*values, **settings)
    try:
        return environment.step([response(text) for text in texts])
    finally:
        environment.close()


def right(response, answer):
    return response == answer


def test_a_function_gets_question_response_answer_and_the_rows_columns_by_name():
    seen = {}

    def score(prompt, response, answer, level, rendered_prompt, **row):
        seen.update(row, prompt=prompt, response=response, answer=answer, level=level, rendered_prompt=rendered_prompt)
        return 0.5

    assert scores(score, texts=["4"]) == [Score(0.5, correct=False)]
    assert seen == {
        "prompt": "q", "response": "4", "answer": "4", "level": 3, "tags": ["a"],
        "rendered_prompt": "<user>q<assistant>",
    }  # fmt: skip


def test_numbers_booleans_and_scores_are_rewards_and_full_marks_are_correct():
    for value, expected in [
        (True, Score(1.0, True)), (False, Score(0.0, False)), (2, Score(2.0, True)), (0.99, Score(0.99, False)),
        (np.float32(0.5), Score(0.5, False)), (torch.tensor(1.0), Score(1.0, True)),
        (Score(0.1, correct=True), Score(0.1, correct=True)), (None, Unscored("no_reward")),
        (Score(np.float64(0.5), np.True_, {"a": torch.tensor(2)}, np.int64(42)), Score(0.5, True, {"a": 2.0}, "42")),
        (Score(torch.tensor(0.5), torch.tensor(False)), Score(0.5, False)),
    ]:  # fmt: skip
        (found,) = scores(lambda value=value: value, texts=["x"])
        assert found == expected
        if isinstance(found, Score):
            assert json.loads(json.dumps([found.reward, found.correct, dict(found.parts), found.answer]))


@pytest.mark.parametrize("value", ["1.0", math.nan, math.inf, [1.0], object(), np.ones(2), 10**309])
def test_anything_else_ends_the_run_with_the_response_and_the_place_of_the_function(value):
    with pytest.raises(
        UserCodeError, match=r"test_custom\.py:\d+\): it returned .* for the response 'x'; return a fin"
    ):
        scores(lambda: value, texts=["x"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Score(1.0, correct=cast(Any, "yes")), "give its `correct` True or False"),
        (Score(1.0, correct=cast(Any, np.ones(2))), "give its `correct` True or False"),
        (Score(1.0, correct=True, answer=cast(Any, ["4"])), "give its `answer` a text, or None"),
        (Score(math.nan, correct=True), "return a finite number"),
    ],
)
def test_a_score_of_other_values_is_told_with_the_field_to_change(value, message):
    with pytest.raises(UserCodeError, match=message):
        scores(lambda: value, texts=["x"])


def test_a_function_that_gives_none_leaves_reward_and_correctness_to_the_others():
    def only_four(response):
        return 1.0 if response == "4" else None

    def short(response):
        return 0.5 if len(response) < 3 else None

    found = scores(only_four, short, weights=[1.0, 2.0], texts=["4", "55", "666"])
    assert found[0] == Score(2.0, True, {"only_four": 1.0, "short": 0.5})
    assert (found[1].reward, found[1].correct, found[1].parts["short"]) == (1.0, False, 0.5)
    assert math.isnan(found[1].parts["only_four"])
    assert found[2] == Unscored("no_reward")


@pytest.mark.parametrize("make_async", [False, True])
def test_failures_end_the_run_or_are_left_out_or_tried_again_as_on_error_says(make_async, caplog):
    tries = []

    def judge(response):
        tries.append(response)
        if response == "broken" or (response == "flaky" and tries.count("flaky") < 3):
            raise ConnectionError("no judge")
        return 1.0

    async def judge_later(response):
        return judge(response)

    texts, judges = ["4", "flaky", "broken"], [judge_later if make_async else judge]
    for on_error in (None, "raise"):
        with pytest.raises(UserCodeError, match=r"no judge.*set env\.mine\.on_error to skip or retry"):
            scores(*judges, texts=texts, on_error=on_error)
        tries.clear()
    failed = [isinstance(found, Unscored) for found in scores(*judges, texts=texts, on_error="skip")]
    assert failed == [False, True, True]
    tries.clear()
    found = scores(*judges, texts=texts, on_error="retry")
    assert found[:2] == [Score(1.0, True)] * 2
    assert found[2].why == "failed" and "no judge" in found[2].reason
    assert [tries.count(text) for text in texts] == [1, 3, 3]
    assert "env.mine: 1 of 3 scores failed and are left out, first: env.mine.target" in caplog.messages[-1]


def test_several_functions_are_added_with_their_weights_and_the_first_says_what_is_correct():
    def short(response):
        return 1.0 if len(response) < 2 else 0.0

    assert scores(right, short, weights=[1.0, 0.25], texts=["4", "5", "55"]) == [
        Score(1.25, True, {"right": 1.0, "short": 1.0}),
        Score(0.25, False, {"right": 0.0, "short": 1.0}),
        Score(0.0, False, {"right": 0.0, "short": 0.0}),
    ]
    assert [(score.reward, score.correct) for score in scores(right, short, texts=["4"])] == [(2.0, True)]


def test_a_column_that_not_all_rows_have_is_told_before_anything_is_scored():
    with pytest.raises(
        UserCodeError, match=r"unknown parameter colour; .* arguments are prompt, response, answer, level, tags"
    ):
        open_one(lambda response, colour: 0.0)


def test_async_functions_wait_together_and_one_that_is_late_has_no_score(caplog):
    all_wait = asyncio.Barrier(20)  # none goes on before all have begun

    async def slowly(response, answer):
        await (all_wait.wait() if response != "never" else asyncio.sleep(600))
        return response == answer

    texts = ["4"] * 20 + ["never"]
    assert scores(slowly, texts=texts, timeout_s=5.0) == [Score(1.0, True)] * 20 + [Unscored("timed_out")]
    assert "env.mine: 1 of 21 scores took longer than 5 s and are left out; raise env.mine.timeout_s" in caplog.text
    with pytest.raises(UserCodeError, match=r"1 of 1 scores took longer than 0\.1 s; raise env\.mine\.timeout_s, or"):
        scores(slowly, texts=["never"], timeout_s=0.1, on_error="raise")


def test_async_functions_work_where_an_event_loop_runs_already():
    async def compare(response, answer):
        await asyncio.sleep(0)
        return response == answer

    async def notebook():
        return scores(compare)

    assert [score.correct for score in asyncio.run(notebook())] == [True, False]


class Calculator:
    """Answers a sum once, then scores; remembers how often it was made."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.pid, self.closed = factor, os.getpid(), False

    def step(self, responses):
        return [
            Observation("= 4") if one.may_go_on and "+" in one.text else Score(self.factor * (one.text == "4"), False)
            for one in responses
        ]


def test_an_environment_class_is_made_with_its_kwargs_and_may_answer():
    environment = open_one(Calculator, factor=0.5)
    first, second = environment.step([response("2+2", may_go_on=True), response("4")])
    assert first == Observation("= 4")
    assert second == Score(0.5, False)
    environment.close()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (type("Empty", (), {}), "the class has no method `step`"),
        (type("Few", (), {"step": lambda self, responses: []}), "step returned 0 outcomes for 2 responses"),
        (type("Void", (), {"step": lambda self, responses: None}), "step returned None; return a list with a Score"),
        (type("Odd", (), {"step": lambda self, responses: ["x"] * 2}), "it returned 'x' for the response"),
        (type("Bare", (), {"step": lambda self: []}), r"step .* cannot be called as .*\(self, responses\)"),
        (type("Numb", (), {"step": lambda self, r: [Observation(3)] * 2}), "an Observation's text is 3"),
    ],
)
def test_an_environment_that_does_not_do_its_part_is_told(value, message):
    with pytest.raises(UserCodeError, match=message):
        scores(value)


@pytest.mark.processes
def test_in_worker_processes_failures_late_responses_and_deaths_are_told_apart(caplog):
    def score(response):
        if response == "dies":
            os._exit(7)
        if response == "late":
            time.sleep(600)
        return 1.0 / len(response)

    environment = open_one(score, num_workers=2, timeout_s=5.0)
    try:
        found = environment.step([response(text) for text in ("1", "late", "dies", "22")])
        assert found[0] == Score(1.0, True) and found[3] == Score(0.5, False)
        assert [found[1].why, found[2].why] == ["timed_out", "failed"]
        assert "1 of 4 scores took longer than 5 s" in caplog.text
        assert "1 of 4 scores failed and are left out, first: the grading process ended with exit code 7" in caplog.text
        with pytest.raises(
            UserCodeError, match=r"ZeroDivisionError: .* at .*test_custom\.py:\d+ in score: return 1\.0 /"
        ):
            environment.step([response("")])
    finally:
        environment.close()


@pytest.mark.processes
def test_worker_processes_make_an_environment_once_each_and_its_failing_constructor_is_told_at_once():
    environment = open_one(Calculator, num_workers=1)
    try:
        assert environment.step([response("4")] * 3) == [Score(1.0, False)] * 3
    finally:
        environment.close()

    class Broken:
        def __init__(self):
            raise RuntimeError("no such judge")

        def step(self, responses):
            return []

    with pytest.raises(UserCodeError, match=r"RuntimeError: no such judge, at .*test_custom\.py:\d+ in __init__"):
        open_one(Broken, num_workers=2)
    assert threading.active_count() < 50


def test_of_several_functions_each_ones_value_is_kept_before_its_weight_and_of_one_what_its_score_says():
    def half(response):
        return 0.25

    (found,) = scores(right, half, right, weights=(1.0, 2.0, 4.0), texts=["4"])
    assert found == Score(5.5, True, {"right": 1.0, "half": 0.25, "right_2": 1.0})
    assert scores(right)[0].parts == {}
    whole = Score(0.5, True, {"form": 0.5}, "4")
    assert scores(lambda: whole, texts=["4"]) == [whole]


def test_a_part_of_a_score_that_is_no_number_is_refused():
    with pytest.raises(UserCodeError, match=r"return a finite number"):
        scores(lambda response: Score(1.0, True, {"form": float("nan")}))


MESSAGES = ({"role": "system", "content": "Add."}, {"role": "user", "content": "q"})


def test_a_function_with_trls_parameters_gets_lists_of_the_whole_batch_in_one_call():
    calls = []

    def reward(completions, **kwargs):
        calls.append({"completions": completions, **kwargs})
        kwargs["log_extra"]("said", completions)
        kwargs["log_extra"]("length", [len(one) for one in completions])
        kwargs["log_metric"]("share", torch.tensor(0.25))
        kwargs["log_metric"]("share", 0.75)
        return np.array([1.0, 0.5])

    batch = [response("4", token_ids=(7, 2), trained_steps=3), response("55", messages=MESSAGES)]
    found = open_one(reward).step(batch)
    assert [(score.reward, score.correct) for score in found] == [(1.0, True), (0.5, False)]
    assert found[0].extra == {"share": 0.5, "said": "4", "length": 1}
    assert found[1].extra == {"share": 0.5, "said": "[{'role': 'assistant', 'content': '55'}]", "length": 1}
    (seen,) = calls
    assert seen.pop("trainer_state").global_step == 3
    assert {*seen} - {"log_extra", "log_metric"} == {
        "prompts", "completions", "completion_ids", "answer", "level", "tags"
    }  # fmt: skip
    assert seen["prompts"] == ["q", list(MESSAGES)]
    assert seen["completions"] == ["4", [{"role": "assistant", "content": "55"}]]
    assert (seen["completion_ids"], seen["answer"]) == ([[7, 2], []], ["4", "4"])
    assert (seen["level"], seen["tags"]) == ([3, 3], [["a"], ["a"]])


def test_trls_own_reward_functions_work_as_they_are():
    from trl.rewards import accuracy_reward, get_soft_overlong_punishment

    rows = [
        Response(
            prompt_text="", text=text, truncated=False, reference_answer="", metadata={"solution": r"\boxed{1}"},
            messages=MESSAGES, token_ids=[0] * 15,
        )
        for text in (r"It is \boxed{1}.", r"It is \boxed{2}.")
    ]  # fmt: skip
    overlong = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10)
    found = open_one(accuracy_reward, overlong, weights=[1.0, 0.5], columns={"solution"}).step(rows)
    assert [score.reward for score in found] == [0.75, -0.25]
    assert [score.correct for score in found] == [True, False]
    assert found[1].extra == {"solution": r"\boxed{1}", "gold_parsed": "[1, '1']", "answer_parsed": "[2, '2']"}
    assert found[1].parts == {"accuracy_reward": 0.0, "soft_overlong_punishment_reward": -0.5}


def test_functions_of_a_batch_of_a_response_and_async_ones_are_added():
    async def of_batch(prompts, completions, answer, bonus=0.0):
        await asyncio.sleep(0)
        pairs = zip(completions, answer, strict=True)
        return [None if len(text) > 1 else float(text == one) + bonus for text, one in pairs]

    async def later(response):
        return 0.5

    def names_a_column(completions, response):
        return completions[response]

    found = scores(of_batch, right, later, weights=[2.0, 1.0, 1.0], texts=["4", "5", "55"])
    assert [score.reward for score in found] == [3.5, 0.5, 0.5]
    assert found[0].parts == {"of_batch": 1.0, "right": 1.0, "later": 0.5} and math.isnan(found[2].parts["of_batch"])
    assert [score.correct for score in found] == [True, False, False]
    assert [score.reward for score in scores(of_batch, texts=["4", "5"], bonus=0.25)] == [1.25, 0.25]
    column = replace(response("x"), metadata={"completions": {"x": 0.25}})
    assert open_one(names_a_column, columns={"completions"}).step([column]) == [Score(0.25, False)]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions: 0.5, r"it returned 0\.5; return a list with a reward or None for each of the 2 responses"),
        (lambda completions: [0.5], "it returned 1 rewards for 2 responses; return one for each, None where it"),
        (lambda completions: [0.5, "x"], "it returned 'x' for the response '5'; return a finite number"),
        (lambda completions: 1 / 0, r"ZeroDivisionError: division by zero, at .*test_custom\.py:"),
        (lambda completions, log_extra: log_extra("a", [1]), r"log_extra\('a', \.\.\.\) got 1 values for 2 responses"),
        (lambda completions, log_metric: log_metric("a", "b"), r"log_metric\('a', 'b'\); give a finite number"),
        (lambda completions, trainer_state: trainer_state.max_steps, r"trainer_state\.max_steps does not exist here"),
    ],
)
def test_what_a_function_of_a_batch_does_wrong_is_told_in_one_line(function, message):
    with pytest.raises(UserCodeError, match=message) as raised:
        scores(function)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completion, **kwargs: 0.0, "unknown parameter completion; did you mean completions?"),
        (lambda prompt, completions: [0.0], "unknown parameter prompt; did you mean prompts?"),
        (lambda completions, solution: [0.0], "unknown parameter solution; .* arguments are prompts, completions"),
        (torch.nn.Linear(1, 1), "it is a model; call it inside a function of yours, and name that"),
    ],
)
def test_a_parameter_of_the_other_kind_of_function_is_told_with_the_nearest_name(function, message):
    with pytest.raises(UserCodeError, match=message):
        open_one(function)


@pytest.mark.processes
def test_one_worker_process_gets_the_whole_batch_and_a_late_or_dead_one_leaves_all_of_it_without_a_score():
    def reward(completions, **kwargs):
        if "late" in completions:
            time.sleep(600)
        return [float(len(completions)), float(os.getpid())]

    environment = open_one(reward, num_workers=4, timeout_s=0.5)
    try:
        first, second = (environment.step([response("4"), response("5")]) for _ in range(2))
        assert first == second and first[0] == Score(2.0, True)
        assert environment.step([response("late"), response("5")]) == [Unscored("timed_out")] * 2
    finally:
        environment.close()
