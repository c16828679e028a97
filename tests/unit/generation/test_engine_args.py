"""From the YAML keys to vLLM's arguments, for the device that is not here."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from pathlib import Path

import pytest
from forked import Script
from transformers import Qwen3Config

from nemo_offload_rl.generation.vllm.allowed_args import ALLOWED, OWN_KEYS, REFUSED
from nemo_offload_rl.generation.vllm.engine_args import engine_args, vllm_env
from nemo_offload_rl.runs.loading import load_grpo_config

EXEMPLAR = Path(__file__).parents[3] / "examples" / "configs" / "grpo_math_1B.yaml"


@pytest.mark.parametrize("sleeps", [False, True])
def test_an_engine_on_a_gpu_sleeps_if_it_is_told_to_and_the_policy_leaves_for_one_that_does(sleeps: bool) -> None:
    config = load_grpo_config(EXEMPLAR, [f"policy.generation.vllm_cfg.enable_sleep_mode={str(sleeps).lower()}"])
    assert engine_args(config.engine, "cuda")["enable_sleep_mode"] is sleeps
    assert config.worker.colocated is sleeps


def test_an_engine_on_a_gpu_has_kernels_that_leave_weights_as_they_are_and_need_no_flashinfer() -> None:
    arguments = engine_args(load_grpo_config(EXEMPLAR, []).engine, "cuda")
    assert (arguments["moe_backend"], arguments["gdn_prefill_backend"]) == ("triton", "triton")


def test_an_engine_in_8_bits_keeps_the_layers_and_modules_that_keys_name() -> None:
    keys = {"precision": "fp8", "num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 2}
    overrides = [f"policy.generation.vllm_cfg.{key}={value}" for key, value in keys.items()]
    overrides.append("policy.generation.vllm_cfg.quantization_ignored_layer_kws=[o_proj]")
    arguments = engine_args(load_grpo_config(EXEMPLAR, overrides).engine, "cuda")
    assert (arguments["dtype"], arguments["quantization"]) == ("bfloat16", "fp8_refit")
    config = arguments["hf_overrides"](Qwen3Config(num_hidden_layers=5))
    assert config.quantization_config["kept_layers"] == [0, 3, 4]
    assert (config.quantization_config["kept_names"], config.quantization_config["of_files"]) == (["o_proj"], False)
    assert vllm_env("cuda", use_deep_gemm=True)["VLLM_USE_DEEP_GEMM"] == "1"
    assert vllm_env("cuda", use_deep_gemm=False)["VLLM_USE_DEEP_GEMM"] == "0"
    assert "VLLM_USE_DEEP_GEMM" not in vllm_env("cuda")


@pytest.mark.parametrize(("value", "warnings"), [("false", 1), ("true", 0)])
def test_an_engine_on_a_gpu_that_waits_for_the_host_in_each_step_is_warned_of(value, warnings, caplog) -> None:
    config = load_grpo_config(EXEMPLAR, [f"+policy.generation.vllm_kwargs.async_scheduling={value}"])
    assert engine_args(config.engine, "cuda")["async_scheduling"] is (value == "true")
    assert [record.getMessage() for record in caplog.records if "async_scheduling" in record.getMessage()] == [
        "vllm_kwargs.async_scheduling is false, so the GPU waits for the host after each token (512 responses of 1,024 "
        "tokens took 25.4 s instead of 16.9 s); remove the key"
    ] * warnings


def test_every_argument_of_the_installed_vllm_is_allowed_refused_or_a_key() -> None:
    spec = importlib.util.find_spec("vllm")  # importing it takes 10 s
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    fields = [
        entry.target.id
        for kind in classes
        if kind.name in ("EngineArgs", "AsyncEngineArgs")
        for entry in kind.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    ]
    decided = [*ALLOWED, *REFUSED, *OWN_KEYS]
    assert len(fields) > 200 and {"speculative_config", "enable_log_requests"} <= set(fields)
    assert sorted(decided) == sorted(fields)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_an_engine_is_quiet_unless_its_run_was_started_with_a_level(monkeypatch, device_type):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert vllm_env(device_type)["VLLM_LOGGING_LEVEL"] == "WARNING"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert vllm_env(device_type)["VLLM_LOGGING_LEVEL"] == "INFO"


def test_vllm_starts_for_the_longest_rows_that_rules_allow_and_for_none_longer(tmp_path: Path) -> None:
    verdicts, output = tmp_path / "verdicts.json", tmp_path / "output"
    output.mkdir()
    script = Script(
        [Path(__file__).parents[2] / "support/longest_rows.py", tmp_path / "models", verdicts],
        output,
        cwd=tmp_path,
        env={**os.environ, **vllm_env("cpu")},
    )
    ended = script.wait(1500)
    assert ended.status == 0, ended.stderr
    assert json.loads(verdicts.read_text()) == {
        "default": [1024, True, False],
        "linear": [2560, True, False],
        "dynamic": [2048, True, False],
        "yarn": [1200, True, False],
        "llama3": [1024, True, False],
    }
