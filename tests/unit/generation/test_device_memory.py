"""Waiting for room before the engine wakes, on a GPU that only the test knows."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_process import engine_settings

from nemo_offload_rl.errors import DeviceMemoryError
from nemo_offload_rl.generation.vllm import device_memory
from nemo_offload_rl.generation.vllm.base import VllmEngineBase
from nemo_offload_rl.generation.vllm.worker_extension import WorkerExtension

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 100 GiB whose free memory the test sets; the engine needs 60 GiB to wake its KV cache."""
    state = SimpleNamespace(free_bytes=0)
    properties = SimpleNamespace(uuid="the-gpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (state.free_bytes, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(device_memory, "sleeping_bytes", lambda tags: 60 * GIB if "kv_cache" in tags else 0)
    monkeypatch.setattr(device_memory, "holders", lambda uuid, names: f"{names[7]} (pid 7) 55.00 GiB on {uuid}")
    return state


def test_a_wait_ends_when_the_other_side_has_given_its_memory_back(gpu):
    gpu.free_bytes = 40 * GIB
    giver = threading.Timer(0.1, lambda: setattr(gpu, "free_bytes", 70 * GIB))
    giver.start()
    assert device_memory.wait_for_room(["kv_cache"], 20.0, {}) is True
    giver.join()


def test_a_wait_that_lasts_too_long_says_what_is_missing_and_who_holds_the_rest(gpu):
    gpu.free_bytes = 40 * GIB
    message = device_memory.wait_for_room(["weights", "kv_cache"], 0.0, {7: "policy worker 0"})
    assert isinstance(message, str)
    assert "weights and kv_cache need 60.06 GiB to wake, but 40.00 of 100.00 GiB were free" in message
    assert "held by policy worker 0 (pid 7) 55.00 GiB on the-gpu" in message
    assert "gpu_memory_utilization" in message


def test_room_needs_a_margin_for_the_grain_of_mappings(gpu):
    gpu.free_bytes = 60 * GIB
    assert device_memory.wait_for_room(["kv_cache"], 0.0, {7: "policy worker 0"}) is not True
    gpu.free_bytes += device_memory.MARGIN_BYTES
    assert device_memory.wait_for_room(["kv_cache"], 0.0, {}) is True


def test_room_for_what_others_allocate_next_is_waited_for_beside_the_engines(gpu, monkeypatch):
    monkeypatch.setattr(device_memory, "EXTRA_TIMEOUT_S", 300.0)
    gpu.free_bytes = 62 * GIB
    giver = threading.Timer(0.1, lambda: setattr(gpu, "free_bytes", 70 * GIB))
    giver.start()
    assert device_memory.wait_for_room(["kv_cache"], 300.0, {}, extra_bytes=3 * GIB) is True
    assert gpu.free_bytes == 70 * GIB
    giver.join()


def test_room_for_what_others_allocate_next_that_does_not_come_does_not_keep_the_engine_asleep(gpu, monkeypatch):
    monkeypatch.setattr(device_memory, "EXTRA_TIMEOUT_S", 0.01)
    gpu.free_bytes = 62 * GIB
    assert device_memory.wait_for_room(["kv_cache"], 20.0, {}, extra_bytes=3 * GIB) is False


class AsleepEngine(VllmEngineBase):
    """Its workers' calls run in this process, each on a GPU with so much free memory."""

    def __init__(self, gpu: Any, free_gib: list[int]) -> None:
        super().__init__(engine_settings(Path("no folder is read")), can_sleep=True, weights_valid=True)
        self._gpu = gpu
        self.free_gib = free_gib
        self._awake.clear()

    def _rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        answers = []
        for free_gib in self.free_gib:
            self._gpu.free_bytes = free_gib * GIB
            answers.append(getattr(WorkerExtension(), method)(*args))
        return answers

    _generate = _begin = _take_finished = _wake_up = _sleep = _reset_prefix_cache = shutdown = None


def test_an_engine_has_room_for_what_others_allocate_next_if_all_of_its_workers_have(gpu, monkeypatch):
    monkeypatch.setattr(device_memory, "EXTRA_TIMEOUT_S", 0.01)
    monkeypatch.setattr("nemo_offload_rl.generation.vllm.base.HAND_OVER_TIMEOUT_S", 0.02)
    engine = AsleepEngine(gpu, [70, 62])
    engine.name_processes({7: "policy worker 0"})
    assert engine.wait_for_room(["kv_cache"], 1 * GIB) is True
    assert engine.wait_for_room(["kv_cache"], 3 * GIB) is False
    engine.free_gib = [70, 50]
    with pytest.raises(DeviceMemoryError, match=r"need 60\.06 GiB to wake, but 50\.00 of 100\.00 GiB were free"):
        engine.wait_for_room(["kv_cache"], 1 * GIB)


@pytest.mark.parametrize("took", [True, False])
def test_an_engine_sleeps_also_while_another_process_takes_memory_of_its_gpu(took, monkeypatch, caplog):
    """vLLM's own method, with what it asks the GPU for answered here."""
    # It imports vLLM's model runner for GPUs, which the other tests do without.
    from nemo_offload_rl.generation.vllm.gpu_worker import SharingWorker

    levels: list[int] = []
    free_bytes = iter([40 * GIB, (30 if took else 50) * GIB])
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (next(free_bytes), 100 * GIB))
    worker = object.__new__(SharingWorker)
    monkeypatch.setattr(worker, "_get_sleep_mode_backend", lambda: SimpleNamespace(suspend=levels.append))
    worker.sleep(1)
    assert levels == [1]
    assert ("another process took memory" in caplog.text) is took
