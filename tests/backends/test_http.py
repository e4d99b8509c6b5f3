"""Remote APIs over HTTP in every dialect: every way they can fail, and what is sent besides the batch."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from headway.backends.http import HttpBackend, retry_after
from headway.backends.remote.credentials import Credentials
from headway.config.target import RemoteTarget
from headway.core.breaker import Breaker
from headway.dialects.table import reach
from headway.errors import BackendError, BadOutput, BatchTimeout, RemoteAbsent, RemoteError, SettingError, TargetError
from headway.model import Cause, ItemResult
from tests.backends.entries import batch
from tests.backends.remote import served, served_raw
from tests.backends.speakers import SPEAKERS, Speaker

LONG = 30.0
SHORT = 0.15
NOW = 1_790_000_000.0


class Api:
    """A remote API of a dialect. It answers the warm-up correctly, then each request with `say`."""

    def __init__(
        self, speaker: Speaker, say: Callable[[Any, list[str]], web.StreamResponse | None] | None = None
    ) -> None:
        self.speaker, self.say = speaker, say
        self.bodies: list[Any] = []
        self.headers: list[Any] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = self.speaker.read(await request.read())
        inputs = self.speaker.inputs(body)
        self.headers.append(request.headers)
        if inputs != ["warm-up"]:
            self.bodies.append(body)
            if self.say is not None and (answer := self.say(request, inputs)) is not None:
                return answer
        return self.well(inputs)

    def well(self, inputs: list[str]) -> web.Response:
        return self.speaker.response(self.speaker.answer([self.speaker.gives(text) for text in inputs]))

    @asynccontextmanager
    async def against(self, **settings: Any) -> AsyncIterator[HttpBackend]:
        given: dict[str, Any] = {"start_timeout": LONG, "rng": lambda: 0.0, "wall": lambda: NOW, **settings}
        async with served(self.handle, self.speaker.path) as url:
            backend = HttpBackend(RemoteTarget(url), remote=self.speaker.remote(url), **given)
            try:
                await backend.start()
                yield backend
            finally:
                await backend.stop()


def only_wrong(answer: Callable[[], web.StreamResponse]) -> Callable[[Any, list[str]], web.StreamResponse | None]:
    return lambda _, inputs: answer() if "wrong" in inputs else None


async def test_an_api_that_nobody_serves_was_sent_nothing_and_a_client_is_not_told_where_it_stands() -> None:
    credentials = Credentials("127.0.0.1")  # The message isn't redacted just because the token occurs in it.
    async with remote(well).against(credentials=credentials) as backend:
        pass
    backend._connections.open()
    with capture_logs() as logged, pytest.raises(RemoteAbsent) as caught:
        await backend.run(batch("a"), LONG)
    await backend.stop()
    assert str(caught.value) == f"the remote API {backend._spec} failed at try 3: ClientConnectorError"
    assert "127.0.0.1" not in caught.value.shown
    assert not logged


@pytest.mark.parametrize("sent", [False, True])
async def test_a_connection_that_does_not_come_about_in_time_was_sent_nothing_unless_a_try_before_was(
    sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late(*_: Any, **__: Any) -> None:
        raise aiohttp.ConnectionTimeoutError

    async with remote(status(503)).against() as backend:
        tries: Any = iter([backend._connections.request if sent else late, late, late])
        monkeypatch.setattr(backend._connections, "request", lambda *given, **how: next(tries)(*given, **how))
        with pytest.raises(RemoteError, match="failed at try 3: ConnectionTimeoutError") as caught:
            await backend.run(batch("a"), LONG)
        assert isinstance(caught.value, RemoteAbsent) != sent


@pytest.mark.parametrize("name", ["oip", "openai-completions", "openai-embeddings"])
async def test_inputs_with_other_parameters_go_in_a_request_of_their_own(name: str) -> None:
    api = Api(SPEAKERS[name])
    async with api.against() as backend:
        parameters = [b'{"k":1}', b"", b'{"k":1}', b'{"k":2}']
        items = await backend.run(batch("a", "b", "c", "d", parameters=parameters), LONG)
        alike = await backend.run(batch("a", "b", "c", "d"), LONG)
        assert [item.output for item in items] == [item.output for item in alike]
    sent = [(api.speaker.inputs(body), body.get("k")) for body in api.bodies]
    assert sorted(sent[:3], key=str) == [(["a", "c"], 1), (["b"], None), (["d"], 2)]
    assert sent[3:] == [(["a", "b", "c", "d"], None)]


async def test_a_lone_input_whose_parameters_are_refused_fails_alone_unless_all_would() -> None:
    async with Api(SPEAKERS["openai-completions"], only_wrong(lambda: web.Response(status=code))).against() as backend:
        code = 400
        a, wrong, b = await backend.run(batch("a", "wrong", "b", parameters=[b"", b'{"k":2}', b""]), LONG)
        assert (a, b) == (ItemResult("A"), ItemResult("B"))
        assert wrong == ItemResult(None, "the remote API failed at try 1: HTTP 400")
        code = 401
        with pytest.raises(RemoteError, match="HTTP 401"):
            await backend.run(batch("a", "wrong", parameters=[b"", b'{"k":2}']), LONG)


async def test_the_time_that_is_left_and_the_token_go_with_every_request() -> None:
    api = Api(SPEAKERS["list"])
    async with api.against(credentials=Credentials("canary")) as backend:
        await backend.run(batch("a"), 2.5)
        assert "canary" not in repr(backend)
    assert 0 < int(api.headers[-1]["X-Request-Timeout-Ms"]) <= 2500
    assert 2500 < int(api.headers[0]["X-Request-Timeout-Ms"]) <= LONG * 1000
    for fields in api.headers:
        assert (fields["Authorization"], fields["Content-Type"]) == ("Bearer canary", "application/json")


async def test_header_fields_of_the_file_go_with_every_request(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("# for the API\nX-Team: blue \n\nAuthorization: Bearer canary-1\n")

    api = Api(SPEAKERS["list"])
    async with api.against(credentials=Credentials(file=str(file))) as backend:
        file.write_text("Authorization: Bearer canary-22\n")
        await backend.run(batch("a"), LONG)
        file.write_text("no field\ncanary-333")
        with capture_logs() as logged:
            await backend.run(batch("a"), LONG)
            await backend.run(batch("a"), LONG)
        assert len(logged) == 1
        assert "canary" not in str(logged)
        assert "does not have a header field in line 1" in str(logged)
        file.unlink()
        await backend.run(batch("a"), LONG)
    assert [headers["Authorization"] for headers in api.headers] == ["Bearer canary-1", *["Bearer canary-22"] * 4]
    assert api.headers[0]["X-Team"] == "blue"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("Bearer canary", "line 1"),
        ("X-A: 1\nX A: canary", "line 2"),
        ("X-A:", "line 1"),
        ("X-A: b\x00canary", "line 1"),
        ("X-A: 1\nx-a: canary", "repeats a field in line 2"),
        ("Content-Length: 5", "sets content-length in line 1, which only Headway may set"),
        ("Authorization: canary", "remote_token does too"),
        ("X-A: \udcff", "not UTF-8"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_without_header_fields_is_refused_and_not_quoted(tmp_path: Path, text: str | None, what: str) -> None:
    file = tmp_path / "headers"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingError, match=what) as caught:
        Credentials("token", file=str(file))
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(("keep_alive", "fresh"), [("", 3.0), ("timeout=5, max=100", 3.0), ("timeout=2", 0.5)])
async def test_an_idle_connection_is_given_up_before_the_api_does(keep_alive: str, fresh: float) -> None:
    now = 100.0
    peers: list[Any] = []

    def say(request: web.Request, inputs: list[str]) -> web.Response:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        answer = web.json_response([text.upper() for text in inputs])
        answer.headers["Keep-Alive"] = keep_alive
        return answer

    async with Api(SPEAKERS["list"], say).against() as backend:
        backend._connections._clock = lambda: now
        backend._connections._used_at = now
        for idle in (0.0, fresh, 4.5):
            now += idle
            await backend.run(batch("a"), LONG)
    assert peers[0] == peers[1] != peers[2]


@pytest.mark.parametrize(
    ("path", "name", "models", "listed"),
    [
        ("/v1/completions", "openai-completions", "/v1/models", {"data": [{"id": "upper"}, {"id": "lower"}]}),
        ("/v1/embeddings", "openai-embeddings", "/v1/models", {"data": [{"id": "upper"}, {"id": "lower"}]}),
        ("", "oip", "/v2/repository/index", [{"name": "upper"}, {"name": "lower"}]),
    ],
)
async def test_a_start_without_its_model_names_the_others(path: str, name: str, models: str, listed: Any) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(listed) if request.path == models else web.Response(status=404)

    async with served(handle, "/{any:.*}") as url:
        url = url.replace("/{any:.*}", path)
        for model in ("other", "upper"):
            with pytest.raises(TargetError, match="HTTP 404") as caught:
                await HttpBackend(RemoteTarget(url), remote=reach(url, name, model), start_timeout=LONG).start()
            words = "It has no model `other`; it lists `upper`, `lower`."
            assert (words in str(caught.value)) == (model == "other")


Answer = Callable[[], web.StreamResponse | None]


def remote(*answers: Answer) -> Api:
    """Return an API that answers successive tries with these answers, repeating the last one."""
    left = list(answers)

    def say(_: Any, inputs: list[str]) -> web.StreamResponse | None:
        return (left.pop(0) if len(left) > 1 else left[0])()

    return Api(SPEAKERS["list"], say)


def well() -> None:
    """Return None, for a correct answer."""


def status(code: int, text: str = "", **headers: str) -> Answer:
    return lambda: web.Response(status=code, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
async def test_a_passing_failure_is_tried_again(code: int) -> None:
    api = remote(status(code), status(code), well)
    async with api.against() as backend:
        assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
    assert len(api.bodies) == 3


@pytest.mark.parametrize(
    ("code", "cause"),
    [(code, Cause.REMOTE) for code in (301, 307, 401, 403, 404, 405, 409)]
    + [(code, Cause.REFUSED) for code in (400, 413, 422)],
)
async def test_a_refusal_is_final_and_only_some_are_the_fault_of_an_input(code: int, cause: Cause) -> None:
    api = remote(status(code, "y" * 5000, Location="http://127.0.0.1:1/"))
    async with api.against() as backend:
        with pytest.raises(BackendError) as caught:
            await backend.run(batch("a"), LONG)
        assert str(caught.value).endswith(f"failed at try 1: HTTP {code}")
        assert caught.value.cause is cause
    assert len(api.bodies) == 1


async def test_what_an_api_writes_into_its_errors_is_in_the_log_alone() -> None:
    bad = (status(401, "canary \x1b[2J"), status(422, "canary \x1b[2J"), status(200, "<p>canary \x1b[2J"))
    async with remote(*bad).against(credentials=Credentials("secret")) as backend:
        for _ in range(3):
            with capture_logs() as logged, pytest.raises(BackendError) as caught:
                await backend.run(batch("a"), LONG)
            assert "canary" not in str(caught.value)
            assert "canary" not in caught.value.shown
            [line] = logged
            assert "canary \\x1b[2J" in line["body"]
            assert "secret" not in f"{caught.value} {logged}"


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
    async with remote(well).against() as backend:
        assert backend._connections.current is not None
        await backend._connections.current.content.session.close()
        with pytest.raises(RemoteError, match="failed at try 1: RuntimeError: Session is closed"):
            await backend.run(batch("a"), LONG)


async def test_slots_that_share_a_breaker_rest_together() -> None:
    breaker, now = Breaker(5, 0.5), 100.0
    api = remote(status(429, Retry_After="90"), status(503))
    async with api.against(breaker=breaker, clock=lambda: now) as backend:
        with pytest.raises(RemoteError):
            await backend.run(batch("a"), LONG)
        assert breaker.rest_left(now) == 90.0
        with pytest.raises(RemoteError, match=r"failed at try 1: HTTP 503$"):
            await backend.run(batch("a"), LONG)
    assert len(api.bodies) == 2


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"x-should-retry": "false"}, "failed at try 1: HTTP 429$"),
        ({"Retry-After": "90"}, "failed at try 1: HTTP 429; it asks for 90 s of rest"),
        ({"Retry-After": formatdate(NOW + 90, usegmt=True)}, "failed at try 1: HTTP 429; it asks for 90 s of rest"),
        ({"retry-after-ms": "90500", "Retry-After": "1"}, "it asks for 90.5 s of rest"),
        ({"retry-after-ms": "soon", "Retry-After": "91"}, "it asks for 91 s of rest"),
    ],
)
async def test_a_rest_longer_than_the_timeout_is_not_waited_for(fields: dict[str, str], what: str) -> None:
    api = remote(status(429, "busy", **fields))
    async with api.against() as backend:
        with pytest.raises(RemoteError, match=what):
            await backend.run(batch("a"), LONG)
    assert len(api.bodies) == 1


async def test_a_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with remote(status(503, Retry_After="3"), status(503), well).against(clock=lambda: sum(slept)) as backend:
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


@pytest.mark.parametrize("compressed", [False, True])
async def test_an_answer_is_bounded_by_what_it_unfolds_to(compressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.backends.remote.backend.MAX_ANSWER", 100_000)

    def bomb() -> web.Response:
        response = web.json_response(["x" * 4_000_000])
        if compressed:
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async with remote(bomb).against() as backend:
        with pytest.raises(BadOutput, match="answered more than 100000 bytes"):
            await backend.run(batch("a"), LONG)


@asynccontextmanager
async def against_raw(say: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[HttpBackend]:
    """Yield a backend whose requests are answered by `say`, each on a new connection."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'["a"]')
        await say(writer)

    async with served_raw(talk) as url:
        backend = HttpBackend(RemoteTarget(url), start_timeout=LONG, rng=lambda: 0.0)
        backend._connections.open()
        yield backend
        await backend.stop()


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
    tries: list[bytes] = []

    async def say(writer: asyncio.StreamWriter) -> None:
        tries.append(said)
        writer.write(said)
        await writer.drain()

    async with against_raw(say) as backend:
        with pytest.raises(RemoteError, match=f"failed at try 3: {what}") as caught:
            await backend.run(batch("a"), LONG)
        assert not isinstance(caught.value, RemoteAbsent)
    assert len(tries) == 3


