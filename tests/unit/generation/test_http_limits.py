"""Limits of an engine's HTTP server over a real port, without an engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nemo_offload_rl.generation.vllm.http_limits import BadRequest, HttpLimits, LimitedProtocol, json_body

LIMITS = HttpLimits(head_s=5.0, body_s=5.0, body_bytes=10_000, depth=20)


async def answer(request: Request) -> Response:
    if request.method == "GET":
        return JSONResponse({})
    return JSONResponse({"keys": sorted(await json_body(request, LIMITS))})


async def refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return JSONResponse({"told": str(error)}, status_code=error.status)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server that answers with the keys of a body."""
    app = Starlette(exception_handlers={BadRequest: refuse})
    app.add_route("/", answer, methods=["GET", "POST"])
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=LimitedProtocol.within(LIMITS), ws="none", lifespan="off", log_config=None, timeout_keep_alive=3600
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join()


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b'{"a": 1, "\xc3\xa9": [1.5, null, "\xc3\xa9"]}', 200, None),
        (b"{}" + b" " * 9998, 200, None),
        (b"{}" + b" " * 9999, 413, "more than 10000 bytes"),
        (b'{"a":' * 20 + b"1" + b"}" * 20, 200, None),
        (b'{"a":' * 21 + b"1" + b"}" * 21, 400, "nests more than 20"),
        (b"[" * 5000 + b"]" * 5000, 400, "nests more than 20"),
        (b'{"a": NaN}', 400, "NaN is not a JSON number"),
        (b'{"a": -Infinity}', 400, "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', 400, "inf is not a JSON number"),
        (b'{"a": ' + b"1" * 9000 + b"}", 400, "not JSON"),
        (b'{"a": [%d, %d]}' % (2**63 - 1, -(2**63)), 200, None),
        (b'{"a": %d}' % 2**63, 400, "more than 64 bits"),
        (b'{"a": "\\ud800"}', 400, "not JSON"),
        (b'{"\\udfff": 1}', 400, "not JSON"),
        (b'{"a": "\xff"}', 400, "not JSON"),
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[]", 400, "not a JSON object"),
        (b'"a"', 400, "not a JSON object"),
    ],
)
def test_only_objects_of_bearable_size_and_depth_are_read(port: int, body: bytes, status: int, told: str | None):
    got = httpx.post(f"http://127.0.0.1:{port}/", content=body)
    assert got.status_code == status
    assert told is None or told in got.json()["told"]


def test_a_nesting_beyond_what_python_can_parse_is_refused_too():
    """In a server with the limits of a run, whose body may be as deep."""
    limits = HttpLimits()

    async def parsed(body: bytes) -> None:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": body}

        await json_body(Request({"type": "http", "method": "POST", "headers": []}, receive), limits)

    for opening in (b"[", b'{"a":'):
        with pytest.raises(BadRequest, match="nests more than 100"):
            asyncio.run(parsed(opening * 200_000))


def closed(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    connection.settimeout(120.0)
    found = b""
    try:
        while some := connection.recv(65536):
            found += some
    except ConnectionResetError:
        pass
    return found


SLOW = {
    "nothing": (b"", b""),
    "line": (b"POST / HT", b""),
    "headers": (b"GET / HTTP/1.1\r\nHost: here\r\nX: ", b""),
    "second request": (b"GET / HTTP/1.1\r\nHost: here\r\n\r\nGET / HT", b"200 OK"),
    "body": (b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 9000\r\n\r\n{", b"408 Request Timeout"),
    "body of an answered request": (b"GET / HTTP/1.1\r\nHost: here\r\nContent-Length: 9000\r\n\r\n{", b"200 OK"),
    "body too large": (
        b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 9000000\r\n\r\n" + b" " * 20_000, b"413 ",
    ),
}  # fmt: skip


def test_clients_that_are_too_slow_are_closed_whether_they_are_silent_or_trickle(port: int):
    connections = {
        (name, trickles): socket.create_connection(("127.0.0.1", port)) for name in SLOW for trickles in (False, True)
    }
    for (name, _), connection in connections.items():
        connection.sendall(SLOW[name][0])
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            for (_, trickles), connection in connections.items():
                if trickles:
                    with suppress(OSError):  # closed already
                        connection.sendall(b"a")

    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        came = {key: closed(connection) for key, connection in connections.items()}
    finally:
        stop.set()
        sender.join()
        for connection in connections.values():
            connection.close()
    assert not {key: found for key, found in came.items() if SLOW[key[0]][1] not in found}


def test_a_head_without_end_is_refused_and_a_connection_is_kept_between_requests(port: int):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000)
        assert b"400 Bad Request" in closed(connection)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/").status_code == 200
        time.sleep(LIMITS.head_s + 1)  # longer than a head may take
        kept = client.get("/", headers={"X": json.dumps(1)})
        assert kept.status_code == 200
