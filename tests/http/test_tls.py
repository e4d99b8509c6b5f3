"""TLS: handshakes that fail, hang or arrive in large numbers; client certificates; new certificates under load."""

import asyncio
import errno
import re
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import structlog

from headway.runtime.certificates import Certificates
from headway.runtime.counters import TlsCounts
from headway.runtime.tls_transport import TlsPort, TlsTransport
from tests.authority import Authority
from tests.http.stand import Client, Stand, get, post, served, settled
from tests.scenes import Scene, as_test

BODY = b'{"input": "abc"}'


class Issued:
    """A service's certificates, the authority that issued them, and the SSL context of a client that trusts it."""

    def __init__(self, folder: Path, client_ca: Path | None = None) -> None:
        self.authority = Authority(folder)
        self.certificate, self.key = self.authority.issue()
        self.trust = self.authority.trust()
        client = "" if client_ca is None else str(client_ca)
        self.certificates = Certificates(str(self.certificate), str(self.key), client, TlsCounts())

    def serve(self, main: Callable[[Stand], Coroutine[Any, Any, None]], **changes: Any) -> None:
        served(main, certificates=self.certificates, **changes)


@pytest.fixture
def issued(tmp_path: Path) -> Issued:
    return Issued(tmp_path)


def over_tls(**changes: Any) -> Callable[[Scene], Callable[..., None]]:
    """Turn a coroutine function that takes a stand with TLS and its certificates into a test."""

    def decorate(test: Scene) -> Callable[..., None]:
        def played(issued: Issued, **given: Any) -> None:
            issued.serve(lambda stand: test(stand, issued, **given), **changes)

        return as_test(test, played, tools=1)

    return decorate


async def connected(stand: Stand, trust: ssl.SSLContext) -> Client:
    return await stand.connect(host="127.0.0.1", port=stand.door.port, ssl=trust)


def serial(client: Client) -> str:
    return str(client.writer.get_extra_info("peercert")["serialNumber"])


def hello(trust: ssl.SSLContext) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        trust.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@over_tls()
async def test_requests_are_answered_over_tls(stand: Stand, issued: Issued, version: ssl.TLSVersion) -> None:
    issued.trust.minimum_version = issued.trust.maximum_version = version
    issued.trust.set_alpn_protocols(["h2", "http/1.1"])
    client = await connected(stand, issued.trust)
    assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    for request in (post(BODY), post(BODY), get("/livez"), post(BODY)):
        assert (await client.ask(request)).status == 200
    assert (await client.ask(*(bytes([octet]) for octet in post(BODY)))).json["output"] == "ABC"
    await client.send(post(BODY) * 20)
    for _ in range(20):
        assert (await client.answer()).status == 200
    large = "x" * 900_000
    assert (await client.ask(post(f'{{"input": "{large}"}}'))).json["output"] == large.upper()


@over_tls()
async def test_a_client_that_leaves_has_its_request_abandoned(stand: Stand, issued: Issued) -> None:
    stand.gateway.hold = True
    client = await connected(stand, issued.trust)
    await client.send(post(BODY))
    await stand.gateway.until(lambda: len(stand.gateway.waiting) == 1)
    client.leave()
    await stand.gateway.until(lambda: len(stand.gateway.abandoned) == 1)


@over_tls()
async def test_a_client_that_takes_no_answer_is_cut(stand: Stand, issued: Issued) -> None:
    stand.gateway.output = "x" * 8_000_000
    client = await connected(stand, issued.trust)
    client.listen(False)
    await client.send(post(BODY))
    [held] = stand.door._connections()
    await settled(lambda: held.unread.since > 0)
    assert held.transport.get_write_buffer_size() > 0
    stand.later(1000.0)
    client.listen()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await client.answer()


@over_tls()
async def test_plain_http_is_told_to_speak_tls(stand: Stand, issued: Issued) -> None:
    for begin in (get("/livez"), b"\r\n", post(BODY)):
        client = await stand.connect()
        answer = await client.ask(begin)
        assert (answer.status, answer.error) == (400, "BAD_REQUEST")
        assert "https://" in answer.json["message"]
        assert await client.ended()
    assert issued.certificates.counts.failures["public", "plain"] == 3


@over_tls()
async def test_what_is_neither_tls_nor_text_is_cut(stand: Stand, issued: Issued) -> None:
    for sent in (b"\x00" * 12, b"\x16\x03\x01\x00\x06\x02" + b"\x00" * 9, b"\x16\x03\x01\xff\xff" + b"x" * 70_000):
        client = await stand.connect()
        await client.send(sent)
        assert b"HTTP" not in await client.reader.read()
    assert issued.certificates.counts.failures["public", "malformed"] == 3


def test_old_versions_are_refused(issued: Issued) -> None:
    async def main(stand: Stand) -> None:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(issued.authority.file)
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises(ssl.SSLError, match=r"PROTOCOL_VERSION|protocol version"):
            await connected(stand, old)
        await settled(lambda: sum(issued.certificates.counts.failures.values()) == 1)
        assert dict(issued.certificates.counts.failures) == {("public", "old_version"): 1}

    with pytest.warns(DeprecationWarning):
        issued.serve(main)


