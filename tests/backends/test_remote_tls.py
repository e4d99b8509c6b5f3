"""TLS to a remote API: trust, error messages, and certificates that change under load."""

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web
from aiohttp.connector import AddrInfoType

from headway.backends.grpc import GrpcBackend
from headway.backends.http import HttpBackend, Sockets, tls_error
from headway.backends.remote.tls_failures import explain, explain_words
from headway.config.target import RemoteTarget
from headway.errors import BackendError, RemoteAbsent, TargetError
from headway.model import ItemResult
from headway.runtime.certificates import Certificates, RemoteCertificates
from headway.runtime.counters import TlsCounts
from headway.runtime.tls_transport import TlsPort
from tests.authority import Authority
from tests.backends.entries import batch
from tests.backends.grpc_remote import answer, served_grpc, server_credentials, texts_of
from tests.backends.remote import served, served_raw

LONG = 30.0


class Api:
    """An API that requires client certificates and records their serial numbers. Each request releases `came`."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.serials: list[str] = []
        self.came = asyncio.Semaphore(0)
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
        self.came.release()
        return web.json_response([text.upper() for text in await request.json()])


def backend_for(
    url: str, ca: object, shown: tuple[object, object] = ("", "")
) -> tuple[HttpBackend | GrpcBackend, RemoteCertificates]:
    certificates = RemoteCertificates(str(ca), str(shown[0]), str(shown[1]), TlsCounts())
    kind = GrpcBackend if url.startswith("grpc") else HttpBackend
    made = kind(RemoteTarget(url), certificates=certificates, start_timeout=LONG, max_tries=2, rng=lambda: 0.0)
    return made, certificates


Shown = Callable[[Authority, Authority], tuple[Path, tuple[Any, Any]]]


ENDED = "it ended the handshake, and gRPC does not say why. It may ask for a certificate"


async def let_in(asked: Any, context: Any) -> bytes:
    raise AssertionError("it was let in")


@pytest.mark.parametrize(
    ("place", "told", "shown"),
    [
        ("https://127.0.0.1", "it asks for a certificate. Name one with remote_cert", lambda by, other: (by.file, ("", ""))),
        ("https://127.0.0.1", "it refuses the certificate of remote_cert", lambda by, other: (by.file, other.issue("stranger"))),
        ("https://127.0.0.1", "it refuses the certificate of remote_cert", lambda by, other: (by.file, by.issue("old", days=-1))),
        ("https://127.0.0.1", "Name the authority that issued it with remote_ca", lambda by, other: (other.file, by.issue("client"))),
        ("https://127.0.0.2", "its certificate is for another host", lambda by, other: (by.file, by.issue("client"))),
        ("grpcs://127.0.0.1", ENDED, lambda by, other: (by.file, ("", ""))),
        ("grpcs://127.0.0.1", ENDED, lambda by, other: (by.file, other.issue("stranger"))),
        ("grpcs://127.0.0.1", "Name the authority that issued it with remote_ca", lambda by, other: (other.file, by.issue("client"))),
    ],
)  # fmt: skip
async def test_a_start_says_which_certificate_will_not_do(tmp_path: Path, place: str, told: str, shown: Shown) -> None:
    api, other = Api(tmp_path), Authority(tmp_path, "other")
    over_grpc = served_grpc(let_in, tls=server_credentials(api.authority))
    async with over_grpc if place.startswith("grpcs") else api.served(place[8:]) as url:
        backend, _ = backend_for(url, *shown(api.authority, other))
        with pytest.raises(TargetError, match=r"failed at try 2") as raised:
            await backend.start()
    assert told in str(raised.value)
    assert place in str(raised.value)
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
            api.authority.issue("client")  # The certificate changes before its key, so they briefly don't match.
            for _ in range(2):
                await certificates.look()
            while len(set(api.serials)) <= number:
                await api.came.acquire()
        stop.set()
        assert all(await asyncio.gather(*load))
        assert len(set(api.serials)) == 3
        for slot in slots:
            await slot.stop()


@pytest.mark.parametrize(
    ("status", "title", "told"),
    [
        (400, "No required SSL certificate was sent", "Name one with remote_cert"),
        (400, "The SSL certificate error", "it refuses the certificate of remote_cert"),
        (400, "The plain HTTP request was sent to HTTPS port", "Write https://"),
        (400, "400 Bad Request", ""),
        (500, "The SSL certificate error", ""),
    ],
)
async def test_a_proxy_that_refuses_a_certificate_blames_no_input(status: int, title: str, told: str) -> None:
    """The page is nginx's."""

    async def handle(request: web.Request) -> web.Response:
        text = f"<html>\r\n<head><title>400 {title}</title></head>\r\n<body>\r\n<center><h1>400 Bad Request</h1></center>\r\n"
        return web.Response(status=status, text=text)

    async with served(handle) as url:
        backend = HttpBackend(RemoteTarget(url), start_timeout=LONG, max_tries=1)
        backend._connections.open()
        with pytest.raises(BackendError) as raised:
            await backend.run(batch("a"), LONG)
        assert told in str(raised.value)
        assert isinstance(raised.value, RemoteAbsent) == bool(told)
        await backend.stop()


