"""What is wrong with a machine is told before Ray starts, in one line each."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from echo_workers import cpu_cluster

from nemo_offload_rl.distributed import preflight
from nemo_offload_rl.distributed.preflight import check_environment, cluster_address, session_folder
from nemo_offload_rl.errors import ConfigError

CPU = cpu_cluster(1)


def refusal(environment: Mapping[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_environment(CPU, environment)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("environment", [{}, {"RAY_ADDRESS": ""}, {"RAY_ADDRESS": "local"}])
def test_without_an_address_ray_starts_here(environment: dict[str, str]) -> None:
    assert cluster_address(environment) is None


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (
            "ray://head:10001",
            "is Ray Client's, .*RAY_ADDRESS=head:6379, or .* `ray job submit --address http://head:8265`",
        ),
        ("https://head:8265/x", "is the dashboard's; .*RAY_ADDRESS=head:6379"),
        ("redis://head:6379", "is not a cluster's; "),
        ("head", "has no port; write HOST:PORT"),
        ("head:99999", "has no port; write HOST:PORT"),
    ],
)
def test_an_address_of_another_kind_is_refused_with_what_to_use(address: str, words: str) -> None:
    assert re.match(f"RAY_ADDRESS={re.escape(address)} {words}", refusal({"RAY_ADDRESS": address}))


def test_only_an_address_where_a_server_of_ray_s_kind_answers_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    check_environment(CPU, {"RAY_ADDRESS": address})
    server.stop(None).wait()
    assert refusal({"RAY_ADDRESS": address}).startswith(f"no Ray cluster answers at RAY_ADDRESS={address} (")
    monkeypatch.setattr(preflight, "_ANSWER_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert refusal({"RAY_ADDRESS": address}).startswith(f"what answers at RAY_ADDRESS={address} is not Ray's GCS; ")


def test_folders_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    assert refusal({"TMPDIR": "/proc/none"}).startswith("/proc/none/ray cannot be written: ")
    monkeypatch.setenv("HOME", str(file))
    assert refusal({}).startswith(f"{file}/.ray cannot be written: ")
    check_environment(CPU, {"RAY_AUTH_TOKEN_PATH": str(file)})


def test_sockets_move_to_a_short_path() -> None:
    assert session_folder({"TMPDIR": "/var/tmp"}) == "/var/tmp"
    assert session_folder({"RAY_TMPDIR": "/x" * 40, "TMPDIR": "/var/tmp"}) == "/tmp"


@pytest.mark.parametrize(
    ("name", "value", "is_known"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "l", False),
        ("NCCL_SOCKET_IFNAME", "l", True),  # names are prefixes there
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "nowhere0", False),
        ("NCCL_SOCKET_IFNAME", "^nowhere0", True),
    ],
)
def test_a_network_interface_that_is_not_there_is_refused(name: str, value: str, is_known: bool) -> None:
    if is_known:
        check_environment(CPU, {name: value})
    else:
        assert refusal({name: value}).startswith(f"{name}={value} is no network interface of this machine, which has ")


def test_what_may_fail_later_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    check_environment(CPU, {"http_proxy": "http://proxy:1", "no_proxy": "example.org, 127.0.0.1"})
    before = len(caplog.messages)
    limits = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_NPROC: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    check_environment(CPU, {"HTTPS_PROXY": "http://proxy:1", "no_proxy": "example.org"})
    proxy, files = caplog.messages[before : before + 2]
    assert proxy.startswith("HTTPS_PROXY is set and no_proxy does not name 127.0.0.1, ")
    assert files.startswith("this process may open 1024 files (ulimit -Hn), ")
    before = len(caplog.messages)
    check_environment(CPU, {"HTTPS_PROXY": "http://proxy:1", "no_proxy": "example.org"})
    assert caplog.messages[before:] == [], "each warning comes once in a process"


def test_bytecode_that_cannot_stay_with_a_library_is_kept_in_the_folder_of_caches(tmp_path: Path) -> None:
    library, caches = tmp_path / "site" / "vllm", tmp_path / "caches"
    library.mkdir(parents=True)
    library.joinpath("__init__.py").touch()
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    plain["PYTHONPATH"] = os.pathsep.join([str(library.parent), *sys.path])

    def told(changes: str, **variables: str) -> list[str]:
        script = f"""if True:
            import sys
            from dataclasses import replace
            from echo_workers import cpu_cluster
            from nemo_offload_rl.distributed.preflight import check_start
            settings = replace(cpu_cluster(), {changes})
            check_start(settings)
            print(*(f"{{name}}={{value}}" for name, value in settings.compile_cache_env.items()))
            import vllm
        """
        command, env = [sys.executable, "-c", script], plain | variables
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return [line for line in done.stderr.splitlines() if "bytecode" in line] + done.stdout.split()

    (warning,) = told("", PYTHONDONTWRITEBYTECODE="1")
    assert warning.startswith(f"{library} has no bytecode and PYTHONDONTWRITEBYTECODE is set, so each process ")
    given = told(f"compile_cache_dir={str(caches)!r}", PYTHONDONTWRITEBYTECODE="1")
    assert given[3:] == [f"PYTHONPYCACHEPREFIX={caches}/python", "PYTHONDONTWRITEBYTECODE="]
    assert list(caches.rglob("vllm/*.pyc"))
    assert told("", PYTHONDONTWRITEBYTECODE="") == [], "Python has put it beside the library"
    assert len(told(f"compile_cache_dir={str(caches)!r}", PYTHONDONTWRITEBYTECODE="1")) == 3


@pytest.mark.parametrize(
    ("changes", "num_more", "words"),
    [
        (
            {"num_nodes": 2},
            0,
            r"cluster\.num_nodes=2, but without RAY_ADDRESS a run has this machine alone; ",
        ),
        ({"gpus_per_node": 99}, 0, r"cluster\.gpus_per_node=99 .* needs 99 .PUs, but this machine has \d+; lower"),
        (
            {},
            998,
            r"cluster\.cpu_workers_per_node=1 .* and 998 more for engines .* needs 999 CPUs, but this",
        ),
    ],
)
def test_devices_that_this_machine_has_not_are_refused(changes: dict[str, int], num_more: int, words: str) -> None:
    settings = replace(CPU, **changes)
    with pytest.raises(ConfigError, match=words):
        check_environment(settings, {}, num_more=num_more)
    if not changes:
        check_environment(settings, {"RAY_OVERRIDE_RESOURCES": '{"CPU": 999}'}, num_more=num_more)
