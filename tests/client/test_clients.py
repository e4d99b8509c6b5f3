"""Both clients against a scripted service."""

import asyncio
import itertools
import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.client import (
    ApiError,
    AsyncClient,
    Client,
    ClientError,
    InvalidInput,
    NotFound,
    Overloaded,
    Result,
    TimedOut,
    Unreachable,
)
from headway.client.service import Service
from headway.errors import SettingError
from tests.authority import Authority
from tests.client.asking import CLIENTS, asking
from tests.client.scripted import CUT, LOST, Scripted, Step, ok, problem, scripted

NOW = {"retry-after-ms": "1"}


def test_a_request_carries_what_the_service_needs(kind: str) -> None:
    with scripted(ok({"label": "a"})) as service:
        with asking(kind, service.url + "/", "hw_key", timeout=7.0, headers={"X-Team": "blue"}) as client:
            result = client.infer([1, 2], model="m", parameters={"n": 1})
            client.infer("x", idempotency_key="order-7")
        asked, keyed = service.asked
    assert (result.output, result.request_id, result.latency_ms) == ({"label": "a"}, "req_1", 1.5)
    assert (asked.method, asked.path) == ("POST", "/v1/inference")
    assert asked.json == {"input": [1, 2], "model": "m", "parameters": {"n": 1}}
    assert (asked.header["Authorization"], asked.header["X-Team"]) == ("Bearer hw_key", "blue")
    assert 6000 < int(asked.header["X-Request-Timeout-Ms"]) <= 7000
    assert (len(asked.header["Idempotency-Key"]), keyed.header["Idempotency-Key"]) == (36, "order-7")


@pytest.mark.parametrize(
    "step", [problem(503, "DRAINING", NOW), problem(429, "RATE_LIMITED", NOW), LOST, (CUT, {}, b'{"request_id"')]
)
def test_a_request_is_sent_again_under_its_key(kind: str, step: Any) -> None:
    with scripted(step, step, ok()) as service, asking(kind, service.url) as client:
        assert client.infer("x").output == "out"
        assert len({asked.header["Idempotency-Key"] for asked in service.asked}) == 1
        assert client.infer("x").output == "out"
        assert len(service.asked) == 4
        assert len({asked.header["Idempotency-Key"] for asked in service.asked}) == 2


def test_without_retries_a_request_is_sent_once_and_has_no_key(kind: str) -> None:
    with scripted(problem(503, "DRAINING", NOW)) as service, asking(kind, service.url, retries=0) as client:
        with pytest.raises(Overloaded) as raised:
            client.infer("x")
        assert (raised.value.code, raised.value.request_id) == ("DRAINING", "req_2")
        [asked] = service.asked
        assert "Idempotency-Key" not in asked.header


def test_nobody_at_the_address_is_unreachable(kind: str) -> None:
    with scripted(ok()) as service:
        url = service.url
    with asking(kind, url, retries=1) as client, pytest.raises(Unreachable, match=f"no connection to {url}"):
        client.infer("x")


@contextmanager
def silent() -> Iterator[Scripted]:
    """Start a service that sends no answer until the block ends."""
    release = threading.Event()

    class Late(dict[str, str]):
        def items(self) -> Any:
            release.wait(30.0)
            return super().items()

    with scripted((200, Late(), b"{}")) as service:
        try:
            yield service
        finally:
            release.set()


def test_a_service_that_does_not_answer_times_out(kind: str) -> None:
    with (
        silent() as service,
        asking(kind, service.url) as client,
        pytest.raises(TimedOut, match=r"no answer within 0\.05 s"),
    ):
        client.infer("x", timeout=0.05)


def test_a_redirect_is_not_followed(kind: str) -> None:
    with scripted((302, {"Location": "http://127.0.0.1:1/"}, b"")) as service, asking(kind, service.url) as client:
        with pytest.raises(ApiError) as raised:
            client.infer("x")
        assert (raised.value.status, len(service.asked)) == (302, 1)


def test_many_inputs_are_answered_in_their_order(kind: str) -> None:
    with scripted(ok()) as service, asking(kind, service.url) as client:
        results = client.infer_many((text for text in "abcdef"), parameters={"n": 1}, concurrency=3)
        assert [result.output for result in results] == ["out"] * 6
        assert sorted(asked.json["input"] for asked in service.asked) == list("abcdef")
        assert client.infer_many([]) == []
        with pytest.raises(ValueError, match="concurrency"):
            client.infer_many(["a"], concurrency=0)