async def test_an_api_without_tls_is_told_from_one_that_is_not_trusted() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    async with served_raw(talk) as url:
        backend = HttpBackend(RemoteTarget(url.replace("http:", "https:")), start_timeout=LONG, max_tries=1)
        with pytest.raises(TargetError, match=r"it does not speak TLS on this port\. Write http://"):
            await backend.start()
    assert tls_error(ConnectionResetError()) is None
    assert "cipher" in explain(ssl.SSLError(1, "[SSL: NO_SHARED_CIPHER] no shared cipher"))


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_backend_that_stops_waits_for_connections_that_had_failed(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API answers nonsense and never closes its end."""
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


async def test_a_certificate_is_shown_and_a_new_one_makes_a_new_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    seen: list[tuple[str, bytes]] = []

    async def handle(asked: Any, context: Any) -> bytes:
        seen.append((context.peer(), context.auth_context()["x509_pem_cert"][0]))
        return answer([text.upper() for text in texts_of(asked)])

    async with served_grpc(handle, tls=server_credentials(authority)) as url:
        backend, certificates = backend_for(url, authority.file, authority.issue("client"))
        try:
            await backend.start()
            assert await backend.run(batch("a"), LONG) == [ItemResult("A")]
            authority.issue("client")
            await certificates.reread()
            assert await backend.run(batch("b"), LONG) == [ItemResult("B")]
        finally:
            await backend.stop()
    warm_up, before, after = seen
    assert warm_up == before
    assert before[0] != after[0] and before[1] != after[1]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", "its certificate is not valid now: certificate has expired."),
        ("CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted"),
        (
            "CERTIFICATE_VERIFY_FAILED: authority and subject key identifier mismatch: OK",
            "its certificate is not trusted: authority and subject key identifier mismatch.",
        ),
        ("CERTIFICATE_VERIFY_FAILED: Hostname mismatch, certificate is not valid for 'a'.", "its certificate is for another host"),
        ("UNAUTHENTICATED: Hostname Verification Check failed.", "its certificate is for another host"),
        ("SSL_ERROR_SSL: OPENSSL_internal:WRONG_VERSION_NUMBER", "it does not speak TLS on this port. Write grpc://"),
        ("Unwrap failed (TSI_DATA_CORRUPTED)", ENDED),
        ("Failed to connect to remote host: connect: Connection refused (111)", ""),
    ],
)  # fmt: skip
def test_words_of_grpc_are_explained(said: str, told: str) -> None:
    assert explain_words(said).startswith(told)
    assert bool(explain_words(said)) == bool(told)


@pytest.mark.processes
def test_the_c_library_is_silent() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    program = (
        "import os\n"
        "from headway.app.backends import SlotPlan, make_backend\n"
        "from headway.config import Settings\n"
        "from headway.config.target import RemoteTarget\n"
        "make_backend(RemoteTarget('grpc://127.0.0.1:1/m'), SlotPlan(Settings(), 'remote-0'))\n"
        "import grpc\n"
        "assert 'GRPC_VERBOSITY' not in os.environ\n"
        "trusted = grpc.ssl_channel_credentials(b'none')\n"
        "channel = grpc.secure_channel('127.0.0.1:1', trusted)\n"
        "try: channel.unary_unary('/a/b')(b'', timeout=5)\n"
        "except grpc.RpcError: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=LONG)
    assert (done.returncode, done.stderr) == (0, b""), "the environment of others is as it was"
