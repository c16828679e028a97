"""Clusters that run already: two nodes of Ray on this machine, joined through RAY_ADDRESS."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import forked_workers
import pytest
import ray
from closeness import assert_close
from echo_workers import EchoWorker, cpu_cluster
from policy_cases import NLL, make_batch, make_settings, save_family
from ray._private.authentication_test_utils import reset_auth_token_state
from ray.cluster_utils import Cluster
from resume_cases import weights_of

from nemo_offload_rl.distributed.policy_group import start_policy
from nemo_offload_rl.distributed.ray_start import start_ray
from nemo_offload_rl.distributed.virtual_cluster import cluster_session
from nemo_offload_rl.distributed.worker_group import RayWorkerGroup, WorkerSpec
from nemo_offload_rl.errors import ConfigError, WorkerDiedError
from nemo_offload_rl.policy.worker import PolicyWorker
from nemo_offload_rl.protocols.backend import ProcessInfo

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests/support"


@pytest.fixture(scope="module")
def two_nodes():
    """A node of four CPUs, which could hold everything, and of four GPUs for Ray, and one of two CPUs."""
    ray.shutdown()  # of other modules
    store = {"object_store_memory": 100 * 2**20}
    head = {"num_cpus": 4, "num_gpus": 4, "include_dashboard": False, **store}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(SUPPORT)]))
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # as in `ray_here`
        for name, value in forked_workers.variables().items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=2, num_gpus=0, **store)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


def two_node_settings(workers_per_node: int = 1):
    return replace(cpu_cluster(workers_per_node), num_nodes=2)


def test_ranks_fill_one_node_after_the_other_and_groups_share_their_slots_and_meet_on_any_host(two_nodes):
    with cluster_session(replace(two_node_settings(2), compile_cache_dir="~/compiled")) as session:
        groups = [
            RayWorkerGroup(session, WorkerSpec(name=name, factory="echo_workers:EchoWorker", kwargs={"greeting": name}))
            for name in ("policy", "engine")
        ]
        nodes = [[location.node_id for location in ray.get(group._location_refs)] for group in groups]
        assert nodes[0] == nodes[1]
        first, second = nodes[0][0], nodes[0][2]
        assert nodes[0] == [first, first, second, second] and first != second
        assert first == ray.get_runtime_context().get_node_id()
        local_ranks = [entry["LOCAL_RANK"] for entry in groups[0].run_all(EchoWorker.environment, ["LOCAL_RANK"])]
        assert local_ranks == ["0", "1", "0", "1"]
        caches = ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"]
        folders = {
            name: str(Path.home() / "compiled" / part)
            for name, part in zip(caches, ["torch", "triton", "vllm"], strict=True)
        }
        for group in groups:
            assert group.run_all(EchoWorker.environment, caches) == [folders] * 4
        assert groups[0].local_pids() == groups[0].pids()[:2], "a process id of another host means nothing here"
        # A meeting place is found on the other host too, although workers have all of its slots.
        session._slots = session._slots[::-1]
        assert session._slots[0].node_id == second
        places = {session.rendezvous() for _ in range(3)}
        assert len(places) == 3


def test_engines_of_two_gpus_each_see_theirs_alone(two_nodes):
    with cluster_session(replace(cpu_cluster(), gpus_per_node=4), num_colocated_groups=1) as session:
        factory, kwargs = "echo_workers:EchoWorker", {"greeting": ""}
        group = RayWorkerGroup(session, WorkerSpec(name="vllm", factory=factory, kwargs=kwargs, slots_per_worker=2))
        found = group.run_all(EchoWorker.environment, ["CUDA_VISIBLE_DEVICES"])
        shown = [gpus for engine in found for gpus in engine["CUDA_VISIBLE_DEVICES"].split(",")]
        assert shown == session._gpu_ids
        assert sorted(shown) == ["0", "1", "2", "3"]


def test_a_policy_spread_over_two_nodes_trains_as_one_rank_does(two_nodes, tmp_path):
    save_family(tmp_path / "model", "qwen3-tied")
    settings = make_settings(tmp_path / "model", residency_verify=False)
    worker = PolicyWorker(settings, ProcessInfo(rank=0, world_size=1, init_method="", device="cpu"), False)
    worker.prepare_for_training()
    expected = worker.train(make_batch(), NLL())
    weights = weights_of(worker)
    worker.shutdown()
    with cluster_session(two_node_settings()) as session:
        policy = start_policy(session, settings, keep_reference=False)
        policy.prepare_for_training()
        result = policy.train(make_batch(), NLL())
        policy.save_checkpoint(tmp_path / "saved")
    assert_close(result.loss, expected.loss)
    assert_close(result.grad_norm, expected.grad_norm)
    worker = PolicyWorker(settings, ProcessInfo(rank=0, world_size=1, init_method="", device="cpu"), False)
    worker.prepare_for_training()
    worker.load_checkpoint(tmp_path / "saved")
    assert_close(weights_of(worker), weights)
    worker.shutdown()


def test_a_head_whose_gcs_has_ended_is_told_once(two_nodes):
    with cluster_session(two_node_settings()) as session, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nothing listens
        daemons = session.daemons
        assert daemons.ended() is None
        address, daemons._gcs_address = daemons._gcs_address, f"127.0.0.1:{closed.getsockname()[1]}"
        daemons._checked_s -= 3600
        with pytest.raises(WorkerDiedError, match=r"^Ray's GCS at 127\.0\.0\.1:\d+ has ended"):
            daemons.check()
        daemons._checked_s -= 3600
        daemons.check()  # a save at the end of the run is let through
        daemons._gcs_address = address


def test_hosts_that_are_too_small_are_told_apart_from_too_few_devices(two_nodes):
    with (
        pytest.raises(ConfigError, match=r"needs 2 hosts with 3 CPUs each, but those of the Ray cluster have 4, 2;"),
        cluster_session(two_node_settings(3)),
    ):
        pass


def test_the_cluster_runs_on_after_each_session_with_all_its_devices_free(two_nodes):
    ray.init(address=two_nodes.address, logging_level="ERROR")
    try:
        assert ray.cluster_resources()["CPU"] == 6
        for _ in range(100):
            if ray.available_resources()["CPU"] == 6:
                break
        assert ray.available_resources()["CPU"] == 6
    finally:
        ray.shutdown()


def test_a_host_that_dies_is_an_error_of_its_worker(two_nodes):
    with cluster_session(two_node_settings()) as session:
        workers = RayWorkerGroup(
            session, WorkerSpec(name="echo", factory="echo_workers:EchoWorker", kwargs={"greeting": ""})
        )
        wait_for_call = workers.start_all(EchoWorker.sleep, 600.0)
        address = ray.get(workers._location_refs[1]).address
        (second,) = two_nodes.worker_nodes
        two_nodes.remove_node(second, allow_graceful=False)
        with pytest.raises(
            WorkerDiedError, match=rf"^echo worker 1 on {address} died during sleep: .*host has ended"
        ) as raised:
            wait_for_call()
    assert "\n" not in str(raised.value)


def test_a_ray_that_does_not_start_is_one_line(two_nodes, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", "/proc/none")
    with pytest.raises(ConfigError, match=r"^/proc/none/ray cannot be written: .*set RAY_TMPDIR to a short path"):
        start_ray(cpu_cluster(1))
    monkeypatch.delenv("RAY_TMPDIR")
    # A file without a token.
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/proc/none")
    reset_auth_token_state()  # that of the cluster before; only Ray's processes would miss it, for whom it waits 60 s
    with pytest.raises(ConfigError, match=r"^Ray does not start on this machine: .*/proc/none.*[^.]\. If ") as raised:
        start_ray(cpu_cluster(1))
    assert "\n" not in str(raised.value)
    tries = []

    def slow(**options):
        tries.append(options)
        raise TimeoutError("the GCS is slow")

    monkeypatch.setattr(ray, "init", slow)
    with pytest.raises(ConfigError, match=r"^Ray does not start on this machine: the GCS is slow"):
        start_ray(cpu_cluster(1))
    assert len(tries) == 2


def test_an_address_without_a_cluster_is_one_line_that_names_it(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at RAY_ADDRESS=127\.0\.0\.1:9") as caught, \
            cluster_session(cpu_cluster(1)):  # fmt: skip
        pass
    assert "\n" not in str(caught.value)
