"""TLS towards a remote API: who is trusted and refused, what is said of it, and certificates that change under load."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web
from aiohttp.connector import AddrInfoType

from headway.backends.http.backend import HttpBackend
from headway.backends.http.connections import Sockets, tls_error
from headway.backends.remote.tls_failures import explain, explain_answer
from headway.config.target import RemoteTarget
from headway.errors import RemoteAbsent, TargetError
from headway.runtime.certificates import Certificates, RemoteCertificates
from headway.runtime.counters import TlsCounts
from headway.runtime.tls_transport import TlsPort
from tests.authority import Authority
from tests.backends.entries import batch

LONG = 30.0


class Api:
    """API that asks for a certificate of its authority, and notes the serial numbers; `held` is released by each request that
    waits for `hold`."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.serials: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.held = asyncio.Semaphore(0)
        certificate, key = self.authority.issue("api")
        self._certificates = Certificates(str(certificate), str(key), str(self.authority.file), TlsCounts())

    @contextlib.asynccontextmanager
    async def served(self, host: str = "127.0.0.1") -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/batch", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        loop = asyncio.get_running_loop()
        tls = TlsPort(self._certificates, "http/1.1", "public", loop)
        assert runner.server is not None
        server = await loop.create_server(tls.around(runner.server, lambda _: None), host, 0)
        try:
            yield f"https://{host}:{server.sockets[0].getsockname()[1]}/batch"
        finally:
            server.close()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.serials.append(request.transport.get_extra_info("ssl_object").getpeercert()["serialNumber"])
        self.held.release()
        texts = await request.json()
        await self.hold.wait()
        return web.json_response([text.upper() for text in texts])


def backend_for(
    url: str, ca: object, shown: tuple[object, object] = ("", "")
) -> tuple[HttpBackend, RemoteCertificates]:
    certificates = RemoteCertificates(str(ca), str(shown[0]), str(shown[1]), TlsCounts())
    made = HttpBackend(RemoteTarget(url), certificates=certificates, start_timeout=LONG, max_tries=2, rng=lambda: 0.0)
    return made, certificates


Shown = Callable[[Authority, Authority], tuple[Path, tuple[Any, Any]]]


@pytest.mark.parametrize(
    ("host", "told", "shown"),
    [
        ("127.0.0.1", "it asks for a certificate. Name one with remote_cert", lambda by, other: (by.file, ("", ""))),
        ("127.0.0.1", "it refuses the certificate of remote_cert", lambda by, other: (by.file, other.issue("stranger"))),
        ("127.0.0.1", "it refuses the certificate of remote_cert", lambda by, other: (by.file, by.issue("old", days=-1))),
        ("127.0.0.1", "Name the authority that issued it with remote_ca", lambda by, other: (other.file, by.issue("client"))),
        ("127.0.0.2", "its certificate is of another host", lambda by, other: (by.file, by.issue("client"))),
    ],
    ids=["none shown", "of a stranger", "ended", "not trusted", "another host"],
)  # fmt: skip
async def test_a_start_says_which_certificate_will_not_do(tmp_path: Path, host: str, told: str, shown: Shown) -> None:
    api = Api(tmp_path)
    async with api.served(host) as url:
        backend, _ = backend_for(url, *shown(api.authority, Authority(tmp_path, "other")))
        with pytest.raises(TargetError, match=r"failed at try 2") as raised:
            await backend.start()
    assert told in str(raised.value)
    assert f"https://{host}" in str(raised.value)
    assert not api.serials


async def test_a_certificate_that_has_become_bad_counts_as_no_run_and_blames_no_input(tmp_path: Path) -> None:
    api, other = Api(tmp_path), Authority(tmp_path, "other")
    certificate, key = api.authority.issue("client")
    async with api.served() as url:
        backend, certificates = backend_for(url, api.authority.file, (certificate, key))
        await backend.start()
        for path, new in zip((certificate, key), other.issue("stranger"), strict=True):
            path.write_bytes(new.read_bytes())
        await certificates.reread()
        with pytest.raises(RemoteAbsent, match="it refuses the certificate of remote_cert") as raised:
            await backend.run(batch("a"), LONG)
        assert raised.value.shown.endswith("the TLS handshake failed")
        api.authority.issue("client")
        await certificates.reread()
        assert [item.output for item in await backend.run(batch("a"), LONG)] == ["A"]
        await backend.stop()


async def test_certificates_change_under_load_without_a_failed_request(tmp_path: Path) -> None:
    api = Api(tmp_path)
    shown = api.authority.issue("client")
    async with api.served() as url:
        slots = []
        _, certificates = backend_for(url, api.authority.file, shown)
        for _ in range(2):
            slot = HttpBackend(RemoteTarget(url), certificates=certificates, start_timeout=LONG, max_tries=1)
            await slot.start()
            slots.append(slot)
        stop = asyncio.Event()

        async def ask_on(slot: HttpBackend) -> int:
            count = 0
            while not stop.is_set():
                items = await slot.run(batch("a", "b"), LONG)
                assert [item.output for item in items] == ["A", "B"]
                count += 1
            return count

        load = [asyncio.create_task(ask_on(slot)) for slot in slots]
        for number in range(1, 3):
            api.authority.issue("client")  # The certificate first, then its key: for a moment they do not fit.
            for _ in range(2):
                await certificates.look()
            while len(set(api.serials)) <= number:
                await api.held.acquire()
        stop.set()
        assert all(await asyncio.gather(*load))
        assert len(set(api.serials)) == 3
        for slot in slots:
            await slot.stop()


