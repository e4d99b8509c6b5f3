"""Every dialect against servers that go wrong in all ways; and what goes over the wire besides the batch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from headway.backends.http.backend import HttpBackend
from headway.backends.remote.credentials import Credentials
from headway.config.target import RemoteTarget
from headway.dialects import reach
from headway.errors import (
    BackendError,
    BadOutput,
    BatchTimeout,
    RemoteAbsent,
    RemoteError,
    RemoteRefused,
    SettingError,
    TargetError,
)
from headway.model import ItemResult
from tests.backends.entries import batch
from tests.backends.remote import served, served_raw
from tests.backends.speakers import SPEAKERS, Speaker
from tests.backends.test_http import request

LONG = 30.0
SHORT = 0.2

Act = Callable[[HttpBackend], Awaitable[None]]


class Api:
    """Remote API of a dialect. It answers the warm-up well, and then each request as its `say` does."""

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

    def against(self, act: Act, **settings: Any) -> None:
        """Run `act` on a backend started on this API."""

        async def main() -> None:
            async with served(self.handle, self.speaker.path) as url:
                await with_backend(self.speaker, url, act, **settings)

        asyncio.run(main())


async def with_backend(speaker: Speaker, url: str, act: Act, **settings: Any) -> None:
    given: dict[str, Any] = {"start_timeout": LONG, "rng": lambda: 0.0, **settings}
    backend = HttpBackend(RemoteTarget(url), remote=speaker.remote(url), **given)
    try:
        await backend.start()
        await act(backend)
    finally:
        await backend.stop()


@pytest.fixture(params=SPEAKERS)
def speaker(request: pytest.FixtureRequest) -> Speaker:
    return SPEAKERS[request.param]


def raises(kind: type[BackendError], what: str, *, timeout: float = LONG, then: str = "b") -> Act:
    """Run a batch that fails so, and one that is answered."""

    async def act(backend: HttpBackend) -> None:
        with pytest.raises(kind, match=what):
            await backend.run(batch("a", "wrong"), timeout)
        if then:
            [item] = await backend.run(batch(then), LONG)
            assert item.output

    return act


def only_wrong(answer: Callable[[], web.StreamResponse]) -> Callable[[Any, list[str]], web.StreamResponse | None]:
    return lambda _, inputs: answer() if "wrong" in inputs else None


def test_every_answer_of_another_shape_fails_the_batch(speaker: Speaker) -> None:
    answers = iter(speaker.wrong)

    async def act(backend: HttpBackend) -> None:
        for _, what in speaker.wrong:
            with pytest.raises(BadOutput, match=what):
                await backend.run(batch("a", "wrong"), LONG)
        assert len(await backend.run(batch("b"), LONG)) == 1

    api = Api(speaker, only_wrong(lambda: speaker.response(next(answers)[0])))
    api.against(act)
    assert len(api.bodies) == len(speaker.wrong) + 1


@pytest.mark.parametrize(
    ("status", "headers", "kind", "what"),
    [
        (401, {}, RemoteError, "failed at try 1: HTTP 401"),
        (307, {"Location": "/elsewhere"}, RemoteError, "failed at try 1: HTTP 307"),
        (400, {}, RemoteRefused, "failed at try 1: HTTP 400"),
        (503, {}, RemoteError, "failed at try 3: HTTP 503"),
        (503, {"x-should-retry": "false"}, RemoteError, "failed at try 1: HTTP 503"),
        (429, {"Retry-After": "90"}, RemoteError, "failed at try 1: HTTP 429; it asks for 90 s of rest"),
        (503, {"retry-after-ms": "90500"}, RemoteError, "failed at try 1: HTTP 503; it asks for 90.5 s of rest"),
        (503, {"retry-after-ms": "90500", "Retry-After": "1"}, RemoteError, "it asks for 90.5 s of rest"),
        (503, {"retry-after-ms": "soon", "Retry-After": "91"}, RemoteError, "it asks for 91 s of rest"),
    ],
)
def test_every_status_means_the_same_in_each_dialect(
    speaker: Speaker, status: int, headers: dict[str, str], kind: type[BackendError], what: str
) -> None:
    api = Api(speaker, only_wrong(lambda: web.Response(status=status, headers=headers, text="no")))
    api.against(raises(kind, what, then=""))


def test_a_hang_ends_at_the_timeout_in_each_dialect(speaker: Speaker) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        inputs = speaker.inputs(speaker.read(await request.read()))
        if "wrong" in inputs:
            await asyncio.Event().wait()
        return Api(speaker).well(inputs)

    async def main() -> None:
        async with served(handle, speaker.path) as url:
            await with_backend(speaker, url, raises(BatchTimeout, r"within 0\.2 s", timeout=SHORT))

    asyncio.run(main())


def test_a_body_that_is_too_long_is_not_read_to_its_end(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.backends.remote.backend.MAX_ANSWER", 10_000)
    api = Api(speaker, only_wrong(lambda: speaker.response(speaker.answer(["x" * 20_000] * 2))))
    api.against(raises(BadOutput, "answered more than 10000 bytes"))


@pytest.mark.parametrize("said", ["nothing", "head", "half"])
def test_a_hang_up_on_the_way_is_a_run_that_failed(speaker: Speaker, said: str) -> None:
    """Bytes have been sent, so that nobody knows whether the batch ran."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inputs = speaker.inputs(speaker.read(await request(reader)))
        body, fields = speaker.write(speaker.answer([speaker.gives(text) for text in inputs]))
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()
        answer = b"HTTP/1.1 200 OK\r\n%bConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
        if "wrong" in inputs:
            answer = {"nothing": b"", "head": answer[:30], "half": answer[: -len(body) // 2]}[said]
        writer.write(answer)
        await writer.drain()

    async def main() -> None:
        async with served_raw(talk, speaker.path) as url:
            await with_backend(speaker, url, check)

    async def check(backend: HttpBackend) -> None:
        with pytest.raises(RemoteError, match="failed at try 3") as caught:
            await backend.run(batch("a", "wrong"), LONG)
        assert not isinstance(caught.value, RemoteAbsent)
        assert len(await backend.run(batch("b"), LONG)) == 1

    asyncio.run(main())


def test_an_api_that_nobody_serves_was_sent_nothing(speaker: Speaker) -> None:
    async def main() -> None:
        async with served(Api(speaker).handle, speaker.path) as url:
            backend = HttpBackend(RemoteTarget(url), remote=speaker.remote(url), start_timeout=LONG, rng=lambda: 0.0)
            await backend.start()
            await backend.stop()
        backend._connections.open()
        try:
            with pytest.raises(RemoteAbsent, match="failed at try 3: ClientConnectorError"):
                await backend.run(batch("a"), LONG)
        finally:
            await backend.stop()

    asyncio.run(main())


def test_a_connection_that_does_not_come_about_in_time_was_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(*_: Any, **__: Any) -> None:
        raise aiohttp.ConnectionTimeoutError

    async def act(backend: HttpBackend) -> None:
        monkeypatch.setattr(backend._connections, "request", late)
        with pytest.raises(RemoteAbsent, match="failed at try 3: ConnectionTimeoutError"):
            await backend.run(batch("a"), LONG)

    Api(SPEAKERS["list"]).against(act)


@pytest.mark.parametrize("name", ["oip", "openai-completions", "openai-embeddings"])
def test_inputs_with_other_parameters_go_in_a_request_of_their_own(name: str) -> None:
    async def act(backend: HttpBackend) -> None:
        parameters = [b'{"k":1}', b"", b'{"k":1}', b'{"k":2}']
        items = await backend.run(batch("a", "b", "c", "d", parameters=parameters), LONG)
        assert [item.output for item in items] == [
            item.output for item in await backend.run(batch("a", "b", "c", "d"), LONG)
        ]

    api = Api(SPEAKERS[name])
    api.against(act)
    sent = [(api.speaker.inputs(body), body.get("k")) for body in api.bodies]
    assert sorted(sent[:3], key=str) == [(["a", "c"], 1), (["b"], None), (["d"], 2)]
    assert sent[3:] == [(["a", "b", "c", "d"], None)]


def test_a_lone_input_whose_parameters_are_refused_fails_alone() -> None:
    def say(_: Any, inputs: list[str]) -> web.Response | None:
        return web.Response(status=400) if inputs == ["wrong"] else None

    async def act(backend: HttpBackend) -> None:
        a, wrong, b = await backend.run(batch("a", "wrong", "b", parameters=[b"", b'{"k":2}', b""]), LONG)
        assert (a, b) == (ItemResult("A"), ItemResult("B"))
        assert wrong == ItemResult(None, "the remote API failed at try 1: HTTP 400")

    Api(SPEAKERS["openai-completions"], say).against(act)


def test_a_batch_of_which_a_part_fails_otherwise_fails_whole() -> None:
    async def act(backend: HttpBackend) -> None:
        with pytest.raises(RemoteError, match="HTTP 401"):
            await backend.run(batch("a", "wrong", parameters=[b"", b'{"k":2}']), LONG)

    Api(SPEAKERS["openai-completions"], only_wrong(lambda: web.Response(status=401))).against(act)


def test_the_time_that_is_left_goes_with_every_request(speaker: Speaker) -> None:
    async def act(backend: HttpBackend) -> None:
        await backend.run(batch("a"), 2.5)

    api = Api(speaker)
    api.against(act)
    assert 0 < int(api.headers[-1]["X-Request-Timeout-Ms"]) <= 2500
    assert 2500 < int(api.headers[0]["X-Request-Timeout-Ms"]) <= LONG * 1000


def test_header_fields_of_the_settings_and_the_file_go_with_every_request(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("# for the API\nX-Team: blue \n\nAuthorization: Bearer canary-1\n")

    async def act(backend: HttpBackend) -> None:
        file.write_text("Authorization: Bearer canary-22\n")
        await backend.run(batch("a"), LONG)
        file.write_text("no field\ncanary-333")
        with capture_logs() as logged:
            await backend.run(batch("a"), LONG)
            await backend.run(batch("a"), LONG)
        assert len(logged) == 1
        assert "canary" not in str(logged)
        assert "has no header field in line 1" in str(logged)
        file.unlink()
        await backend.run(batch("a"), LONG)

    api = Api(SPEAKERS["list"])
    api.against(act, credentials=Credentials(fields="X-Other: yes", file=str(file)))
    assert [headers["Authorization"] for headers in api.headers] == ["Bearer canary-1", *["Bearer canary-22"] * 4]
    assert api.headers[0]["X-Team"] == "blue"
    assert all(headers["X-Other"] == "yes" for headers in api.headers)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("Bearer canary", "line 1"),
        ("X-A: 1\nX A: canary", "line 2"),
        ("X-A:", "line 1"),
        ("X-A: b\x00canary", "line 1"),
        ("X-A: 1\nx-a: canary", "twice, again in line 2"),
        ("Content-Length: 5", "sets content-length in line 1, which Headway sets"),
        ("Authorization: canary", "remote_token sets, too"),
        ("X-A: \udcff", "not UTF-8"),
    ],
)
def test_a_file_that_is_none_of_header_fields_is_refused_without_quoting_it(
    tmp_path: Path, text: str, what: str
) -> None:
    file = tmp_path / "headers"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingError, match=what) as caught:
        Credentials("token", file=str(file))
    assert "canary" not in str(caught.value)


