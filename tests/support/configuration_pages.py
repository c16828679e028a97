"""Writes docs/reference/configuration.md and a page for each section in docs/reference/configuration/.

Run `python -m tests.support.configuration_pages` in the repository root.

Texts, types and defaults come from the sections, rules from the docstrings of the rule functions.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from nemo_offload_rl.config.keys import KeyDoc, known_keys, walk_keys
from nemo_offload_rl.config.rules import DISTILLATION_RULES, DPO_RULES, GRPO_RULES, SFT_RULES
from nemo_offload_rl.config.rules.evaluation import EVAL_RULES
from nemo_offload_rl.keys.master import (
    EXEMPLARS,
    DistillationMasterConfig,
    DpoMasterConfig,
    EvalMasterConfig,
    GrpoMasterConfig,
    SftMasterConfig,
)

TARGET = Path("docs/reference/configuration.md")
FOLDER = TARGET.with_suffix("")

_WRITTEN = "<!-- Written by `python -m tests.support.configuration_pages`; change the sections. -->"

_HEAD = f"""\
# Configuration

{_WRITTEN}

A run is configured by one YAML file and overrides on the command line:

```
python examples/run_grpo.py --config examples/configs/grpo_arithmetic_cpu.yaml grpo.max_num_steps=20
```

- `--config` may also be the name of an exemplar, `grpo_arithmetic_cpu.yaml`, from any folder that has no such file.
- A file may begin with `defaults: other.yaml` (or a list), relative to itself. A name that is not in its folder may be
  that of an exemplar. What the file sets goes over what it inherits. A mapping with `_override_: true` replaces the
  inherited one, and one with `_remove_: true` removes it.
- Values may refer to others: `${{policy.precision}}`, `${{.temperature}}` (same section), `${{mul:a,b}}`, and likewise
  `add`, `div` and `max`.
- Overrides follow Hydra's grammar: `a.b=c` changes a key, `+a.b=c` adds one, `++a.b=c` does either, `~a.b` deletes.
  A key whose values are text takes everything after the first `=` as it is, such as `a=b #1, ü`; quote it for the shell
  only. `null` stays null; write `'null'` for that text.
- An unknown key is an error that names the nearest known one.

The pages give every key: those of a GRPO run first, then what is different for distillation, SFT, DPO and an
evaluation. A file may leave out a key with a default, and a section whose keys all have one. It has to set a key that
is *required*. Where the default is empty, the meaning says what leaving the key out does. The exemplars
`grpo_math_1B.yaml`, `distillation_math.yaml`, `sft.yaml`, `dpo.yaml` and `eval.yaml` in `examples/configs` set every
key; to begin with one, write `defaults: grpo_math_1B.yaml` (from any folder).
"""

# Sections of a GRPO run that have a page of their own, with the sections below them.
_PAGES = (
    *("grpo", "loss_fn", "policy", "policy.dtensor_cfg", "policy.megatron_cfg", "policy.generation", "data", "env"),
    *("logger", "cluster", "checkpointing"),
)

_LIKE_GRPO = {
    "distillation": """\
`examples/run_distillation.py --config examples/configs/{exemplar}`. All other sections have the keys that
[they have in a GRPO run](../configuration.md); there is no section `grpo`.
""",
    "sft": """\
`examples/run_sft.py --config examples/configs/{exemplar}`. The sections [`policy`](policy.md), [`logger`](logger.md),
[`cluster`](cluster.md) and [`checkpointing`](checkpointing.md) have the keys that they have in a GRPO run, without
{without}.
""",
    "dpo": """\
`examples/run_dpo.py --config examples/configs/{exemplar}`. The sections [`policy`](policy.md), [`logger`](logger.md),
[`cluster`](cluster.md) and [`checkpointing`](checkpointing.md) have the keys that they have in a GRPO run, without
{without}.
""",
    "evaluation": """\
