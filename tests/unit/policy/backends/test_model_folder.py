import pytest
from tiny_models import save_model_folder

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.policy.backends.model_folder import check_model_folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model_folder(path, 0)
    return path


def test_a_complete_folder_and_a_hub_name_pass(model_folder):
    check_model_folder(str(model_folder))
    check_model_folder("Qwen/Qwen2.5-1.5B")


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
