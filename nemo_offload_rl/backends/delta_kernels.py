"""Check of the kernels that train gated delta nets on this machine's GPU."""

import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from packaging.version import Version

_HOPPER = 9  # major compute capability of H100, H200 and GH200
_WRONG_FROM, _RIGHT_FROM = Version("3.4.0"), Version("3.7.1")


def gradients_problem() -> str | None:
    """Say why flash-linear-attention has no right gradients of gated delta nets on this GPU, and what to install.

    Triton 3.4.0 to 3.7.0 compiles one of the package's kernels wrongly for Hopper GPUs (flash-linear-attention's issue
    #640). With these versions the package raises an error in the first backward pass, unless a replacement is
    installed: FlashQLA, or TileLang with CUDA's compiler.

    Source: `chunk_bwd_dqkwg` in fla/ops/common/chunk_o.py of flash-linear-attention 0.6.0.

    Returns:
        None if the gradients are right, or if there is no GPU, Triton or flash-linear-attention. Initializes CUDA.
    """
    if find_spec("fla") is None or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != _HOPPER:
        return None
    try:
        triton = Version(version("triton"))
    except PackageNotFoundError:
        return None
    replaced = find_spec("flash_qla") is not None or (find_spec("tilelang") is not None and shutil.which("nvcc"))
    if replaced or not _WRONG_FROM <= triton < _RIGHT_FROM:
        return None
    return (
        f"Triton {triton} compiles the gradients of flash-linear-attention's gated delta nets wrongly for this GPU; "
        f"install Triton {_RIGHT_FROM} or later, flash_qla, or tilelang together with nvcc"
    )
