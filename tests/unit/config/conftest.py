"""Configurations of this folder begin with a few files, each read once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig

from nemo_offload_rl.utils import config


@pytest.fixture(scope="module", autouse=True)
def files_are_read_once() -> Iterator[None]:
    """A file that is as it was when it was read is not parsed and merged with its parents again."""
    read = config._load_with_defaults
    kept: dict[tuple[Path, int], DictConfig] = {}

    def read_once(path: Path, seen: tuple[Path, ...]) -> DictConfig:
        if seen or not path.is_file() or not path.resolve().is_relative_to(Path.cwd()):
            return read(path, seen)
        key = (path.resolve(), path.stat().st_mtime_ns)
        if key not in kept:
            kept[key] = read(path, seen)
        return copy.deepcopy(kept[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_load_with_defaults", read_once)
        yield
