"""What an export has, and that this package and transformers load it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cache import fill_hub_cache
from policy_cases import assert_equal, full_params, one_rank_worker, save_family
from tiny_models import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_offload_rl.data.config import TokenizerConfig
from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.policy.backends import hf_folder
from nemo_offload_rl.policy.backends.factory import check_model

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
