import os
import socket
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from huggingface_hub import close_session, constants

from nemo_offload_rl.errors import UserError
from nemo_offload_rl.utils import hub


@pytest.fixture
def online(monkeypatch):
    """A process that has not looked for the hub, which the settings do not forbid."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # as it was afterwards, whatever a test does
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub._read_cache_without_hub.cache_clear()
    close_session()  # which knows the proxies of its start
    yield
    hub._read_cache_without_hub.cache_clear()
    close_session()


def test_a_hub_that_does_not_answer_is_left_out_from_then_on_and_warned_of_once(online, monkeypatch, caplog, tmp_path):
    with socket.socket() as taken:  # nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        for path in (str(tmp_path), str(tmp_path / "none"), "./none", "~/none", "a/b/c"):
            with hub.looking_up(path):
                assert not constants.HF_HUB_OFFLINE, "a path is not looked up in the hub"
        for name in ("Qwen/Qwen3-0.6B", "gpt2"):
            with hub.looking_up(name):
                assert constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
    (told,) = caplog.messages
    assert told.startswith(f"the hub {constants.ENDPOINT} cannot be reached (") and "from its cache" in told


@pytest.mark.parametrize("endpoint", ["hub.example", "http://[hub"])
def test_an_endpoint_that_is_no_address_is_a_hub_that_cannot_be_reached(online, monkeypatch, caplog, endpoint):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with hub.looking_up("Qwen/Qwen3-0.6B"):
        assert constants.HF_HUB_OFFLINE
    assert len(caplog.messages) == 1


def test_a_proxy_that_needs_a_package_is_an_error_that_names_it(online, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "socksio", None)  # not installed
    with pytest.raises(UserError, match=r"ALL_PROXY.*socksio.*; install that package"), hub.looking_up("some/model"):
        pass


def test_a_process_that_had_the_library_before_its_environment_asks_nobody(online, monkeypatch, caplog):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with hub.looking_up("Qwen/Qwen3-0.6B"):
        assert constants.HF_HUB_OFFLINE
    assert not caplog.messages


def test_a_hub_that_answers_is_used_whatever_it_says(online, monkeypatch, caplog):
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(500)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        for _ in range(2):
            with hub.looking_up("Qwen/Qwen3-0.6B"):
                assert not constants.HF_HUB_OFFLINE
        server.shutdown()
        thread.join()
    assert len(asked) == 1 and not caplog.messages
