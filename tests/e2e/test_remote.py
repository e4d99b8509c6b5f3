"""A remote API that fails in every way: what can be saved is, and it is left in peace when it cannot."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e import remote as moods
from tests.e2e.client import wait_until
from tests.e2e.remote import Mood, remote
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


HOPELESS: dict[str, Mood] = {
    "500": moods.status(500),
    "404": moods.status(404),
    "cut": moods.cut,
    "no JSON": moods.body("this is no JSON"),
    "too many": moods.body('["one", "too many"]'),
    "no list": moods.body('{"neither": "nor"}'),
    "null": moods.body("[null]"),
}


def test_what_does_not_pass_is_told_to_the_client(tmp_path: Path) -> None:
    with remote() as api, serving(tmp_path, target=api.url) as server:
        server.expected = UNHAPPY
        for name, mood in HOPELESS.items():
            api.mood = mood
            asked = server.ask(f"in vain: {name}")
            assert asked.refusal() == "BACKEND_ERROR", name
            assert server.letters()[0]["id"] == f"req_{asked.id}"
            api.mood = moods.well
            server.ask(f"after {name}").output()


@pytest.mark.parametrize("mood", [moods.hang, moods.trickle])
def test_an_api_that_does_not_come_to_an_end_is_cut_off_at_the_deadline(tmp_path: Path, mood: Mood) -> None:
    with remote() as api, serving(tmp_path, "--gpu-timeout-ms", "2000", target=api.url) as server:
        server.expected = UNHAPPY
        api.script.append(mood)
        server.ask("once").output()
        metrics = server.metrics()
        assert metrics.value("retries_total") == metrics.value("retries_total", cause="timeout") >= 1
        assert metrics.value("wasted_gpu_seconds_total", cause="timeout") > 1.9


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


def test_an_api_that_asks_for_a_rest_is_left_in_peace_by_all_slots(tmp_path: Path) -> None:
    flags = ("--workers", "4", "--queue-timeout-ms", "1000", "--request-timeout-ms", "2000")
    with remote() as api, serving(tmp_path, *flags, target=api.url) as server:
        server.expected = UNHAPPY
        api.mood = moods.status(429, Retry_After="3600")
        before = len(api.calls)
        asked = [server.ask(f"in vain {number}") for number in range(30)]
        assert {one.answer().status for one in asked} <= {503, 504}
        asked = [server.ask(f"still in vain {number}") for number in range(30)]
        assert {one.answer().status for one in asked} == {503}
        assert len(api.calls) - before <= 4, "what was on its way when the API asked"
        assert {worker["status"] for worker in server.workers()} == {"degraded"}


@pytest.mark.parametrize("status", [301, 401, 500])
def test_what_is_no_fault_of_an_input_never_makes_a_batch_into_many_calls(tmp_path: Path, status: int) -> None:
    with remote() as api, serving(tmp_path, target=api.url) as server:
        server.expected = UNHAPPY
        release = threading.Event()
        api.script.append(lambda talk: moods.well(talk) if release.wait() else None)
        first = server.ask("first")
        wait_until(lambda: api.calls[-1].inputs == ["first"])
        asked = [server.ask(f"together {number}") for number in range(8)]
        server.queued(8)
        before = len(api.calls)
        api.mood = moods.status(status)
        release.set()
        first.output()
        for one in asked:
            answer = one.answer()
            assert answer.status == 502
            assert answer.json["detail"].endswith(f"HTTP {status}")
        calls = [call for call in api.calls[before:] if len(call.inputs) > 1]
        assert {len(call.inputs) for call in calls} == {8}
        assert len(calls) == (9 if status == 500 else 3)
        assert len(api.calls) - before == len(calls)


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


def test_a_broken_api_is_left_in_peace_until_it_is_well(tmp_path: Path) -> None:
    with remote() as api, serving(tmp_path, "--workers", "2", "--queue-timeout-ms", "1000", target=api.url) as server:
        server.expected = UNHAPPY
        api.mood = moods.status(500)

        def opened() -> bool:
            server.ask("in vain", "X-Request-Timeout-Ms: 4000").answer()
            return min(server.metrics().value("breaker_state", backend=f"remote-{n}") for n in (0, 1)) > 0

        wait_until(opened)
        wait_until(lambda: server.get("/readyz").status == 503)
        before = len(api.calls)
        held = [server.ask(f"held {number}") for number in range(20)]
        for one in held:
            assert one.answer().status in (502, 503)
        assert len(api.calls) - before < 20, "few probes, not a storm"
        api.mood = moods.well
        wait_until(lambda: server.get("/readyz").status == 200)
        wait_until(lambda: server.ask("well again").answer().status == 200)
        server.all_healthy()
        wait_until(lambda: server.metrics().value("breaker_state") == 0)


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
