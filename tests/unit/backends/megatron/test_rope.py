"""Rotary embeddings of every type and family equal Hugging Face's over 1024 tokens, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from policy_cases import PAD_ID, hf_logprobs, one_rank_worker, save_family
from transformers import AutoModelForCausalLM

from nemo_offload_rl.data.batch import TrainBatch
from nemo_offload_rl.errors import ConfigError, UserError

LENGTH = 1024
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
# What config.json has, by a name for it.
ROPES: dict[str, dict[str, Any]] = {
    "base": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "base, as before transformers 5": {"rope_theta": 5000.0},
    "linear": {"rope_parameters": LINEAR},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn, as Qwen documents": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    },
    "yarn with mscale": {
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 16}
    },
    "yarn with a factor below 1": {"rope_parameters": {**YARN, "attention_factor": 0.6}},
}
CASES = [(family, name) for family in ("qwen3", "llama-tied") for name in ROPES]
CASES += [(family, name) for family in ("qwen2", "qwen3-moe", "mistral") for name in ("linear", "llama3", "yarn")]


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    ids = torch.randint(0, PAD_ID, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([LENGTH, LENGTH - 37])
    return TrainBatch(input_ids=ids, input_lengths=lengths, token_mask=torch.ones(2, LENGTH), sample_mask=torch.ones(2))


@pytest.fixture(scope="module")
def rotated(tmp_path_factory):
    """Folders with weights of a family and the rotary embeddings of a case."""
    made: dict[str, Path] = {}

    def get(family: str, **settings: Any) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_family(made[family], family)
        path = made[family] / "config.json"
        config = json.loads(path.read_text())
        for name in ("rope_parameters", "rope_scaling", "rope_theta", "sliding_window"):
            config.pop(name, None)
        path.write_text(json.dumps({**config, "sliding_window": None, "max_position_embeddings": LENGTH, **settings}))
        return made[family]

    return get


def expected_logprobs(folder: Path, batch: TrainBatch) -> torch.Tensor:
    with torch.no_grad():
        return hf_logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), batch)


def logprobs(folder: Path, batch: TrainBatch, **changes: Any) -> torch.Tensor:
    """Of a Megatron worker whose parameters were offloaded before."""
    with one_rank_worker(folder, backend="megatron", max_total_sequence_length=LENGTH, **changes) as worker:
        worker.prepare_for_lp_inference()
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.prepare_for_lp_inference()
        return worker.get_logprobs(batch)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_logprobs_of_1024_tokens_equal_hugging_faces(rotated, batch, family, name):
    folder = rotated(family, **ROPES[name])
    assert_close(logprobs(folder, batch), expected_logprobs(folder, batch))


def test_mistrals_sliding_window_is_hugging_faces_too(rotated, batch):
    folder = rotated("mistral", **ROPES["base"])
    whole = expected_logprobs(folder, batch)
    folder = rotated("mistral", **ROPES["base"], sliding_window=64)
    expected = expected_logprobs(folder, batch)
    assert (expected - whole).abs()[:, 64:].mean() > 0.01
    assert_close(logprobs(folder, batch), expected)


def test_an_override_of_the_rotary_embeddings_is_what_hugging_face_makes_of_it(rotated, batch):
    expected = expected_logprobs(rotated("qwen3", rope_parameters=YARN), batch)
    folder = rotated("qwen3", **ROPES["base"])
    assert_close(logprobs(folder, batch, hf_config_overrides={"rope_parameters": YARN}), expected)
    without_base = {name: value for name, value in YARN.items() if name != "rope_theta"}
    with pytest.raises(UserError, match=r"has no rope_theta; add it \(5000 in config\.json\)"):
        logprobs(folder, batch, hf_config_overrides={"rope_parameters": without_base})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "has rope_type dynamic"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "has rope_type proportional"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "has partial_rotary_factor 0.5",
        ),
    ],
)
def test_what_cannot_be_reproduced_is_refused_by_name_when_the_model_is_built_too(rotated, batch, settings, words):
    with pytest.raises(ConfigError, match=words):
        logprobs(rotated("qwen3", **settings), batch)


def test_the_fused_kernel_is_refused_where_it_would_leave_a_factor_out():
    from transformers import Qwen3Config

    from nemo_offload_rl.backends.megatron.upstream.rope import check_fusion, rotation_of

    scaled, plain = (Qwen3Config(rope_parameters=rope) for rope in (YARN, LLAMA3))
    check_fusion(plain, rotation_of(plain), is_fused=True)
    check_fusion(scaled, rotation_of(scaled), is_fused=False)
    with pytest.raises(ConfigError, match=r"apply_rope_fusion is true.*factor 1\.1386.*set it to false"):
        check_fusion(scaled, rotation_of(scaled), is_fused=True)
