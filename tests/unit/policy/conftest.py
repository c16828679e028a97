"""What modules here share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch.distributed as dist
from policy_cases import one_rank_worker, save_family


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left_behind() -> Iterator[None]:
    """Neither by a worker that ended nor by one that could not be built."""
    yield
    assert not dist.is_initialized()
    if (parallel_state := sys.modules.get("megatron.core.parallel_state")) is not None:
        assert not parallel_state.is_initialized()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model folders and models by family."""
    made = {}

    def get(family):
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            made[family] = (path, save_family(path, family))
        return made[family]

    return get


@pytest.fixture(params=["dtensor", "megatron"])
def backend(request):
    return request.param


@pytest.fixture
def make_worker(backend):
    """A worker of either backend: what every one of them promises is tested with this."""
    return partial(one_rank_worker, backend=backend)
