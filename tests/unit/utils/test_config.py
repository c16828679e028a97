from __future__ import annotations

import copy
import os
import pickle
import re
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from setuptools import find_namespace_packages

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.section import as_used, as_written
from nemo_offload_rl.utils.config import EXEMPLARS, _apply_override, _Files, _read_yaml, load_config, nearest_key


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(
        tmp_path,
        "small.yaml",
        """
        policy:
          length: 512
          batch: 4
          tokens: ${mul:${policy.length},${policy.batch}}
          lr: 1e-8
          betas: [0.9, 0.999]
        logger:
          wandb: {project: p}
        phases:
          - {name: a, kwargs: {x: 1}}
          - {name: b, kwargs: {x: 2}}
        """,
    )


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


# ---------------------------------------------------------------- files


def test_a_dictionary_is_what_its_file_is(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sections = yaml.safe_load(small.read_text().replace("1e-8", "1.0e-8"))
    assert load_config(sections) == load_config(small)
    changed = load_config({"defaults": "small.yaml", "policy": {"batch": 8}, "logger": {"folder": tmp_path}})
    assert changed["policy"] == {**load_config(small)["policy"], "batch": 8, "tokens": 4096}
    assert changed["logger"] == {"wandb": {"project": "p"}, "folder": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"^the dictionary is no configuration: "):
        load_config({"policy": {"batch": object()}})


def test_changes_are_values_that_replace_those_of_their_keys(small: Path) -> None:
    changed = load_config(small, {"policy.batch": 2, "policy.betas": (0.5,), "logger.wandb": {"name": "a=b, c"}})
    assert changed["policy"]["tokens"] == 1024
    assert changed["policy"]["betas"] == [0.5]
    assert changed["logger"]["wandb"] == {"name": "a=b, c"}
    with pytest.raises(ConfigError, match=r"^policy\.batch\.size: policy\.batch is the value 4"):
        load_config(small, {"policy.batch.size": 1})
    with pytest.raises(ConfigError, match=r"^policy\.batch cannot be set to <object"):
        load_config(small, {"policy.batch": object()})


def test_a_bare_exponent_is_a_float_in_yaml_and_on_the_command_line(small: Path) -> None:
    assert load_config(small)["policy"]["lr"] == 1e-8
    assert load_config(small, ["policy.lr=2e-6"])["policy"]["lr"] == 2e-6


def test_resolvers_compute_with_overridden_values(small: Path) -> None:
    assert load_config(small)["policy"]["tokens"] == 2048
    assert load_config(small, ["policy.batch=3"])["policy"]["tokens"] == 1536


def test_resolvers_keep_integers_integers(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", "a: ${div:8,2}\nb: ${div:1,2}\nc: ${add:1,2,3}\nd: ${max:1,5,2}\n")
    values = load_config(path)
    assert values == {"a": 4, "b": 0.5, "c": 6, "d": 5}
    assert isinstance(values["a"], int)


def test_a_child_goes_over_its_parent_and_keeps_the_rest(tmp_path: Path) -> None:
    write(tmp_path, "base/parent.yaml", "a: {x: 1, y: 2}\nb: [1, 2]\n")
    path = write(tmp_path, "child.yaml", "defaults: base/parent.yaml\na: {y: 3}\nb: [4]\n")
    assert load_config(path) == {"a": {"x": 1, "y": 3}, "b": [4]}


def test_what_was_loaded_before_changes_nothing_and_changed_files_are_read_again(tmp_path: Path) -> None:
    parent = write(tmp_path, "parent.yaml", "a: {x: 1, y: [2]}\n")
    path = write(tmp_path, "child.yaml", "defaults: parent.yaml\nb: 1\n")
    assert load_config(path, ["a.x=7", "+c=1", "a.y.0=3"]) == {"a": {"x": 7, "y": [3]}, "b": 1, "c": 1}
    load_config(path)["a"]["y"].append(4)
    assert load_config(path) == {"a": {"x": 1, "y": [2]}, "b": 1}
    state = parent.stat()
    parent.write_text("a: {x: 2, y: [2]}\n")
    os.utime(parent, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert load_config(path) == {"a": {"x": 2, "y": [2]}, "b": 1}
    parent.unlink()
    assert "no such configuration file" in message(path)


def test_of_several_parents_the_later_one_wins(tmp_path: Path) -> None:
    write(tmp_path, "grand.yaml", "a: 0\nd: 0\n")
    write(tmp_path, "one.yaml", "defaults: grand.yaml\na: 1\nb: 1\n")
    write(tmp_path, "two.yaml", "a: 2\nc: 2\n")
    path = write(tmp_path, "child.yaml", "defaults: [one.yaml, two.yaml]\nc: 3\n")
    assert load_config(path) == {"a": 2, "b": 1, "c": 3, "d": 0}


def test_a_marked_mapping_replaces_the_inherited_one(tmp_path: Path) -> None:
    write(tmp_path, "parent.yaml", "data: {train: {name: hub, split: big}, other: 1}\n")
    path = write(tmp_path, "child.yaml", "defaults: parent.yaml\ndata: {train: {_override_: true, name: local}}\n")
    assert load_config(path) == {"data": {"train": {"name": "local"}, "other": 1}}


def test_a_mark_survives_a_further_child(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "env: {math: {n: 1}}\n")
    write(tmp_path, "b.yaml", "defaults: a.yaml\nenv: {_override_: true, sums: {n: 2}}\n")
    path = write(tmp_path, "c.yaml", "defaults: b.yaml\nenv: {sums: {n: 3}}\n")
    assert load_config(path) == {"env": {"sums": {"n": 3}}}


def test_parents_in_a_circle_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "defaults: b.yaml\n")
    path = write(tmp_path, "b.yaml", "defaults: a.yaml\n")
    assert "b.yaml -> a.yaml -> b.yaml" in message(path)


def test_the_same_parent_may_come_in_twice(tmp_path: Path) -> None:
    write(tmp_path, "root.yaml", "a: 1\n")
    write(tmp_path, "l.yaml", "defaults: root.yaml\nb: 1\n")
    write(tmp_path, "r.yaml", "defaults: root.yaml\nc: 1\n")
    path = write(tmp_path, "child.yaml", "defaults: [l.yaml, r.yaml]\n")
    assert load_config(path) == {"a": 1, "b": 1, "c": 1}


def test_a_missing_file_names_the_nearest_one_in_its_folder(small: Path) -> None:
    assert "did you mean" in message(small.with_name("smal.yaml"))
    assert "small.yaml" in message(small.with_name("smal.yaml"))
    assert message(small.parent) == f"{small.parent} is a folder; give a YAML file"


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "child.yaml", "defaults: nowhere.yaml\n")
    assert "nowhere.yaml: no such configuration file" in message(path)


def test_exemplars_are_parents_by_name_from_any_folder_behind_files_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "mine/run.yaml", "defaults: grpo_math_1B.yaml\ngrpo: {seed: 7}\n")
    monkeypatch.chdir(tmp_path)
    config = load_config("mine/run.yaml")
    assert config["grpo"]["seed"] == 7 and config["policy"]["train_global_batch_size"] == 512
    words = "grpo_math_1b.yaml: no such configuration file in {} and among the package's in {}; did you mean {}"
    nearest = EXEMPLARS / "grpo_math_1B.yaml"
    wrong = write(tmp_path, "mine/wrong.yaml", "defaults: grpo_math_1b.yaml\n")
    assert words.format(wrong.parent, EXEMPLARS, nearest) in message(wrong)
    assert load_config("sft.yaml") == load_config(EXEMPLARS / "sft.yaml"), "so are files, on the command line too"
    assert words.format(tmp_path, EXEMPLARS, nearest) in message(Path("grpo_math_1b.yaml"))
    write(tmp_path, "sft.yaml", "own: 2\n")
    assert load_config("sft.yaml") == {"own": 2}
    write(tmp_path, "mine/grpo_math_1B.yaml", "own: 1\n")
    assert load_config(path) == {"own": 1, "grpo": {"seed": 7}}
    packages = find_namespace_packages(str(Path(__file__).parents[3]), include=["nemo_offload_rl*"])
    assert "nemo_offload_rl.exemplars" in packages  # so a wheel has them