def test_a_file_of_header_fields_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read: No such file"):
        Credentials(file=str(tmp_path / "headers"))


def test_credentials_are_in_no_error_and_no_line_of_the_log() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/batch"
        backend = HttpBackend(
            RemoteTarget(url), credentials=Credentials("127.0.0.1"), start_timeout=LONG, rng=lambda: 0.0
        )

        async def main() -> None:
            backend._connections.open()
            try:
                with capture_logs() as logged, pytest.raises(RemoteAbsent) as caught:
                    await backend.run(batch("a"), LONG)
            finally:
                await backend.stop()
            assert str(caught.value) == f"the remote API {url} failed at try 3: ClientConnectorError"
            assert not logged

        asyncio.run(main())


@pytest.mark.parametrize(("keep_alive", "fresh"), [("", 3.0), ("timeout=5, max=100", 3.0), ("timeout=2", 0.5)])
def test_an_idle_connection_is_given_up_before_the_api_does(keep_alive: str, fresh: float) -> None:
    now = 100.0
    peers: list[Any] = []

    def say(request: web.Request, inputs: list[str]) -> web.Response:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        answer = web.json_response([text.upper() for text in inputs])
        answer.headers["Keep-Alive"] = keep_alive
        return answer

    async def act(backend: HttpBackend) -> None:
        nonlocal now
        backend._connections._clock = lambda: now
        backend._connections._used_at = now
        for idle in (0.0, fresh, 4.5):
            now += idle
            await backend.run(batch("a"), LONG)

    Api(SPEAKERS["list"], say).against(act)
    assert peers[0] == peers[1] != peers[2]


