"""A folder with a tensor more, less or of another shape than the model is refused in one line, on both ways in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from policy_cases import assert_equal, one_rank_worker, save_family
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_offload_rl.backends.hf.weight_files import HubNames
from nemo_offload_rl.errors import UserError

Q_BIAS = "model.layers.1.self_attn.q_proj.bias"
NORM = "model.layers.0.self_attn.q_norm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def change(tmp_path: Path) -> Callable[..., Path]:
    """A model folder whose tensors a function changed in place."""

    def make(family: str, edit: Callable[[dict[str, Tensor]], object]) -> Path:
        save_family(tmp_path, family)
        tensors = load_file(tmp_path / "model.safetensors")
        edit(tensors)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return make


def refused(folder: Path, words: str, **changes: object) -> None:
    with (
        pytest.raises(UserError, match=re.escape(words)) as error,
        one_rank_worker(folder, backend="megatron", **changes),
    ):
        pass
    assert "\n" not in str(error.value) and "; " in str(error.value)


def test_a_tensor_that_the_model_has_no_place_for_is_refused(change):
    folder = change("qwen3", lambda tensors: tensors.update({Q_BIAS: torch.ones(128)}))
    refused(folder, f"has 1 tensors that the Megatron backend cannot load, first {Q_BIAS}")


def test_a_tensor_that_is_missing_is_refused(change):
    refused(
        change("qwen3", lambda tensors: tensors.pop(NORM)),
        f"lacks 1 tensors that its config.json asks for, first {NORM}",
    )


@pytest.mark.parametrize(("value", "shown"), [(float("nan"), "NaN"), (1e30, "1e+30")])
def test_a_value_that_no_weight_can_have_is_refused_by_the_name_in_the_folder(change, value, shown):
    def spoil(tensors: dict[str, Tensor]) -> None:  # one of the three that are one parameter here
        tensors[Q_BIAS][1] = value

    folder = change("qwen2", spoil)
    refused(folder, f"have {shown} in {Q_BIAS} ({folder / 'model.safetensors'}); the file is damaged")


def test_an_expert_that_is_missing_is_refused(change):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    refused(
        change("qwen3-moe", lambda tensors: tensors.pop(name)),
        f"lacks 1 tensors that its config.json asks for, first {name}",
    )


def test_an_expert_more_than_the_config_says_is_refused(change):
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    folder = change("qwen3-moe", lambda tensors: tensors.update({name: torch.ones(32, 64)}))
    refused(folder, f"cannot load, first {name}")


@pytest.mark.parametrize("name", [NORM, EMBEDDING, "model.layers.0.mlp.down_proj.weight"])
def test_a_tensor_of_another_shape_is_refused(change, name):
    folder = change("qwen3", lambda tensors: tensors.update({name: torch.ones(*(n + 2 for n in tensors[name].shape))}))
    refused(folder, "correct config.json or policy.hf_config_overrides")


def test_a_config_with_other_heads_than_the_files_is_refused(change):
    folder = change("qwen3", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    refused(folder, "has weights whose shapes differ from its config.json")


def test_buffers_that_transformers_computes_anew_do_not_matter(change):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = change("llama-tied", lambda tensors: tensors.update({name: torch.ones(4)}))
    with one_rank_worker(folder, backend="megatron"):
        pass


def test_a_tied_output_layer_in_the_folder_is_the_embeddings_or_is_refused(change):
    folder = change("qwen3-tied", lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    with one_rank_worker(folder, backend="megatron") as worker:
        worker.offload_before_refit()
        assert_equal(dict(worker.named_weights()), load_file(folder / "model.safetensors"))
    folder = change("qwen3-tied", lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING] + 1}))
    refused(folder, "set +policy.hf_config_overrides.tie_word_embeddings=false to train both")


def test_layers_for_further_tokens_are_left_out_with_a_line(change, caplog):
    name, other = "model.layers.2.eh_proj.weight", "mtp.fc.weight"
    folder = change("glm4_moe", lambda tensors: tensors.update({name: torch.ones(4), other: torch.ones(4)}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    refused(folder, f"cannot load, first {name}")
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with one_rank_worker(folder, backend="megatron") as worker:
        assert "its layers for multi-token prediction are not trained" in caplog.text
        worker.offload_before_refit()
        tensors = load_file(folder / "model.safetensors")
        del tensors[name], tensors[other]
        hub = HubNames("glm4_moe")
        sent = [part for weight in worker.named_weights() for part in hub.divided(*weight)]
        assert_equal(dict(sent), tensors)


def lists_a_missing_file(weights: Path) -> None:
    names = dict.fromkeys(load_file(weights), "model-00001-of-00001.safetensors")
    (weights.parent / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def is_cut_short(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:100])


def is_another_format(weights: Path) -> None:
    torch.save(load_file(weights), weights.parent / "pytorch_model.bin")
    weights.unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lists_a_missing_file, "model-00001-of-00001.safetensors (No such file"),
        (is_cut_short, "not a complete safetensors file"),
        (is_another_format, "has no safetensors files"),
    ],
)
def test_weights_that_cannot_be_read_are_refused(tmp_path, damage, words):
    save_family(tmp_path, "qwen3")
    damage(tmp_path / "model.safetensors")
    refused(tmp_path, words)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("qwen3", {"attention_bias": True}, "has attention_bias true"),
        ("qwen3-moe", {"attention_bias": True}, "has attention_bias true"),
        # Of its layers the first would be a dense one.
        ("qwen3-moe", {"decoder_sparse_step": 2}, "asks for, first model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_layers_that_would_be_left_out_are_refused_when_the_model_is_built_too(tmp_path, family, settings, words):
    save_family(tmp_path, family)
    refused(tmp_path, words, hf_config_overrides=settings)
