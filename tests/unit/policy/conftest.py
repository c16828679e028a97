"""What modules here share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left_behind() -> Iterator[None]:
    """A worker that is refused half-built leaves its groups; a module that makes its own would fail on them."""
    yield
    if (parallel_state := sys.modules.get("megatron.core.parallel_state")) is not None:
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
