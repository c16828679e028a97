from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_offload_rl.backends.megatron.upstream.affinity import bind_to_numa_node, parse_cpu_list


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("\n", set()), ("0-0", {0})]
)
def test_lists_of_cpus_are_read_as_the_kernel_writes_them(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def node_with(folder: Path, cpus: str) -> Path:
    (folder / "node1").mkdir()
    (folder / "node1/cpulist").write_text(cpus)
    return folder


@pytest.mark.processes
def test_a_process_and_its_threads_move_to_the_cpus_of_the_node_that_they_may_use(tmp_path: Path) -> None:
    """In another process, since threads that exist here would be bound for the rest of the tests."""
    allowed = sorted(os.sched_getaffinity(0))
    nodes = node_with(tmp_path, f"{allowed[-1]},100000")
    script = (
        "import os, threading, pathlib; from nemo_offload_rl.backends.megatron.upstream.affinity import *\n"
        "stop = threading.Event(); thread = threading.Thread(target=stop.wait); thread.start()\n"
        f"print(bind_to_numa_node(1, pathlib.Path({str(nodes)!r})))\n"
        "print(os.sched_getaffinity(0), os.sched_getaffinity(thread.native_id)); stop.set()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    only = {allowed[-1]}
    assert result.stdout.splitlines() == [f"{only}", f"{only} {only}"]


def test_nothing_changes_where_none_of_the_nodes_cpus_may_be_used(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    assert bind_to_numa_node(1, node_with(tmp_path, "100000-100001")) is None
    assert bind_to_numa_node(7, tmp_path) is None
    assert os.sched_getaffinity(0) == before
