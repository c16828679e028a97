from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
import torch
from echo_workers import EchoWorker, TwoArgumentError

from nemo_offload_rl.distributed import watch
from nemo_offload_rl.distributed.actors import WorkerLocation
from nemo_offload_rl.distributed.virtual_cluster import VirtualCluster
from nemo_offload_rl.distributed.watch import CallTimes, CallWatch
from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec
from nemo_offload_rl.errors import DataError, UserError, WorkerDiedError, WorkerHungError
from nemo_offload_rl.utils import liveness

ECHO = "echo_workers:EchoWorker"


@pytest.fixture(scope="module")
def group(cluster: VirtualCluster) -> Iterator[RayWorkerGroup]:
    spec = WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"})
    workers = RayWorkerGroup(cluster, spec, builds=False)
    workers.start_before_build("echo_workers:remember")
    workers.build()
    yield workers
    workers.shutdown()


def test_results_come_back_by_rank_with_arguments_shared_or_per_rank(group: RayWorkerGroup) -> None:
    assert group.world_size == 2
    assert group.run_all(EchoWorker.greet, 1, key="v") == [
        ("hi", "0", (1,), {"key": "v"}),
        ("hi", "1", (1,), {"key": "v"}),
    ]
    assert group.run_each(EchoWorker.greet, [("a",), ("b",)]) == [("hi", "0", ("a",), {}), ("hi", "1", ("b",), {})]
    assert group.start_all(EchoWorker.greet)() == [("hi", "0", (), {}), ("hi", "1", (), {})]


def test_workers_find_a_rendezvous_that_works(group: RayWorkerGroup) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    assert group.run_all(EchoWorker.environment, names) == [
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    ]
    assert group.run_all(EchoWorker.all_reduce) == [3.0, 3.0]


def test_libraries_are_loaded_in_each_process_with_what_the_worker_is_built_with(group: RayWorkerGroup) -> None:
    assert group.run_all(EchoWorker.environment, ["LOADED_FOR"]) == [{"LOADED_FOR": "hi"}] * 2


def test_garbage_collections_do_not_go_through_what_was_there_once_workers_were_built(group: RayWorkerGroup) -> None:
    assert group.run_all(EchoWorker.is_collected) == [False, False]


def test_calls_before_workers_are_built_warn_once_they_are_and_no_process_outlives_them(
    cluster: VirtualCluster, caplog: pytest.LogCaptureFixture
) -> None:
    variables = {"RANK": "9", "EXTRA": "x"}
    spec = WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}, env_vars=variables, num_workers=1)
    workers = RayWorkerGroup(cluster, spec, builds=False)
    assert workers.start_before_build("echo_workers:tell", more=2)() == [("hi", 2)]
    with pytest.raises(RuntimeError, match="greet was called before the worker was built"):
        workers.run_all(EchoWorker.greet)
    workers.build()
    workers.wait_until_ready()
    assert "echo worker 0: told before it was built" in caplog.messages
    assert workers.run_all(EchoWorker.environment, list(variables)) == [variables]
    orphan = psutil.Process(workers.run_on(0, EchoWorker.start_orphan))
    workers.shutdown()
    assert not orphan.is_running()
    workers.shutdown()  # safe to call twice
    assert not [message for message in caplog.messages if "did not end when asked to" in message]


def test_a_group_ends_while_it_still_loads_libraries(cluster: VirtualCluster) -> None:
    spec = WorkerSpec(name="echo", factory=ECHO, num_workers=1)
    workers = RayWorkerGroup(cluster, spec, builds=False)
    workers.start_before_build("echo_workers:hang")
    pids = workers.pids()
    workers.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_large_tensor_reaches_every_rank(group: RayWorkerGroup) -> None:
    assert group.run_all(EchoWorker.total, torch.ones(3_000_000)) == [3_000_000.0] * 2


def test_an_error_of_one_rank_keeps_its_type_and_message_while_the_other_rank_hangs(cluster: VirtualCluster) -> None:
    workers = RayWorkerGroup(cluster, WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}))
    with pytest.raises(DataError) as raised:
        workers.run_all(EchoWorker.raise_on, 1, "user")
    assert type(raised.value) is DataError
    assert str(raised.value) == "row 7 has no answer"
    assert any("echo worker 1, raise_on" in note for note in raised.value.__notes__)
    assert not workers.settle(0.1)  # the other rank takes no further call
    pids = workers.pids()
    workers.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_error_in_a_constructor_is_raised_by_the_first_call(cluster: VirtualCluster) -> None:
    extra = [{}, {"fail": True}]
    spec = WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}, per_rank_kwargs=extra)
    workers = RayWorkerGroup(cluster, spec)
    with pytest.raises(DataError) as raised:
        workers.run_all(EchoWorker.greet)
    assert str(raised.value) == "hi: cannot start"
    workers.shutdown()


