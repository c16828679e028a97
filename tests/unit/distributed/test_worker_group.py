from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import psutil
import pytest
import torch
from echo_workers import TwoArgumentError

from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster
from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec
from nemo_offload_rl.errors import DataError, WorkerDiedError

ECHO = "echo_workers:EchoWorker"


@pytest.fixture(scope="module")
def group(cluster: VirtualCluster) -> Iterator[RayWorkerGroup]:
    spec = WorkerSpec(name="echo", factory=ECHO, libraries="echo_workers:remember", kwargs={"greeting": "hi"})
    workers = RayWorkerGroup(cluster, spec, builds=False)
    workers.build()
    yield workers
    workers.shutdown()


def test_results_come_back_by_rank_with_arguments_shared_or_per_rank(group: RayWorkerGroup) -> None:
    assert group.world_size == 2
    assert group.run_all("greet", 1, key="v") == [("hi", "0", (1,), {"key": "v"}), ("hi", "1", (1,), {"key": "v"})]
    assert group.run_each("greet", [("a",), ("b",)]) == [("hi", "0", ("a",), {}), ("hi", "1", ("b",), {})]
    assert group.join(group.start_all("greet")) == [("hi", "0", (), {}), ("hi", "1", (), {})]


def test_workers_find_a_rendezvous_that_works(group: RayWorkerGroup) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    assert group.run_all("environment", names) == [
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    ]
    assert group.run_all("all_reduce") == [3.0, 3.0]


def test_libraries_are_loaded_in_each_process_with_what_the_worker_is_built_with(group: RayWorkerGroup) -> None:
    assert group.run_all("environment", ["LOADED_FOR"]) == [{"LOADED_FOR": "hi"}] * 2


def test_garbage_collections_do_not_go_through_what_was_there_once_workers_were_built(group: RayWorkerGroup) -> None:
    assert group.run_all("is_collected") == [False, False]


def test_a_group_ends_while_it_still_loads_libraries(cluster: VirtualCluster) -> None:
    spec = WorkerSpec(name="echo", factory=ECHO, libraries="echo_workers:hang", num_workers=1)
    workers = RayWorkerGroup(cluster, spec, builds=False)
    pids = workers.pids()
    workers.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_large_tensor_reaches_every_rank(group: RayWorkerGroup) -> None:
    assert group.run_all("total", torch.ones(3_000_000)) == [3_000_000.0] * 2


def test_an_error_of_one_rank_keeps_its_type_and_message_while_the_other_rank_hangs(cluster: VirtualCluster) -> None:
    workers = RayWorkerGroup(cluster, WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}))
    with pytest.raises(DataError) as raised:
        workers.run_all("raise_on", 1, "user")
    assert type(raised.value) is DataError
    assert str(raised.value) == "row 7 has no answer"
    assert any("echo worker 1, raise_on" in note for note in raised.value.__notes__)
    pids = workers.pids()
    workers.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_error_with_its_own_arguments_keeps_its_type(cluster: VirtualCluster) -> None:
    spec = WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}, num_workers=1)
    workers = RayWorkerGroup(cluster, spec)
    with pytest.raises(TwoArgumentError) as raised:
        workers.run_all("raise_on", 0, "bug")
    assert raised.value.code == 3
    workers.shutdown()


def test_an_error_in_a_constructor_is_raised_by_the_first_call(cluster: VirtualCluster) -> None:
    extra = [{}, {"fail": True}]
    spec = WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}, per_rank_kwargs=extra)
    workers = RayWorkerGroup(cluster, spec)
    with pytest.raises(DataError) as raised:
        workers.run_all("greet")
    assert str(raised.value) == "hi: cannot start"
    workers.shutdown()


def test_a_dead_worker_is_the_cause_even_when_its_peer_fails_first(cluster: VirtualCluster) -> None:
    workers = RayWorkerGroup(cluster, WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}))
    dead = workers.pids()[1]
    with pytest.raises(WorkerDiedError, match=rf"^echo worker 1 died during die_on: process {dead}: .*unexpected"):
        workers.run_all("die_on", 1)
    with pytest.raises(WorkerDiedError, match="echo worker 1 died during greet"):
        workers.run_all("greet")
    workers.shutdown()


@pytest.mark.parametrize(("kind", "error"), [("user", DataError), ("died", WorkerDiedError)])
def test_a_group_knows_the_errors_that_its_calls_raised(
    cluster: VirtualCluster, group: RayWorkerGroup, kind: str, error: type[Exception]
) -> None:
    workers = RayWorkerGroup(cluster, WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}, num_workers=1))
    with pytest.raises(error) as raised:
        workers.run_all("raise_on", 0, kind)
    assert workers.has_raised(raised.value)
    assert not workers.has_raised(error("raised elsewhere"))
    assert not group.has_raised(raised.value)
    workers.shutdown()


def test_a_bug_is_the_cause_even_when_its_peer_misses_the_connection_first(cluster: VirtualCluster) -> None:
    workers = RayWorkerGroup(cluster, WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}))
    with pytest.raises(ArithmeticError, match="a bug"):
        workers.run_all("leave_on", 1)
    workers.shutdown()


def test_what_a_crash_in_native_code_says_is_shown(cluster: VirtualCluster, caplog: pytest.LogCaptureFixture) -> None:
    workers = RayWorkerGroup(cluster, WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}, num_workers=1))
    with pytest.raises(WorkerDiedError, match="echo worker 0 died during crash"):
        workers.run_all("crash")
    assert re.search(r"the last words of echo worker 0, from /.*\n(.*\n)*.*(SIGSEGV|Segmentation fault)", caplog.text)
    workers.shutdown()


def test_what_workers_warn_of_reaches_the_driver_once(group: RayWorkerGroup, caplog: pytest.LogCaptureFixture) -> None:
    group.run_all("warn", "1")
    group.run_all("warn", "0", "1")
    group.run_all("warn")
    assert caplog.messages == ["echo worker 1: 7 bytes are slow", "echo worker 0 and 1 more: 7 bytes are slow"]


def test_an_error_brings_along_what_was_warned_of_before(group: RayWorkerGroup) -> None:
    with pytest.raises(ArithmeticError, match="a bug") as raised:
        group.run_all("warn_and_raise")
    assert "Warned of before: 7 bytes are slow" in raised.value.__notes__


def test_a_worker_killed_while_idle_is_named_by_the_next_call(cluster: VirtualCluster) -> None:
    spec = WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}, num_workers=1)
    workers = RayWorkerGroup(cluster, spec)
    workers.wait_until_ready()
    os.kill(workers.pids()[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="echo worker 0 died during greet"):
        workers.run_all("greet")
    workers.shutdown()


def test_environment_variables_are_set_before_the_worker_is_built(cluster: VirtualCluster) -> None:
    spec = WorkerSpec(
        name="echo", factory=ECHO, kwargs={"greeting": "hi"}, env_vars={"RANK": "9", "EXTRA": "x"}, num_workers=1
    )
    workers = RayWorkerGroup(cluster, spec)
    assert workers.run_all("environment", ["RANK", "EXTRA"]) == [{"RANK": "9", "EXTRA": "x"}]
    workers.shutdown()
    workers.shutdown()
