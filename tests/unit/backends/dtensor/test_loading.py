"""What a worker has after it read its files, against `from_pretrained`, bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import ONE_RANK, assert_equal, full_params, make_settings, one_rank_worker, save_family
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_offload_rl.backends.hf.weight_files import fault_in
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.policy.worker import PolicyWorker

FAMILIES = ("qwen3", "qwen3-tied", "qwen2", "llama-tied")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROPES: list[dict[str, Any]] = [
    LLAMA3,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        save_family(root / family, family)
    return root


def copied(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def change_weights(folder: Path, changed: dict[str, Tensor], removed: tuple[str, ...] = ()) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in removed} | changed
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def assert_as_from_pretrained(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with one_rank_worker(folder) as worker:
        assert_equal(full_params(worker), {name: value.detach() for name, value in model.named_parameters()})
        causal_lm = worker._backend._built.module.causal_lm
        assert_equal(dict(causal_lm.named_buffers()), dict(model.named_buffers()))
        assert causal_lm.model.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling
        is_tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert (causal_lm.lm_head.weight is causal_lm.model.embed_tokens.weight) is is_tied


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_of_any_type_and_number_become_the_same_float32_parameters(
    folders: Path, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders / family, dtype=dtype)
    folder = copied(folders / family, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert_as_from_pretrained(folder)
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")  # tied weights under both names
    assert_as_from_pretrained(folder)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rotary_frequencies_are_those_of_the_config(folders: Path, tmp_path: Path, rope: dict[str, Any]) -> None:
    folder = copied(folders / "llama-tied", tmp_path / "model")
    change_config(folder, rope_parameters={**rope, "rope_theta": 5000.0})
    assert_as_from_pretrained(folder)


def test_tied_weights_may_be_saved_under_either_name(folders: Path, tmp_path: Path) -> None:
    folder = copied(folders / "qwen3-tied", tmp_path / "model")
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, {"lm_head.weight": weight}, ("model.embed_tokens.weight",))
    assert_as_from_pretrained(folder)


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as error:
        PolicyWorker(make_settings(folder, **changes), ONE_RANK, keep_reference=False)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_tied_weights_that_differ_are_refused(folders: Path, tmp_path: Path) -> None:
    folder = copied(folders / "qwen3-tied", tmp_path / "model")
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    weight[-1, -1] += 1
    change_weights(folder, {"lm_head.weight": weight})
    assert "tie_word_embeddings=false to train both" in refusal(folder)
    with one_rank_worker(folder, hf_config_overrides={"tie_word_embeddings": False}) as worker:
        assert torch.equal(full_params(worker)["lm_head.weight"], weight)


def test_a_weight_that_is_not_finite_is_refused_by_name(folders: Path, tmp_path: Path) -> None:
    folder, name = copied(folders / "llama-tied", tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"
    weight = load_file(folder / "model.safetensors")[name].clone()
    weight[-1, -1] = torch.nan
    change_weights(folder, {name: weight})
    assert f"have NaN in {name} ({folder / 'model.safetensors'})" in refusal(folder)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_gpu_finds_the_weights_that_a_cpu_finds(dtype: torch.dtype) -> None:
    weights = torch.randn(999, 33, dtype=dtype)
    assert fault_in(weights) is fault_in(weights.cuda()) is None
    for value in (torch.nan, torch.inf, -torch.inf):
        weights[-1, -1] = value
        assert fault_in(weights.cuda()) == fault_in(weights) is not None


def test_tensors_that_the_config_does_not_ask_for_are_refused_unless_they_are_computed_anew(
    folders: Path, tmp_path: Path
) -> None:
    folder = copied(folders / "llama-tied", tmp_path / "model")
    change_weights(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert_as_from_pretrained(folder)
    # The biases of Qwen2, which Llama's attention has no use for.
    biases = {
        name: value for name, value in load_file(folders / "qwen2" / "model.safetensors").items() if "bias" in name
    }
    change_weights(folder, biases)
    assert f"have {len(biases)} tensors that its config does not ask for, first" in refusal(folder)


def test_tensors_that_are_missing_or_of_another_shape_are_refused(folders: Path, tmp_path: Path) -> None:
    folder = copied(folders / "qwen3", tmp_path / "model")
    norm = "model.layers.1.self_attn.k_norm.weight"
    assert "first model.layers.0.mlp.down_proj.weight" in refusal(folder, hf_config_overrides={"intermediate_size": 9})
    assert "tensors that its config does not ask for" in refusal(folder, hf_config_overrides={"num_hidden_layers": 1})
    change_weights(folder, {}, (norm,))
    assert f"lack 1 of the 25 tensors that its config asks for, first {norm}" in refusal(folder)


def test_an_override_of_the_rotary_embeddings_without_a_base_is_refused(folders: Path) -> None:
    overrides = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    assert "has no rope_theta; add it" in refusal(folders / "qwen3", hf_config_overrides=overrides)