async def test_a_request_under_way_ends_on_the_former_connections_and_they_are_closed_then(tmp_path: Path) -> None:
    api = Api(tmp_path)
    async with api.served() as url:
        backend, certificates = backend_for(url, api.authority.file, api.authority.issue("client"))
        await backend.start()
        connections = backend._connections
        former = connections.current
        assert former is not None
        await api.held.acquire()
        api.hold.clear()
        first = asyncio.create_task(backend.run(batch("a"), LONG))
        await api.held.acquire()
        api.authority.issue("client")
        await certificates.reread()
        second = asyncio.create_task(backend.run(batch("b"), LONG))
        await api.held.acquire()
        assert connections.retired == [former]
        closed = [former.content.session.closed]
        api.hold.set()
        assert [(await one)[0].output for one in (first, second)] == ["A", "B"]
        assert [*closed, former.content.session.closed] == [False, True]
        assert not connections.retired
        assert len(set(api.serials)) == 2
        await backend.stop()


async def test_a_stop_closes_former_connections_too(tmp_path: Path) -> None:
    api = Api(tmp_path)
    async with api.served() as url:
        backend, certificates = backend_for(url, api.authority.file, api.authority.issue("client"))
        await backend.start()
        former = backend._connections.current
        assert former is not None
        await api.held.acquire()
        api.hold.clear()
        running = [asyncio.create_task(backend.run(batch("a"), LONG))]
        await api.held.acquire()
        await certificates.reread()
        running.append(asyncio.create_task(backend.run(batch("b"), LONG)))
        await api.held.acquire()
        for one in running:
            one.cancel()
        await backend.stop()
        await asyncio.gather(*running, return_exceptions=True)
        assert former.content.session.closed
        api.hold.set()


# What is said without TLS, and by proxies.

_NGINX = "<html>\r\n<head><title>400 {0}</title></head>\r\n<body>\r\n<center><h1>400 Bad Request</h1></center>\r\n"


@pytest.mark.parametrize(
    ("title", "told"),
    [
        ("No required SSL certificate was sent", "Name one with remote_cert"),
        ("The SSL certificate error", "it refuses the certificate of remote_cert"),
        ("The plain HTTP request was sent to HTTPS port", "Write https://"),
    ],
)
async def test_an_answer_in_which_a_proxy_refuses_a_certificate_blames_no_input(title: str, told: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = _NGINX.format(title).encode()
        writer.write(
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    backend = HttpBackend(RemoteTarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), start_timeout=LONG)
    backend._connections.open()
    with pytest.raises(RemoteAbsent, match=told):
        await backend.run(batch("a"), LONG)
    await backend.stop()
    server.close()


def test_another_400_blames_the_input() -> None:
    assert explain_answer(400, b"<title>400 Bad Request</title>") == ""
    assert explain_answer(500, _NGINX.format("The SSL certificate error").encode()) == ""


async def test_an_api_without_tls_is_told_from_one_that_is_not_trusted() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/batch"
    backend = HttpBackend(RemoteTarget(url), start_timeout=LONG, max_tries=1)
    with pytest.raises(TargetError, match=r"it does not speak TLS on this port\. Write http://"):
        await backend.start()
    server.close()


def test_other_errors_are_not_of_tls() -> None:
    assert tls_error(ConnectionResetError()) is None
    assert "cipher" in explain(ssl.SSLError(1, "[SSL: NO_SHARED_CIPHER] no shared cipher"))


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_backend_that_stops_waits_for_connections_that_had_failed(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API answers nonsense, and never says that it ends the connection too."""
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("api"))
    made, kept, create = list[socket.socket](), list[ssl.SSLSocket](), Sockets.create

    def created(sockets: Sockets, address: AddrInfoType) -> socket.socket:
        made.append(create(sockets, address))
        return made[-1]

    def answer(listener: socket.socket) -> None:
        for _ in range(2):
            kept.append(context.wrap_socket(listener.accept()[0], server_side=True))
            kept[-1].recv(1 << 16)
            kept[-1].sendall(b"nonsense\r\n\r\n")

    async def main(url: str) -> None:
        backend, _ = backend_for(url, authority.file)
        with pytest.raises(TargetError, match=r"failed at try 2"):
            await backend.start()
        assert [one.fileno() for one in made] == [-1, -1]

    monkeypatch.setattr(Sockets, "create", created)
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as open_ends:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main(f"https://127.0.0.1:{listener.getsockname()[1]}/batch"))
        thread.join()
        for one in kept:
            open_ends.enter_context(one)
