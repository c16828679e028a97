"""A model hub's cache that was filled earlier, on a machine that has no network now."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest


def fill_hub_cache(patch: pytest.MonkeyPatch, cache: Path, model_name: str, folder: Path) -> None:
    """Have `model_name` be in the cache with the files of `folder`; the hub itself cannot be reached."""
    repository, commit = cache / f"models--{model_name.replace('/', '--')}", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