def test_broken_yaml_names_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "broken.yaml", "a: 1\nb: [1, 2\nc: 3\n")
    assert "not valid YAML at line 3" in message(path)


def test_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "twice.yaml", "a: 1\na: 2\n")
    assert "duplicate key a" in message(path)


def test_a_list_is_no_configuration(tmp_path: Path) -> None:
    for text in ("- 1\n", "[]", "1", "word"):
        assert "is a mapping of sections" in message(write(tmp_path, "list.yaml", text))
    assert load_config(write(tmp_path, "empty.yaml", "# nothing\n")) == {}


def test_yaml_is_read_as_omegaconf_reads_it(tmp_path: Path) -> None:
    kinds = "{a: [1e-8, 0x1f, 1_0, yes, 2001-01-01, ~, !!str 1], b: &b {c: .inf}, d: *b, e: {<<: *b, 1: '1'}}"
    for path in (write(tmp_path, "kinds.yaml", kinds), *EXEMPLARS.glob("*.yaml")):
        assert repr(_read_yaml(path, _Files())) == repr(OmegaConf.load(path))


def test_an_unknown_reference_names_the_nearest_key(small: Path) -> None:
    text = message(small, "policy.batch=${policy.lenght}")
    assert text.startswith("policy.")
    assert "did you mean policy.length" in text


