"""What an export has, and that this package and transformers load it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from hub_cache import fill_hub_cache
from policy_cases import assert_equal, full_params, hf_logprobs, make_batch, one_rank_worker, save_family
from quantized_folders import save_quantized
from tiny_models import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from nemo_offload_rl.backends.factory import check_model
from nemo_offload_rl.backends.hf import export as hf_folder
from nemo_offload_rl.backends.hf.export import export_config, export_tokenizer, load_config
from nemo_offload_rl.backends.hf.weight_files import WeightFiles
from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.keys.data import TokenizerConfig

CHAT = [{"role": "user", "content": "2+3="}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_family(path, "qwen3")
    (path / "generation_config.json").write_text('{"temperature": 0.6}')
    return path


def export(name: Path | str, to: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Export a worker's model, load it in a second worker, and return the first one's parameters."""
    with one_rank_worker(name, **changes) as worker:
        params = full_params(worker)
        worker.export_hf(to)
        settings = worker._settings
    check_model(replace(settings, model_name=str(to)))
    with one_rank_worker(to) as worker:
        assert_equal(full_params(worker), params)
    return params


def prompt_of(tokenizer: Any) -> str:
    return tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)


def test_a_model_of_a_hub_is_exported_with_its_tokenizer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_hub_cache(monkeypatch, tmp_path / "cache", "some/model", folder)
    export("some/model", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == {"temperature": 0.6}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "hf" / name).read_bytes() == (folder / name).read_bytes()
    found = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert found.get_vocab() == make_tokenizer().get_vocab()
    assert prompt_of(found) == prompt_of(make_tokenizer()) == "2+3="


def test_the_tokenizer_and_the_chat_template_of_the_run_are_exported(folder: Path, tmp_path: Path) -> None:
    other = make_tokenizer()
    other.add_special_tokens({"additional_special_tokens": ["<mine>"]})
    other.chat_template = "never used"
    other.save_pretrained(tmp_path / "tokenizer")
    # As older releases saved it: the template inside of the config.
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    config_file = tmp_path / "tokenizer" / "tokenizer_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"chat_template": "never used"}))
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    tokenizer = TokenizerConfig(name=str(tmp_path / "tokenizer"), chat_template=template, chat_template_kwargs=None)
    export(folder, tmp_path / "hf", tokenizer=tokenizer)
    used = load_tokenizer(tokenizer)
    as_exported = TokenizerConfig(name=str(tmp_path / "hf"), chat_template=None, chat_template_kwargs=None)
    for found in (load_tokenizer(as_exported), AutoTokenizer.from_pretrained(tmp_path / "hf")):
        assert found.get_vocab() == used.get_vocab()
        assert "<mine>" in found.get_vocab()
        assert prompt_of(found) == prompt_of(used) == "[2+3=]"


