"""Metrics of a run for Prometheus, over HTTP at `/metrics` while the run goes on.

Metrics of steps are those of the last logged step. GPU memory is the last line of memory.jsonl, which the driver writes
several times a second, so that a scrape within a long step shows the memory at that moment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.engine import Listening
from nemo_offload_rl.keys.run import PrometheusConfig
from nemo_offload_rl.utils.memory_sampler import MEMORY_FILE
from nemo_offload_rl.utils.sockets import listening

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_LOG = logging.getLogger(__name__)

_PREFIX = "nemo_offload_rl"
_TIMING, _TRAIN, _RATE, _HOST_MEMORY = "timing/", "train/", "_tokens_per_s", "memory/host_"
_LONGEST_LINE_BYTES = 65536
_LONGEST_HEAD_BYTES = 16384
_REQUEST_S = 10.0  # for a request and its answer
_MOST_OPEN = 128  # connections at a time


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
            from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
        except ModuleNotFoundError as error:
            raise not_installed("prometheus", "prometheus_client", "prometheus-client") from error
        where = listening(settings.host, settings.port, key="logger.prometheus.host")
        self._figures = _Figures(run_dir / MEMORY_FILE)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._figures)
        self._server = _Server(where, partial(generate_latest, registry), CONTENT_TYPE_LATEST)
        self.port = self._server.port
        _LOG.info("metrics for Prometheus: http://%s:%d/metrics", settings.host, self.port)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._figures.take(step, metrics)

    def write_samples(self, step: int, lines: Sequence[str]) -> None:
        """Ignore samples, which are text."""

    def close(self) -> None:
        self._server.close()


def not_installed(section: str, module: str, package: str | None = None) -> ConfigError:
    """The error for an enabled sink whose library is missing."""
    return ConfigError(
        f"logger.{section}_enabled is true, but {module} is not installed; pip install {package or module}, or set it "
        "to false"
    )


class _Figures:
    """The values of a scrape, as a collector of prometheus_client."""

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
        """GiB by owner of each GPU, from the last whole line that this run wrote; {} if there is none."""
        try:
            with self._memory_file.open("rb") as file:
                end = file.seek(0, 2)
                file.seek(max(self._size_at_start, end - _LONGEST_LINE_BYTES))
                lines = file.read().rpartition(b"\n")[0].splitlines()
        except OSError:
            return {}
        try:
            return json.loads(lines[-1])["gib"] if lines else {}
        except (ValueError, KeyError, TypeError):  # not a line of the driver's
            return {}


class _Server:
    """Answers GET requests on one thread; a client that is slow or idle costs no thread and is closed.

    Args:
        where: The address and the token.
        answer: Makes the body at `/metrics`.
        kind: Its content type.

    Raises:
        ConfigError: The address cannot be listened on.
    """

    def __init__(self, where: Listening, answer: Callable[[], bytes], kind: str) -> None:
        self._where, self._metrics, self._kind = where, answer, kind
        self._listening = where.bound()
        self._listening.setblocking(False)
        self._listening.listen()
        self.port = int(self._listening.getsockname()[1])
        self._open: dict[asyncio.Task[None], socket.socket] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.add_reader(self._listening, self._accept)
        self._thread = threading.Thread(target=self._loop.run_forever, name="prometheus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and all connections."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._loop.remove_reader(self._listening)
        self._listening.close()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:  # the client has gone, or this process has too many files open
            _LOG.debug("a connection is not accepted: %s", error)
            return
        if len(self._open) >= _MOST_OPEN:
            next(iter(self._open)).cancel()  # the one that has taken longest
        task = self._loop.create_task(self._converse(connection))
        self._open[task] = connection
        task.add_done_callback(lambda task: self._open.pop(task).close())

    async def _converse(self, connection: socket.socket) -> None:
        """Answer one request and close the connection."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=_LONGEST_HEAD_BYTES)
        try:
            with suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(_REQUEST_S):
                    try:
                        head = await reader.readuntil(b"\r\n\r\n")
                    except asyncio.LimitOverrunError:
                        writer.write(_answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"too many headers\n"))
                    else:
                        writer.write(self._answered(head))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()

    def _answered(self, head: bytes) -> bytes:
        request, *lines = head.decode("latin-1").split("\r\n")
        method, target, version = (*request.split(" "), "", "", "")[:3]
        if not version.startswith("HTTP/1."):
            return _answer(HTTPStatus.BAD_REQUEST, b"this is no request of HTTP/1.1\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if not self._where.admits(headers.get("authorization")):
            return _answer(HTTPStatus.UNAUTHORIZED, b"send the token as Authorization: Bearer TOKEN\n")
        if method != "GET":
            return _answer(HTTPStatus.METHOD_NOT_ALLOWED, b"use GET\n")
        if target.partition("?")[0] != "/metrics":
            return _answer(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")
        return _answer(HTTPStatus.OK, self._metrics(), self._kind)


def _answer(status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
