"""Measures the structure of the package: `python tests/support/house.py`, or `make house`.

Prints imports against the order of folders, circles of modules, sizes, and small modules with a single importer, and
ends with status 1 where a figure is worse than its limit in `LIMITS`. Runs of the tests check `RUN_LIMITS`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nemo_offload_rl"

# A folder or top-level module may import those that stand before it.
ORDER = (
    *("errors", "models", "targets", "keys", "utils", "data", "environments", "residency", "optim", "protocols"),
    *("weight_sync", "generation", "backends", "memory", "experience", "report", "policy", "distributed"),
    *("algorithms", "config", "migrate", "runs", "plan"),
)
SMALL_LINES = 60

# The most that each figure may be.
LIMITS = {
    "imports upward": 0,
    "circles of modules": 0,
    "modules": 335,
    "lines": 63430,
    "modules under 60 lines with one importer": 0,
}

# The same of a run: `ways.py` records what these are measured by.
PASSES = ("training", "logprobs", "reference logprobs")
RUN_LIMITS = {
    **{f"functions from launch to model, {kind}, with one RPC": 10 for kind in PASSES},
    "files on those ways": 15,
    "lines of those files": 4000,
    "files that a step executes": 85,
    "lines of files that a step executes": 20000,
}


@dataclass(frozen=True)
class Import:
    """One import statement of a module of the package, at the top of a file or inside a function."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules() -> dict[str, Path]:
    """Path of every module of the package, by dotted name without the package's own."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__").removesuffix("__init__")] = path
    return found


def imports(paths: Mapping[str, Path]) -> Iterator[Import]:
    """Every import of one module by another, those for type checkers included."""
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            targets: set[str] = set()
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = node.module.removeprefix("nemo_offload_rl").removeprefix(".")
                if node.module.partition(".")[0] == "nemo_offload_rl":
                    whole = {alias.name: f"{inner}.{alias.name}".removeprefix(".") for alias in node.names}
                    targets = {full if full in paths else inner for full in whole.values()}
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("nemo_offload_rl.")]
                targets = {alias.removeprefix("nemo_offload_rl.") for alias in names}
            yield from (Import(name, target, node.lineno) for target in targets - {name, ""})


def upward(found: list[Import]) -> list[Import]:
    """Imports of a folder that does not stand before the importer's in `ORDER`; unknown folders count."""
    rank = {name: number for number, name in enumerate(ORDER)}

    def is_upward(one: Import) -> bool:
        importer, imported = one.importer.partition(".")[0], one.imported.partition(".")[0]
        if importer in ("", imported):  # the package's own file of public names imports all
            return False
        return importer not in rank or imported not in rank or rank[imported] > rank[importer]

    return [one for one in found if is_upward(one)]


def circles(found: list[Import]) -> list[set[str]]:
    """Sets of modules that import each other, directly or through others (strongly connected components)."""
    imported: dict[str, set[str]] = {}
    for one in found:
        imported.setdefault(one.importer, set()).add(one.imported)

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for name in imported.get(waiting.pop(), set()) - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    reach = {name: reached(name) for name in imported}
    groups = {frozenset({name} | {other for other in reach[name] if name in reach.get(other, ())}) for name in reach}
    return [set(group) for group in groups if len(group) > 1]


def small_with_one_importer(paths: Mapping[str, Path], found: list[Import]) -> list[str]:
    """Modules under `SMALL_LINES` lines that one other module imports; files of packages and commands are left out."""
    importers: dict[str, set[str]] = {}
    for one in found:
        importers.setdefault(one.imported, set()).add(one.importer)
    return sorted(
        name
        for name, path in paths.items()
        if not path.name.startswith("__") and len(importers.get(name, ())) == 1 and _num_lines(path) < SMALL_LINES
    )


def _num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@cache
def measure() -> tuple[dict[str, int], list[str]]:
    """The figures that `LIMITS` names, and a line for each thing that should not be there."""
    paths = modules()
    found = list(imports(paths))
    wrong, rings, small = upward(found), circles(found), small_with_one_importer(paths, found)
    figures = {
        "imports upward": len(wrong),
        "circles of modules": len(rings),
        "modules": len(paths),
        "lines": sum(map(_num_lines, paths.values())),
        "modules under 60 lines with one importer": len(small),
    }
    details = [f"upward: {one}" for one in wrong] + [f"circle: {', '.join(sorted(ring))}" for ring in rings]
    return figures, details + [f"small, one importer: {name}" for name in small]


def measure_run(record: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """The figures that `RUN_LIMITS` names, and the ways. Files of `utils/` are left out; the RPC is Ray's."""
    ways: Mapping[str, Sequence[str]] = record["ways"]
    read = {function.partition(":")[0] for way in ways.values() for function in way}
    executed = [PACKAGE / name for name in record["files"] if not name.startswith("utils/")]
    on_ways = [PACKAGE / name for name in read if not name.startswith("utils/")]
    figures = {f"functions from launch to model, {kind}, with one RPC": len(ways[kind]) + 1 for kind in PASSES}
    figures |= {
        "files on those ways": len(on_ways),
        "lines of those files": sum(map(_num_lines, on_ways)),
        "files that a step executes": len(executed),
        "lines of files that a step executes": sum(map(_num_lines, executed)),
    }
    return figures, [f"{kind}: {' -> '.join(ways[kind])}" for kind in PASSES]


def show(figures: Mapping[str, int], details: Iterable[str], limits: Mapping[str, int]) -> list[str]:
    """Print figures; names of those that are above their limits."""
    for line in details:
        print(line)
    for name, figure in figures.items():
        print(f"{figure:7} {name} (at most {limits[name]})")
    return [name for name, figure in figures.items() if figure > limits[name]]


def main() -> int:
    """Print the figures; 1 where one is worse than its limit."""
    return int(bool(show(*measure(), LIMITS)))


if __name__ == "__main__":
    sys.exit(main())
