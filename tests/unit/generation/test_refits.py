"""Refits of an engine: orders, buckets, types, and what must not pass in silence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_process import EngineProcess, engine_process, engine_settings, send_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_cases import GREEDY, PROMPTS, answers_like
from model_families import checkpoint_tensors, save_family_folder
from quantized_folders import save_quantized
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.hf.weight_files import WeightFiles
from nemo_offload_rl.protocols.refit import RefitError


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_process() as process:
        yield process


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2-tied"])
def test_a_refit_of_any_order_and_buckets_is_whole_or_names_what_it_lacks(
    engine: EngineProcess, tmp_path: Path, family: str
) -> None:
    models = [save_family_folder(tmp_path, family, seed) for seed in range(2)]
    engine.start(engine_settings(tmp_path))
    names = list(checkpoint_tensors(models[0]))
    runs = []

    @settings(max_examples=40, derandomize=True)
    @given(
        order=st.permutations(names),
        missing=st.sets(st.sampled_from(names), max_size=3),
        buffer_bytes=st.sampled_from([1, 5_000, 70_000, 2**30]),
    )
    def refits(order: list[str], missing: set[str], buffer_bytes: int) -> None:
        # Weights of the other model than before, so that what is not written shows.
        model = models[len(runs) % 2]
        runs.append(missing)
        tensors = checkpoint_tensors(model)
        sent = {name: tensors[name] for name in order if name not in missing}
        if not missing:
            send_weights(engine, sent, buffer_bytes)
            answers_like(engine, model)
            return
        with pytest.raises(RefitError) as raised:
            send_weights(engine, sent, buffer_bytes)
        assert f"of the engine: {', '.join(sorted(missing))}. The policy" in str(raised.value)
        with pytest.raises(RuntimeError, match="before a refit"):
            engine.generate(PROMPTS, GREEDY)

    refits()
    assert any(runs) and not all(runs)


def stacked_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """As a policy sends them: the experts of a layer in one tensor for each projection."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def returns_the_routing_of(engine: EngineProcess, model: Any) -> None:
    """Of each token but the last, also of prompts that are in the cache already, in every layer."""
    for prompt, completions in zip(PROMPTS, engine.generate(PROMPTS, replace(GREEDY, temperature=1.0), 2), strict=True):
        for completion in completions:
            tokens = torch.tensor([*prompt, *completion.token_ids])
            logits = model(tokens[None, :-1], output_router_logits=True).router_logits
            chosen = torch.stack([of_layer.topk(2).indices for of_layer in logits], dim=1)
            assert completion.routed_experts.dtype == np.uint8
            assert np.array_equal(np.sort(completion.routed_experts), chosen.sort().values.numpy())


def test_stacked_experts_are_loaded_whole_and_missing_ones_named(engine: EngineProcess, tmp_path: Path) -> None:
    first, second = (save_family_folder(tmp_path, "qwen3_moe", seed) for seed in range(2))
    engine.start(engine_settings(tmp_path, returns_routed_experts=True))
    for model in (first, second):
        send_weights(engine, stacked_tensors(model), 5_000)
        answers_like(engine, model)
        returns_the_routing_of(engine, model)
    down, gate_up = "model.layers.1.mlp.experts.down_proj", "model.layers.0.mlp.experts.gate_up_proj"
    one_lacks = stacked_tensors(first)
    del one_lacks[down]
    with pytest.raises(RefitError, match=f"of the engine: {down}. The policy"):
        send_weights(engine, one_lacks, 2**30)
    wider = stacked_tensors(first) | {gate_up: torch.zeros(4, 96, 65)}
    with pytest.raises(RefitError, match=rf"{gate_up}: its shape is \[4, 96, 65\] instead of \[4, 96, 64\]"):
        send_weights(engine, wider, 2**30)
    # Stacked for one layer, one by one for the other.
    mixed = {name: tensor for name, tensor in checkpoint_tensors(first).items() if "layers.0.mlp.experts" not in name}
    mixed |= {name: tensor for name, tensor in stacked_tensors(first).items() if "layers.0.mlp.experts" in name}
    send_weights(engine, mixed, 2**30)
    answers_like(engine, first)


STRANGE = [
    ("model.layers.0.mlp.experts.4.up_proj.weight", lambda _: torch.zeros(48, 64)),
    ("model.layers.0.self_attn.q_proj.bias", lambda _: torch.zeros(128)),
    ("model.layers.0.mlp.extra.weight", lambda _: torch.zeros(4)),
    ("model.layers.1.mlp.experts.2.down_proj.weight", lambda tensor: tensor.repeat(1, 2)),
    ("model.layers.1.self_attn.k_proj.weight", lambda tensor: tensor.repeat(2, 1)),
    ("model.layers.1.self_attn.k_proj.weight", lambda tensor: tensor[:32]),
    ("lm_head.weight", lambda tensor: tensor[:-1]),
    ("model.norm.weight", lambda tensor: tensor[:1]),
]


def test_a_tensor_that_the_engine_does_not_have_or_of_another_size_fails_the_refit_by_name(
    engine: EngineProcess, tmp_path: Path
) -> None:
    model = save_family_folder(tmp_path, "qwen3_moe")
    engine.start(engine_settings(tmp_path))
    tensors = checkpoint_tensors(model)
    for name, change in STRANGE:
        with pytest.raises(RefitError, match=name.replace(".", r"\.")) as raised:
            send_weights(engine, tensors | {name: change(tensors.get(name)).contiguous()}, 2**30)
        assert "\n" not in str(raised.value)
        with pytest.raises(RuntimeError, match="before a refit"):
            engine.generate(PROMPTS, GREEDY)
    send_weights(engine, tensors, 2**30)
    answers_like(engine, model)


def test_weights_of_another_type_are_cast(engine: EngineProcess, tmp_path: Path) -> None:
    model = save_family_folder(tmp_path, "qwen3_moe")
    engine.start(engine_settings(tmp_path))
    tensors = {name: tensor.bfloat16() for name, tensor in checkpoint_tensors(model).items()}
    send_weights(engine, tensors, 2**30)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    answers_like(engine, model)


def test_an_engine_of_a_folder_in_8_bits_takes_weights_in_16(engine: EngineProcess, tmp_path: Path) -> None:
    save_quantized(tmp_path / "in 8 bits", "qwen3_moe")
    files = WeightFiles(str(tmp_path / "in 8 bits"))
    tensors = {name: files.read_whole(name) for name in files.shapes}
    save_family_folder(tmp_path / "plain", "qwen3_moe")
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    engine.start(engine_settings(tmp_path / "in 8 bits"))
    send_weights(engine, tensors, 2**20)
    answers_like(engine, AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32))