`examples/run_eval.py --config examples/configs/{exemplar}`. The sections [`env`](env.md) and [`cluster`](cluster.md)
have the keys that they have in a GRPO run, `tokenizer` those of [`policy.tokenizer`](policy.md#policytokenizer), and
`data.validation` those of `data.train`.
""",
}
_ALGORITHMS = (
    ("distillation", "distillation", DistillationMasterConfig, ("distillation", "loss_fn", "teacher")),
    ("sft", "SFT", SftMasterConfig, ("sft", "data")),
    ("dpo", "DPO", DpoMasterConfig, ("dpo", "data")),
    ("evaluation", "an evaluation", EvalMasterConfig, ("eval", "generation", "data")),
)


def render() -> dict[Path, str]:
    """Render all pages, by path from the root of the repository."""
    sections = {key.path: key for key in walk_keys(GrpoMasterConfig) if key.is_section}
    pages: dict[str, list[str]] = {}
    contents: list[tuple[str, str, str]] = []
    for root in _PAGES:
        name = root.rpartition(".")[2]
        pages[name] = _sections(GrpoMasterConfig, lambda path, root=root: _page_of(path) == root, root.count(".") + 1)
        contents.append((name, f"`{root}`", sections[root].description or ""))
    of_grpo = set(known_keys(GrpoMasterConfig))
    for name, title, schema, own in _ALGORITHMS:
        gone = [key for key in of_grpo - set(known_keys(schema)) if key.startswith("policy.")]
        without = ", ".join(f"`{key}`" for key in sorted(gone) if _parent(key) not in gone)
        intro = _LIKE_GRPO[name].format(exemplar=EXEMPLARS[schema], without=without)
        tables = _sections(schema, lambda path, own=own: path.partition(".")[0] in own, 0)
        pages[name] = [f"# Keys of {title}", "", intro, *tables]
        contents.append((name, f"Keys of {title}", ", ".join(f"`{section}`" for section in own)))
    pages["rules"] = _rules()
    contents.append(("rules", "Rules between keys", "Checked before Ray starts."))
    rows = [f"| [{title}](configuration/{name}.md) | {text} |" for name, title, text in contents]
    toctree = ["```{toctree}", ":hidden:", "", *(f"configuration/{name}" for name, _, _ in contents), "```"]
    written = {TARGET: "\n".join([_HEAD, "| page | contents |", "|---|---|", *rows, "", *toctree]) + "\n"}
    for name, (title, *rest) in pages.items():
        text = "\n".join([title, "", _WRITTEN, *rest]).rstrip("\n")
        written[FOLDER / f"{name}.md"] = f"{text}\n"
    return written


def _rules() -> list[str]:
    lines = ["# Rules between keys", "", "All are checked before Ray starts.", ""]
    lines += [f"- {rule.__doc__}" for rule in GRPO_RULES]
    known = {rule.__name__ for rule in GRPO_RULES}
    more = {rule.__name__: rule for rule in (*SFT_RULES, *DPO_RULES) if rule.__name__ not in known}
    of_distillation = {rule.__name__: rule for rule in DISTILLATION_RULES if rule.__name__ not in known}
    lines += ["", "## Distillation", "", *(f"- {rule.__doc__}" for rule in of_distillation.values())]
    lines += ["", "## SFT and DPO", "", *(f"- {rule.__doc__}" for rule in more.values())]
    lines += ["", "## Evaluations", "", *(f"- {rule.__doc__}" for rule in EVAL_RULES)]
    return lines


def _page_of(path: str) -> str:
    """The longest of `_PAGES` that `path` is or begins with."""
    return max((root for root in _PAGES if f"{path}.".startswith(f"{root}.")), key=len)


def _sections(schema: type, is_wanted: Callable[[str], bool], depth: int) -> list[str]:
    """Heading, text and tables of each wanted section; one with `depth` dots in its path has a heading of level 2."""
    keys = list(walk_keys(schema))
    lines: list[str] = []
    for section in [key for key in keys if key.is_section]:
        if _is_repeated(section) or not is_wanted(section.path):
            continue
        lines += [f"{'#' * (2 + section.path.count('.') - depth)} `{section.path}`", ""]
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


def main() -> None:
    pages = render()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in set(FOLDER.glob("*.md")) - pages.keys():
        path.unlink()
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
