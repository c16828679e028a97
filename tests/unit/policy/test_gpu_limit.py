"""`policy.gpu_memory_limit_gib`: what the process may take, and what `policy.residency=auto` makes of it."""

from __future__ import annotations

import pytest
import torch
from policy_cases import make_settings, one_rank_worker

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.memory.host_plan import SHARED_RESERVE_BYTES, resident_groups
from nemo_offload_rl.policy.residency_setup import limit_gpu_memory
from nemo_offload_rl.protocols.backend import ProcessInfo
from nemo_offload_rl.residency import CpuDevice

GIB = 2**30


class Gpu(CpuDevice):
    is_host_memory = False

    def total_bytes(self):
        return 80 * GIB


@pytest.fixture
def shares(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: given.append(args))
    return given


def test_the_allocator_gets_the_limit_s_share_of_the_gpu(shares):
    process = ProcessInfo(rank=0, world_size=1, init_method="", device="cuda:3")
    limit_gpu_memory(None, Gpu(), process)
    assert not shares
    limit_gpu_memory(20.0, Gpu(), process)
    assert shares == [(0.25, torch.device("cuda:3"))]
    with pytest.raises(ConfigError, match=r"is 80.5, but the GPU has 80.0 GiB"):
        limit_gpu_memory(80.5, Gpu(), process)
    assert len(shares) == 1


def test_a_worker_on_a_cpu_refuses_it(folders):
    with pytest.raises(ConfigError, match="trains on a CPU"):
        one_rank_worker(folders("qwen3")[0], gpu_memory_limit_gib=1.0).__enter__()


def test_no_more_than_the_limit_stays_beside_the_engine():
    sizes = {"params": 8 * GIB, "optimizer": 16 * GIB}

    def kept(limit_gib):
        settings = make_settings("a-model", residency="auto", engine_memory_share=0.5, gpu_memory_limit_gib=limit_gib)
        return resident_groups(settings, sizes, 80 * GIB)

    reserve_gib = SHARED_RESERVE_BYTES / GIB
    assert kept(None) == {"params", "optimizer"}
    assert kept(reserve_gib + 24) == {"params", "optimizer"}
    assert kept(reserve_gib + 23) == {"optimizer"}
    assert kept(reserve_gib + 15) == {"params"}
    assert kept(reserve_gib) == set()
