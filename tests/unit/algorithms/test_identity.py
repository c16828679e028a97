"""What counts as the same model, tokenizer and chat template, and what is refused at a resume."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tokenizer, qwen3_config, save_model_folder

from nemo_offload_rl.algorithms.identity import check_identity, run_identity
from nemo_offload_rl.errors import CheckpointError

MODEL, TOKENIZER, TEMPLATE = "policy.model_name", "policy.tokenizer.name", "policy.tokenizer.chat_template"


def identity(model: Any, template: str | None = None, tokenizer: Any = None, enabled: bool = True) -> Any:
    tokenizer = tokenizer or make_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    settings = SimpleNamespace(name="tokenizers/mine", chat_template=template)
    policy = SimpleNamespace(model_name=str(model), tokenizer=settings)
    config = SimpleNamespace(policy=policy, checkpointing=SimpleNamespace(enabled=enabled))
    return run_identity(config, tokenizer)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    save_model_folder(path, 0, qwen3_config(tied=True, num_layers=1, hidden_size=32))
    return path


def test_a_model_is_known_by_its_weights_wherever_they_are_and_however_they_are_divided(folder, tmp_path):
    known = identity(folder)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    tensors = load_file(moved / "model.safetensors")
    (moved / "model.safetensors").unlink()
    names = list(tensors)
    for file, part in (("a.safetensors", names[:3]), ("b.safetensors", names[3:])):
        save_file({name: tensors[name] for name in part}, moved / file)
    weight_map = {name: "a.safetensors" if name in names[:3] else "b.safetensors" for name in names}
    (moved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_identity(tmp_path, known, identity(moved))

    other = tmp_path / "other"
    save_model_folder(other, 1, qwen3_config(tied=True, num_layers=1, hidden_size=32))
    refused = (
        rf"step_8 was trained from policy\.model_name={folder}, and this run has {other}, which is another one; .*"
    )
    with pytest.raises(CheckpointError, match=refused + "set it as it was") as caught:
        check_identity(tmp_path / "step_8", known, identity(other))
    assert "\n" not in str(caught.value)
    shutil.copy(other / "model.safetensors", tmp_path / "kept")
    torch.manual_seed(0)
    save_file({name: torch.randn_like(value) for name, value in tensors.items()}, other / "model.safetensors")
    trained = identity(other)
    shutil.copy(tmp_path / "kept", other / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"from policy\.model_name={other}, whose contents have changed since"):
        check_identity(tmp_path, trained, identity(other))


def test_a_model_of_a_hub_is_known_by_its_name(folder, tmp_path):
    known = identity("owner/base")
    assert known[MODEL] == {"name": "owner/base", "digest": ""}
    check_identity(tmp_path, known, identity("owner/base"))
    for other in ("owner/other", folder):
        with pytest.raises(CheckpointError, match=r"policy\.model_name=owner/base, and this run has"):
            check_identity(tmp_path, known, identity(other))


def test_another_tokenizer_or_chat_template_is_refused_and_what_was_not_recorded_is_not_compared(tmp_path):
    known = identity("owner/base")
    larger = make_tokenizer()
    larger.add_tokens(["<mine>"])
    with pytest.raises(CheckpointError, match=r"policy\.tokenizer\.name=tokenizers/mine, whose contents have changed"):
        check_identity(tmp_path, known, identity("owner/base", tokenizer=larger))
    template = "{% for message in messages %}" + "{{ message.content }}" * 9 + "{% endfor %}"
    with pytest.raises(CheckpointError) as caught:
        check_identity(tmp_path, known, identity("owner/base", template))
    assert "policy.tokenizer.chat_template=default, and this run has '{% for message" in str(caught.value)
    assert len(str(caught.value)) < 400
    same = make_tokenizer().chat_template
    check_identity(tmp_path, known, identity("owner/base", same))  # under another name
    check_identity(tmp_path, {}, known)
    assert identity("owner/base", enabled=False) == {}
    check_identity(tmp_path, known, {})