def test_clients_have_to_show_a_certificate(tmp_path: Path) -> None:
    clients = Authority(tmp_path, "clients")
    issued = Issued(tmp_path, clients.file)
    shown = issued.authority.trust(clients.issue("client"))
    other = issued.authority.trust(issued.authority.issue("stranger"))

    async def main(stand: Stand) -> None:
        client = await connected(stand, shown)
        assert (await client.ask(post(BODY))).status == 200
        for trust, reason in ((issued.trust, "no_certificate"), (other, "bad_certificate")):
            with pytest.raises((ssl.SSLError, ConnectionError)) as refused:
                client = await connected(stand, trust)
                await client.ask(post(b'{"input": "%b"}' % (b"x" * 200_000)))
            assert issued.certificates.counts.failures["public", reason] == 1
            if reason == "no_certificate":  # The client reads the alert, although its side of the handshake succeeded.
                assert re.search("(?i)certificate.required", str(refused.value))
        assert len(stand.gateway.asked) == 1

    with structlog.testing.capture_logs() as lines:
        issued.serve(main)
    [line] = (line for line in lines if line["event"] == "TLS handshakes with clients are failing")
    assert line["times"] == {"no_certificate": 1}


@over_tls()
async def test_a_handshake_that_hangs_is_cut_after_the_time_for_a_header(stand: Stand, issued: Issued) -> None:
    silent, half, done = await stand.connect(), await stand.connect(), await connected(stand, issued.trust)
    await half.send(hello(issued.trust))
    assert await half.reader.read(1)
    await half.send(b"\x14")
    stand.later(9.0)
    assert len(stand.door._connections()) == 3
    stand.later(11.0)
    for client in (silent, half, done):
        await client.reader.read()
    await settled(lambda: not stand.door._connections())
    assert issued.certificates.counts.failures["public", "unfinished"] == 2


@over_tls(keys={"k": {}}, max_connections=20)
async def test_handshakes_count_as_connections_and_make_room_for_others(stand: Stand, issued: Issued) -> None:
    crowd = [await stand.connect() for _ in range(30)]
    for client in crowd:
        await client.send(hello(issued.trust))
    for _ in range(3):
        client = await connected(stand, issued.trust)
        assert (await client.ask(post(BODY, "/v1/inference", "Authorization: Bearer k"))).status == 200
    assert len(stand.door._connections()) <= 21


@over_tls(max_connections=1)
async def test_a_connection_too_many_is_told_so_in_tls(stand: Stand, issued: Issued) -> None:
    first = await connected(stand, issued.trust)
    assert (await first.ask(post(BODY))).status == 200
    client = await connected(stand, issued.trust)
    answer = await client.answer()
    assert (answer.status, answer.error) == (503, "SERVICE_OVERLOADED")
    assert await client.ended()


def test_a_client_that_resets_its_failed_handshake_holds_up_no_other(issued: Issued) -> None:
    loop = mock.Mock(time=lambda: 0.0)
    port = TlsPort(issued.certificates, "http/1.1", "public", loop)
    port.line._clock = lambda: 0.0  # One turn is long enough for both.
    gone, other = mock.Mock(**{"is_closing.return_value": False}), mock.Mock(**{"is_closing.return_value": False})
    gone.write_eof.side_effect = OSError(errno.ENOTCONN, "Transport endpoint is not connected")
    for raw, data, address in ((gone, b"\x16nonsense", "10.0.0.1"), (other, hello(issued.trust), "10.0.0.2")):
        raw.get_extra_info.return_value = (address, 1)
        handshake = TlsTransport(port, asyncio.Protocol(), mock.Mock())
        handshake.connection_made(raw)
        handshake.data_received(data)
    ((give,), _) = loop.call_soon.call_args
    give()
    assert issued.certificates.counts.failures["public", "malformed"] == 1
    loop.call_later.assert_called_once()
    assert other.write.called, "the service's side of the other handshake"


@over_tls()
async def test_a_drain_lets_requests_over_tls_end(stand: Stand, issued: Issued) -> None:
    stand.gateway.hold = True
    busy, half = await connected(stand, issued.trust), await stand.connect()
    await half.send(hello(issued.trust))
    await busy.send(post(BODY))
    await stand.gateway.until(lambda: len(stand.gateway.waiting) == 1)
    draining = asyncio.create_task(stand.door.drain())
    await asyncio.sleep(0)
    stand.gateway.release()
    answer = await busy.answer()
    assert (answer.status, answer.header["connection"]) == (200, "close")
    assert await busy.ended()
    stand.later(2.0)
    await draining


@over_tls()
async def test_new_certificates_are_for_new_connections_and_fail_no_request(stand: Stand, issued: Issued) -> None:
    kept = await connected(stand, issued.trust)
    seen = [serial(kept)]
    for _ in range(2):
        issued.authority.issue()
        for _ in range(2):
            await issued.certificates.look()
        fresh = await connected(stand, issued.trust)
        for client in (kept, fresh):
            assert (await client.ask(post(BODY))).json["output"] == "ABC"
        seen.append(serial(fresh))
    assert len(set(seen)) == 3
    assert serial(kept) == seen[0], "a connection has the one that it began with"
