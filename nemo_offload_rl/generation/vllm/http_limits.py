"""Limits the size and time of requests to an engine's HTTP server.

`LimitedProtocol` closes a connection if the client does not send a request's head, or the rest of an unread body, in
time. `json_body` reads and parses a body within limits of time, size, depth and values.
"""

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one request.

    Attributes:
        head_s: Seconds for the first line and headers, and for the rest of a body after the answer.
        body_s: Seconds for the body.
        body_bytes: Size of the body; several images fit, or 8 million tokens of text.
        depth: Levels of nested lists and objects.
        choices: Answers to one request, `n`; OpenAI's limit.
    """

    head_s: float = 20.0
    body_s: float = 60.0
    body_bytes: int = 32 * 2**20
    depth: int = 100
    choices: int = 128


class BadRequest(Exception):
    """A refused request; status and message are for the client."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


async def json_body(request: Request, limits: HttpLimits) -> dict[str, Any]:
    """Read the body and parse it as a JSON object.

    Raises:
        BadRequest: The body is not a JSON object, is too large, too deep or too slow, or has invalid numbers or text.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise BadRequest(f"the body has more than {limits.body_bytes} bytes; send less", 413)
    except TimeoutError as error:
        raise BadRequest(f"the body was incomplete after {limits.body_s:g} s; send it faster", 408) from error
    except ClientDisconnect as error:
        raise BadRequest("the client has disconnected") from error
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant)
        _check(parsed, limits.depth)
    except RecursionError as error:
        raise BadRequest(_too_deep(limits.depth)) from error
    except ValueError as error:  # includes UnicodeError
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise BadRequest("the body is not a JSON object; send one")
    return parsed


def _check(parsed: Any, depth: int) -> None:
    """Raise if values nest too deep, a number has more than 64 bits, or text is not valid Unicode."""
    level = [parsed]
    for _ in range(depth + 1):
        if not level:
            return
        below: list[Any] = []
        for value in level:
            match value:
                case Mapping():
                    below += value.keys()
                    below += value.values()
                case list():
                    below += value
                case str() if not value.isascii():
                    value.encode()
                case float() if not math.isfinite(value):
                    _refuse_constant(str(value))
                case int() if not -(2**63) <= value < 2**63:
                    raise ValueError(f"{value} has more than 64 bits")
        level = below
    if level:
        raise BadRequest(_too_deep(depth))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _too_deep(depth: int) -> str:
    return f"the body nests more than {depth} lists and objects; send fewer levels"


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 protocol that closes slow clients' connections; uvicorn limits only the time between requests.

    Args:
        head_s: See `HttpLimits`.
        arguments: Arguments of `H11Protocol`.
    """

    def __init__(self, *arguments: Any, head_s: float, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head_s = head_s
        self._owed: asyncio.TimerHandle | None = None

    @classmethod
    def within(cls, limits: HttpLimits) -> Any:
        """Bind these limits to the class, for uvicorn."""
        return partial(cls, head_s=limits.head_s)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        if self.conn.their_state is h11.IDLE or (answered and self.conn.their_state is h11.SEND_BODY):
            self._wait()
        else:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the rest of an unread body, or of a next request that has begun."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]):
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for the client."""
        self._stop_waiting()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; abort it if the client has not read its answer."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _wait(self) -> None:
        if self._owed is None:
            self._owed = self.loop.call_later(self._head_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._owed is not None:
            self._owed.cancel()
            self._owed = None
