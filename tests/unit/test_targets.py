"""Code from outside: found where a person expects it, checked, told about, and carried to other processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_offload_rl.errors import ConfigError, UserCodeError
from nemo_offload_rl.targets import UserCode, is_target, with_whole_paths

REWARD = """\
from helper import FULL_MARK

def score(prompt, response, answer, level=1, **row):
    return FULL_MARK if response == answer else 0.0

def strict(prompt, response, level):
    return int(response)

class Counter:
    def __init__(self, start=0):
        self.count = start

    def __call__(self, value):
        self.count += value
        return self.count
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "helper.py").write_text("FULL_MARK = 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("reward", "helper", "my_rewards", "my_rewards.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def named(target: str, **kwargs) -> UserCode:
    return UserCode.named("env.mine.target", target, kwargs)


def test_a_file_is_imported_with_what_lies_beside_it_and_once_however_often_it_is_named(folder):
    score = named(f"{folder}/reward.py:score")
    assert score.call_named({"prompt": "", "response": "4", "answer": "4", "other": 1}) == 1.0
    assert named(f"{folder}/reward.py:score").value is score.value


@pytest.mark.parametrize("target", ["my_rewards.inner.score", "my_rewards.inner:score", "my_rewards:inner.score"])
def test_a_module_of_the_working_directory_is_found(folder, monkeypatch, target):
    (folder / "my_rewards").mkdir()
    (folder / "my_rewards/__init__.py").write_text("from . import inner\n")
    (folder / "my_rewards/inner.py").write_text("def score(response):\n    return 2.0\n")
    monkeypatch.chdir(folder)
    assert named(target).call_named({"response": ""}) == 2.0


def test_a_file_named_like_a_library_is_the_users_and_leaves_the_library_alone(folder):
    (folder / "math.py").write_text("def score(response):\n    return 3.0\n")
    (folder / "my-reward.v2.py").write_text("def score(response):\n    return 4.0\n")
    import math

    assert named(f"{folder}/math.py:score").call_named({"response": ""}) == 3.0
    assert named(f"{folder}/my-reward.v2.py:score").call_named({"response": ""}) == 4.0
    assert sys.modules["math"] is math


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("score", "no name of code; write package.module.name or path/to/file.py:name"),
        ("reward.py", "no name of code"),
        ("{folder}/reward.py:scores", "reward.py has no scores; did you mean score?"),
        ("{folder}/rewards.py:score", "there is no file"),
        ("no_such_module.score", "there is no module no_such_module, neither in"),
        ("{folder}/broken.py:score", "broken.py:2: "),
        ("{folder}/needs.py:score", "ModuleNotFoundError: No module named 'no_such_library', at {folder}/needs.py:3"),
        ("{folder}/raises.py:score", "ZeroDivisionError: division by zero, at {folder}/raises.py:2 in <module>: 1 / 0"),
        ("{folder}/exits.py:score", "SystemExit: 3, at {folder}/exits.py:2"),
    ],
)
def test_what_cannot_be_imported_is_told_in_one_line_with_its_place(folder, target, message):
    (folder / "broken.py").write_text("def score(response):\nreturn 1\n")
    (folder / "needs.py").write_text("\n\nimport no_such_library\n")
    (folder / "raises.py").write_text("\n1 / 0\n")
    (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(UserCodeError) as caught:
        named(target.replace("{folder}", str(folder)))
    assert message.replace("{folder}", str(folder)) in str(caught.value)
    assert str(caught.value).startswith(f"env.mine.target {target.replace('{folder}', str(folder))}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_was_corrected_after_its_import_failed_is_imported_anew(folder):
    (folder / "later.py").write_text("1 / 0\n")
    with pytest.raises(UserCodeError):
        named(f"{folder}/later.py:score")
    (folder / "later.py").write_text("def score():\n    return 1  # longer than before\n")
    assert named(f"{folder}/later.py:score").value() == 1


@pytest.mark.parametrize(
    ("function", "kwargs", "problem"),
    [
        (lambda prompt, response, answer: 0, {}, None),
        (lambda response: 0, {}, None),
        (lambda response, **row: 0, {"factor": 2}, None),
        (lambda response, *, level: 0, {}, None),
        (lambda response, truncated: 0, {}, None),
        (lambda response, factor: 0, {"factor": 2}, None),
        (lambda response, colour="red": 0, {}, None),
        (
            lambda response, colour: 0,
            {},
            "unknown parameter colour; remove it, give it a default, or set kwargs; arguments are prompt, response",
        ),
        (lambda answers: 0, {}, "unknown parameter answers; did you mean answer?"),
        (lambda response: 0, {"factor": 2}, "kwargs has factor, but it takes response"),
        (lambda response, /: 0, {}, "parameter response is positional-only, but gets its name; drop the /"),
        (3, {}, "it is a int; name a function or a class"),
    ],
)
def test_a_function_is_checked_against_the_names_that_it_will_be_given(function, kwargs, problem):
    code = UserCode("env.mine", function, kwargs=kwargs)
    given = ("prompt", "response", "answer", "level")
    if problem is None:
        code.check_named(given, optional=("truncated",))
        values = dict.fromkeys(given, "")
        assert code.call_named(values, {"truncated": False}) == 0
    else:
        with pytest.raises(UserCodeError, match=problem):
            code.check_named(given, optional=("truncated",))


def test_a_failing_call_is_told_with_the_line_of_the_users_code_not_of_the_library_that_it_called(folder):
    (folder / "judge.py").write_text("import json\n\ndef score(response):\n    return json.loads(response)['mark']\n")
    code = named(f"{folder}/judge.py:score")
    with pytest.raises(UserCodeError) as caught:
        code.call_named({"response": "no JSON"})
    line = f"at {folder}/judge.py:4 in score: return json.loads(response)['mark']"
    assert str(caught.value).startswith("env.mine.target ") and "JSONDecodeError: Expecting value" in str(caught.value)
    assert line in str(caught.value)


def test_a_class_is_made_with_its_kwargs_and_wrong_ones_are_told(folder):
    assert named(f"{folder}/reward.py:Counter", start=3).make()(2) == 5
    with pytest.raises(UserCodeError, match=r"Counter\(\): .*unexpected|kwargs has begin, but it takes start"):
        named(f"{folder}/reward.py:Counter", begin=3).check_positional(())


def elsewhere(code: UserCode, folder: Path, then: str) -> str:
    """What another process, which cannot import what lies in the folders here, prints of unpickled code."""
    pickled = folder / "pickled"
    pickled.write_bytes(pickle.dumps(code))
    script = f"import pickle, sys; code = pickle.load(open({str(pickled)!r}, 'rb')); {then}"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/", env=env)
    return done.stdout.strip() or done.stderr


def test_by_value_a_function_needs_neither_its_file_nor_those_beside_it(folder):
    code = named(f"{folder}/reward.py:score").by_value()
    call = "print(code.call_named({'response': '4', 'answer': '4', 'prompt': ''}))"
    pickle.dumps(code)  # before the files are gone, as in the driver
    for name in ("reward.py", "helper.py"):
        (folder / name).rename(folder / f"{name}.gone")
    assert elsewhere(code, folder, call) == "1.0"


def test_by_name_a_function_is_imported_again(folder):
    code = named(f"{folder}/reward.py:score")
    then = "print(code.value.__module__, code.value.__code__.co_filename)"
    assert elsewhere(code, folder, then) == f"reward {folder}/reward.py"


def test_objects_and_lambdas_travel_and_what_cannot_is_told():
    assert pickle.loads(pickle.dumps(UserCode("environments", lambda response: 7))).call_named({"response": ""}) == 7
    import threading

    lock = threading.Lock()
    with pytest.raises(UserCodeError, match=r"cannot be sent to another process .*make what cannot be pickled inside"):
        pickle.dumps(UserCode("environments", lambda response: lock))


def test_relative_paths_are_of_the_working_directory_and_then_of_the_configuration(tmp_path, monkeypatch):
    work, configs = tmp_path / "work", tmp_path / "configs"
    for folder, names in ((work, ("both.py", "work.py")), (configs, ("both.py", "config.py"))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("")
    monkeypatch.chdir(work)
    raw = {
        "env": {"a": {"target": "both.py:f", "kwargs": {"target": "x.py:f"}}, "b": {"target": ["work.py:f", "m.n.f"]}},
        "data": {"default": {"processor": "config.py:f", "prompt_file": "x.py:f"}},
    }
    assert with_whole_paths(raw, configs) == {
        "env": {
            "a": {"target": f"{work}/both.py:f", "kwargs": {"target": "x.py:f"}},
            "b": {"target": [f"{work}/work.py:f", "m.n.f"]},
        },
        "data": {"default": {"processor": f"{configs}/config.py:f", "prompt_file": "x.py:f"}},
    }
    with pytest.raises(
        ConfigError, match=rf"env\.a\.target: gone\.py:f: there is no file {work}/gone\.py nor {configs}"
    ):
        with_whole_paths({"env": {"a": {"target": "gone.py:f"}}}, configs)


def test_plain_names_are_of_the_package():
    assert not is_target("math_hf_data_processor")
    assert is_target("m.f") and is_target("m:f") and is_target("a/b.py:f")