def test_what_is_no_list_of_inputs_is_refused_before_it_is_sent(kind: str) -> None:
    with scripted(ok()) as service, asking(kind, service.url) as client:
        for inputs in ("good", b"good", bytearray(b"good"), {"a": 1}, 7):
            wrong: Any = inputs
            says = f"inputs of type {type(inputs).__name__} .* call infer, or give a list"
            with pytest.raises(InvalidInput, match=says):
                client.infer_many(wrong)
        assert service.asked == []


def test_the_first_error_among_many_is_raised_and_the_rest_is_not_sent(kind: str) -> None:
    with scripted(problem(404, "NOT_FOUND")) as service, asking(kind, service.url) as client:
        with pytest.raises(NotFound):
            client.infer_many(["x"] * 100, concurrency=1)
        assert len(service.asked) < 100


def test_an_error_among_many_inputs_has_its_place(kind: str) -> None:
    with scripted(ok(), problem(404, "NOT_FOUND")) as service, asking(kind, service.url) as client:
        with pytest.raises(NotFound, match=r"^input 1 of 3, counted from 0: told: NOT_FOUND \(404") as raised:
            client.infer_many(["a", "b", "c"], concurrency=1)
        assert raised.value.input_index == 1
        with pytest.raises(NotFound, match=r"^told: NOT_FOUND") as alone:
            client.infer("a")
        assert alone.value.input_index is None
    with scripted(ok()) as service, asking(kind, service.url) as client:
        with pytest.raises(InvalidInput, match=r"^input 1, counted from 0: input of type object: is not JSON"):
            client.infer_many(iter(["a", object()]))
        sent = len(service.asked)
        good, error = client.infer_many(["a", object()], return_errors=True)
        assert isinstance(good, Result) and isinstance(error, InvalidInput)
        assert (error.input_index, len(service.asked) - sent) == (1, 1)
        assert str(error).startswith("input 1 of 2, counted from 0: ")


def test_many_inputs_wait_out_the_rate_of_their_key(kind: str) -> None:
    refusals = [problem(429, "RATE_LIMITED", NOW)] * 20
    with scripted(*refusals, ok()) as service, asking(kind, service.url, retries=1) as client:
        assert [result.output for result in client.infer_many(["a", "b"])] == ["out"] * 2
        assert len(service.asked) == 22


def test_who_interrupts_a_call_for_many_inputs_waits_for_none(kind: str) -> None:
    def inputs() -> Iterator[str]:
        yield "x"
        raise RuntimeError("interrupted")

    with silent() as service, asking(kind, service.url) as client, pytest.raises(RuntimeError, match="interrupted"):
        client.infer_many(inputs())


SUBMITTED: Step = 202, {}, b'{"task_id":"req_9","status":"PENDING"}'
PENDING: Step = 200, {}, b'{"task_id":"req_9","status":"PENDING"}'
DONE: Step = 200, {}, b'{"task_id":"req_9","status":"SUCCESS","output":"out"}'
MISSING = problem(404, "NOT_FOUND")


def test_a_task_is_submitted_and_polled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.client.service.PAUSE", 0.0)
    with scripted(SUBMITTED, PENDING, PENDING, LOST, DONE) as service, asking(kind, service.url) as client:
        task = client.submit("x", timeout=9.0)
        assert task.id == "req_9"
        assert task.status() == "PENDING"
        result = task.result()
        assert (result.output, result.request_id, result.latency_ms) == ("out", "req_9", None)
        asked = service.asked
        assert (asked[0].header["Prefer"], asked[0].header["X-Request-Timeout-Ms"]) == ("respond-async", "9000")
        assert [one.path for one in asked[1:]] == ["/v1/result/req_9", *["/v1/result/req_9?wait=20.000"] * 3]


def test_the_wait_for_a_task_ends_with_the_callers_time(kind: str) -> None:
    with scripted(PENDING) as service, asking(kind, service.url) as client:
        with pytest.raises(TimedOut, match="it continues"):
            client.task("req_9").result(timeout=0.01)
        assert service.asked[0].path == "/v1/result/req_9?wait=0.010"


def test_a_task_is_cancelled_whether_or_not_it_is_still_known(kind: str) -> None:
    with scripted((204, {}, b""), LOST, MISSING) as service, asking(kind, service.url) as client:
        for _ in range(3):
            client.task("req_9").cancel()
        assert {asked.method for asked in service.asked} == {"DELETE"}


