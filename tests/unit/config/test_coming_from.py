"""The guides for users of TRL, verl and OpenRLHF name keys that exist; TRL's leaves no argument of TRL out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.keys import walk_keys

GUIDES = Path(__file__).parents[3] / "docs/guides"
KEYS = {key.path.replace("[]", "") for one in ALGORITHMS.values() for key in walk_keys(one.keys)}
SECTIONS = {path.partition(".")[0] for path in KEYS}
FREE = {path for path in KEYS if path.endswith((".kwargs", "_kwargs", "hf_config_overrides"))}


def rows(page: str) -> Iterator[tuple[str, str, str]]:
    """Heading, first cell and last cell of every row of the page's tables."""
    heading = ""
    for line in (GUIDES / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| TRL |"):
            first, *_, last = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
            yield heading, first, last


def in_code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("page", ["from-trl.md", "from-verl.md", "from-openrlhf.md"])
def test_each_key_that_a_guide_names_exists(page):
    named = {re.split(r"[=\s]", code)[0] for _, _, cell in rows(page) for code in in_code(cell)}
    keys = {name for name in named if "." in name and name.partition(".")[0] in SECTIONS}
    assert len(keys) > 25
    assert [key for key in keys if key not in KEYS and key.rpartition(".")[0] not in FREE] == []


def class_of(package: str, file: str, name: str) -> ast.ClassDef:
    """A class in the source of an installed package, which is not imported."""
    (folder,) = find_spec(package).submodule_search_locations
    tree = ast.parse((Path(folder) / file).read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def fields_of(*where: str) -> set[str]:
    return {node.target.id for node in class_of(*where).body if isinstance(node, ast.AnnAssign)}


def arguments_of(*where: str) -> set[str]:
    (init,) = (node for node in class_of(*where).body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return {argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)} - {"self"}


ARGUMENTS = {
    "GRPOConfig": fields_of("trl", "trainer/grpo_config.py", "GRPOConfig"),
    "SFTConfig": fields_of("trl", "trainer/sft_config.py", "SFTConfig"),
    "DPOConfig": fields_of("trl", "trainer/dpo_config.py", "DPOConfig"),
    "TrainingArguments": fields_of("trl", "trainer/base_config.py", "_BaseConfig")
    | fields_of("transformers", "training_args.py", "TrainingArguments"),
    "Arguments of the trainers": arguments_of("trl", "trainer/grpo_trainer.py", "GRPOTrainer")
    | arguments_of("trl", "trainer/sft_trainer.py", "SFTTrainer")
    | arguments_of("trl", "trainer/dpo_trainer.py", "DPOTrainer"),
}


@pytest.mark.parametrize("heading", ARGUMENTS)
def test_the_guide_from_trl_has_a_row_for_every_argument_and_for_no_other(heading):
    arguments = ARGUMENTS[heading]
    assert len(arguments) > 10
    cells = [first for where, first, _ in rows("from-trl.md") if where == heading and first.startswith("`")]
    named = [[code.partition(":")[0] for code in in_code(cell)] for cell in cells]
    assert arguments - {name for names in named for name in names} == set()
    assert {names[0] for names in named} - arguments == set()


def test_the_script_for_trl_in_the_guide_gives_arguments_that_trl_has():
    page = (GUIDES / "from-trl.md").read_text(encoding="utf-8")
    (script,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "GRPOTrainer(" in block)
    calls = {
        node.func.id: {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert calls["GRPOConfig"] - ARGUMENTS["GRPOConfig"] - ARGUMENTS["TrainingArguments"] == set()
    assert calls["GRPOTrainer"] - ARGUMENTS["Arguments of the trainers"] == set()
