"""Defaults in code: what the exemplars set otherwise, and files that leave keys out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import EXEMPLARS, GrpoMasterConfig
from nemo_offload_rl.keys.section import default_of, keys_of, sections_of
from nemo_offload_rl.runs import loading
from nemo_offload_rl.runs.loading import load_grpo_config
from nemo_offload_rl.utils.config import load_unresolved

CONFIGS = Path("examples/configs")
# What an exemplar sets to another value than the default, since its model, its data or its algorithm asks for it.
SUPERVISED = {
    "policy.logprob_chunk_size",
    "policy.dynamic_batching.train_mb_tokens",
    "policy.dynamic_batching.logprob_mb_tokens",
    "policy.sequence_packing.enabled",
    "policy.sequence_packing.train_mb_tokens",
    "policy.sequence_packing.logprob_mb_tokens",
    "policy.sequence_packing.sequence_length_round",
    "logger.tensorboard_enabled",
}
OTHERWISE = {
    "grpo_math_1B.yaml": {"data.default.prompt_file"},
    "distillation_math.yaml": {
        "data.default.prompt_file",
        "policy.logprob_chunk_size",
        "policy.dynamic_batching.enabled",
        "policy.dtensor_cfg.activation_checkpointing",
    },
    "sft.yaml": {*SUPERVISED, "policy.dropout"},
    "dpo.yaml": SUPERVISED,
    "eval.yaml": {
        "generation.num_prompts_per_step",
        "generation.vllm_cfg.gpu_memory_utilization",
        "generation.vllm_cfg.enable_sleep_mode",
    },
}


def exemplar(kind: type) -> dict[str, Any]:
    keys = OmegaConf.to_container(load_unresolved(CONFIGS / EXEMPLARS[kind]), resolve=False)
    assert isinstance(keys, dict)
    return {str(key): value for key, value in keys.items()}


def keys_set(kind: type, keys: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Dotted name, section, name and default of every key with a default that is set, apart from those of lists."""
    for name in [name for name in keys_of(kind) if name in keys]:
        if default := default_of(kind, name):
            yield f"{prefix}{name}", keys, name, default[0]
        below = sections_of(keys_of(kind)[name][0])
        if len(below) == 1 and isinstance(keys[name], dict):
            yield from keys_set(below[0], keys[name], f"{prefix}{name}.")


@pytest.mark.parametrize("kind", EXEMPLARS)
def test_exemplars_set_keys_to_their_defaults_but_for_those_listed_here(kind: type) -> None:
    otherwise = {path for path, keys, name, default in keys_set(kind, exemplar(kind)) if keys[name] != default}
    assert otherwise == OTHERWISE[EXEMPLARS[kind]]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_exemplar_without_its_defaults_is_the_same_run(name: str, tmp_path: Path) -> None:
    kind = ALGORITHMS[name].keys
    short = exemplar(kind)
    for _, keys, key, default in list(keys_set(kind, short)):
        if keys[key] == default:
            del keys[key]
    text = yaml.safe_dump(without_empty_sections(short))
    assert len(text) < 0.4 * len(yaml.safe_dump(exemplar(kind)))
    (tmp_path / "short.yaml").write_text(text)
    made, whole = (loading._load(name, path, ()) for path in (tmp_path / "short.yaml", CONFIGS / EXEMPLARS[kind]))
    assert replace(made, resolved={}) == replace(whole, resolved={})
    assert made.resolved["cluster"] == whole.resolved["cluster"]  # records of a run have the defaults too


def without_empty_sections(keys: dict[str, Any]) -> dict[str, Any]:
    below = {key: without_empty_sections(value) if isinstance(value, dict) else value for key, value in keys.items()}
    return {key: value for key, value in below.items() if value != {} or keys[key] == {}}


def test_a_key_that_a_file_leaves_out_is_changed_like_any_other(tmp_path: Path) -> None:
    short = exemplar(GrpoMasterConfig)
    del short["cluster"], short["policy"]["generation"]["vllm_cfg"]["gpu_memory_utilization"]
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(short))
    overrides = ["policy.generation.vllm_cfg.gpu_memory_utilization=0.5", "cluster.call_warning_s=60"]
    config = load_grpo_config(tmp_path / "short.yaml", overrides)
    assert config.engine.gpu_memory_utilization == 0.5 and config.cluster.call_warning_s == 60
    added = load_grpo_config(tmp_path / "short.yaml", ["+env.other={target: a.b}"])
    assert added.env["other"].num_workers == 8


def test_a_required_key_that_is_left_out_is_named(tmp_path: Path) -> None:
    short = exemplar(GrpoMasterConfig)
    del short["policy"]["model_name"], short["policy"]["tokenizer"]
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(short))
    with pytest.raises(ConfigError, match=r"policy\.model_name: missing; set it, or begin with .*grpo_math_1B"):
        load_grpo_config(tmp_path / "short.yaml")
