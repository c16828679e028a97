"""The set-up of a machine with GPUs, as far as it shows without one: pins, what is missing, kept wheels, the image."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[3]
REQUIREMENTS = ROOT / "requirements"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("requirements_build", REQUIREMENTS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FLASH_ATTN_CUDA_ARCHS", raising=False)


def pins(name: str) -> dict[str, str]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_each_part_of_transformer_engine_is_pinned_to_the_same_version_where_it_is_installed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = dict(entry.split("==") for entry in extras["transformer-engine"] if "==" in entry)
    found = {**pins("gpu.txt"), **pins("transformer_engine.txt")}
    assert {name: found[name] for name in wanted} == wanted
    assert len(set(wanted.values())) == 1
    assert "transformer-engine-torch" not in pins("gpu.txt"), "it can be built only once torch is installed"
    assert {"ninja", "setuptools", "wheel", "onnx", "nvdlfw-inspect", "einops"} <= pins("gpu.txt").keys()


def test_what_the_extension_includes_is_among_the_requirements(build):
    for requirement in build.PACKAGES["transformer_engine"].headers.values():
        assert requirement in pins("gpu.txt"), requirement
    here = pins("cpu.txt")
    for path, requirement in build.PACKAGES["transformer_engine"].headers.items():
        assert (build.SITE / "nvidia" / path).exists() == (requirement in here), "the requirement is what brings it"


@pytest.mark.parametrize("name", ["transformer_engine", "flash_attn", "causal_conv1d", "mamba_ssm"])
def test_a_wheel_is_kept_for_what_it_was_built_for_and_taken_again(build, name, monkeypatch, tmp_path):
    import torch

    requirement = (REQUIREMENTS / f"{name}.txt").read_text().strip()
    folder = build.built_for(requirement)
    assert f"torch{torch.__version__.partition('+')[0]}" in folder and "cp312" in folder
    kept = tmp_path / "nemo_offload_rl" / "wheels" / folder / "built.whl"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert build.built_wheel(name, "no-pip") == kept
    monkeypatch.setenv("FLASH_ATTN_CUDA_ARCHS", "90;100")
    assert (build.built_for(requirement) != folder) == (name == "flash_attn"), "other GPUs are another build"


@pytest.mark.parametrize(
    ("name", "break_it", "message"),
    [
        ("transformer_engine", {"CXX": "no-such-compiler"}, "no no-such-compiler; install g++"),
        ("transformer_engine", {}, r"crt/host_defines\.h is missing; install nvidia-cuda-crt"),
        ("flash_attn", {"PATH": "/usr/bin", "CUDA_HOME": "/nowhere"}, "there is no nvcc; install the CUDA toolkit of"),
    ],
)
def test_what_a_build_lacks_is_said_in_one_line_with_what_to_install(
    build, name, break_it, message, monkeypatch, capsys
):
    for key, value in break_it.items():
        monkeypatch.setenv(key, value)
    assert build.main([name, "--pip", "no-pip", "--uv", "no-uv"]) == 1
    said = capsys.readouterr().err
    assert re.search(message, said) and said.startswith("error: ") and said.count("\n") == 1


def test_a_build_that_fails_leaves_no_wheel_and_an_import_that_fails_is_told(build, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "check_tools", lambda package: None)
    with pytest.raises(build.CannotBuild, match=r"`false -m pip \.\.\.` failed, see above; nothing was installed"):
        build.built_wheel("transformer_engine", "false")
    assert not list(tmp_path.rglob("*.whl"))
    build.check_import("json", no_driver=False)
    with pytest.raises(build.CannotBuild, match=r"nowhere cannot be imported \(ModuleNotFoundError.*; remove "):
        build.check_import("nowhere", no_driver=True)


def test_make_builds_the_extension_after_the_rest_and_for_machines_with_gpus_only():
    def commands(target: str) -> list[str]:
        shown = subprocess.run(["make", "-nB", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [line for line in shown.splitlines() if "build.py" in line or "-r requirements" in line]

    assert [line.split()[-1] for line in commands("setup-gpu")] == ["requirements/megatron.txt", "transformer_engine"]
    assert [line.split()[-1] for line in commands("flash-attn")] == ["requirements/megatron.txt", "flash_attn"]
    assert [line.split()[-1] for line in commands("mamba")][-2:] == ["causal_conv1d", "mamba_ssm"]
    assert not any("build.py" in line for line in commands("setup"))


def test_the_image_is_built_in_stages_from_pinned_bases_and_runs_as_an_ordinary_user():
    bases = dict(re.findall(r"^ARG (UBUNTU|CUDA)=(\S+)$", DOCKERFILE, re.MULTILINE))
    stages = re.findall(r"^FROM \$\{(\w+)\}", DOCKERFILE, re.MULTILINE)
    assert stages == ["CUDA", "UBUNTU"] and bases.keys() == set(stages)
    assert all(":" in image and not image.endswith(":latest") for image in bases.values())
    assert bases["CUDA"].split(":")[1].startswith("13.0."), "torch's CUDA"
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1] not in ("0", "root")
    assert "setup-gpu flash-attn" in DOCKERFILE


def test_what_the_image_copies_is_there_and_reaches_the_build():
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [line.split() for line in DOCKERFILE.splitlines() if line.startswith("COPY") and "--from" not in line]
    for _, *sources, _target in copied:
        for source in [entry for entry in sources if not entry.startswith("--")]:
            assert (ROOT / source).exists(), source
            assert any(entry.startswith("!") and fnmatch(source, entry[1:]) for entry in ignored), source


def test_the_manifest_and_the_documents_name_the_image_that_make_builds():
    image = re.search(r"^IMAGE \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert image is not None
    manifest = yaml.safe_load((ROOT / "examples/cluster/kuberay.yaml").read_text())
    cluster = manifest["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [container for pod in pods for container in pod["template"]["spec"]["containers"]]
    assert {container["image"] for container in containers} == {image[1]}
    folder = re.findall(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE)[-1]
    assert {container["workingDir"] for container in containers} == {folder}
    assert image[1] in (ROOT / "docs/guides/clusters.md").read_text()
    assert f"{folder}/.venv/bin/python" in (ROOT / "examples/cluster/slurm.sh").read_text()
