"""Waiting for room before the engine wakes, on a GPU that only the test knows."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from nemo_offload_rl.generation.vllm import device_memory

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
    assert device_memory.wait_for_room(["kv_cache"], 20.0, {}) is None
    giver.join()


def test_a_wait_that_lasts_too_long_says_what_is_missing_and_who_holds_the_rest(gpu):
    gpu.free_bytes = 40 * GIB
    message = device_memory.wait_for_room(["weights", "kv_cache"], 0.0, {7: "policy worker 0"})
    assert message is not None
    assert "weights and kv_cache need 60.06 GiB to wake, but 40.00 of 100.00 GiB were free" in message
    assert "held by policy worker 0 (pid 7) 55.00 GiB on the-gpu" in message
    assert "gpu_memory_utilization" in message


def test_room_needs_a_margin_for_the_grain_of_mappings(gpu):
    gpu.free_bytes = 60 * GIB
    assert device_memory.wait_for_room(["kv_cache"], 0.0, {7: "policy worker 0"}) is not None
    gpu.free_bytes += device_memory.MARGIN_BYTES
    assert device_memory.wait_for_room(["kv_cache"], 0.0, {}) is None


def test_room_for_what_others_allocate_next_is_waited_for_beside_the_engines(gpu, monkeypatch):
    monkeypatch.setattr(device_memory, "BESIDE_TIMEOUT_S", 20.0)
    gpu.free_bytes = 62 * GIB
    giver = threading.Timer(0.1, lambda: setattr(gpu, "free_bytes", 70 * GIB))
    giver.start()
    assert device_memory.wait_for_room(["kv_cache"], 20.0, {}, beside_bytes=3 * GIB) is None
    assert gpu.free_bytes == 70 * GIB
    giver.join()


def test_room_for_what_others_allocate_next_that_does_not_come_does_not_keep_the_engine_asleep(gpu, monkeypatch):
    monkeypatch.setattr(device_memory, "BESIDE_TIMEOUT_S", 0.01)
    gpu.free_bytes = 62 * GIB
    assert device_memory.wait_for_room(["kv_cache"], 20.0, {}, beside_bytes=3 * GIB) is None
