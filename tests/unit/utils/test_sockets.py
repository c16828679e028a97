"""Ports are open to this machine alone, or to who bears the token."""

from __future__ import annotations

import pytest

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.utils.sockets import TOKEN_VARIABLE, is_loopback, listening

TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_alone_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    where = listening(host, 0, key="a.host")
    assert where.token is None
    assert where.admits(None) and where.admits("Bearer anything")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "8.8.8.8", "a-name", "localhost.example.org", ""])
def test_any_other_address_needs_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=rf"^a\.host={host} can be reached from other machines.*{TOKEN_VARIABLE}"):
        listening(host, 0, key="a.host")
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert listening(host, 0, key="a.host").token == TOKEN


def test_only_the_token_is_admitted_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    where = listening("127.0.0.1", 0, key="a.host")
    assert where.admits(f"Bearer {TOKEN}")
    for wrong in (
        None,
        "",
        TOKEN,
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}0",
        f"Bearer {TOKEN[:-1]}",
        "Bearer \xe4",
        "Basic x",
    ):
        assert not where.admits(wrong)
    assert TOKEN not in repr(where)


@pytest.mark.parametrize("token", ["short", "0123456789abcde", "0123456789abcde\xe4", "0123456789\nabcdef"])
def test_a_token_that_is_easily_guessed_or_no_header_can_hold_is_refused(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match=f"{TOKEN_VARIABLE} has fewer than 16 characters") as refused:
        listening("127.0.0.1", 0, key="a.host")
    assert token not in str(refused.value)


def test_a_bound_port_is_known_and_a_taken_one_refused() -> None:
    with listening("127.0.0.1", 0, key="a.host").bound() as bound:
        bound.listen()
        port = bound.getsockname()[1]
        assert port > 0
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port} "):
            listening("127.0.0.1", port, key="a.host").bound()
