"""A run's metrics over a real port, parsed by Prometheus' own client."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.run import PrometheusConfig
from nemo_offload_rl.utils import prometheus
from nemo_offload_rl.utils.gpu_memory import GpuUse
from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE, MemorySampler
from nemo_offload_rl.utils.prometheus import PrometheusSink
from nemo_offload_rl.utils.sockets import TOKEN_VARIABLE

HERE = PrometheusConfig(host="127.0.0.1", port=0)
type Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def fetch(sink: PrometheusSink, path: str = "/metrics", token: str | None = None) -> str:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{sink.port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=1500) as answer:
        return answer.read().decode()


def scrape(sink: PrometheusSink) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(fetch(sink))
        for sample in family.samples
    }


def test_a_scrape_has_the_last_steps_metrics_rates_and_the_seconds_of_all_steps(tmp_path: Path) -> None:
    sink = PrometheusSink(HERE, tmp_path)
    try:
        assert scrape(sink) == {}
        sink.write(1, {"train/reward_mean": 0.25, "timing/training_s": 2.0, "timing/refit/stream_s": 0.5})
        sink.write(2, {"train/reward_mean": 0.5, "timing/training_s": 3.0, "train/training_tokens_per_s": 70.0})
        assert scrape(sink) == {
            ("nemo_offload_rl_step", ()): 2.0,
            ("nemo_offload_rl_phase_seconds_total", (("phase", "training"),)): 5.0,
            ("nemo_offload_rl_phase_seconds_total", (("phase", "refit/stream"),)): 0.5,
            ("nemo_offload_rl_tokens_per_second", (("phase", "training"),)): 70.0,
            ("nemo_offload_rl_metric", (("name", "train/reward_mean"),)): 0.5,
        }
        sink.write(3, {"train/loss": float("nan"), 'train/accuracy/a "b"\n\\c': 1.0})
        found = scrape(sink)
        assert str(found["nemo_offload_rl_metric", (("name", "train/loss"),)]) == "nan"
        assert found["nemo_offload_rl_metric", (("name", 'train/accuracy/a "b"\n\\c'),)] == 1.0
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(sink, "/")
    finally:
        sink.close()
    with pytest.raises(urllib.error.URLError):
        fetch(sink)


def test_gpu_memory_is_what_the_sampler_saw_last_and_nothing_of_an_older_run(tmp_path: Path) -> None:
    line = {"t_s": 1.0, "step": 9, "phase": "training", "gib": {"old": {"policy": 9.0}}}
    (tmp_path / MEMORY_FILE).write_text(json.dumps(line) + "\n")
    sink = PrometheusSink(HERE, tmp_path)
    try:
        assert scrape(sink) == {}
        use = GpuUse("GPU", total_bytes=8 << 30, used_bytes=5 << 30, by_pid={os.getpid(): 3 << 30})
        with MemorySampler({os.getpid(): "policy"}, tmp_path / MEMORY_FILE, 0.01, read=lambda: {"uuid": use}):
            began = time.monotonic()
            while not scrape(sink) and time.monotonic() - began < 300:
                time.sleep(0.01)
        assert scrape(sink) == {
            ("nemo_offload_rl_gpu_memory_bytes", (("gpu", "uuid"), ("owner", "policy"))): 3 << 30,
            ("nemo_offload_rl_gpu_memory_bytes", (("gpu", "uuid"), ("owner", "other"))): 2 << 30,
        }
        with (tmp_path / MEMORY_FILE).open("a") as file:
            file.write('{"t_s": 2.0, "gib": {"uu')  # a line that is just being written
        assert len(scrape(sink)) == 2
        for damaged in ("not json", "[]", '{"t_s": 1}', '{"gib'):
            with (tmp_path / MEMORY_FILE).open("a") as file:
                file.write(f"{damaged}\n")
            assert scrape(sink) == {}
    finally:
        sink.close()


def test_a_request_without_the_token_learns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "0123456789abcdef")
    sink = PrometheusSink(PrometheusConfig(host="0.0.0.0", port=0), tmp_path)
    try:
        sink.write(1, {"train/reward_mean": 0.25})
        for token in (None, "0123456789abcdeg", ""):
            with pytest.raises(urllib.error.HTTPError, match="401") as caught:
                fetch(sink, token=token)
            assert b"0.25" not in caught.value.read()
        assert "0.25" in fetch(sink, token="0123456789abcdef")
    finally:
        sink.close()


def test_other_machines_are_answered_only_with_a_token_and_a_taken_port_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"logger\.prometheus\.host=0\.0\.0\.0 can be reached from other machines"):
        PrometheusSink(PrometheusConfig(host="0.0.0.0", port=0), tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1 port {port}"):
            PrometheusSink(PrometheusConfig(host="127.0.0.1", port=port), tmp_path)


def closed(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    connection.settimeout(60.0)
    found = b""
    try:
        while some := connection.recv(65536):
            found += some
    except ConnectionResetError:
        pass
    return found


def test_half_requests_cost_no_threads_do_not_delay_a_scrape_and_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prometheus, "_REQUEST_S", 5.0)
    sink = PrometheusSink(HERE, tmp_path)
    sink.write(1, {"train/reward_mean": 0.25})
    num_threads = threading.active_count()
    slow = [socket.create_connection(("127.0.0.1", sink.port)) for _ in range(300)]
    try:
        for connection in slow:
            connection.sendall(b"GET /metr")
        assert "0.25" in fetch(sink)
        assert threading.active_count() == num_threads
        for connection in slow:
            assert closed(connection) == b""
    finally:
        sink.close()
        for connection in slow:
            connection.close()
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"200 OK"),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"b" * 100_000 + b"\r\n\r\n", b"431 "),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405 "),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b"404 "),
        (b"GET\r\n\r\n", b"400 "),
        (b"\x16\x03\x01\x02\0\r\n\r\n", b"400 "),
        (b"\r\n\r\n", b"400 "),
        (b"GET  HTTP/1.1\r\n:\r\n\xff\r\n\r\n", b"4"),
    ],
)
def test_a_malformed_request_is_told(tmp_path: Path, request_head: bytes, status: bytes) -> None:
    sink = PrometheusSink(HERE, tmp_path)
    try:
        with socket.create_connection(("127.0.0.1", sink.port)) as connection:
            connection.sendall(request_head)
            assert closed(connection).startswith(b"HTTP/1.1 " + status)
    finally:
        sink.close()


def test_a_client_that_goes_on_does_not_keep_the_sink_from_closing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):  # it is closed while it is accepted too
        sink = PrometheusSink(HERE, tmp_path)
        with socket.create_connection(("127.0.0.1", sink.port)) as connection:
            connection.sendall(b"GET /metr")
            sink.close()
            assert closed(connection) == b""
    assert not [record for record in caplog.records if record.name == "asyncio"]
