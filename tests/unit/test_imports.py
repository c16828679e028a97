"""The order of imports that docs/design/outline.md shows, and the limits of `make house`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import house
import pytest

PACKAGE = Path(__file__).parents[2] / "nemo_offload_rl"

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


@pytest.mark.parametrize("figure", house.LIMITS)
def test_the_structure_of_the_package_is_no_worse_than_its_limits(figure):
    figures, details = house.measure()
    assert figures[figure] <= house.LIMITS[figure], details


def test_the_outline_in_the_documents_has_the_order_of_imports():
    text = (PACKAGE.parent / "docs/design/outline.md").read_text()
    assert tuple(re.findall(r"^  (\w+)/? ", text, flags=re.MULTILINE)) == house.ORDER


def test_ray_is_imported_in_distributed_only():
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name.split(".")[0] == "ray" for name in imports_of(path)) and path.parts[-2] != "distributed"
    ]
    assert not wrong


def test_broad_handlers_stand_only_where_the_rules_allow_them():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        caught = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught.append(node.type)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                caught += node.args
        broad = [kind for kind in caught if kind is None or re.search(r"\bException\b", ast.unparse(kind))]
        if broad:
            found[str(path.relative_to(PACKAGE))] = len(broad)
    assert found == {
        "targets.py": 2,  # calling, and pickling, what a user gave
        "environments/agents.py": 1,  # a user's agent
        "distributed/ray_start.py": 2,
        "utils/metric_sinks.py": 2,  # services, and what abandons them
        "generation/vllm/requests.py": 1,  # hands the error to all callers that wait
        "policy/early_start.py": 1,  # a model's code on a sample without weights
        "memory/activations.py": 1,  # a model's code on tensors without data
    }


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
    rows = [
        re.findall(r"`residency/([\w/]+)\.py`", line) for line in text.splitlines() if line.startswith("| `residency/")
    ]
    level = {name: number for number, names in enumerate(rows) for name in names}
    files = {path: path.relative_to(PACKAGE / "residency") for path in (PACKAGE / "residency").rglob("*.py")}
    assert level.keys() == {str(name.with_suffix("")) for name in files.values() if name.stem != "__init__"}
    for name in level:
        body = ast.parse((PACKAGE / "residency" / f"{name}.py").read_text()).body
        modules = [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module]
        inner = [module.partition("nemo_offload_rl.residency.")[2].replace(".", "/") for module in modules]
        own = [module for module in inner if module]
        assert all(level[other] > level[name] for other in own), f"{name}.py imports {own}"


def test_the_core_imports_no_large_library_and_the_driver_of_a_run_no_engine():
    script = (
        f"import sys\nheavy = {HEAVY_AT_IMPORT!r}\n"
        "import nemo_offload_rl.residency, nemo_offload_rl.protocols.refit, nemo_offload_rl.data.batch\n"
        "import nemo_offload_rl.config, nemo_offload_rl.protocols.engine\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "import nemo_offload_rl.runs.rollouts, nemo_offload_rl.distributed.generation_engine\n"
        "import nemo_offload_rl.distributed.policy_group\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["[]", "['ray']"]


def test_the_public_names_are_those_of_the_reference_and_each_says_what_it_is() -> None:
    import nemo_offload_rl

    page = (PACKAGE.parent / "docs/reference/api.md").read_text().partition("## Names")[2]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(nemo_offload_rl.__all__)
    for name in named:
        assert getattr(nemo_offload_rl, name).__doc__, name