@pytest.mark.processes
def test_a_large_answer_of_each_dialect_is_read_in_a_process_of_its_own(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.backends.remote.reader.APART_FROM", 0)

    async def act(backend: HttpBackend) -> None:
        apart = await backend.run(batch("a", "bb"), LONG)
        monkeypatch.undo()
        assert apart == await backend.run(batch("a", "bb"), LONG)

    Api(speaker).against(act)


@pytest.mark.parametrize(
    ("path", "name", "models", "listed"),
    [
        ("/v1/completions", "openai-completions", "/v1/models", {"data": [{"id": "upper"}, {"id": "lower"}]}),
        ("/v1/embeddings", "openai-embeddings", "/v1/models", {"data": [{"id": "upper"}, {"id": "lower"}]}),
        ("", "oip", "/v2/repository/index", [{"name": "upper"}, {"name": "lower"}]),
    ],
)
@pytest.mark.parametrize("model", ["other", "upper"])
def test_a_start_names_the_models_that_the_api_has_where_it_lacks_the_one(
    path: str, name: str, models: str, listed: Any, model: str
) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(listed) if request.path == models else web.Response(status=404)

    async def main() -> str:
        async with served(handle, "/{any:.*}") as url:
            url = url.replace("/{any:.*}", path)
            remote = reach(url, name, model)
            with pytest.raises(TargetError, match="HTTP 404") as caught:
                await HttpBackend(RemoteTarget(url), remote=remote, start_timeout=LONG).start()
            return str(caught.value)

    found = asyncio.run(main())
    assert ("It has no model `other`; it says that it has `upper`, `lower`." in found) == (model == "other")
