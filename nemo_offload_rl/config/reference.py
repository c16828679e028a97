"""Writes docs/reference/configuration.md.

Run `python -m nemo_offload_rl.config.reference [--check]` in the repository root.

Texts, types and defaults come from the sections, rules from the docstrings of the rule functions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from nemo_offload_rl.config.keys import KeyDoc, known_keys, walk_keys
from nemo_offload_rl.config.rules import DISTILLATION_RULES, DPO_RULES, GRPO_RULES, SFT_RULES
from nemo_offload_rl.config.rules.evaluation import EVAL_RULES
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import (
    EXEMPLARS,
    DistillationMasterConfig,
    DpoMasterConfig,
    EvalMasterConfig,
    GrpoMasterConfig,
    SftMasterConfig,
)
from nemo_offload_rl.utils.cli import ending_process

CONFIGS = Path("examples/configs")
TARGET = Path("docs/reference/configuration.md")

_HEAD = """\
# Configuration

<!-- Written by `python -m nemo_offload_rl.config.reference`; change the sections. -->

A run is configured by one YAML file and overrides on the command line:

```
python examples/run_grpo.py --config examples/configs/grpo_arithmetic_cpu.yaml grpo.max_num_steps=20
```

- A file may begin with `defaults: other.yaml` (or a list), relative to itself. What it sets goes over what it inherits;
  a mapping with `_override_: true` replaces the inherited one, and `_remove_: true` takes it away.
- Values may refer to others: `${policy.precision}`, `${.temperature}` (same section), `${mul:a,b}`, and likewise `add`,
  `div` and `max`.
- Overrides follow Hydra's grammar: `a.b=c` changes a key, `+a.b=c` adds one, `++a.b=c` does either, `~a.b` deletes.
- An unknown key is an error that names the nearest known one.

The tables below give every key: those of a GRPO run first, then what is different for [distillation](#distillation),
[SFT](#sft), [DPO](#dpo) and an [evaluation](#evaluation). A file may leave out a key with a default, and a section
whose keys all have one. It has to set a key that is *required*. Where the default is empty, the meaning says what
leaving the key out does. The exemplars `grpo_math_1B.yaml`, `distillation_math.yaml`, `sft.yaml`, `dpo.yaml` and
`eval.yaml` in `examples/configs` set every key; to begin with one, write `defaults: grpo_math_1B.yaml` (from any
folder).
"""

_SUPERVISED = """\
## {name}

`examples/run_{section}.py --config examples/configs/{exemplar}`. The sections `policy`, `logger`, `cluster` and
`checkpointing` have the keys that they have above, without {without}.
"""


_DISTILLATION = f"""\
## Distillation

`examples/run_distillation.py --config examples/configs/{EXEMPLARS[DistillationMasterConfig]}`. All other sections have
the keys that they have above; there is no section `grpo`.
"""


_EVALUATION = """\
## Evaluation

`examples/run_eval.py --config examples/configs/eval.yaml`. The sections `env` and `cluster` have the keys that they
have above, `tokenizer` those of `policy.tokenizer`, and `data.validation` those of `data.train`.
"""


def render() -> str:
    """Render the whole page."""
    lines = [_HEAD, *_sections(GrpoMasterConfig)]
    of_grpo = set(known_keys(GrpoMasterConfig))
    lines += [_DISTILLATION]
    lines += _sections(DistillationMasterConfig, only=("distillation", "loss_fn", "teacher"), heading="###")
    for name, schema in (("SFT", SftMasterConfig), ("DPO", DpoMasterConfig)):
        own = set(known_keys(schema))
        gone = [key for key in of_grpo - own if key.startswith("policy.") and _parent(key) not in of_grpo - own]
        without = ", ".join(f"`{key}`" for key in sorted(gone))
        lines.append(_SUPERVISED.format(name=name, section=name.lower(), exemplar=EXEMPLARS[schema], without=without))
        lines += _sections(schema, only=(name.lower(), "data"), heading="###")
    lines += [_EVALUATION, *_sections(EvalMasterConfig, only=("eval", "generation", "data"), heading="###")]
    lines += ["## Rules between keys", "", "All are checked before Ray starts.", ""]
    lines += [f"- {rule.__doc__}" for rule in GRPO_RULES]
    known = {rule.__name__ for rule in GRPO_RULES}
    more = {rule.__name__: rule for rule in (*SFT_RULES, *DPO_RULES) if rule.__name__ not in known}
    of_distillation = {rule.__name__: rule for rule in DISTILLATION_RULES if rule.__name__ not in known}
    lines += ["", "For distillation:", "", *(f"- {rule.__doc__}" for rule in of_distillation.values())]
    lines += ["", "For SFT and DPO:", "", *(f"- {rule.__doc__}" for rule in more.values())]
    lines += ["", "For evaluations:", "", *(f"- {rule.__doc__}" for rule in EVAL_RULES)]
    return "\n".join(lines) + "\n"


def _sections(schema: type, only: Sequence[str] = (), heading: str = "##") -> list[str]:
    """Heading, text and tables of each section; `only` selects sections of the top level, () selects all."""
    keys = list(walk_keys(schema))
    lines: list[str] = []
    for section in [key for key in keys if key.is_section]:
        if _is_repeated(section) or (only and section.path.partition(".")[0] not in only):
            continue
        lines += [f"{heading}{'#' if '.' in section.path else ''} `{section.path}`", ""]
        lines += [section.description or "", ""]
        own = [key for key in keys if _parent(key.path) in (section.path, f"{section.path}.NAME", f"{section.path}[]")]
        variants = list(dict.fromkeys(key.variant for key in own))
        for variant in variants:
            if len(variants) > 1:
                lines += [f"With `dataset_name: {variant}`:", ""]
            lines += _table(key for key in own if key.variant == variant and (not key.is_section or _is_repeated(key)))
    return lines


def _is_repeated(section: KeyDoc) -> bool:
    """Tell whether a section repeats the keys of `data.train`; it then gets one row instead of tables."""
    return section.path == "data.validation" or ".datasets" in section.path


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _table(keys: Iterable[KeyDoc]) -> list[str]:
    rows = [f"| `{key.path}` | {_cell(key.values)} | {_default(key)} | {_cell(key.description)} |" for key in keys]
    if not rows:
        return []
    return ["| key | values | default | meaning |", "|---|---|---|---|", *rows, ""]


def _default(key: KeyDoc) -> str:
    if not key.default:
        return "*required*" if key.is_required else ""
    value = key.default[0]
    return f"`{_cell(value if isinstance(value, str) else json.dumps(value))}`"


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
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    with ending_process():
        sys.exit(main())
