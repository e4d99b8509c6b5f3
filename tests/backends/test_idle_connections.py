"""Idle connections that we or the API closed: the next batch immediately opens a new one, and is sent once as one try.
Runs on asyncio's event loop, and on uvloop's as in production."""

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from aiohttp import web

from headway.backends.grpc import IDLE as IDLE_CHANNEL
from headway.backends.grpc import GrpcBackend
from headway.backends.http import IDLE, HttpBackend, Sockets
from headway.config.target import RemoteTarget
from headway.model import ItemResult
from headway.runtime.certificates import RemoteCertificates
from headway.runtime.counters import TlsCounts
from tests.authority import Authority
from tests.backends.entries import batch
from tests.backends.grpc_remote import answer, served_grpc, server_credentials, texts_of
from tests.backends.remote import served
from tests.servers.proxy import ChaosProxy

LONG = 20.0
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=list(LOOPS))
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as made:
        yield made


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many sockets are still open after each `Sockets.end`. There should be none."""
    found: list[int] = []
    end = Sockets.end

    async def checked(sockets: Sockets) -> None:
        await end(sockets)
        found.append(len(sockets._open))

    monkeypatch.setattr(Sockets, "end", checked)
    return found


class Api:
    """A remote API over HTTP that records its inputs and connections."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.connections: list[asyncio.Transport] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        if request.transport not in self.connections:
            self.connections.append(request.transport)
        texts = await request.json()
        self.asked += texts
        return web.json_response([text.upper() for text in texts])


def of_client(authority: Authority) -> dict[str, Any]:
    """Return the setting for the certificates that a backend trusts and presents."""
    certificate, key = authority.issue("client")
    return {"certificates": RemoteCertificates(str(authority.file), str(certificate), str(key), TlsCounts())}


@pytest.fixture(params=["http", "https with certificates"])
def secured(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ssl.SSLContext | None, dict[str, Any]]:
    if request.param == "http":
        return None, {}
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.file))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(*authority.issue("api"))
    return context, of_client(authority)


Secured = tuple[ssl.SSLContext | None, dict[str, Any]]


async def runs(backend: HttpBackend | GrpcBackend, text: str) -> None:
    assert await backend.run(batch(text), LONG) == [ItemResult(text.upper())]


@pytest.mark.parametrize("closed_by", ["us", "the API"])
def test_an_idle_connection_over_http_costs_neither_a_try_nor_a_pause(
    runner: asyncio.Runner, secured: Secured, closed_by: str, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, forget = asyncio.Event(), Sockets._forget

    def told(sockets: Sockets, one: Any) -> None:
        forget(sockets, one)
        heard.set()

    monkeypatch.setattr(Sockets, "_forget", told)

    async def main() -> None:
        api = Api()
        async with served(api.handle, tls=secured[0]) as url:
            backend = HttpBackend(RemoteTarget(url), start_timeout=LONG, max_tries=1, **secured[1])
            now = asyncio.get_running_loop().time()
            monkeypatch.setattr(backend._connections, "_clock", lambda: now)
            await backend.start()
            await runs(backend, "a")
            assert len(api.connections) == 1
            if closed_by == "us":
                now += IDLE + 0.1
            else:
                heard.clear()
                api.connections[0].close()
                async with asyncio.timeout(LONG):
                    await heard.wait()
            await runs(backend, "b")
            await backend.stop()
        assert api.asked == ["warm-up", "a", "b"]
        assert len(api.connections) == 2

    runner.run(main())
    assert ended == ([0, 0] if closed_by == "us" else [0])


@pytest.mark.parametrize("closed_by", ["us", "the API"])
@pytest.mark.parametrize("tls", [False, True], ids=["grpc", "grpcs with certificates"])
def test_an_idle_channel_costs_no_try(
    runner: asyncio.Runner, tmp_path: Path, tls: bool, closed_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], str]] = []

    async def handle(request: Any, context: Any) -> bytes:
        asked.append((texts_of(request), context.peer()))
        return answer([text.upper() for text in texts_of(request)])

    async def main(credentials: Any, settings: dict[str, Any]) -> None:
        now = 100.0
        async with served_grpc(handle, tls=credentials) as url:
            with ChaosProxy(int(url.rpartition(":")[2].partition("/")[0])) as proxy:
                there = f"{url.partition('//')[0]}//127.0.0.1:{proxy.port}/m"
                backend = GrpcBackend(RemoteTarget(there), start_timeout=LONG, max_tries=1, now=lambda: now, **settings)
                await backend.start()
                await runs(backend, "a")
                if closed_by == "us":
                    now += IDLE_CHANNEL + 0.1
                else:
                    assert backend._channels.current is not None
                    channel = backend._channels.current.content
                    proxy.cut()
                    async with asyncio.timeout(LONG):
                        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
                await runs(backend, "b")
                await backend.stop()

    credentials, settings = None, dict[str, Any]()
    if tls:
        authority = Authority(tmp_path)
        credentials = server_credentials(authority)
        settings = of_client(authority)
    runner.run(main(credentials, settings))
    assert [texts for texts, _ in asked] == [["warm-up"], ["a"], ["b"]]
    assert asked[0][1] == asked[1][1] != asked[2][1]