def test_a_dead_worker_is_the_cause_even_when_its_peer_fails_first(cluster: VirtualCluster) -> None:
    workers = RayWorkerGroup(cluster, WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}))
    dead = workers.pids()[1]
    with pytest.raises(WorkerDiedError, match=rf"^echo worker 1 died during die_on: process {dead}: .*unexpected"):
        workers.run_all(EchoWorker.die_on, 1)
    assert not workers.settle(60)
    with pytest.raises(WorkerDiedError, match="echo worker 1 died during greet"):
        workers.run_all(EchoWorker.greet)
    workers.shutdown()


def test_a_group_knows_the_errors_that_its_calls_raised_whose_type_is_kept(
    cluster: VirtualCluster, group: RayWorkerGroup
) -> None:
    workers = RayWorkerGroup(cluster, WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}, num_workers=1))

    def raised_for(kind: str, error: type[Exception]) -> Exception:
        with pytest.raises(error) as raised:
            workers.run_all(EchoWorker.raise_on, 0, kind)
        assert workers.has_raised(raised.value)
        assert not group.has_raised(raised.value)
        return raised.value

    bug = raised_for("bug", TwoArgumentError)
    assert isinstance(bug, TwoArgumentError) and bug.code == 3
    assert workers.settle(0)
    for kind, error in (("user", DataError), ("memory", UserError), ("died", WorkerDiedError)):
        raised = raised_for(kind, error)
        assert not workers.has_raised(error("raised elsewhere"))
        if kind == "memory":
            told = "echo worker 0 ran out of the device's memory during raise_on (CUDA out of memory. Tried to al"
            assert str(raised).startswith(told)
    workers.shutdown()


def test_a_bug_is_the_cause_even_when_its_peer_misses_the_connection_first(cluster: VirtualCluster) -> None:
    workers = RayWorkerGroup(cluster, WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}))
    with pytest.raises(ArithmeticError, match="a bug"):
        workers.run_all(EchoWorker.leave_on, 1)
    workers.shutdown()


def test_what_a_crash_in_native_code_says_is_shown(cluster: VirtualCluster, caplog: pytest.LogCaptureFixture) -> None:
    workers = RayWorkerGroup(cluster, WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}, num_workers=1))
    with pytest.raises(WorkerDiedError, match="echo worker 0 died during crash"):
        workers.run_all(EchoWorker.crash)
    assert re.search(
        r"the last lines of echo worker 0's standard error, from /.*\n(.*\n)*.*(SIGSEGV|Segmentation fault)",
        caplog.text,
    )
    workers.shutdown()


def test_what_workers_warn_of_reaches_the_driver_once(group: RayWorkerGroup, caplog: pytest.LogCaptureFixture) -> None:
    group.run_all(EchoWorker.warn, "1")
    group.run_all(EchoWorker.warn, "0", "1")
    group.run_all(EchoWorker.warn)
    assert caplog.messages == ["echo worker 1: 7 bytes are slow", "echo worker 0 and 1 more: 7 bytes are slow"]


def test_an_error_brings_along_what_was_warned_of_before(group: RayWorkerGroup) -> None:
    with pytest.raises(ArithmeticError, match="a bug") as raised:
        group.run_all(EchoWorker.warn_and_raise)
    assert "Warned of before: 7 bytes are slow" in raised.value.__notes__


