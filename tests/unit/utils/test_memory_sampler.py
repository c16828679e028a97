from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from nemo_offload_rl.utils.gpu_memory import GpuUse, holders
from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE, MemorySampler

GIB = 1 << 30


def gpu(**by_pid: int) -> GpuUse:
    pids = {int(name.removeprefix("pid")): size for name, size in by_pid.items()}
    return GpuUse("a GPU", 100 * GIB, sum(pids.values()) + GIB, pids)


def without_host(drained: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in drained.items() if not name.startswith("host_")}


def test_a_child_counts_as_its_parent_and_strangers_and_the_driver_as_other():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        use = GpuUse("a GPU", 100 * GIB, 16 * GIB, {child.pid: 4 * GIB, os.getpid(): 5 * GIB, 1: 6 * GIB})
        assert use.by_owner({os.getpid(): "engine"}) == {"engine": 9 * GIB, "other": 7 * GIB}
    finally:
        child.communicate(b"\n")


def test_the_highest_values_of_each_phase_are_metrics_and_every_sample_is_a_line(tmp_path):
    readings = [
        {"u": gpu(pid90000001=2 * GIB, pid90000002=3 * GIB)},
        {"u": gpu(pid90000001=7 * GIB, pid90000002=0)},
        {"u": gpu(pid90000003=50 * GIB)},
    ]
    phases = iter(["generation", "training", "training"])
    sampler = MemorySampler(
        {90000001: "engine", 90000002: "policy"}, tmp_path / MEMORY_FILE, 0.2, read=lambda: readings.pop(0)
    )
    sampler.follow(lambda: next(phases))
    written = [sampler._sample(float(second)) for second in range(3)]
    assert without_host(sampler.drain(2)) == {
        "generation_engine_gib": 2.0,
        "generation_policy_gib": 3.0,
        "generation_other_gib": 1.0,
        "training_engine_gib": 7.0,
        "training_policy_gib": 0.0,
        "training_other_gib": 1.0,
        "peak_gib": 8.0,
    }
    assert without_host(sampler.drain(3)) == {}
    lines = [json.loads(line) for line in written]
    assert [line["phase"] for line in lines] == ["generation", "training", "training"]
    assert lines[0]["gib"] == {"u": {"engine": 2.0, "policy": 3.0, "other": 1.0}}
    assert lines[2]["gib"] == {}, "a GPU on which none of ours lives is not shown"


def test_a_sampler_takes_samples_until_it_is_left(tmp_path):
    path = tmp_path / MEMORY_FILE
    with MemorySampler({90000001: "policy"}, path, 0.01, read=lambda: {"u": gpu(pid90000001=GIB)}) as sampler:
        while not without_host(sampler.drain(1)):
            time.sleep(0.01)
    assert json.loads(path.read_text().splitlines()[0])["phase"] == "between"


def test_a_file_that_takes_no_samples_costs_a_warning_and_not_the_metrics(tmp_path, caplog):
    (tmp_path / MEMORY_FILE).symlink_to("/dev/full")
    read = lambda: {"u": gpu(pid90000001=GIB)}  # noqa: E731
    with MemorySampler({90000001: "policy"}, tmp_path / MEMORY_FILE, 0.001, read=read) as sampler:
        for _ in range(3):
            while not without_host(sampler.drain(1)):
                time.sleep(0.01)
    assert caplog.text.count("memory.jsonl gets no more samples: [Errno 28] No space left on device") == 1


def test_without_gpus_a_sampler_takes_no_samples(tmp_path):
    with MemorySampler({90000001: "policy"}, tmp_path / "none", 0.2, read=dict) as sampler:
        assert without_host(sampler.drain(1)) == {}
    assert not (tmp_path / "none").exists()


def test_main_memory_of_an_owner_is_its_processes_and_their_children(tmp_path):
    grandchild = "import sys; held = bytearray(300 << 20); print(flush=True); sys.stdin.read()"
    child = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {grandchild!r}]))"
    engine = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    sampler = MemorySampler({engine.pid: "engine", 90000001: "policy"}, tmp_path / MEMORY_FILE, 0.2, read=dict)
    try:
        assert engine.stdout is not None
        engine.stdout.readline()
        held = sampler.drain(1)
    finally:
        engine.communicate()
    assert set(held) == {"host_engine_gib", "host_driver_gib"}, "a process that is gone has none"
    assert 300 / 1024 < held["host_engine_gib"] < 400 / 1024
    assert held["host_driver_gib"] == pytest.approx(psutil.Process().memory_info().rss / GIB, rel=0.1)


def test_where_no_gpu_is_known_nobody_is_named():
    assert holders("no such GPU", {}) == "processes that the driver does not name"