def test_a_closed_client_refuses_calls(kind: str) -> None:
    with scripted(ok()) as service, asking(kind, service.url) as client:
        client.infer("x")
        client.close()
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.infer("x")


def test_one_client_serves_many_threads() -> None:
    with scripted(ok()) as service, Client(service.url, connections=2) as client:
        threads = [threading.Thread(target=client.infer_many, args=(["x"] * 5,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(service.asked) == 20


def test_connections_are_not_shared_with_a_process_that_was_forked_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(ok()) as service, Client(service.url) as client:
        client.infer("x")
        before = client._connections()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert client._connections() is not before
        before.clear()


def test_an_asynchronous_client_belongs_to_one_loop() -> None:
    with scripted(ok()) as service:
        client = AsyncClient(service.url)

        async def ask() -> None:
            await client.infer("x")

        with asyncio.Runner() as first, asyncio.Runner() as second:
            first.run(ask())
            with pytest.raises(RuntimeError, match="another event loop"):
                second.run(ask())
            first.run(client.close())


@pytest.mark.parametrize(
    ("named", "values"),
    [
        ("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://me:secret@host"]),
        ("url", ["http://host/?q", "http://ho st", "http://host/v1/inference", "http://host/prefix/v1/inference/"]),
        ("api_key", ["secret\nkey", ""]),
        ("timeout", [0, float("inf"), "5"]),
        ("retries", [-1, True]),
        ("connections", [0]),
    ],
)
def test_a_wrong_argument_is_named_and_secrets_are_not_told(named: str, values: list[Any]) -> None:
    for make, value in itertools.product((Client, AsyncClient), values):
        with pytest.raises(SettingError) as raised:
            make(**{named: value})
        assert raised.value.setting == named
        assert "secret" not in str(raised.value)


def test_a_wrong_time_of_a_call_is_refused() -> None:
    client = Client()
    for call in (lambda: client.infer("x", timeout=-1.0), lambda: client.submit("x", timeout=0)):
        with pytest.raises(SettingError, match="timeout") as raised:
            call()
        assert isinstance(raised.value, ClientError)
        assert raised.value.hopeless


def test_the_way_to_this_machine_needs_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "proxy.example:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    for url in ("http://127.0.0.1:1", "http://localhost", "http://[::1]:1", "http://a.localhost"):
        assert Service(url=url).proxy is None
    assert Service(url="http://models.example").proxy == "http://proxy.example:3128"
    monkeypatch.setenv("no_proxy", "models.example")
    assert Service(url="http://models.example").proxy is None


def test_a_proxy_of_the_environment_is_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(ok()) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        with asking(kind, "http://models.example/in") as client:
            assert client.infer("x").output == "out"
        assert proxy.asked[0].path == "http://models.example/in/v1/inference"


def test_certificates_are_checked_and_shown_where_the_service_asks_for_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("client")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*authority.issue())
    for kind in CLIENTS:
        with scripted(ok(), tls=tls) as service, asking(kind, service.url) as client:
            with pytest.raises(Unreachable, match=r"certificate.*ssl_context") as raised:
                client.infer("x")
            assert raised.value.hopeless  # So it isn't retried.
    tls.load_verify_locations(authority.file)
    tls.verify_mode = ssl.CERT_REQUIRED
    with scripted(ok(), tls=tls) as service:
        for kind in CLIENTS:
            with asking(kind, service.url, ssl_context=authority.trust(own)) as client:
                assert client.infer("x").output == "out"
            with asking(kind, service.url, ssl_context=authority.trust(), retries=0) as client:
                with pytest.raises(Unreachable) as raised:
                    client.infer("x")
                # The client may see the closed connection before it reads the alert that gives the reason.
                assert raised.value.hopeless == ("requires a client certificate" in str(raised.value))


def test_a_port_that_does_not_speak_tls_is_asked_once(kind: str) -> None:
    with scripted(ok()) as service, asking(kind, service.url.replace("http:", "https:")) as client:
        with pytest.raises(Unreachable, match=r"does not speak TLS .* Is it http://\?") as raised:
            client.infer("x")
        assert raised.value.hopeless and service.asked == []


def test_no_secret_is_shown() -> None:
    assert "secret" not in repr(Client(api_key="secret")) + repr(Service(api_key="secret", headers={"a": "secret"}))
