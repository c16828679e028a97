"""Writes docs/configuration.md: `python -m nemo_offload_rl.config.reference [--check]`, in the repository root.

Texts and types come from the TypedDicts, defaults from examples/configs/grpo_math_1B.yaml (interpolations as they are
written there), rules from the docstrings of the rule functions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_offload_rl.config.keys import KeyDoc, walk_keys
from nemo_offload_rl.config.rules import AVAILABILITY_RULES, RULES
from nemo_offload_rl.config.schema import GrpoMasterConfig
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.utils.cli import run_main

DEFAULTS = Path("examples/configs/grpo_math_1B.yaml")
TARGET = Path("docs/configuration.md")

_HEAD = """\
# Configuration

<!-- Written by `python -m nemo_offload_rl.config.reference`; change the TypedDicts or the exemplar. -->

A run is configured by one YAML file and overrides on the command line:

```
python examples/run_grpo.py --config examples/configs/grpo_arithmetic_cpu.yaml grpo.max_num_steps=20
```

- A file may begin with `defaults: other.yaml` (or a list), relative to itself. What it sets goes over what it inherits;
  a mapping with `_override_: true` replaces the inherited one.
- Values may refer to others: `${policy.precision}`, `${.temperature}` (same section), `${mul:a,b}`, and likewise `add`,
  `div` and `max`.
- Overrides follow Hydra's grammar: `a.b=c` changes a key, `+a.b=c` adds one, `++a.b=c` does either, `~a.b` deletes.
- An unknown key is an error that names the nearest known one.

The tables below give every key. The default is what `examples/configs/grpo_math_1B.yaml` sets; code has no defaults.
"""


def render(defaults_path: Path = DEFAULTS) -> str:
    """The whole page."""
    defaults = OmegaConf.to_container(OmegaConf.load(defaults_path), resolve=False)
    keys = list(walk_keys(GrpoMasterConfig))
    lines = [_HEAD]
    for section in [key for key in keys if key.is_section]:
        if _is_repeated(section):
            continue
        lines += [f"## `{section.path}`" if "." not in section.path else f"### `{section.path}`", ""]
        lines += [section.description or "", ""]
        own = [key for key in keys if _parent(key.path) in (section.path, f"{section.path}.NAME", f"{section.path}[]")]
        variants = list(dict.fromkeys(key.variant for key in own))
        for variant in variants:
            if len(variants) > 1:
                lines += [f"With `dataset_name: {variant}`:", ""]
            lines += _table(
                (key for key in own if key.variant == variant and (not key.is_section or _is_repeated(key))), defaults
            )
    lines += ["## Rules between keys", "", "All are checked before Ray starts.", ""]
    lines += [f"- {rule.__doc__}" for rule in (*AVAILABILITY_RULES, *RULES)]
    return "\n".join(lines) + "\n"


def _is_repeated(section: KeyDoc) -> bool:
    """`data.validation` takes what `data.train` takes: one row instead of its tables again."""
    return section.path == "data.validation"


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _table(keys: Iterable[KeyDoc], defaults: Any) -> list[str]:
    rows = [
        f"| `{key.path}` | {_cell(key.values)} | {_default(key.path, defaults)} | {_cell(key.description)} |"
        for key in keys
    ]
    if not rows:
        return []
    return ["| key | values | default | meaning |", "|---|---|---|---|", *rows, ""]


def _default(path: str, defaults: Any) -> str:
    value: Any = defaults
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ""
        value = value[part]
    if isinstance(value, str):
        return f"`{_cell(value)}`"
    return f"`{_cell(json.dumps(value))}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m nemo_offload_rl.config.reference`."""
    parser = argparse.ArgumentParser(description="Write the configuration reference.")
    parser.add_argument("--check", action="store_true", help="only check that the file is up to date")
    parsed = parser.parse_args(argv)
    text = render()
    if parsed.check:
        if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{TARGET} is out of date; run python -m nemo_offload_rl.config.reference")
        return 0
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_main(main)
