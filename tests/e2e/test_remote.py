"""A remote API that fails in every way: what can be saved is, and it is left in peace when it cannot."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from pathlib import Path

from tests.e2e import remote as moods
from tests.e2e.client import wait_until
from tests.e2e.remote import remote
from tests.e2e.server import serving

UNHAPPY = {"batch failed", "probe failed", "the remote API answered no outputs"}


def test_what_passes_is_waited_out_as_long_as_the_api_asks(tmp_path: Path) -> None:
    with remote() as api, serving(tmp_path, target=api.url) as server:
        api.script.extend([moods.status(429, Retry_After="1"), moods.status(503)])
        server.ask("patience").output()
        first, second, third = api.calls[-3:]
        assert first.inputs == second.inputs == third.inputs == ["patience"]
        assert second.at - first.at > 0.99, "but for the milliseconds in which timers count"
        api.script.extend([moods.cut, moods.status(500)])
        server.ask("again").output()
        metrics = server.metrics()
        assert metrics.value("batches_total") == 2
        assert metrics.value("retries_total") == 0


def test_an_input_that_the_api_refuses_is_told_from_its_batch_mates(tmp_path: Path) -> None:
    with remote() as api, serving(tmp_path, target=api.url) as server:
        server.expected = UNHAPPY
        api.mood = moods.choosy
        release = threading.Event()
        api.script.append(lambda talk: moods.well(talk) if release.wait() else None)
        first = server.ask("first")
        wait_until(lambda: api.calls[-1].inputs == ["first"])
        asked = [server.ask(f"good {number}") for number in range(7)]
        bad = server.ask("bad")
        server.queued(8)
        release.set()
        first.output()
        assert bad.refusal() == "REJECTED_BY_MODEL"
        for one in asked:
            one.output()


def test_neither_query_nor_error_body_of_the_api_is_told(tmp_path: Path) -> None:
    with remote() as api, serving(tmp_path, target=f"{api.url}?key=canary-query") as server:
        server.expected = UNHAPPY
        api.mood = moods.status(401)
        answer = server.ask("in vain").answer()
        assert answer.json["detail"] == "the remote API failed at try 1: HTTP 401"
        assert "not\\nnow" in server.logged("the remote API answered no outputs")["body"]
        [letter] = server.letters()
        assert "now" not in letter["error"]
        assert "canary-query" not in server.log_text() + server.banner() + str(letter)


def test_an_api_that_is_gone_and_comes_back_is_used_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        # Bound, it is nobody else's meanwhile; who does not listen there does not hinder who does.
        place = stack.enter_context(socket.socket())
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
        with remote(port) as api:
            flags = ("--remote-token", "s3cret-canary", "--request-timeout-ms", "2000", "--gpu-timeout-ms", "1000")
            server = stack.enter_context(serving(tmp_path, *flags, target=api.url))
            server.expected = UNHAPPY
            server.ask("before").output()
            assert api.calls[-1].authorization == "Bearer s3cret-canary"
        # Nothing is sent, so that it waits for the API as long as it may.
        assert server.ask("meanwhile").refusal() in ("BACKEND_ERROR", "NO_WORKERS", "DEADLINE_EXCEEDED")
        with remote(port):
            server.ask("after").output()
        assert "s3cret-canary" not in server.log_text() + server.banner() + str(server.letters())
