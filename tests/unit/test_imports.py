"""Which package may import which: the table of docs/design/outline.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nemo_offload_rl"

# What each package may import of this project, besides itself; `schema` are the building blocks of the YAML keys.
ALLOWED = {
    "residency": set(),
    "models": set(),
    "utils": {"errors", "models", "schema", "targets"},
    "data": {"errors", "schema", "targets"},
    "environments": {"data", "errors", "targets"},
    "weight_sync": {"errors", "generation", "policy", "utils"},
    "generation": {"weight_sync", "data", "errors", "models", "schema", "utils"},
    "policy/backends": {"residency", "data", "errors", "models", "policy", "schema", "utils"},
    "policy": {"residency", "data", "errors", "weight_sync", "generation", "schema", "utils"},
    "experience": {"data", "environments", "generation", "errors"},
    "report": {"errors", "utils"},
    "distributed": {"residency", "data", "errors", "policy", "generation", "weight_sync", "utils"},
}
HEAVY_AT_IMPORT = (
    "vllm",
    "ray",
    "transformers",
    "datasets",
    "megatron",
    "transformer_engine",
    "wandb",
    "mlflow",
    "matplotlib",
)


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_what_is_below_it(layer):
    folder = PACKAGE / layer
    own = layer.split("/")[0]
    deeper = {PACKAGE / other for other in ALLOWED if other != layer and other.startswith(layer + "/")}
    wrong = []
    files = [path for path in folder.rglob("*.py") if not any(parent in deeper for parent in path.parents)]
    assert files
    for path in files:
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "nemo_offload_rl" and len(parts) > 1 and parts[1] not in ALLOWED[layer] | {own}:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_the_outline_in_the_documents_has_the_same_table():
    text = (PACKAGE.parent / "docs/design/outline.md").read_text()
    rows = re.findall(r"^\| `([\w/]+)` \| (.+) \|$", text, flags=re.MULTILINE)
    assert {package: set(re.findall(r"`(\w+)`", imported)) for package, imported in rows} == ALLOWED


def test_ray_is_imported_in_distributed_only():
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name.split(".")[0] == "ray" for name in imports_of(path)) and path.parts[-2] != "distributed"
    ]
    assert not wrong


def test_residency_knows_torch_and_the_standard_library_only():
    wrong = []
    for path in (PACKAGE / "residency").rglob("*.py"):
        for name in imports_of(path):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names | {"torch", "nemo_offload_rl", "__future__"}:
                wrong.append(f"{path.name} imports {name}")
    assert not wrong


def test_the_files_of_residency_import_in_the_direction_of_the_table_in_its_document():
    text = (PACKAGE.parent / "docs/design/residency.md").read_text()
    rows = [re.findall(r"`(\w+)\.py`", line) for line in text.splitlines() if re.match(r"\| `\w+\.py`", line)]
    level = {name: number for number, names in enumerate(rows) for name in names}
    assert level.keys() == {path.stem for path in (PACKAGE / "residency").glob("*.py")} - {"__init__"}
    for name in level:
        body = ast.parse((PACKAGE / "residency" / f"{name}.py").read_text()).body
        modules = [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module]
        own = [module.split(".")[-1] for module in modules if module.startswith("nemo_offload_rl.residency.")]
        assert all(level[other] >= level[name] for other in own), f"{name}.py imports {own}"


def test_importing_the_core_loads_no_engine_no_cluster_and_no_model_library():
    script = (
        "import sys, nemo_offload_rl.residency, nemo_offload_rl.weight_sync.interfaces, nemo_offload_rl.data.batch, "
        "nemo_offload_rl.config, nemo_offload_rl.generation.interfaces; "
        f"print([name for name in {HEAVY_AT_IMPORT!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_stable_names_are_those_of_the_guide_and_each_says_what_it_is() -> None:
    import nemo_offload_rl

    guide = (PACKAGE.parent / "docs/guides/python.md").read_text().partition("## Names")[2]
    rows = [line.split("|")[1] for line in guide.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(nemo_offload_rl.__all__)
    for name in named:
        assert getattr(nemo_offload_rl, name).__doc__, name
