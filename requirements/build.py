"""Builds what must be compiled against the torch that is installed, once: `python requirements/build.py NAME ...`.

NAME is `transformer_engine` (its torch extension: C++ alone, for every GPU), `flash_attn` (CUDA, for the GPUs of this
machine or of FLASH_ATTN_CUDA_ARCHS), `causal_conv1d` or `mamba_ssm` (CUDA, for all GPUs that their setups list). Each
has its requirement pinned in requirements/NAME.txt. The wheel is kept in a cache folder whose name says what it was
built for, and installed from there the next time. At the end the module is imported. `make setup-gpu`, `make
flash-attn` and `make mamba` call this with the Python of .venv.
"""

from __future__ import annotations

import argparse
import ctypes.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_paths()["purelib"])
NO_DRIVER = ("libcuda.so.1", "NVIDIA driver")  # what importing CUDA libraries says where there is none


class CannotBuild(Exception):
    """What is missing, and what to install, in one line."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package that is built here.

    Attributes:
        module: What is imported at the end.
        environment: For its build.
        headers: What its sources include, with the requirement or package that has it.
        needs_nvcc: Whether it has CUDA sources.
        duration: How long its build takes, for the message.
    """

    module: str
    environment: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict)
    needs_nvcc: bool = False
    duration: str


