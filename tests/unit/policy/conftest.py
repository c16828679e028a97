"""What modules here share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch.distributed as dist
from passing_cases import save_eight_layers
from policy_cases import NLL, full_params, make_batch, one_rank_worker, save_family

from nemo_offload_rl.policy import worker as worker_module


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


@pytest.fixture
def use_device(monkeypatch):
    """From here on, workers have this device."""
    return lambda device: monkeypatch.setattr(worker_module, "make_device", lambda _: device)


@pytest.fixture(scope="module")
def eight_layers(tmp_path_factory):
    """A folder, and the bytes of the parameters of its largest part and of all parts."""
    return save_eight_layers(tmp_path_factory.mktemp("eight_layers"))


@pytest.fixture(scope="module")
def two_steps(eight_layers):
    """The state after none, one and two steps, by a worker that nothing happens to."""
    with one_rank_worker(eight_layers[0]) as worker:
        worker.prepare_for_training()
        states = [full_params(worker)]
        for seed in range(2):
            worker.train(make_batch(seed=seed), NLL())
            states.append(full_params(worker))
    return states
