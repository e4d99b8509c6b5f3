"""Every dialect against servers that go wrong in all ways; and what goes over the wire besides the batch."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from headway.backends.http.backend import HttpBackend
from headway.backends.remote.credentials import Credentials
from headway.config.target import RemoteTarget
from headway.dialects.table import reach
from headway.errors import BadOutput, RemoteAbsent, RemoteError, RemoteRefused, SettingError, TargetError
from headway.model import ItemResult
from tests.backends.entries import batch
from tests.backends.remote import served
from tests.backends.speakers import SPEAKERS, Speaker

LONG = 30.0


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

    @asynccontextmanager
    async def against(self, **settings: Any) -> AsyncIterator[HttpBackend]:
        given: dict[str, Any] = {"start_timeout": LONG, "rng": lambda: 0.0, **settings}
        async with served(self.handle, self.speaker.path) as url:
            backend = HttpBackend(RemoteTarget(url), remote=self.speaker.remote(url), **given)
            try:
                await backend.start()
                yield backend
            finally:
                await backend.stop()


@pytest.fixture(params=SPEAKERS)
def speaker(request: pytest.FixtureRequest) -> Speaker:
    return SPEAKERS[request.param]


def only_wrong(answer: Callable[[], web.StreamResponse]) -> Callable[[Any, list[str]], web.StreamResponse | None]:
    return lambda _, inputs: answer() if "wrong" in inputs else None


async def test_an_answer_of_another_shape_fails_its_batch_alone(speaker: Speaker) -> None:
    answer, what = speaker.wrong[0]
    async with Api(speaker, only_wrong(lambda: speaker.response(answer))).against() as backend:
        with pytest.raises(BadOutput, match=what):
            await backend.run(batch("a", "wrong"), LONG)
        assert len(await backend.run(batch("b"), LONG)) == 1


async def test_a_refusal_means_the_same_in_each_dialect(speaker: Speaker) -> None:
    async with Api(speaker, only_wrong(lambda: web.Response(status=400, text="no"))).against() as backend:
        with pytest.raises(RemoteRefused, match="failed at try 1: HTTP 400"):
            await backend.run(batch("a", "wrong"), LONG)


async def test_an_api_that_nobody_serves_was_sent_nothing() -> None:
    api = Api(SPEAKERS["list"])
    async with api.against() as backend:
        pass
    backend._connections.open()
    try:
        with pytest.raises(RemoteAbsent, match="failed at try 3: ClientConnectorError"):
            await backend.run(batch("a"), LONG)
    finally:
        await backend.stop()


async def test_a_connection_that_does_not_come_about_in_time_was_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(*_: Any, **__: Any) -> None:
        raise aiohttp.ConnectionTimeoutError

    async with Api(SPEAKERS["list"]).against() as backend:
        monkeypatch.setattr(backend._connections, "request", late)
        with pytest.raises(RemoteAbsent, match="failed at try 3: ConnectionTimeoutError"):
            await backend.run(batch("a"), LONG)


@pytest.mark.parametrize("name", ["oip", "openai-completions", "openai-embeddings"])
async def test_inputs_with_other_parameters_go_in_a_request_of_their_own(name: str) -> None:
    api = Api(SPEAKERS[name])
    async with api.against() as backend:
        parameters = [b'{"k":1}', b"", b'{"k":1}', b'{"k":2}']
        items = await backend.run(batch("a", "b", "c", "d", parameters=parameters), LONG)
        assert [item.output for item in items] == [
            item.output for item in await backend.run(batch("a", "b", "c", "d"), LONG)
        ]
    sent = [(api.speaker.inputs(body), body.get("k")) for body in api.bodies]
    assert sorted(sent[:3], key=str) == [(["a", "c"], 1), (["b"], None), (["d"], 2)]
    assert sent[3:] == [(["a", "b", "c", "d"], None)]


async def test_a_lone_input_whose_parameters_are_refused_fails_alone() -> None:
    def say(_: Any, inputs: list[str]) -> web.Response | None:
        return web.Response(status=400) if inputs == ["wrong"] else None

    async with Api(SPEAKERS["openai-completions"], say).against() as backend:
        a, wrong, b = await backend.run(batch("a", "wrong", "b", parameters=[b"", b'{"k":2}', b""]), LONG)
        assert (a, b) == (ItemResult("A"), ItemResult("B"))
        assert wrong == ItemResult(None, "the remote API failed at try 1: HTTP 400")


async def test_a_batch_of_which_a_part_fails_otherwise_fails_whole() -> None:
    async with Api(SPEAKERS["openai-completions"], only_wrong(lambda: web.Response(status=401))).against() as backend:
        with pytest.raises(RemoteError, match="HTTP 401"):
            await backend.run(batch("a", "wrong", parameters=[b"", b'{"k":2}']), LONG)


async def test_the_time_that_is_left_goes_with_every_request(speaker: Speaker) -> None:
    api = Api(speaker)
    async with api.against() as backend:
        await backend.run(batch("a"), 2.5)
    assert 0 < int(api.headers[-1]["X-Request-Timeout-Ms"]) <= 2500
    assert 2500 < int(api.headers[0]["X-Request-Timeout-Ms"]) <= LONG * 1000


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
        assert "has no header field in line 1" in str(logged)
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
        ("X-A: 1\nx-a: canary", "twice, again in line 2"),
        ("Content-Length: 5", "sets content-length in line 1, which Headway sets"),
        ("Authorization: canary", "remote_token sets, too"),
        ("X-A: \udcff", "not UTF-8"),
    ],
)
def test_a_file_without_header_fields_is_refused_without_quoting_it(tmp_path: Path, text: str, what: str) -> None:
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


@pytest.mark.processes
async def test_large_answers_are_read_in_a_process_apart(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.backends.remote.reader.APART_FROM", 0)
    async with Api(speaker).against() as backend:
        apart = await backend.run(batch("a", "bb"), LONG)
        monkeypatch.undo()
        assert apart == await backend.run(batch("a", "bb"), LONG)


@pytest.mark.parametrize(
    ("path", "name", "models", "listed"),
    [
        ("/v1/completions", "openai-completions", "/v1/models", {"data": [{"id": "upper"}, {"id": "lower"}]}),
        ("/v1/embeddings", "openai-embeddings", "/v1/models", {"data": [{"id": "upper"}, {"id": "lower"}]}),
        ("", "oip", "/v2/repository/index", [{"name": "upper"}, {"name": "lower"}]),
    ],
)
@pytest.mark.parametrize("model", ["other", "upper"])
def test_a_start_without_its_model_names_the_others(path: str, name: str, models: str, listed: Any, model: str) -> None:
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
