"""Batch sizes that are `auto` in a configuration."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nemo_offload_rl import load_grpo_config
from nemo_offload_rl.errors import ConfigError

CPU_FILE = Path(__file__).parents[3] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
AUTO = "policy.train_micro_batch_size=auto"


def test_on_a_cpu_the_size_is_four_or_what_divides_below_it(caplog):
    with caplog.at_level(logging.INFO, "nemo_offload_rl"):
        cfg = load_grpo_config(CPU_FILE, [AUTO])
    assert "policy.train_micro_batch_size is auto: 4" in caplog.text
    sizes = cfg.policy.train_micro_batch_size, cfg.policy.logprob_batch_size
    assert sizes == (4, cfg.worker.train_micro_batch_size) == (4, 4)
    assert cfg.resolved["policy"]["train_micro_batch_size"] == 4
    assert cfg.policy.sequence_packing.train_mb_tokens == 4 * cfg.policy.max_total_sequence_length
    batch = ["policy.train_global_batch_size=6", "grpo.num_prompts_per_step=3", "grpo.num_generations_per_prompt=2"]
    odd = load_grpo_config(CPU_FILE, [AUTO, *batch, "policy.logprob_batch_size=auto"])
    assert (odd.policy.train_micro_batch_size, odd.policy.logprob_batch_size) == (3, 3)
    assert load_grpo_config(CPU_FILE, [AUTO, "policy.train_micro_batch_size=2"]).policy.train_micro_batch_size == 2


def test_without_a_gpu_or_a_models_files_a_number_is_asked_for():
    with pytest.raises(ConfigError, match=r"is auto, but what passes need of the GPU is not known: .*; give a number"):
        load_grpo_config(CPU_FILE, [AUTO, "cluster.gpus_per_node=1"])
    with pytest.raises(ConfigError, match=r"policy\.train_global_batch_size"):
        load_grpo_config(CPU_FILE, ["policy.train_global_batch_size=auto"])
