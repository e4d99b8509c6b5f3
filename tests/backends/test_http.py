"""A remote API, and every way in which it can go wrong."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from headway.backends.http.backend import HttpBackend, retry_after
from headway.backends.remote.backend import advice, asked_for
from headway.backends.remote.credentials import Credentials
from headway.config.target import RemoteTarget
from headway.core.breaker import Breaker
from headway.dialects import AUTO
from headway.dialects.table import reach
from headway.errors import BackendError, BadOutput, BatchTimeout, RemoteAbsent, RemoteError, RemoteRefused, TargetError
from headway.model import Cause, ItemResult
from tests.backends.entries import batch
from tests.backends.remote import Raw, served, served_raw

LONG = 30.0
SHORT = 0.15
NOW = 1_790_000_000.0


class Remote:
    """Answers tries in turn with the given ones, then with the last one again; the warm-up is always answered."""

    def __init__(self, *answers: Callable[[Any], web.Response]) -> None:
        self.answers = list(answers)
        self.bodies: list[Any] = []
        self.headers: list[Any] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body in (["warm-up"], {"inputs": ["warm-up"]}):
            return web.json_response(["WARM-UP"])
        self.bodies.append(body)
        self.headers.append(request.headers)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(body)


def well(body: Any) -> web.Response:
    inputs = body["inputs"] if isinstance(body, dict) else body
    return web.json_response([text.upper() for text in inputs])


def status(code: int, text: str = "", **headers: str) -> Callable[[Any], web.Response]:
    return lambda _: web.Response(status=code, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})


def says(answer: Any) -> Callable[[Any], web.Response]:
    return lambda _: web.json_response(answer)


@asynccontextmanager
async def against(remote: Remote, **settings: Any) -> AsyncIterator[HttpBackend]:
    async with served(remote.handle) as url, started(url, **settings) as backend:
        yield backend


@asynccontextmanager
async def started(url: str, format: str = AUTO, **settings: Any) -> AsyncIterator[HttpBackend]:
    arguments = {"start_timeout": LONG, "rng": lambda: 0.0, "wall": lambda: NOW, **settings}
    backend = HttpBackend(RemoteTarget(url), remote=reach(url, format), **arguments)
    try:
        await backend.start()
        yield backend
    finally:
        await backend.stop()


@pytest.mark.parametrize("member", ["outputs", "results", "predictions"])
async def test_an_answer_may_be_wrapped(member: str) -> None:
    async with against(Remote(says({member: ["A", "B"], "took": 3}))) as backend:
        assert await backend.run(batch("a", "b"), LONG) == [ItemResult("A"), ItemResult("B")]


async def test_the_body_is_a_list_or_an_object_as_configured() -> None:
    bare, wrapped = Remote(well), Remote(well)
    for remote, format in ((bare, AUTO), (wrapped, "inputs")):
        async with against(remote, format=format) as backend:
            await backend.run(batch("a", "b"), LONG)
            await backend.run(batch("a", "b", parameters=[b"", b'{"k":1}']), LONG)
    assert bare.bodies == [["a", "b"]] * 2
    assert wrapped.bodies == [{"inputs": ["a", "b"]}, {"inputs": ["a", "b"], "parameters": [{}, {"k": 1}]}]


async def test_the_token_is_sent_and_never_told() -> None:
    remote = Remote(well, status(401, "no"))
    async with against(remote, credentials=Credentials("canary")) as backend:
        await backend.run(batch("a"), LONG)
        with pytest.raises(RemoteError) as caught:
            await backend.run(batch("a"), LONG)
        assert "canary" not in str(caught.value)
        assert "canary" not in repr(backend)
    assert remote.headers[0]["Authorization"] == "Bearer canary"
    assert remote.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
async def test_a_passing_failure_is_tried_again(code: int) -> None:
    remote = Remote(status(code), status(code), well)
    async with against(remote) as backend:
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
    assert len(remote.bodies) == 3


async def test_the_error_says_at_which_try_a_call_failed() -> None:
    remote = Remote(status(503, "no GPU"))
    async with against(remote) as backend:
        with pytest.raises(RemoteError, match=r"failed at try 3: HTTP 503$"):
            await backend.run(batch("a"), LONG)
    assert len(remote.bodies) == 3


@pytest.mark.parametrize(
    ("code", "cause"),
    [(code, Cause.REMOTE) for code in (301, 307, 401, 403, 404, 405, 409)]
    + [(code, Cause.REFUSED) for code in (400, 413, 422)],
)
async def test_a_refusal_is_final_and_only_some_are_the_fault_of_an_input(code: int, cause: Cause) -> None:
    remote = Remote(status(code, "y" * 5000, Location="http://127.0.0.1:1/"))
    async with against(remote) as backend:
        with pytest.raises(BackendError) as caught:
            await backend.run(batch("a"), LONG)
        assert str(caught.value).endswith(f"failed at try 1: HTTP {code}")
        assert caught.value.cause is cause
    assert len(remote.bodies) == 1


async def test_what_an_api_writes_into_its_errors_is_in_the_log_alone() -> None:
    bad = (status(401, "canary \x1b[2J"), status(422, "canary \x1b[2J"), status(200, "<p>canary \x1b[2J"))
    async with against(Remote(*bad)) as backend:
        for _ in range(3):
            with capture_logs() as logged, pytest.raises(BackendError) as caught:
                await backend.run(batch("a"), LONG)
            assert "canary" not in str(caught.value)
            assert "canary" not in caught.value.shown
            [line] = logged
            assert "canary \\x1b[2J" in line["body"]


@pytest.mark.parametrize("place", ["http://127.0.0.1:{port}/batch", "http://nowhere.invalid:{port}/batch"])
async def test_the_query_of_the_url_is_in_no_error(place: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 nonsense " + head.split(b" ")[1] + b"\r\n\r\n")
        await writer.drain()

    async with served_raw(talk) as url:
        target = RemoteTarget(place.format(port=url.split(":")[2].partition("/")[0]) + "?key=can%C3%A4ry&token=canary")
        backend = HttpBackend(target, start_timeout=LONG, rng=lambda: 0.0)
        with capture_logs() as logged, pytest.raises(TargetError) as caught:
            await backend.start()
        assert "failed at try" in str(caught.value)
        for secret in ("canary", "can%C3%A4ry", "canäry"):
            assert secret not in f"{caught.value} {logged} {backend!r}"


async def test_whatever_a_library_raises_is_a_failure_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with against(Remote(well)) as backend:
        assert backend._connections.current is not None
        await backend._connections.current.content.session.close()
        with pytest.raises(RemoteError, match="failed at try 1: RuntimeError: Session is closed"):
            await backend.run(batch("a"), LONG)


async def test_slots_that_share_a_breaker_rest_together() -> None:
    breaker, now = Breaker(5, 0.5), 100.0
    async with against(Remote(status(429, Retry_After="90")), breaker=breaker, clock=lambda: now) as backend:
        with pytest.raises(RemoteError):
            await backend.run(batch("a"), LONG)
        assert breaker.rest_left(now) == 90.0


async def test_a_try_waits_for_the_rest_that_another_slot_was_asked_for() -> None:
    breaker, now = Breaker(5, 0.5), 100.0
    breaker.rest(now, 60.0)

    remote = Remote(status(503))
    async with against(remote, breaker=breaker, clock=lambda: now) as backend:
        with pytest.raises(RemoteError, match=r"failed at try 1: HTTP 503$"):
            await backend.run(batch("a"), LONG)
    assert len(remote.bodies) == 1


@pytest.mark.parametrize("rest", ["0", formatdate(NOW - 60, usegmt=True), "soon"])
async def test_a_rest_that_is_over_is_not_kept(rest: str) -> None:
    async with against(Remote(status(429, Retry_After=rest), well)) as backend:
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"x-should-retry": "false"}, "failed at try 1: HTTP 429$"),
        ({"Retry-After": "90"}, "failed at try 1: HTTP 429; it asks for 90 s of rest"),
        ({"Retry-After": formatdate(NOW + 90, usegmt=True)}, "failed at try 1: HTTP 429; it asks for 90 s of rest"),
        ({"retry-after-ms": "90500"}, "failed at try 1: HTTP 429; it asks for 90.5 s of rest"),
        ({"retry-after-ms": "90500", "Retry-After": "1"}, "it asks for 90.5 s of rest"),
        ({"retry-after-ms": "soon", "Retry-After": "91"}, "it asks for 91 s of rest"),
    ],
)
async def test_a_rest_longer_than_the_timeout_is_not_waited_for(fields: dict[str, str], what: str) -> None:
    remote = Remote(status(429, "busy", **fields))
    async with against(remote) as backend:
        with pytest.raises(RemoteError, match=what):
            await backend.run(batch("a"), LONG)
    assert len(remote.bodies) == 1


async def test_a_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with against(Remote(status(503, Retry_After="3"), status(503), well), clock=lambda: sum(slept)) as backend:
        monkeypatch.setattr("headway.backends.remote.backend.asyncio.sleep", sleep)
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
        monkeypatch.undo()
    assert slept[0] == 3.0
    assert 0.0 < slept[1] < 1.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("", None),
        ("7", 7.0),
        ("1.5", 1.5),
        ("soon", None),
        ("-3", None),
        ("1e999", None),
        ("9" * 400, None),
        (formatdate(NOW + 12, usegmt=True), 12.0),
        (formatdate(NOW - 12, usegmt=True), 0.0),
        ("Fri, 99 Foo 2026 99:99:99 GMT", None),
    ],
)
def test_what_a_retry_after_header_asks_for(value: str, seconds: float | None) -> None:
    assert retry_after(value, NOW) == seconds


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (lambda _: web.Response(text="<html>oops\x00</html>"), r"something that is not JSON \(.*\)$"),
        (says({"output": ["A"]}), "neither a list nor an object with one of outputs, results, predictions"),
        (says(["A", "B"]), "2 outputs for 1 inputs"),
    ],
)
async def test_an_answer_of_another_shape_fails_the_batch(answer: Callable[[Any], web.Response], what: str) -> None:
    remote = Remote(answer)
    async with against(remote) as backend:
        with pytest.raises(BadOutput, match=what):
            await backend.run(batch("a"), LONG)
    assert len(remote.bodies) == 1


async def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.backends.remote.backend.MAX_ANSWER", 10_000)
    async with against(Remote(says(["x" * 20_000]))) as backend:
        with pytest.raises(BadOutput, match="answered more than 10000 bytes"):
            await backend.run(batch("a"), LONG)


async def test_a_compressed_answer_is_bounded_by_what_it_unfolds_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.backends.remote.backend.MAX_ANSWER", 100_000)

    def bomb(_: Any) -> web.Response:
        response = web.json_response(["x" * 4_000_000])
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async with against(Remote(bomb)) as backend:
        with pytest.raises(BadOutput, match="answered more than 100000 bytes"):
            await backend.run(batch("a"), LONG)


@asynccontextmanager
async def against_raw(talk: Raw) -> AsyncIterator[tuple[HttpBackend, list[None]]]:
    """A backend whose connections after the first are had with `talk`, and an item for each of those."""
    connections: list[None] = []
    warm = False

    async def first_warm_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal warm
        if warm:
            connections.append(None)
            return await talk(reader, writer)
        warm = True
        await request(reader)
        writer.write(b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 11\r\n\r\n["WARM-UP"]')
        return await writer.drain()

    async with served_raw(first_warm_up) as url, started(url) as backend:
        yield backend, connections


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
    return await reader.readexactly(length)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (b"", "(ClientOSError|ServerDisconnectedError)"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "Client"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n["A"', "Client"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", ""),
    ],
)
async def test_an_answer_that_breaks_off_or_is_no_http_is_tried_again_and_may_have_run(said: bytes, what: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(said)
        await writer.drain()

    async with against_raw(talk) as (backend, connections):
        with pytest.raises(RemoteError, match=f"failed at try 3: {what}") as caught:
            await backend.run(batch("a"), LONG)
        assert not isinstance(caught.value, RemoteAbsent)
    assert len(connections) == 3


async def test_an_answer_that_trickles_is_cut_off_at_the_timeout() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n[")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with against_raw(talk) as (backend, connections):
        with pytest.raises(BatchTimeout, match=r"no complete answer within 0\.15 s"):
            await backend.run(batch("a"), SHORT)
    assert len(connections) <= 1


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (status(404, "nothing here"), "failed at try 1: HTTP 404"),
        (says({"label": "x"}), "neither a list nor an object"),
        (says([None]), "answered null for this input"),
        (says([]), "0 outputs for 1 inputs"),
    ],
)
async def test_a_target_that_fails_its_warm_up_is_refused(answer: Callable[[Any], web.Response], what: str) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return answer(await request.json())

    async with served(handle) as url:
        backend = HttpBackend(RemoteTarget(url), start_timeout=LONG)
        with pytest.raises(TargetError, match=what) as caught:
            await backend.start()
        with pytest.raises(RemoteError, match="was not started"):
            await backend.run(batch("a"), LONG)
        assert str(caught.value).startswith(f"target {url}: the warm-up batch ['warm-up'] failed: ")
        assert (
            "Use " in str(caught.value)
            or "check " in str(caught.value).lower()
            or "--remote-format" in str(caught.value)
        )


async def test_a_target_that_nobody_serves_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Nobody listens there, and nobody else can.
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/batch"
        with pytest.raises(TargetError, match=r"failed at try 3: ClientConnectorError.*127\.0\.0\.1"):
            async with started(url):
                pass


async def test_one_connection_serves_many_batches() -> None:
    peers = set()
    remote = Remote(well)

    async def handle(request: web.Request) -> web.StreamResponse:
        peers.add(request.transport.get_extra_info("peername") if request.transport else None)
        return await remote.handle(request)

    async with served(handle) as url, started(url) as backend:
        for _ in range(5):
            await backend.run(batch("a"), LONG)
    assert len(peers) == 1


async def test_a_client_is_not_told_where_the_remote_api_stands() -> None:
    backend = None
    async with served(Remote(well).handle) as url:
        backend = HttpBackend(RemoteTarget(url), start_timeout=LONG, max_tries=1)
        await backend.start()
    try:
        with pytest.raises(RemoteError) as failure:
            await backend.run(batch("a"), LONG)
    finally:
        await backend.stop()
    assert url in str(failure.value)
    assert "127.0.0.1" not in failure.value.shown


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (RemoteError("x"), 401, "HEADWAY_REMOTE_TOKEN"),
        (RemoteError("x"), 403, "--remote-model"),
        (RemoteError("x"), 404, "check the path"),
        (RemoteError("x"), 307, "name the URL to which it leads"),
        (RemoteError("x"), 429, "--remote-rate"),
        (RemoteError("x"), 503, "in trouble itself"),
        (RemoteRefused("x"), 413, "--max-batch-size"),
        (RemoteRefused("x"), 422, "check --remote-format"),
        (RemoteAbsent("x"), 0, "host and port"),
        (BatchTimeout("x"), 0, "--start-timeout-ms"),
        (BadOutput("x"), 0, "another form"),
        (RemoteError("x"), 0, "Check the URL, --remote-format"),
    ],
)
def test_each_failure_has_advice_of_its_own(error: BackendError, status: int, says: str) -> None:
    told = advice(error, status, b"")
    assert says in told
    assert ("Check the URL, --remote-format" in told) is (says == "Check the URL, --remote-format")


@pytest.mark.parametrize(
    ("body", "format"),
    [
        (b'{"detail": [{"loc": ["body", "inputs"], "msg": "field required"}]}', "inputs"),
        (b'{"error": {"message": "you must provide a `prompt`"}}', "openai-completions"),
        (b'{"error": "\'input\' is a required property"}', "openai-embeddings"),
        (b'{"error": "datatype of inputs is missing"}', "oip"),
        (b"bad request", ""),
        (b"\xff" * 9000 + b"inputs", ""),
    ],
)
def test_an_answer_that_names_a_member_names_the_format(body: bytes, format: str) -> None:
    assert asked_for(body) == format


def test_a_start_that_fails_tells_the_one_advice() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response({"detail": "field `inputs` is required"}, status=400)

    async def main() -> str:
        async with served(handle) as url:
            with pytest.raises(TargetError) as caught:
                await HttpBackend(RemoteTarget(url), start_timeout=30.0).start()
            return str(caught.value)

    assert (
        "HTTP 400. It turned the request down for its form: its answer names what --remote-format inputs"
        in asyncio.run(main())
    )
