"""The matrix: every family with every backend that trains it, from import to refit.

`make test` runs each family's first row with each backend, and `FURTHER_IN_CI`, up to the exported folder, and those of
`SERVED_IN_CI` with an engine. `make test-models` runs all rows with an engine and over two ranks, and writes what
docs/reference/models.md is made of.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import matrix_results
import pytest
from engine_process import EngineProcess, engine_process, engine_settings
from matrix_cases import (
    ROWS,
    Row,
    adapters_move_the_merged_weights,
    answers_like,
    hf_model,
    is_refitted,
    scores_of,
    split_over_two_ranks,
    trains_like_plain_torch,
)
from model_families import FAMILIES, save_family_folder
from models_page import BY_ENGINE, EVERYWHERE, LORA, PACKING
from policy_cases import run_ranks

from nemo_offload_rl.protocols.backend import ProcessInfo

pytestmark = [pytest.mark.trains, pytest.mark.processes]
# Rotary embeddings of Llama 3, of OLMo 3 by layer type, and of DeepSeek-R1-0528-Qwen3-8B with its `attn_factor`.
SERVED_IN_CI = ("llama/dtensor", "olmo3/dtensor", "qwen3-tied/megatron", "qwen3_moe/megatron")
# Further settings of a family that code of this package acts on: rotary embeddings with a factor, experts beside
# another layer, keys that layers share; and most of Megatron, which gets every setting through a bridge.
FURTHER_IN_CI = (
    *(f"{name}/dtensor" for name in ("deepseek_v3-yarn", "phi3-longrope", "gemma4-shared-tied", "gemma4-experts-tied")),
    *(f"{name}/dtensor" for name in ("nemotron_h-moe", "granitemoehybrid-moe-tied", "qwen2_moe-dense-tied")),
    *(f"{name}/megatron" for name in ("llama-llama3", "llama-odd", "llama-tied", "mistral-window", "qwen3_moe-dense")),
    *(f"{name}/megatron" for name in ("deepseek_v3-moonlight", "nemotron_h-latent", "nemotron_h-moe")),
)


def rows_of_families() -> list[object]:
    """Names and backends of the rows that `make test` runs without an engine."""
    first = {(FAMILIES[name][0], backend): f"{name}/{backend}" for name, backend in reversed(ROWS)}
    chosen = {*first.values(), *FURTHER_IN_CI}.difference(SERVED_IN_CI)
    assert chosen.union(SERVED_IN_CI) <= {"/".join(row) for row in ROWS}
    return [pytest.param(*row, id="-".join(row)) for row in ROWS if "/".join(row) in chosen]


def served_rows() -> list[object]:
    """Names and backends of all rows; with the marker of `make test-models` those that `make test` leaves to it."""
    marks = {row: [] if "/".join(row) in SERVED_IN_CI else [pytest.mark.models] for row in ROWS}
    return [pytest.param(*row, id="-".join(row), marks=marks[row]) for row in ROWS]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_process() as process:
        yield process


def check(row: Row, root: Path, engine: EngineProcess | None) -> list[str]:
    """Go through everything that one rank can show, and return what was seen, in the page's words."""
    facts = [fact for fact in EVERYWHERE if row.is_served or fact not in BY_ENGINE]
    save_family_folder(row.folder, row.name)
    model = hf_model(row.folder)
    scores_BS = scores_of(model)
    trains_like_plain_torch(row, root, model, scores_BS)
    facts += [PACKING] if row.packs else []
    if engine is not None:
        files = {"load_format": "auto"}
        engine.start(engine_settings(root / "hf", vllm_kwargs=files, returns_routed_experts=row.tells_experts))
        answers_like(engine, hf_model(root / "hf"))
        is_refitted(row, engine)
    if row.has_adapters:
        adapters_move_the_merged_weights(row, root, scores_BS, engine)
        facts.append(LORA)
    return facts


@pytest.mark.parametrize(("name", "backend"), rows_of_families())
def test_a_family_trains_as_in_plain_torch(tmp_path: Path, name: str, backend: str) -> None:
    check(Row(name, backend, tmp_path / "model"), tmp_path, None)


@pytest.mark.parametrize(("name", "backend"), served_rows())
def test_a_family_trains_and_is_served(engine: EngineProcess, tmp_path: Path, name: str, backend: str) -> None:
    row = Row(name, backend, tmp_path / "model")
    matrix_results.write(row, check(row, tmp_path, engine if row.is_served else None))


def two_ranks(process: ProcessInfo, rows_by_key: dict[str, Row]) -> None:
    """What is seen of each row goes to a file beside its folder."""
    wrong = []
    for key, row in rows_by_key.items():
        try:
            facts = split_over_two_ranks(process, row)
        except (AssertionError, RuntimeError, ValueError) as error:  # the same on both ranks
            wrong.append(f"{key}: {error}")
        else:
            if process.rank == 0:
                row.folder.with_name(f"{row.name}-{row.backend}.facts").write_text("\n".join(facts))
    assert not wrong, "\n".join(wrong)


@pytest.mark.models
def test_families_are_split_over_two_ranks(tmp_path: Path) -> None:
    """All in the same two processes: starting them, and importing what Megatron needs, is most of the cost."""
    only = os.environ.get("ONLY", "").split(" or ")
    rows_by_key = {
        f"{name}-{backend}": Row(name, backend, tmp_path / name)
        for name, backend in ROWS
        if any(part in name for part in only)
    }
    for row in rows_by_key.values():
        if not row.folder.exists():
            save_family_folder(row.folder, row.name)
    try:
        run_ranks(2, tmp_path, two_ranks, rows_by_key)
    finally:
        for row in rows_by_key.values():
            if (facts := row.folder.with_name(f"{row.name}-{row.backend}.facts")).exists():
                matrix_results.write(row, facts.read_text().splitlines())
