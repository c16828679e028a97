import logging
import shutil
import time

import huggingface_hub.constants
import pytest
from hub_cache import fill_hub_cache
from tiny_models import save_model_folder

from nemo_offload_rl.backends.hf.model_folder import check_model_folder
from nemo_offload_rl.errors import UserError


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model_folder(path, 0)
    return path


def test_a_complete_folder_and_a_model_that_the_hub_has_pass(model_folder, tmp_path, monkeypatch, caplog):
    check_model_folder(str(model_folder))
    fill_hub_cache(monkeypatch, tmp_path, "Qwen/Qwen2.5-1.5B", model_folder)
    check_model_folder("Qwen/Qwen2.5-1.5B")
    next(tmp_path.glob("*/snapshots/*/model.safetensors")).unlink()
    with pytest.raises(UserError, match=r"Qwen2\.5-1\.5B has no weights .*; connect to the model hub"):
        check_model_folder("Qwen/Qwen2.5-1.5B")
    with pytest.raises(UserError, match=r"policy\.model_name=Qwen/Qwen2\.5 is not a folder, and neither the model hub"):
        check_model_folder("Qwen/Qwen2.5")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}")
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    tries = []
    monkeypatch.setattr(time, "sleep", tries.append)
    with pytest.raises(UserError, match=r"policy\.model_name=Qwen/Qwen2\.5 is not a folder, and neither the model hub"):
        check_model_folder("Qwen/Qwen2.5")
    assert tries and caplog.text == "", "the hub library's warnings of each try are hidden"


def test_weights_that_were_cut_off_or_are_not_those_of_the_index_are_refused_before_they_are_read(
    model_folder, tmp_path
):
    for file in model_folder.iterdir():
        shutil.copy(file, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="not a complete safetensors file"):
        check_model_folder(str(tmp_path))
    weights.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UserError, match="not a complete safetensors file"):
        check_model_folder(str(tmp_path))
    weights.unlink()
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="not an index of weights"):
        check_model_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("removed", "named"),
    [("config.json", "config.json"), ("model.safetensors", "weights"), ("tokenizer.json", "tokenizer")],
)
def test_a_folder_without_a_part_of_the_model_is_refused_by_that_parts_name(model_folder, tmp_path, removed, named):
    for file in model_folder.iterdir():
        if file.name != removed:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(UserError, match=named):
        check_model_folder(str(tmp_path))


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a folder"):
        check_model_folder(str(tmp_path / "nowhere"))


def test_a_config_that_is_no_json_is_refused(model_folder, tmp_path):
    for file in model_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        check_model_folder(str(tmp_path))