def test_every_named_chat_template_is_exported_unless_the_run_replaces_them(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    named = {"default": "D{{ messages[0]['content'] }}", "tool_use": "T{{ messages[0]['content'] }}"}
    tokenizer.chat_template = named
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for own, expected in ((None, named), ("default", named), ("R{{ messages }}", "R{{ messages }}")):
        to = tmp_path / str(own)
        to.mkdir()
        settings = TokenizerConfig(name=str(tmp_path / "tokenizer"), chat_template=own, chat_template_kwargs=None)
        export_tokenizer(settings, to)
        assert AutoTokenizer.from_pretrained(to).chat_template == expected


def read_by_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """Keys that its configs know, and transformers 5 has under other names; its defaults are not repeated here."""
    names = ("rope_theta", "rope_local_base_freq", "rope_scaling", "partial_rotary_factor", "torch_dtype")
    return {name: config[name] for name in (*names, "num_experts", "num_local_experts") if config.get(name) is not None}


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PUBLISHED = {
    "qwen3": {"rope_theta": 1000000.0, "rope_scaling": None},
    "llama": {
        "rope_theta": 500000.0,
        "rope_scaling": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0} | {"high_freq_factor": 4.0},
    },
    "qwen3_moe": {"rope_theta": 1000000.0, "num_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"rope_theta": 1000000.0, "num_local_experts": 4},
    "glm4": {"rope_theta": 20000.0, "partial_rotary_factor": 0.5},
    "gemma3_text": {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 7000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "phi3": {
        "rope_theta": 10000.0,
        "rope_scaling": LONG,
        "original_max_position_embeddings": 4096,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
    },
    "olmo3": {"rope_theta": 500000.0, "rope_scaling": YARN},
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_readers_on_transformers_4_and_5_find_in_an_export_what_was_published(tmp_path: Path, model_type: str) -> None:
    published = {"model_type": model_type, "torch_dtype": "bfloat16", **PUBLISHED[model_type]}
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = load_config(str(tmp_path), {})
    (tmp_path / "hf").mkdir()
    export_config(config, torch.bfloat16, [], tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = read_by_transformers_4(published)
    assert {name: written.get(name) for name in expected} == expected
    assert written["dtype"] == "bfloat16" and "rope_parameters" in written
    again = AutoConfig.from_pretrained(tmp_path / "hf")
    assert again.rope_parameters == config.rope_parameters
    # A model that transformers 5 has saved has no older names, and its export has them all the same.
    (tmp_path / "saved").mkdir()
    again.save_pretrained(tmp_path / "saved")
    (tmp_path / "second").mkdir()
    export_config(load_config(str(tmp_path / "saved"), {}), torch.bfloat16, [], tmp_path / "second")
    assert json.loads((tmp_path / "second" / "config.json").read_text()) == written


def test_rotary_settings_by_layer_type_are_read_from_an_export_as_they_were(tmp_path: Path) -> None:
    scaled, plain = {**YARN, "rope_theta": 500000.0}, {"rope_type": "default", "rope_theta": 500000.0}
    for model_type in ("olmo3", "gemma3_text"):
        settings = {"full_attention": scaled, "sliding_attention": plain}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "rope_parameters": settings}))
        config = load_config(str(tmp_path), {})
        export_config(config, torch.bfloat16, [], tmp_path)
        assert load_config(str(tmp_path), {}).rope_parameters == config.rope_parameters
        assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 500000.0


def test_an_export_promises_no_layers_that_it_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}))
    config = load_config(str(tmp_path), {})
    for names, expected in (([], 0), (["model.layers.61.eh_proj.weight"], 1)):
        export_config(config, torch.bfloat16, names, tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == expected


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_every_file_of_an_export_can_be_read_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    tokenizer = tmp_path / "tokenizer"
    make_tokenizer().save_pretrained(tokenizer)
    for path in tokenizer.iterdir():
        path.chmod(0o600)
    before = os.umask(umask)
    try:
        to = tmp_path / "hf"
        to.mkdir()
        export_tokenizer(TokenizerConfig(name=str(tokenizer), chat_template=None, chat_template_kwargs=None), to)
        writer = hf_folder._WeightWriter(to)
        writer.add("weight", torch.zeros(2))
        writer.close()
        export_config(Qwen3Config(), torch.bfloat16, writer.names, to)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in to.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= modes.keys()
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)


def test_weights_are_written_file_by_file_as_the_files_fill(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, held_bytes, files = 40_000, [], []
    save = hf_folder.save_file

    def watched(tensors: dict[str, torch.Tensor], file: Path, **kwargs: Any) -> None:
        held_bytes.append(sum(tensor.nbytes for tensor in tensors.values()))
        files.append(list(tensors))
        save(tensors, file, **kwargs)

    monkeypatch.setattr(hf_folder, "MAX_FILE_BYTES", limit)
    monkeypatch.setattr(hf_folder, "save_file", watched)
    params = export(folder, tmp_path / "hf")
    assert [name for names in files for name in names] == list(params)
    assert len(files) > 3
    assert all(total <= limit or len(names) == 1 for total, names in zip(held_bytes, files, strict=True))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(held_bytes) == sum(value.nbytes for value in params.values())
    written = {path.name for path in (tmp_path / "hf").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == written
    assert index["weight_map"].keys() == params.keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_equal({name: value.detach() for name, value in model.named_parameters()}, params)


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_weights_in_8_or_4_bits_are_trained_and_exported_in_16(tmp_path: Path, family: str, backend: str) -> None:
    save_quantized(tmp_path / "quantized", family)
    with one_rank_worker(tmp_path / "quantized", backend=backend) as worker:
        worker.prepare_for_lp_inference()
        logprobs = worker.get_logprobs(make_batch())
        worker.export_hf(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert not hasattr(model.config, "quantization_config")
    assert_close(logprobs, hf_logprobs(model, make_batch()).detach())
    files, exported = WeightFiles(str(tmp_path / "quantized")), WeightFiles(str(tmp_path / "exported"))
    assert files.are_packed and files.shapes == exported.shapes and not exported.are_packed
    assert all(torch.equal(exported.read_whole(name), files.read_whole(name).float()) for name in files.shapes)
