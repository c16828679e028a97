"""Writes the table of docs/reference/models.md from the records and the results of `make test-models`.

Run `python tests/support/models_page.py` in the repository root.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_offload_rl.models.families import FAMILIES, ModelFamily, refused_settings

RESULTS = Path("benchmarks/results/models.json")
PAGE = Path("docs/reference/models.md")
BEGIN, END = "<!-- Written by `python tests/support/models_page.py`. -->", "<!-- The end of what is written. -->"
BACKENDS = {"dtensor": "DTensor", "megatron": "Megatron"}
TP, PACKING, LORA, EXPERTS = "tensor parallelism", "packing", "LoRA", "experts"
SP, CP = "sequence parallelism", "context parallelism"
BY_ENGINE = ("vLLM", "refit")
EVERYWHERE = ("import", "logprobs", "three steps", "resume", "hf/ folder", *BY_ENGINE)
"""Facts of every entry of the results; `BY_ENGINE` only of families that vLLM serves."""

_COLUMNS = ("family", "`model_type`", "backend", "TP", "SP", "CP", "packing", "LoRA", "MoE", "refused", "checked")

type Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By `name/backend`, then by machine ("CPU", "GPU"): `model_type`, `facts`, `date` and versions."""


def table(results: Results) -> str:
    """Render one line for each family and backend."""
    lines = [
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
    ]
    for family in sorted(FAMILIES.values(), key=lambda family: family.title.lower()):
        lines += [_line(family, backend, results) for backend in family.trained_by]
    return "\n".join(lines)


def _line(family: ModelFamily, backend: str, results: Results) -> str:
    seen = [
        (machine, entry)
        for key, by_machine in results.items()
        if key.endswith(f"/{backend}")
        for machine, entry in by_machine.items()
        if entry["model_type"] == family.model_type
    ]
    facts = {fact for _, entry in seen for fact in entry["facts"]}
    cells = [family.title, f"`{family.model_type}`", BACKENDS[backend]]
    cells += ["yes" if fact in facts else "-" for fact in (TP, SP, CP, PACKING, LORA, EXPERTS)]
    cells += [", ".join(refused_settings(family, backend)), _checked(seen)]
    return "| " + " | ".join(cells) + " |"


def _checked(seen: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """List the machines, each with the date of its oldest entry; for a CPU also the version of vLLM."""
    oldest: dict[str, Mapping[str, Any]] = {}
    for machine, entry in seen:
        oldest[machine] = min(oldest.get(machine, entry), entry, key=lambda one: one["date"])
    return "; ".join(
        f"{entry.get('device', f'{machine}, vLLM {entry["vllm"]}')}, {entry['date']}"
        for machine, entry in sorted(oldest.items())
    )


def with_table(page: str, results: Results) -> str:
    """Return the page with a new table."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}"


def read_results() -> Results:
    """Read the results."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def main() -> None:
    """Entry of `python tests/support/models_page.py`."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read_results()), encoding="utf-8")


if __name__ == "__main__":
    main()