def test_a_worker_killed_while_idle_is_named_by_the_next_call(cluster: VirtualCluster) -> None:
    spec = WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}, num_workers=1)
    workers = RayWorkerGroup(cluster, spec)
    workers.wait_until_ready()
    os.kill(workers.pids()[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="echo worker 0 died during greet"):
        workers.run_all(EchoWorker.greet)
    workers.shutdown()


@pytest.fixture
def limited(cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayWorkerGroup]:
    """Two workers that are built, and hang if they show no progress for 5 s."""
    monkeypatch.setattr(watch, "_stack_log", watch._StackLog())  # of an earlier test
    workers = RayWorkerGroup(cluster, WorkerSpec(name="echo", factory=ECHO, kwargs={"greeting": "hi"}))
    workers.wait_until_ready()
    workers._times = CallTimes(warning_s=0.5, timeout_s=5.0, longest_s={})
    yield workers
    workers.shutdown()


def test_a_rank_that_never_reaches_a_collective_ends_the_call_with_the_stacks_of_all_ranks(
    limited: RayWorkerGroup, caplog: pytest.LogCaptureFixture
) -> None:
    pids = limited.pids()
    with pytest.raises(
        WorkerHungError,
        match=r"^echo worker 0 and echo worker 1 have not answered: miss_a_collective has taken \d+ s, the last 5 s "
        r"without progress\. .*raise cluster\.call_timeout_s",
    ) as raised:
        limited.run_all(EchoWorker.miss_a_collective, 1)
    assert limited.has_raised(raised.value)
    assert re.search(r"echo worker 0 and echo worker 1 have not answered yet: miss_a_collective has taken", caplog.text)
    stacks = caplog.text.partition("the Python stacks of all workers:")[2]
    (first, second) = (stacks.partition(f"echo worker {rank}:\n")[2] for rank in range(2))
    assert "in all_reduce" in first.partition("echo worker 1:")[0]
    assert "in miss_a_collective" in second and "in all_reduce" not in second
    limited.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_stopped_worker_is_named_and_ended(limited: RayWorkerGroup, caplog: pytest.LogCaptureFixture) -> None:
    stopped = limited.pids()[1]
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(WorkerHungError, match=rf"^echo worker 1 has not .*: process {stopped} \(`kill -CONT"):
        limited.run_all(EchoWorker.greet)
    assert re.search(rf"echo worker 1 has not answered yet: greet has taken .* process {stopped} ", caplog.text)
    assert re.search(rf"echo worker 1:\nno stacks; stopped by a signal .* process {stopped}", caplog.text)
    limited.shutdown()
    assert not psutil.pid_exists(stopped)


class _OneWorker:
    """A worker that hangs, or makes progress, as its file of standard error says."""

    world_size = 1

    def __init__(self, stderr_path: Path) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        self._location = WorkerLocation(node_id, "127.0.0.1", os.getpid(), str(stderr_path))

    def label(self, rank: int) -> str:
        return "slow worker 0"

    def own_stacks(self) -> dict[int, str]:
        return {}

    def locations(self) -> dict[int, WorkerLocation]:
        return {0: self._location}


def test_progress_and_a_suspended_driver_put_off_the_end_of_a_call(
    cluster: VirtualCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_DUMP_TIMEOUT_S", 0.0)  # this process writes its stacks elsewhere
    stderr = tmp_path / "stderr"
    stderr.touch()
    workers, times = _OneWorker(stderr), CallTimes(warning_s=1e9, timeout_s=1e4, longest_s={})
    watched = CallWatch(workers, [workers], "train", times)

    def wait(seconds: float) -> None:
        watched._last_s -= seconds
        watched.tick([0])

    hour_ago = time.time() - 3600
    os.utime(stderr, (hour_ago, hour_ago))
    for _ in range(20):
        wait(1e6)  # this process did not run
    watched._waited_s = 9999.0
    wait(5.0)  # the worker's last progress is an hour old: 1e4 - 3600 s are left
    os.utime(stderr, (hour_ago - 1e4, hour_ago - 1e4))
    wait(5.0)
    output = stderr.with_suffix(".out")
    output.touch()
    watched._waited_s += 6401.0
    wait(0.0)  # it has just written something
    os.utime(output, (0.0, 0.0))
    watched._waited_s += 10001.0
    with pytest.raises(
        WorkerHungError, match=r"^slow worker 0 has not answered: train has taken 264\d\d s, the last 10000 s"
    ):
        wait(0.0)


def test_a_call_that_usually_takes_long_is_warned_of_later(
    cluster: VirtualCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = _OneWorker(tmp_path / "stderr")
    times = CallTimes(warning_s=30.0, timeout_s=None, longest_s={"train": 100.0})
    together = [CallWatch(workers, [workers], "train", times) for _ in range(3)]
    shown = []
    for waited_s in (31.0, 199.0, 201.0, 399.0, 403.0):
        for watched in together:  # one warns for all
            watched._waited_s = waited_s
            watched.tick([0])
        shown.append(len(caplog.messages))
    assert shown == [0, 0, 1, 1, 2]
    assert caplog.messages[0].startswith("slow worker 0 has not answered yet: train has taken 201 s")
