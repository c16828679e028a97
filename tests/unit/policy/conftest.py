"""What modules here share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left_behind() -> Iterator[None]:
    """Neither by a worker that ended nor by one that could not be built."""
    yield
    assert not dist.is_initialized()
    if (parallel_state := sys.modules.get("megatron.core.parallel_state")) is not None:
        assert not parallel_state.is_initialized()