PACKAGES = {
    "transformer_engine": Package(
        module="transformer_engine.pytorch",
        # Without the first, its setup asks GitHub for a wheel. The last would need headers of torch's NCCL.
        environment={
            "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
            "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
            "NVTE_FRAMEWORK": "pytorch",
            "NVTE_WITH_NCCL_EP": "0",
        },
        headers={
            "cu13/include/cuda_runtime.h": "nvidia-cuda-runtime",
            "cu13/include/crt/host_defines.h": "nvidia-cuda-crt",
            "cu13/include/cccl": "nvidia-cuda-cccl",
            "cudnn/include/cudnn.h": "nvidia-cudnn-cu13",
            "nccl/include/nccl.h": "nvidia-nccl-cu13",
        },
        duration="33 C++ files of about a minute each, MAX_JOBS at a time",
    ),
    "flash_attn": Package(
        module="flash_attn",
        environment={"FLASH_ATTENTION_FORCE_BUILD": "TRUE"},
        needs_nvcc=True,
        duration="from half an hour on 64 cores to many hours on a few; MAX_JOBS bounds its memory, 8 GiB a job",
    ),
    "causal_conv1d": Package(
        module="causal_conv1d",
        environment={"CAUSAL_CONV1D_FORCE_BUILD": "TRUE"},
        needs_nvcc=True,
        duration="four files for each of nine kinds of GPU, the longest takes 5 CPU-minutes each; MAX_JOBS at a time",
    ),
    "mamba_ssm": Package(
        module="mamba_ssm",
        environment={"MAMBA_FORCE_BUILD": "TRUE"},
        needs_nvcc=True,
        duration="ten files for each of nine kinds of GPU, hours on a few cores; MAX_JOBS bounds its memory",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Build and install each package that was named; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=sorted(PACKAGES))
    parser.add_argument("--pip", required=True, help="the Python of an environment that has pip")
    parser.add_argument("--uv", required=True, help="the program uv")
    parser.add_argument("--no-driver", action="store_true", help="take an import that lacks the GPU's driver as good")
    options = parser.parse_args(arguments)
    try:
        for name in options.names:
            wheel = built_wheel(name, options.pip)
            install = [options.uv, "pip", "install", "--quiet", "--no-deps", "--reinstall", "--python", sys.executable]
            run([*install, str(wheel)], os.environ)
            check_import(PACKAGES[name].module, no_driver=options.no_driver)
    except CannotBuild as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def built_wheel(name: str, pip: str) -> Path:
    """The wheel, from the cache or built now.

    Raises:
        CannotBuild: A tool is missing, or the build fails.
    """
    package, requirement = PACKAGES[name], (HERE / f"{name}.txt").read_text().strip()
    folder = cache_folder() / built_for(requirement)
    if found := sorted(folder.glob("*.whl")):
        print(f"{requirement}: {found[0]}, built before")
        return found[0]
    check_tools(package)
    print(f"{requirement}: building: {package.duration}", flush=True)
    began = time.monotonic()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    build = [pip, "-m", "pip", "--python", sys.executable, "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    build += ["--no-cache-dir", "--no-binary", requirement.partition("==")[0], "--wheel-dir", str(partial), requirement]
    own = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # ninja is there
    if not package.needs_nvcc:  # nvcc brings its own
        own["CPLUS_INCLUDE_PATH"] = str(SITE / "nvidia/cu13/include/cccl")
    run(build, {**os.environ, **package.environment, **own})
    partial.rename(folder)  # whole under its name, whenever this is interrupted
    (wheel,) = folder.glob("*.whl")
    print(f"{requirement}: {wheel}, built in {(time.monotonic() - began) / 60:.0f} min")
    return wheel


def built_for(requirement: str) -> str:
    """Name of the cache folder: the requirement and whatever a wheel depends on."""
    versions = [f"{name}{metadata.version(name)}" for name in ("torch", "nvidia-cuda-runtime", "nvidia-cudnn-cu13")]
    if requirement.startswith("flash-attn") and "FLASH_ATTN_CUDA_ARCHS" in os.environ:
        versions.append("sm" + os.environ["FLASH_ATTN_CUDA_ARCHS"].replace(";", "_"))
    return "-".join([requirement.replace("==", "-"), f"cp{sys.version_info.major}{sys.version_info.minor}", *versions])


def cache_folder() -> Path:
    """Where wheels are kept: `$XDG_CACHE_HOME/nemo_offload_rl/wheels`."""
    home = os.environ["XDG_CACHE_HOME"] if "XDG_CACHE_HOME" in os.environ else Path.home() / ".cache"
    return Path(home) / "nemo_offload_rl" / "wheels"


def check_tools(package: Package) -> None:
    """What the build needs of this machine.

    Raises:
        CannotBuild: Something is missing.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise CannotBuild(f"{package.module} is built here and there is no {compiler}; install g++ (apt install g++)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        raise CannotBuild(
            f"{package.module} is built here and Python.h is missing; install the headers of this Python (apt install "
            f"python3.{sys.version_info.minor}-dev)"
        )
    for path, requirement in package.headers.items():
        if not (SITE / "nvidia" / path).exists():
            raise CannotBuild(
                f"{package.module} is built here and {path} is missing; install {requirement} as requirements/gpu.txt "
                "has it (make setup-gpu)"
            )
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if package.needs_nvcc and shutil.which("nvcc") is None and not (Path(home) / "bin" / "nvcc").is_file():
        raise CannotBuild(
            f"{package.module} has CUDA sources and there is no nvcc; install the CUDA toolkit of torch's version, "
            f"{metadata.version('nvidia-cuda-runtime')}, and set CUDA_HOME"
        )


def run(command: list[str], environment: Mapping[str, str]) -> None:
    """Run a program.

    Raises:
        CannotBuild: It fails; its own output is above.
    """
    if subprocess.run(command, env=dict(environment), check=False).returncode:
        raise CannotBuild(f"`{' '.join(command[:3])} ...` failed, see above; nothing was installed")


def check_import(module: str, *, no_driver: bool) -> None:
    """Import in a process of its own, as a run would.

    Raises:
        CannotBuild: It fails.
    """
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        print(f"{module}: imported")
        return
    reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
    if any(text in reason for text in NO_DRIVER) and ctypes.util.find_library("cuda") is None:
        if no_driver:
            print(f"{module}: built; it can be imported where the GPU's driver is")
            return
        raise CannotBuild(f"{module} is built, but this machine has no {NO_DRIVER[0]}; install the NVIDIA driver")
    raise CannotBuild(f"{module} cannot be imported ({reason}); remove {cache_folder()} and run `make setup-gpu` again")


if __name__ == "__main__":
    raise SystemExit(main())
