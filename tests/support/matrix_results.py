"""Writes what the matrix has seen to the file that docs/reference/models.md is made of."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

import torch
from matrix_cases import Row
from model_families import FAMILIES

VARIABLE = "MODELS_RESULTS"
"""The environment variable with the file; nothing is written without it."""
LIBRARIES = ("torch", "transformers", "vllm", "transformer-engine")


def write(row: Row, facts: Sequence[str], machine: str = "CPU") -> None:
    """Add facts of a row to those of the same day; those of days before are forgotten.

    Args:
        row: Of the matrix.
        facts: What was seen of it.
        machine: "CPU" or "GPU", by whose entry they stand.
    """
    if not (path := os.environ.get(VARIABLE)):
        return
    with Path(path).open("r+" if Path(path).exists() else "w+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several processes of tests
        results = json.loads(file.read() or "{}")
        entry = results.setdefault(f"{row.name}/{row.backend}", {})
        today = {"date": f"{datetime.now(UTC):%Y-%m-%d}", **versions()}
        if machine == "GPU":
            today["device"] = torch.cuda.get_device_name()
        before = entry.get(machine, {})
        kept = before["facts"] if all(before.get(key) == value for key, value in today.items()) else []
        known = {*kept, *facts, *(["experts"] if row.has_experts else [])}
        entry[machine] = {"model_type": FAMILIES[row.name][0], **today, "facts": sorted(known)}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(results, indent=1, sort_keys=True) + "\n")


def versions() -> dict[str, str]:
    """Of the libraries beside which rows were checked; that of vLLM for CPUs has another name."""
    installed: dict[str, str] = {}
    for found in distributions():
        # The first on the path is the one that is imported.
        installed.setdefault(found.name.removesuffix("-cpu").replace("_", "-").lower(), found.version)
    return {name: installed[name] for name in LIBRARIES if name in installed}
