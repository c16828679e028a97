"""Folders that read images too: the language model is trained, exported with the rest as it was, and served."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from engine_process import EngineProcess, engine_process, engine_settings
from lora_cases import lora_worker
from matrix_cases import BATCHES, EPSILON, PACKING, RATE, answers_like, policy_of, scores_like, scores_of, steps
from model_families import save_family_folder
from peft import PeftModel
from policy_cases import ONE_RANK, assert_equal, hf_logprobs, make_settings, torch_optimizer, worker_of
from resume_cases import weights_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from whole_models import WHOLE, save_whole_folder, whole_model

from nemo_offload_rl.backends.dtensor.supported import unsupported
from nemo_offload_rl.backends.factory import check_model
from nemo_offload_rl.backends.hf.export import load_config
from nemo_offload_rl.backends.hf.model_folder import local_config
from nemo_offload_rl.backends.megatron.supported import unsupported as megatron_refuses
from nemo_offload_rl.errors import UserError
from nemo_offload_rl.memory.account import model_sizes
from nemo_offload_rl.models.families import DTENSOR, FAMILIES, MEGATRON, unread_tensors
from nemo_offload_rl.models.served import unserved
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.models.towers import PART_OF, WHOLE_MODELS, is_of_towers, language_config, place_in_whole
from nemo_offload_rl.weight_sync.refit import refit

CHANGES: dict[str, Any] = {
    "max_total_sequence_length": 400,
    "logprob_batch_size": 4,
    "optimizer": torch_optimizer("AdamW", lr=RATE, eps=EPSILON, weight_decay=0.0),
}
MEGATRON_CHANGES: dict[str, Any] = {
    **{"max_total_sequence_length": 400, "logprob_batch_size": 4},
    **{"lr": RATE, "adam_eps": EPSILON, "start_weight_decay": 0.0, "end_weight_decay": 0.0},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_process() as process:
        yield process


def worker(folder: Path, **changes: Any) -> Any:
    return worker_of(make_settings(folder, backend="dtensor", **(CHANGES | changes)), ONE_RANK)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: it for file in sorted(folder.glob("*.safetensors")) for name, it in load_file(file).items()}


@pytest.mark.trains
@pytest.mark.processes
@pytest.mark.parametrize("name", WHOLE)
def test_the_language_model_is_trained_exported_with_its_towers_and_served(
    engine: EngineProcess, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "model"
    save_whole_folder(folder, name)
    model, before = whole_model(folder), tensors_of(folder)
    place = place_in_whole(before)
    towers = {own_name for own_name in before if is_of_towers(own_name, place)}
    assert 0 < len(towers) < len(before)
    scores_BS, losses = scores_of(model), losses_in_plain_torch(model)

    with worker(folder) as policy:
        scores_like(policy, scores_BS)
        first = steps(policy, BATCHES[:1])
        policy.save_checkpoint(tmp_path / "saved")
        second = steps(policy, BATCHES[1:])
        assert_close([loss for result in first + second for loss in result.loss], losses)
        trained = weights_of(policy)
        policy.export_hf(tmp_path / "hf")
        policy.load_checkpoint(tmp_path / "saved")
        assert steps(policy, BATCHES[1:]) == second
        assert_equal(weights_of(policy), trained)
        engine.start(engine_settings(folder))
        refit(policy_of(policy), engine)

    exported, after = whole_model(tmp_path / "hf"), tensors_of(tmp_path / "hf")
    answers_like(engine, exported)
    assert_close(dict(exported.named_parameters()), dict(model.named_parameters()))
    assert after.keys() == before.keys()
    unread = unread_tensors(exported.config.text_config.to_dict()) or "layer_scalar"
    for own_name, tensor in after.items():
        is_frozen = own_name in towers or own_name.endswith("layer_scalar") or bool(re.search(unread, own_name))
        assert torch.equal(tensor, before[own_name]) == is_frozen, own_name
    assert (tmp_path / "hf/preprocessor_config.json").read_text() == '{"of": "images"}'
    with worker(tmp_path / "hf", sequence_packing=PACKING) as policy:
        scores_like(policy, scores_of(exported))


@pytest.mark.trains
@pytest.mark.processes
@pytest.mark.parametrize("name", ["qwen3_5-tied", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"])
def test_megatron_trains_the_language_model_and_exports_the_rest_as_it_was(
    engine: EngineProcess, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "model"
    save_whole_folder(folder, name)
    model, before = whole_model(folder), tensors_of(folder)
    scores_BS, losses = scores_of(model), losses_in_plain_torch(model)
    changes = {**MEGATRON_CHANGES, **({"freeze_moe_router": False} if "moe" in name else {})}
    with worker_of(make_settings(folder, backend="megatron", **changes), ONE_RANK) as policy:
        scores_like(policy, scores_BS)
        assert_close([loss for result in steps(policy, BATCHES) for loss in result.loss], losses)
        policy.export_hf(tmp_path / "hf")
        engine.start(engine_settings(folder))
        refit(policy_of(policy), engine)
    exported, after = whole_model(tmp_path / "hf"), tensors_of(tmp_path / "hf")
    answers_like(engine, exported)
    assert_close(dict(exported.named_parameters()), dict(model.named_parameters()))
    place = place_in_whole(before)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[own], it) == is_of_towers(own, place) for own, it in before.items())


def losses_in_plain_torch(model: Any) -> list[float]:
    """Train the language model of a `transformers` model as the worker does; towers get no gradient in rows of text."""
    for own_name, parameter in model.named_parameters():
        parameter.requires_grad_("language_model" in own_name or own_name.startswith("lm_head"))
    optimizer = torch.optim.AdamW(
        (it for it in model.parameters() if it.requires_grad), lr=RATE, eps=EPSILON, weight_decay=0.0
    )
    losses = []
    for batch in BATCHES:
        weights_BS = batch.token_mask * batch.sample_mask.unsqueeze(1)
        loss = -(hf_logprobs(model, batch) * weights_BS).sum() / weights_BS.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.trains
@pytest.mark.parametrize(("backend", "changes"), [(DTENSOR, CHANGES), (MEGATRON, MEGATRON_CHANGES)])
def test_adapters_are_merged_and_named_as_in_the_whole_model(
    tmp_path: Path, backend: str, changes: dict[str, Any]
) -> None:
    save_whole_folder(tmp_path / "model", "mistral3")
    with lora_worker(tmp_path / "model", backend, **changes) as policy:
        steps(policy, BATCHES)
        policy.export_hf(tmp_path / "hf")
    merged = scores_of(whole_model(tmp_path / "hf"))
    base = whole_model(tmp_path / "model")
    assert not torch.equal(scores_of(base), merged)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "hf/adapter"))
    assert_close(scores_of(adapted), merged)


@pytest.mark.trains
def test_a_folder_with_newer_names_keeps_them(tmp_path: Path) -> None:
    save_whole_folder(tmp_path / "model", "gemma3-tied", newer_names=True)
    before = tensors_of(tmp_path / "model")
    assert "model.language_model.embed_tokens.weight" in before
    with worker(tmp_path / "model") as policy:
        scores_like(policy, scores_of(whole_model(tmp_path / "model")))
        policy.export_hf(tmp_path / "hf")
    assert_equal(tensors_of(tmp_path / "hf"), before)


@pytest.mark.trains
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_stacked_experts_are_exported_stacked_and_with_their_dimensions_in_order(tmp_path: Path, name: str) -> None:
    model = save_whole_folder(tmp_path / "model", name)
    stacked = {own: it.detach() for own, it in model.named_parameters() if ".experts." in own}
    if name == "qwen3_vl_moe":  # as the hub has them
        stacked = {own: it.transpose(1, 2).contiguous() for own, it in stacked.items()}
    before = {name: it for name, it in tensors_of(tmp_path / "model").items() if ".experts." not in name} | stacked
    save_file(before, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    with worker(tmp_path / "model") as policy:
        scores_like(policy, scores_of(model))
        policy.export_hf(tmp_path / "hf")
    assert_equal(tensors_of(tmp_path / "hf"), before)


def test_layers_for_multi_token_prediction_are_exported_as_they_were(tmp_path: Path) -> None:
    save_whole_folder(tmp_path / "model", "qwen3_5-tied")
    before = tensors_of(tmp_path / "model") | {"mtp.norm.weight": torch.randn(128)}
    save_file(before, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    with worker(tmp_path / "model") as policy:
        policy.export_hf(tmp_path / "hf")
    assert_equal(tensors_of(tmp_path / "hf"), before)


def test_a_missing_tensor_of_the_language_model_is_named(tmp_path: Path) -> None:
    save_whole_folder(tmp_path, "mistral3")
    tensors = tensors_of(tmp_path)
    tensors.pop("language_model.model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 of the 21 .* first language_model\.model\.norm\.weight"):
        check_model(make_settings(tmp_path, backend="dtensor", **CHANGES))


def test_sizes_are_those_of_the_language_model(tmp_path: Path) -> None:
    save_whole_folder(tmp_path / "whole", "mistral3")
    save_family_folder(tmp_path / "text", "mistral")
    whole, text = (model_sizes(str(tmp_path / folder)) for folder in ("whole", "text"))
    assert whole is not None and whole == text
    (tmp_path / "whole/model.safetensors").unlink()
    assert model_sizes(str(tmp_path / "whole"), without_weights=True) == text


_QWEN3_5 = {
    **{"attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256},
    **{"hidden_act": "silu", "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16},
    **{"linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32"},
    **{"max_position_embeddings": 262144, "mtp_num_hidden_layers": 1, "num_attention_heads": 16},
    **{"num_hidden_layers": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "vocab_size": 248320},
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "rope_parameters": {
        **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
        **{"rope_theta": 10000000, "rope_type": "default"},
    },
}
PUBLISHED = {
    # google/gemma-3-4b-it leaves out what transformers takes anyway.
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34},
            **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
    # As google/gemma-4-31B-it: no embeddings of layers, no shared keys, large heads of full attention.
    "gemma4": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            **{"attention_k_eq_v": True, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256},
            **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "hidden_size_per_layer_input": 0},
            **{"intermediate_size": 21504, "max_position_embeddings": 262144, "model_type": "gemma4_text"},
            **{"num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60},
            **{"num_key_value_heads": 16, "num_kv_shared_layers": 0, "sliding_window": 1024, "vocab_size": 262144},
            **{"tie_word_embeddings": True, "use_bidirectional_attention": "vision"},
        },
        "vision_config": {"model_type": "gemma4_vision"},
    },
    # mistralai/Mistral-Small-3.2-24B-Instruct-2506, whose output layer is not tied although the whole's default is.
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {
            **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32768},
            **{"max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32},
            **{"num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1e9},
            **{"sliding_window": None, "vocab_size": 131072},
        },
        "vision_config": {"model_type": "pixtral"},
    },
    # Qwen/Qwen3.5-4B and Qwen/Qwen3.5-35B-A3B
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": _QWEN3_5 | {"intermediate_size": 9216, "hidden_size": 2560, "model_type": "qwen3_5_text"},
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "qwen3_5"},
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": _QWEN3_5
        | {
            **{"model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8, "hidden_size": 2048},
            **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_key_value_heads": 2},
        },
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5_moe"},
    },
    # Qwen/Qwen3-VL-4B-Instruct
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {
            **{"attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560},
            **{"intermediate_size": 9728, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text"},
            **{"num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06},
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            **{"rope_theta": 5000000, "tie_word_embeddings": True, "vocab_size": 151936},
        },
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "qwen3_vl"},
    },
    # Qwen/Qwen3-VL-30B-A3B-Instruct
    "qwen3_vl_moe": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {
            **{"attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu"},
            **{"hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 262144},
            **{"mlp_only_layers": [], "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768},
            **{"norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8},
            **{"num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06},
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            **{"rope_theta": 5000000, "tie_word_embeddings": False, "vocab_size": 151936},
        },
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_vl_moe"},
    },
}


@pytest.mark.parametrize("kind", WHOLE_MODELS)
def test_published_settings_are_read_as_transformers_reads_them(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **PUBLISHED[kind]}))
    language = local_config(str(tmp_path), {})
    assert language is not None and unsupported(language) is None and unserved(language, 8192) is None
    refused = None if MEGATRON in FAMILIES[language["model_type"]].trained_by else f"model_type {kind}, whose language"
    assert str(megatron_refuses(language)).startswith(str(refused))
    loaded = load_config(str(tmp_path), {})
    assert ModelShape.of(language) == ModelShape.of(loaded.to_dict())
    whole = AutoConfig.from_pretrained(tmp_path)
    own, theirs = loaded.to_dict(), whole.text_config.to_dict()
    only_named = {"architectures", "model_type", PART_OF, "rope_parameters", "tie_word_embeddings"}
    assert {key: own[key] for key in own.keys() & theirs.keys() - only_named} == {
        key: theirs[key] for key in own.keys() & theirs.keys() - only_named
    }
    rope = {key: value for key, value in theirs["rope_parameters"].items() if not key.startswith("mrope")}
    assert own["rope_parameters"] == rope
    assert own["tie_word_embeddings"] == (kind not in ("mistral3", "qwen3_5_moe", "qwen3_vl_moe"))


@pytest.mark.parametrize("changes", [{"model_type": "llava"}, {"text_config": {"model_type": "gpt2"}}])
def test_other_folders_are_refused_by_name(changes: dict[str, Any]) -> None:
    config = {"model_type": "mistral3", "text_config": {"model_type": "mistral"}} | changes
    assert f"model_type {config['model_type']}, " in str(unsupported(language_config(config)))