def test_a_mandatory_value_that_is_not_given_is_named(small: Path) -> None:
    assert message(small, "policy.batch=???").startswith("policy.batch: needs a value")


# ---------------------------------------------------------------- overrides


def test_a_new_key_without_plus_names_the_nearest_known_one(small: Path) -> None:
    assert message(small, "policy.lenght=3") == "policy.lenght: unknown key; did you mean policy.length?"


def test_a_key_in_the_wrong_section_is_found_in_its_own(small: Path) -> None:
    assert "did you mean policy.length" in message(small, "logger.length=3")


def test_a_key_like_no_other_lists_its_section(small: Path) -> None:
    assert "logger.wandb has project" in message(small, "logger.wandb.qqq=3")


def test_plus_adds_and_refuses_what_is_there(small: Path) -> None:
    assert load_config(small, ["+policy.new.deep=1"])["policy"]["new"] == {"deep": 1}
    assert "drop the +" in message(small, "+policy.batch=1")


def test_two_plusses_add_or_change(small: Path) -> None:
    changed = load_config(small, ["++policy.batch=8", "++policy.new=1"])["policy"]
    assert (changed["batch"], changed["new"]) == (8, 1)


def test_tilde_deletes_a_key_a_section_and_only_a_matching_value(small: Path) -> None:
    assert "wandb" not in load_config(small, ["~logger.wandb"])["logger"]
    assert "batch" not in load_config(small, ["~policy.tokens", "~policy.batch=4"])["policy"]
    assert "its value is 4" in message(small, "~policy.batch=5")
    assert "did you mean logger.wandb" in message(small, "~logger.wand")


def test_list_entries_are_reached_by_index(small: Path) -> None:
    assert load_config(small, ["phases.1.kwargs.x=7"])["phases"][1] == {"name": "b", "kwargs": {"x": 7}}
    for override in ("phases.2.name=c", "+phases.2.name=c", "++phases.2={name: c}"):
        assert "phases has 2 entries and none with the index 2; set the whole list" in message(small, override)


def test_a_list_is_replaced_and_a_mapping_is_merged(small: Path) -> None:
    changed = load_config(small, ["policy.betas=[0.5]", "logger.wandb={name: n}"])
    assert changed["policy"]["betas"] == [0.5]
    assert changed["logger"]["wandb"] == {"project": "p", "name": "n"}


def test_later_overrides_win(small: Path) -> None:
    assert load_config(small, ["policy.batch=1", "policy.batch=2"])["policy"]["batch"] == 2


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("policy.batch", "Hydra's grammar"),
        ("x y", "Hydra's grammar"),
        (
            "policy.batch=1,2",
            "a list as policy.batch=[1,2], or text as \"policy.batch='1,2'\" with both kinds of quotes",
        ),
        ("policy@x=1", "package"),
        ("+policy.batch.deep=1", "nothing can be below it"),
    ],
)
def test_malformed_overrides_end_in_one_line(small: Path, override: str, part: str) -> None:
    assert part in message(small, override)


def test_a_value_that_hydra_reads_only_in_quotes_is_text_without_them(small: Path) -> None:
    texts = ("a=b", "x#1", "a,b", "später", "lr=1e-3, später", "C:\\ü\\", 'say="a\\"', "a: b (c", "${policy.batch}=x")
    for text in texts:
        expected = text.replace("${policy.batch}", "4")
        assert load_config(small, [f"logger.wandb.project={text}"])["logger"]["wandb"]["project"] == expected
        assert load_config(small, [f"+policy.new={text}"])["policy"]["new"] == expected


@given(st.text(st.characters(exclude_categories=["C"]), min_size=1))
@example("${0}")
@example("???")
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    config = OmegaConf.create({"name": "x"})
    try:
        _apply_override(config, f"name={text}", None, config, lambda key: False)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    # Resolving would refuse `???`, and `${0}` where no key has that name.
    name = OmegaConf.to_container(config, resolve=False)["name"]
    if isinstance(name, str) and not re.search(r"""^\s*['"\[{]|[\\$]""", text):
        assert name.strip(" \t") == text.strip(" \t")


