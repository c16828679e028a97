from __future__ import annotations

from functools import partial

import pytest
from cgroups import write_tree
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayTaskError

from nemo_offload_rl.distributed.worker_group import original_error
from nemo_offload_rl.errors import WorkerDiedError
from nemo_offload_rl.memory import limits as limits_module
from nemo_offload_rl.memory.limits import (
    THRESHOLD,
    HostLimit,
    as_started_here,
    host_limits,
    killed_by_kernel,
    killed_by_monitor,
    memory_total_bytes,
    oom_kills,
    oom_kills_at_first,
    read_host_limits,
    watched,
)

CONTAINER = "/sys/fs/cgroup/memory.max"
# What Ray 2.60 said of a worker that it had killed, without the list of processes that follows.
REPORT = (
    "1 worker(s) were killed due to the node running low on memory.\nMemory on the node (IP: 192.0.2.2, ID: 11) was "
    "119.87GB used / 125.87GB limit (0.952319)\nOOM kill reason: Memory usage 128609050624B exceeded threshold of "
    "128391135232B (95.0% of 135148564480B limit)\nObject store memory usage: [- objects spillable: 0"
)
sizes = st.integers(0, 1000)


@given(machine=st.tuples(sizes, sizes), container=st.none() | st.tuples(sizes, sizes), percent=st.integers(0, 100))
def test_the_smaller_of_machine_and_container_is_filled_up_to_the_threshold(machine, container, percent):
    total, available = max(machine), min(machine)
    limits = [HostLimit("a", "MemAvailable", available, total), HostLimit("b", "/sys/fs/cgroup/job/memory.max", 7, 9)]
    if container is not None:
        limits.append(HostLimit("c", CONTAINER, min(container), max(container)))
    found = {limit.scope: limit.left_bytes for limit in watched(limits, percent / 100)}
    expected = {limit.scope: limit.left_bytes for limit in limits}
    scope = "c" if container is not None and max(container) < total else "a"
    whole, left = (max(container), min(container)) if scope == "c" else (total, available)
    used = whole - left
    assert found[scope] == pytest.approx(max(0, whole * percent / 100 - used), abs=1.001)
    assert {**found, scope: 0} == {**expected, scope: 0}


def test_what_the_environment_says_counts_and_where_there_is_no_monitor_nothing_changes():
    total = memory_total_bytes()

    def gap_bytes(environment):
        return read_host_limits()[0].left_bytes - host_limits(environment)[0].left_bytes

    for environment, share in (
        ({}, 0.05),
        ({THRESHOLD: "0.8"}, 0.2),
        ({THRESHOLD: "most"}, 0.05),
        ({THRESHOLD: "0.8", "RAY_memory_monitor_refresh_ms": "0"}, 0),
    ):
        assert gap_bytes(environment) == pytest.approx(share * total, abs=total / 50)  # others take and free meanwhile
    assert host_limits({THRESHOLD: "0.8"})[0].name == f"Ray's memory monitor ({THRESHOLD}=0.8)"


def test_a_ray_that_starts_here_leaves_at_most_3_gib_free_unless_it_is_told_otherwise(monkeypatch):
    assert as_started_here({THRESHOLD: "0.7", "other": "x"}) == {THRESHOLD: "0.7", "other": "x"}
    for total_gib, threshold in ((16, 0.95), (60, 0.95), (128, 1 - 3 / 128), (2048, 1 - 3 / 2048)):
        monkeypatch.setattr("nemo_offload_rl.memory.limits.memory_total_bytes", lambda size=total_gib: size << 30)
        assert float(as_started_here({})[THRESHOLD]) == pytest.approx(threshold, abs=1e-4)


def test_a_worker_that_the_monitor_killed_is_explained_in_one_line_and_nothing_else_is():
    told = killed_by_monitor(REPORT)
    assert told is not None and "\n" not in told
    assert "119.78 of 125.87 GiB" in told and "allows 119.57 (95.0 %)" in told
    assert killed_by_monitor("The actor died because its node has died.") is None


@pytest.mark.parametrize(
    ("version", "name", "text"),
    [
        (2, "memory.events", "low 0\nhigh 0\nmax 7\noom 3\noom_kill {}\noom_group_kill 0\n"),
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    ],
)
def test_kills_of_the_kernel_since_the_start_are_told_with_their_cgroup(tmp_path, monkeypatch, version, name, text):
    folders = {"/": {}, "/job": {name: text.format(2)}, "/job/step": {name: text.format(1)}}
    proc = write_tree(tmp_path, folders, "/job/step", version)
    monkeypatch.setattr(limits_module, "oom_kills", partial(oom_kills, proc))
    oom_kills_at_first.cache_clear()
    try:
        assert oom_kills_at_first() == {
            str(tmp_path / "cgroup" / "job" / "step"): 1,
            str(tmp_path / "cgroup" / "job"): 2,
        }
        assert killed_by_kernel() is None
        (tmp_path / "cgroup" / "job" / name).write_text(text.format(4))
        told = killed_by_kernel()
        assert (
            told is not None and f"has killed 2 processes of the cgroup {tmp_path}/cgroup/job since the start" in told
        )
        # An engine whose own process was killed lives on and tells of it.
        died = RayTaskError("generate", "", WorkerDiedError("a process of vLLM's engine core has ended"))
        error = original_error(died, "vllm worker 0", "generate")
        assert isinstance(error, WorkerDiedError) and str(error).endswith(f"engine core has ended ({told})")
    finally:
        oom_kills_at_first.cache_clear()
