"""Engines that apply the policy's adapters themselves: refits of adapters alone, from real workers of both backends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import relative_difference
from engine_process import EngineProcess, engine_process, engine_settings, send_weights
from lora_cases import SERVED, lora_worker, merged, random_adapters
from matrix_cases import BATCHES, GREEDY, PROMPTS, answers_like, hf_model, policy_of, steps
from model_families import checkpoint_tensors, save_family_folder
from torch import Tensor

from nemo_offload_rl.generation.vllm.engine_args import vllm_env
from nemo_offload_rl.protocols.refit import RefitError
from nemo_offload_rl.residency import BASE
from nemo_offload_rl.weight_sync.refit import refit


@pytest.mark.parametrize(
    ("family", "with_weights"), [("qwen2-tied", True), ("phi3", True), ("gemma3-tied", True), ("qwen2", False)]
)
def test_each_refit_replaces_the_adapters_and_answers_are_those_of_merged_weights(
    tmp_path: Path, family: str, with_weights: bool
) -> None:
    model = save_family_folder(tmp_path, family)
    weights = checkpoint_tensors(model) if with_weights else {}
    with engine_process() as engine:
        engine.start(engine_settings(tmp_path, adapters=replace(SERVED, with_weights=with_weights)))
        with pytest.raises(RuntimeError, match="before a refit"):
            engine.generate(PROMPTS, GREEDY)
        first, second = (random_adapters(model, seed) for seed in range(2))
        second = {name: it for name, it in second.items() if ".q_proj." in name or ".down_proj." in name}
        if with_weights:
            with pytest.raises(RefitError, match=r"did not change .* model\.embed_tokens"):
                send_weights(engine, first, 2**30)
        send_weights(engine, weights | first, 5_000)
        answers = answers_like(engine, merged(model, first))
        for adapters in (second, first):
            engine.finish_generation(discard_weights=True)
            engine.prepare_for_generation()
            with pytest.raises(RuntimeError, match="before a refit"):
                engine.generate(PROMPTS, GREEDY)
            send_weights(engine, weights | adapters, 2**30, version=7)
            found = answers_like(engine, merged(model, adapters))
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in answers]
        assert {version for answer in found for version, _ in answer.versions} == {7}


def refused_refits(engine: EngineProcess, sent: dict[str, Tensor]) -> None:
    """Refits that are refused by name; the engine then refuses to answer."""
    name, wide = "model.layers.1.self_attn.q_proj.lora_B.weight", "model.layers.0.mlp.down_proj.lora_A.weight"
    for tensors, message in [
        ({key: it for key, it in sent.items() if key != name}, r"sent no model\.layers\.1\.self_attn\.q_proj\.lora_B"),
        (sent | {key.replace("q_proj", "other"): sent[key] for key in sent}, r"no layers model\.layers\.0\.self_attn"),
        (sent | {wide: torch.zeros(4, 5)}, r"layers model\.layers\.0\.mlp\.down_proj have another number of inputs"),
        (sent | {wide: torch.zeros(9, 96), wide.replace("_A", "_B"): torch.zeros(64, 9)}, "cannot load the policy's"),
    ]:
        with pytest.raises(RefitError, match=message):
            send_weights(engine, tensors, 5_000)
        with pytest.raises(RuntimeError, match="before a refit"):
            engine.generate(PROMPTS, GREEDY)


def test_adapters_that_are_not_the_engine_s_fail_the_refit_by_name(tmp_path: Path) -> None:
    sent = random_adapters(model := save_family_folder(tmp_path, "qwen3"), 0)
    with engine_process() as engine:
        engine.start(engine_settings(tmp_path, adapters=SERVED, async_engine=True))
        refused_refits(engine, sent)
        send_weights(engine, sent, 5_000)
        answers_like(engine, merged(model, sent))


def test_both_halves_of_an_engine_over_two_devices_apply_the_adapters(tmp_path: Path) -> None:
    sent = random_adapters(model := save_family_folder(tmp_path, "qwen3"), 0)
    with engine_process() as engine:
        settings = engine_settings(tmp_path, adapters=replace(SERVED, with_weights=True), tensor_parallel_size=2)
        engine.start(settings)
        send_weights(engine, checkpoint_tensors(model) | sent, 5_000)
        answers_like(engine, merged(model, sent))


PART = {"dim": 3, "match_all_linear": False, "target_modules": ("q_proj", "down_proj")}


@pytest.mark.parametrize(
    ("backend", "sleeps", "base", "lora"),
    [("dtensor", True, "host", PART), ("megatron", True, "device", {}), ("dtensor", False, "device", {})],
)
def test_a_worker_s_refit_brings_its_adapters_and_to_an_engine_that_sleeps_the_frozen_model(
    tmp_path: Path, backend: str, sleeps: bool, base: str, lora: dict[str, Any]
) -> None:
    model = save_family_folder(tmp_path, "qwen3-tied")
    served = replace(SERVED, with_weights=sleeps, modules=lora.get("target_modules", SERVED.modules))
    keys = {"sends_adapters": True, "colocated": sleeps, "residency_overrides": {"base": base} if sleeps else {}}
    with lora_worker(tmp_path, backend, lora=lora, **keys) as worker, engine_process() as engine:
        engine.start(engine_settings(tmp_path, adapters=served))
        num_sent = 2 * 2 * (len(PART["target_modules"]) if lora else 7)  # adapters of two layers
        num_sent += len(checkpoint_tensors(model)) if sleeps else 0
        for number in range(2):
            steps(worker, BATCHES)
            report = refit(policy_of(worker), engine)
            assert report.num_tensors == num_sent
            assert bool(worker.residency.device_bytes()[BASE]) is (base == "device")
            worker.export_hf(tmp_path / f"merged{number}")
            answers_like(engine, hf_model(tmp_path / f"merged{number}"))
            engine.finish_generation(discard_weights=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_answers_are_those_of_merged_weights_also_after_a_sleep_that_discarded_all(
    tmp_path: Path,
) -> None:
    script = Path(__file__).parents[2] / "support" / "adapter_engines.py"
    command = [sys.executable, str(script), str(tmp_path / "model"), str(tmp_path / "answers.json")]
    subprocess.run(command, env={**os.environ, **vllm_env("cuda")}, check=True)
    found = json.loads((tmp_path / "answers.json").read_text())
    assert found["applied"] == found["before"] != found["between"]
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(found["applied"], found["merged"], strict=True):
        pairs = list(zip(tokens, other_tokens, strict=True))
        num_same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
        assert num_same > 0  # merged weights are rounded to bfloat16, so later tokens may be another of the likeliest
        logprobs_of_both = [torch.tensor(one[:num_same]) for one in (logprobs, other_logprobs)]
        assert relative_difference(*logprobs_of_both) < 0.1  # without the adapters 0.8 or more
