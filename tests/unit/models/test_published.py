"""Settings like those of published models: refused by nothing, and the same function in policy and engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from model_families import PUBLISHED, family_config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_offload_rl.generation.vllm.engine_args import as_the_policy_reads_it
from nemo_offload_rl.models.families import FAMILIES, unsupported_settings
from nemo_offload_rl.models.rope import for_engine, with_published_factor, yarn_score_factor
from nemo_offload_rl.models.served import unserved


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_like_those_of_a_published_model_are_refused_by_nothing(name):
    config = PUBLISHED[name]
    reason = unserved(config, 8192)
    assert reason is None if FAMILIES[config["model_type"]].is_served else "vLLM 0.25.1 does not serve" in str(reason)
    for backend in FAMILIES[config["model_type"]].trained_by:
        assert unsupported_settings(config, backend) is None


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
USUAL = 0.1 * math.log(4.0) + 1


def factors(**changes: Any) -> tuple[float, float]:
    """What transformers multiplies cosine and sine by in a policy, and vLLM in the engine that is told its settings."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

    config = family_config("qwen3", rope_parameters=YARN | changes)
    if (settings := with_published_factor(config.to_dict())) is not None:
        config.rope_parameters = settings
    told = as_the_policy_reads_it(family_config("qwen3"), {"rope_parameters": YARN | changes}).rope_parameters
    keys = ("attn_factor", "extrapolation_factor", "apply_yarn_scaling", "beta_fast", "beta_slow", "truncate")
    given = {key: told[key] for key in keys if key in told}
    with set_current_vllm_config(VllmConfig()):
        engine = YaRNScalingRotaryEmbedding(32, 32, 64, 1e6, True, told["factor"], torch.float32, **given)
    return ROPE_INIT_FUNCTIONS["yarn"](config, None)[1], engine.mscale


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, USUAL),
        ({"attn_factor": 0.8782488562869419}, 1.0),  # DeepSeek-R1-0528-Qwen3-8B
        ({"apply_yarn_scaling": False}, 1.0),
        ({"apply_yarn_scaling": False, "attn_factor": 0.5}, 0.5),
        ({"attention_factor": 1.3}, 1.3),
        ({"attention_factor": 1.3, "attn_factor": 0.5}, 1.3),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0}, USUAL),
        ({"beta_fast": None, "attn_factor": None}, USUAL),
    ],
)
def test_policy_and_engine_multiply_by_the_published_attention_factor(changes: dict[str, Any], factor: float) -> None:
    assert factors(**changes) == pytest.approx((factor, factor), rel=1e-12)


def test_the_factor_of_longrope_is_said_in_both_vocabularies() -> None:
    config = family_config("phi3-longrope").to_dict()
    own = 1.190238  # sqrt(1 + log(131072 / 4096) / log(4096))
    assert for_engine(config)["short_mscale"] == for_engine(config)["long_mscale"] == pytest.approx(own)
    assert with_published_factor(config) is None
    published = config | {"rope_parameters": config["rope_parameters"] | {"short_mscale": 1.1, "long_mscale": 1.1}}
    assert with_published_factor(published)["attention_factor"] == 1.1
    assert for_engine(published) is None
    given = config | {"rope_parameters": config["rope_parameters"] | {"attention_factor": 1.3}}
    assert for_engine(given)["long_mscale"] == 1.3


def test_the_engine_rotates_text_of_qwen3_5_without_axes_of_images() -> None:
    rope = PUBLISHED["qwen3.5-4b-text"]["rope_parameters"]
    told = for_engine(PUBLISHED["qwen3.5-4b-text"])
    assert told == {key: value for key, value in rope.items() if not key.startswith("mrope")}
    assert len(rope) - len(told) == 2


def test_the_rotated_share_and_the_factor_of_scores_that_transformers_does_not_read_are_the_published_ones() -> None:
    assert with_published_factor(PUBLISHED["minimax-m2"] | {"rope_scaling": {}}) == {"partial_rotary_factor": 0.5}
    # As `modeling_deepseek.py` of DeepSeek-V2-Lite: (0.1 * 0.707 * log(40) + 1) ** 2
    assert yarn_score_factor(PUBLISHED["deepseek-v2-lite"]) == pytest.approx(1.589626, rel=1e-6)
    assert yarn_score_factor(PUBLISHED["glm-4.7-flash"]) == 1.0


def test_other_rotary_embeddings_are_left_as_they_are() -> None:
    for name in ("llama", "gemma3-tied", "hunyuan", "seed_oss"):
        assert with_published_factor(family_config(name).to_dict()) is for_engine(family_config(name).to_dict()) is None
