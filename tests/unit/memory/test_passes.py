"""Needs of passes from a config.json, beside what passes took of an H200 (benchmarks/results/pass_memory.json)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.keys.master import GrpoMasterConfig
from nemo_offload_rl.keys.worker import PolicySettings, grpo_worker
from nemo_offload_rl.memory.account import PhaseUse
from nemo_offload_rl.memory.passes import pass_needs
from nemo_offload_rl.residency import PassKind, Phase
from nemo_offload_rl.utils.config import load_config

ROOT = Path(__file__).parents[3]
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "pass_memory.json").read_text())["tables"]
ROW = 1024
EXAMPLES = {"dtensor": "grpo_math_1B.yaml", "megatron": "grpo_math_1B_megatron.yaml"}
BF16_GRADS = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=false"

sys.path.insert(0, str(ROOT / "benchmarks"))
from qwen3_shapes import TIED, hf_config, shape_of  # noqa: E402


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def folder(shape: str) -> Path:
        path = tmp_path_factory.getbasetemp() / f"passes-{shape}"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(hf_config(shape_of(shape), shape in TIED)))
        return path

    return folder


def settings_of(table: dict, overrides: list[str], most: int, folder: Path) -> PolicySettings:
    rows = most // ROW
    given = [
        f"policy.model_name={folder}",
        f"policy.train_global_batch_size={rows}",
        f"policy.train_micro_batch_size={rows}",
        f"policy.logprob_batch_size={rows}",
        f"policy.max_total_sequence_length={ROW}",
        "policy.make_sequence_length_divisible_by=1",
        "policy.logprob_chunk_size=1024",
        f"policy.sequence_packing.train_mb_tokens={most}",
        f"policy.sequence_packing.logprob_mb_tokens={most}",
        *([BF16_GRADS] if table["backend"] == "megatron" and "--small-states" in table["command"] else []),
        *overrides,
    ]
    path = ROOT / "examples" / "configs" / EXAMPLES[table["backend"]]
    keys = validate_keys(load_config(path, given), GrpoMasterConfig)
    return grpo_worker(keys.policy, keys.grpo)


def with_tokens(table: dict) -> int:
    return max(int(tokens) for row in table["rows"] for tokens in row["tokens"])


# Measured while states left the GPU in the pass, so that the bytes before it are not those at its peak.
LEAVING = {("dtensor", "1.7B", "kept", "65536"), ("megatron", "8B", "kept", "16384")}


@pytest.mark.parametrize("number", range(len(MEASURED)))
def test_planned_peaks_of_passes_are_within_five_percent_of_measured_ones(number, folder_of):
    table = MEASURED[number]
    backend, shape, grads_bytes = table["backend"], table["shape"], 0
    for row in table["rows"]:
        settings = settings_of(table, row["overrides"], with_tokens(table), folder_of(shape))
        for tokens, seen in row["tokens"].items():
            if "error" in seen or (backend, shape, row["variant"], tokens) in LEAVING:
                continue
            training, logprobs = seen["training"], seen["logprobs"]
            before_bytes = training["before_bytes"]
            if backend == "megatron":  # dispatchers of experts keep tensors of the pass before, which are no state
                before_bytes = min(it["training"]["before_bytes"] for it in row["tokens"].values() if "error" not in it)
            if backend == "dtensor":  # they come in the pass
                grads_bytes = grads_bytes or training["after_bytes"] - training["before_bytes"]
            needs = pass_needs(settings, 1, grads_bytes)
            planned = before_bytes + grads_bytes + needs[PassKind.TRAINING].num_bytes(int(tokens))
            assert planned == pytest.approx(training["peak_bytes"], rel=0.05), (row["variant"], tokens)
            planned = logprobs["before_bytes"] + needs[PassKind.LOGPROBS].num_bytes(int(tokens))
            assert planned == pytest.approx(logprobs["peak_bytes"], rel=0.05), (row["variant"], tokens)


def test_a_phase_is_short_if_state_is_or_passes_exceed_the_gpu_by_more_than_their_error():
    def use(state: int, passes: int | None, limit: int | None = None) -> PhaseUse:
        return PhaseUse(Phase.TRAINING, {"params": state}, 0, 0, passes, 20, 10, 100, limit)

    assert use(60, 20).peak_bytes == 80  # state comes early only where a reserve is left, larger than this GPU
    assert not use(100, None).is_short and use(101, None).is_short
    assert not use(80, 24).is_short and use(80, 25).is_short
    assert use(101, 1).is_short
    assert not use(40, 24, limit=60).is_short and use(40, 25, limit=60).is_short
    assert use(40, 25, limit=60).exceeds_limit