async def test_an_answer_that_trickles_is_cut_off_at_the_timeout() -> None:
    async def say(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n[")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with against_raw(say) as backend:
        with pytest.raises(BatchTimeout, match=r"no complete answer within 0\.15 s"):
            await backend.run(batch("a"), SHORT)


@pytest.mark.parametrize(
    ("answer", "what", "mend"),
    [
        (status(404, "nothing here"), "failed at try 1: HTTP 404", "check "),
        (status(200, '{"label": "x"}'), "neither a list nor an object", "--remote-format"),
        (status(200, "[null]"), "answered null for this input", "--remote-format"),
        (status(400, '{"detail": "field `inputs`"}'), "HTTP 400", "its answer mentions what --remote-format inputs"),
    ],
)
async def test_a_target_that_fails_its_warm_up_is_refused(answer: Answer, what: str, mend: str) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return answer() or web.Response()

    async with served(handle) as url:
        backend = HttpBackend(RemoteTarget(url), start_timeout=LONG)
        with pytest.raises(TargetError, match=what) as caught:
            await backend.start()
        with pytest.raises(RemoteError, match="was not started"):
            await backend.run(batch("a"), LONG)
        assert str(caught.value).startswith(f"target {url}: the warm-up batch ['warm-up'] failed: ")
        assert mend in str(caught.value).replace("Check ", "check ")
