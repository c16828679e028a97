"""Metrics of a run for Prometheus, over HTTP at `/metrics` while the run goes on.

Metrics of steps are those of the last step that was logged. GPU memory is the last line of memory.jsonl, which the
driver writes several times a second, so that a scrape within a long step shows what is there then.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.utils.listening import Listening, listening
from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE
from nemo_offload_rl.utils.schema import PrometheusConfig

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_LOG = logging.getLogger(__name__)

_PREFIX = "nemo_offload_rl"
_TIMING, _TRAIN, _RATE, _HOST_MEMORY = "timing/", "train/", "_tokens_per_s", "memory/host_"
_LONGEST_LINE_BYTES = 65536


class PrometheusSink:
    """Answers requests in a thread until it is closed; see `MetricSink`.

    Args:
        settings: The keys `logger.prometheus.*`.
        run_dir: The run folder, whose memory.jsonl is read.

    Raises:
        ConfigError: prometheus_client is not installed, the port is taken, or it needs a token and has none.
    """

    def __init__(self, settings: PrometheusConfig, run_dir: Path) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ModuleNotFoundError as error:
            raise ConfigError(
                "logger.prometheus_enabled is true, but prometheus_client is not installed; pip install "
                "prometheus-client, or set it to false"
            ) from error
        where = listening(settings.host, settings.port, key="logger.prometheus.host")
        self._figures = _Figures(run_dir / MEMORY_FILE)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._figures)
        self._server = _server(where, registry)
        self.port = int(self._server.server_address[1])
        _LOG.info("metrics for Prometheus: http://%s:%d/metrics", settings.host, self.port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of this step from now on."""
        self._figures.take(step, metrics)

    def write_samples(self, step: int, lines: Sequence[str]) -> None:
        """Samples are no numbers."""

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Figures:
    """What a scrape gives: a collector of prometheus_client."""

    def __init__(self, memory_file: Path) -> None:
        self._memory_file = memory_file
        self._size_at_start = memory_file.stat().st_size if memory_file.exists() else 0
        self._lock = threading.Lock()
        self._step: int | None = None
        self._metrics: Mapping[str, float] = {}
        self._seconds: dict[str, float] = {}

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._step, self._metrics = step, dict(metrics)
            for name, value in metrics.items():
                if name.startswith(_TIMING) and math.isfinite(value):
                    phase = name.removeprefix(_TIMING).removesuffix("_s")
                    self._seconds[phase] = self._seconds.get(phase, 0.0) + value

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            step, metrics, seconds = self._step, self._metrics, dict(self._seconds)
        memory = GaugeMetricFamily(
            f"{_PREFIX}_gpu_memory_bytes", "Memory of a GPU of the driver's host, by owner.", labels=("gpu", "owner")
        )
        for gpu, owners in self._memory().items():
            for owner, gib in owners.items():
                memory.add_metric((gpu, owner), gib * 2**30)
        yield memory
        if step is None:
            return
        yield GaugeMetricFamily(f"{_PREFIX}_step", "The last step that was logged.", value=step)
        phases = CounterMetricFamily(
            f"{_PREFIX}_phase_seconds", "Seconds by phase since the process began.", labels=("phase",)
        )
        rates = GaugeMetricFamily(f"{_PREFIX}_tokens_per_second", "Rate in the last step.", labels=("phase",))
        others = GaugeMetricFamily(
            f"{_PREFIX}_metric", "Of the last step, by its name in metrics.jsonl.", labels=("name",)
        )
        host = GaugeMetricFamily(
            f"{_PREFIX}_host_memory_bytes", "Main memory at the end of the last step, by owner.", labels=("owner",)
        )
        for phase, value in seconds.items():
            phases.add_metric((phase,), value)
        for name, value in metrics.items():
            if name.startswith(_TRAIN) and name.endswith(_RATE):
                rates.add_metric((name.removeprefix(_TRAIN).removesuffix(_RATE),), value)
            elif name.startswith(_HOST_MEMORY):
                host.add_metric((name.removeprefix(_HOST_MEMORY).removesuffix("_gib"),), value * 2**30)
            elif not name.startswith(_TIMING):
                others.add_metric((name,), value)
        yield from (host, phases, rates, others)

    def _memory(self) -> Mapping[str, Mapping[str, float]]:
        """GiB by owner of each GPU, from the last whole line that this run wrote; nothing where there is none."""
        try:
            with self._memory_file.open("rb") as file:
                end = file.seek(0, 2)
                file.seek(max(self._size_at_start, end - _LONGEST_LINE_BYTES))
                lines = file.read().rpartition(b"\n")[0].splitlines()
        except OSError:
            return {}
        return json.loads(lines[-1])["gib"] if lines else {}


def _server(where: Listening, registry: Any) -> ThreadingHTTPServer:
    """Listens there, and answers when it is told to serve."""
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not where.admits(self.headers.get("Authorization")):
                self._answer(HTTPStatus.UNAUTHORIZED, b"send the token as Authorization: Bearer TOKEN\n")
            elif self.path.partition("?")[0] == "/metrics":
                self._answer(HTTPStatus.OK, generate_latest(registry), CONTENT_TYPE_LATEST)
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")

        def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            _LOG.debug(format, *args)

    bound = where.bound()
    server = ThreadingHTTPServer((where.host, where.port), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket, server.server_address = bound, bound.getsockname()
    server.server_activate()
    return server
