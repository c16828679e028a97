"""From the YAML keys to vLLM's arguments, for the device that is not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_offload_rl.config import load_grpo_config
from nemo_offload_rl.generation.vllm.engine_args import engine_args

EXEMPLAR = Path(__file__).parents[3] / "examples" / "configs" / "grpo_math_1B.yaml"


@pytest.mark.parametrize("sleeps", [False, True])
def test_an_engine_on_a_gpu_sleeps_if_it_is_told_to_and_the_policy_leaves_for_one_that_does(sleeps: bool) -> None:
    config = load_grpo_config(EXEMPLAR, [f"policy.generation.vllm_cfg.enable_sleep_mode={str(sleeps).lower()}"])
    assert engine_args(config.generation.vllm, "cuda")["enable_sleep_mode"] is sleeps
    assert config.policy.colocated is sleeps
