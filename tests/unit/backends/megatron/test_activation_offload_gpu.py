"""Activation offloading through Transformer Engine on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    pytest.importorskip("transformer_engine")
    variables = {"NVTE_CPU_OFFLOAD_V1": "1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    variables["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")])
    program = Path(__file__).parent / "offload_on_gpu.py"
    result = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


def of(found: dict[str, Any], run: str, key: str) -> list[float]:
    return [step[key] for step in found[run]["steps"]]


def test_losses_and_gradient_norms_are_bitwise_those_without_offloading(found: dict[str, Any]) -> None:
    for run in ("offloaded", "logprobs first"):
        assert of(found, run, "loss") == of(found, "resident", "loss")
        assert of(found, run, "grad_norm") == of(found, "resident", "grad_norm")


def test_activations_leave_and_the_peak_of_a_pass_is_lower(found: dict[str, Any]) -> None:
    assert of(found, "resident", "count") == [0, 0, 0]
    assert of(found, "offloaded", "num_bytes")[-1] > 10 << 20
    assert of(found, "offloaded", "peak_bytes")[-1] < 0.9 * of(found, "resident", "peak_bytes")[-1]


def test_a_pass_of_logprobs_before_training_changes_nothing_about_what_leaves(found: dict[str, Any]) -> None:
    assert of(found, "logprobs first", "num_bytes") == of(found, "offloaded", "num_bytes")
    assert of(found, "logprobs first", "count") == of(found, "offloaded", "count")
