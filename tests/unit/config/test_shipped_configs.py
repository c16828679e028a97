from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from nemo_rl_files import grpo_file

from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.keys.master import GrpoMasterConfig
from nemo_offload_rl.migrate import migrate
from nemo_offload_rl.runs.loading import load_grpo_config
from nemo_offload_rl.utils.config import load_config

CONFIGS = sorted(
    path for name in ("grpo*", "dapo*", "gspo*") for path in Path("examples/configs").rglob(f"{name}.yaml")
)


def test_there_are_configurations_to_check() -> None:
    assert {path.name for path in CONFIGS} >= {
        "grpo_math_1B.yaml",
        "grpo_math_1B_megatron.yaml",
        "grpo_arithmetic_cpu.yaml",
        "dapo_math_1B.yaml",
        "gspo_math_1B.yaml",
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_passes_every_check(path: Path) -> None:
    load_grpo_config(path)


def test_the_exemplar_sets_every_required_key() -> None:
    """So that `defaults: grpo_math_1B.yaml` is always enough to begin with."""
    validate_keys(load_config("examples/configs/grpo_math_1B.yaml"), GrpoMasterConfig)


def test_files_that_configurations_name_exist() -> None:
    for path in CONFIGS:
        default = load_config(path)["data"]["default"]
        for key in ("prompt_file", "system_prompt_file"):
            assert default[key] is None or Path(default[key]).is_file(), f"{path}: data.default.{key}"


def test_a_wheel_has_the_exemplars_that_defaults_name_from_any_folder_and_converts_files_of_nemo_rl(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(name, tmp_path)
    for name in ("nemo_offload_rl", "examples"):
        shutil.copytree(name, tmp_path / name, symlinks=True)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        packed = {Path(name).name: archive.read(name) for name in archive.namelist() if "/exemplars/" in name}
        archive.extractall(tmp_path / "installed")
    assert packed == {path.name: path.read_bytes() for path in Path("examples/configs").glob("*.yaml")}
    (tmp_path / "mine.yaml").write_text("defaults: sft.yaml\n")
    assert load_config(tmp_path / "mine.yaml") == load_config("examples/configs/sft.yaml")
    (tmp_path / "their.yaml").write_text(yaml.safe_dump(grpo_file()))
    command = [sys.executable, "-m", "nemo_offload_rl.migrate", "../their.yaml", "-o", "our.yaml"]
    installed = tmp_path / "installed"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    subprocess.run(command, cwd=installed, env=environment, check=True, capture_output=True)
    assert load_config(installed / "our.yaml") == migrate(grpo_file()).config