@given(st.text(st.characters(exclude_categories=["C"])))
@example("007")
@example("[a, b]")
@example("a=b #1, ü")
def test_a_key_that_takes_text_has_what_is_written_after_the_first_equals_sign(text: str) -> None:
    assume("${" not in text and text.strip().lower() != "null" and text.lstrip()[:1] not in {"'", '"'})
    config = OmegaConf.create({"name": "x"})
    _apply_override(config, f"name={text}", None, config, lambda key: key == "name")
    assert OmegaConf.to_container(config, resolve=False) == {"name": text}


def test_null_and_quotes_of_a_key_that_takes_text_are_hydras(small: Path) -> None:
    for written, value in (("null", None), ("'null'", "null"), ('"a, b"', "a, b"), ("'it's'", "'it's'"), ("", "")):
        config = load_config(small, [f"logger.wandb.project={written}"], takes_text=lambda key: key.endswith("project"))
        assert config["logger"]["wandb"]["project"] == value


def test_nearest_prefers_a_very_like_sibling_then_the_same_name_elsewhere() -> None:
    known = ["grpo.val_batch_size", "grpo.seed", "policy.train_global_batch_size", "policy.seed"]
    assert nearest_key("grpo.val_batchsize", known) == "grpo.val_batch_size"
    assert nearest_key("grpo.train_global_batch_size", known) == "policy.train_global_batch_size"
    assert nearest_key("polcy.seed", known) == "policy.seed"
    assert nearest_key("grpo.zzz", known) is None


# ---------------------------------------------------------------- environment


@pytest.fixture
def with_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MY_SECRET", "t0p/secret")
    monkeypatch.setenv("SIZES", "{a: [one, 2]}")
    monkeypatch.delenv("NOT_SET", raising=False)
    return write(
        tmp_path,
        "secret.yaml",
        """
        token: ${oc.env:MY_SECRET}
        also: ${token}
        header: Bearer ${also}
        nested:
          - {kwargs: {key: "${oc.env:MY_SECRET}", plain: text}}
        copied: ${nested}
        decoded: ${oc.decode:${oc.env:SIZES}}
        text: ${oc.decode:"'${oc.env:MY_SECRET}'"}
        fallback: ${oc.env:NOT_SET,${oc.env:MY_SECRET}}
        default: ${oc.env:NOT_SET,here}
        none: ${oc.env:NOT_SET,null}
        number: 3
        """,
    )


def test_text_of_the_environment_is_used_and_recorded_as_it_is_written(with_secret: Path) -> None:
    config = load_config(with_secret, ["+typed='${oc.env:MY_SECRET}'", "+expanded=x-t0p/secret"])
    kwargs = {"key": "t0p/secret", "plain": "text"}
    used = as_used(config)
    assert used == {
        "token": "t0p/secret", "also": "t0p/secret", "header": "Bearer t0p/secret", "nested": [{"kwargs": kwargs}],
        "copied": [{"kwargs": kwargs}], "decoded": {"a": ["one", 2]}, "text": "t0p/secret", "fallback": "t0p/secret",
        "default": "here", "none": None, "number": 3, "typed": "t0p/secret", "expanded": "x-t0p/secret",
    }  # fmt: skip
    assert type(used["token"]) is str
    written = as_written(config)
    for text in (yaml.safe_dump(written), repr(config), repr(written)):
        assert "t0p" not in text
    assert written["token"] == written["also"] == written["typed"] == "${oc.env:MY_SECRET}"
    assert written["header"] == "Bearer ${oc.env:MY_SECRET}"
    assert written["copied"] == [{"kwargs": {"key": "${oc.env:MY_SECRET}", "plain": "text"}}]
    assert written["expanded"] == "x-${oc.env:MY_SECRET}"
    assert (written["default"], written["none"], written["number"]) == ("here", None, 3)
    again = copy.deepcopy(pickle.loads(pickle.dumps(config)))
    assert as_used(again) == used and as_written(again) == written


def test_messages_do_not_tell_what_the_environment_holds(with_secret: Path) -> None:
    text = message(with_secret, "+wrong='${oc.decode:\\'[${oc.env:MY_SECRET}\\'}'")
    assert "wrong: the interpolation" in text and "t0p" not in text
    assert "NOT_SET" in message(with_secret, "+wrong='${oc.env:NOT_SET}'")
