"""TLS on a port: handshakes that fail, hang or come in a crowd; certificates of clients; new certificates under load."""

import asyncio
import contextlib
import errno
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import structlog

from headway.runtime.certificates import Certificates
from headway.runtime.counters import TlsCounts
from headway.runtime.fair_turns import MILLISECOND, FairTurns
from headway.runtime.tls_transport import TlsPort, TlsTransport
from tests.authority import Authority
from tests.http.stand import Client, Stand, get, post, served, settled
from tests.scenes import Scene, as_test

BODY = b'{"input": "abc"}'


class Issued:
    """Certificates of a service, the authority behind them, and the context of a client that trusts it."""

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
    """Make a test of a coroutine function of a stand whose door speaks TLS, and of its certificates."""

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
        await client.send(request)
        assert (await client.answer()).status == 200
    await client.send(*(bytes([octet]) for octet in post(BODY)))
    assert (await client.answer()).json["output"] == "ABC"
    await client.send(post(BODY) * 20)
    for _ in range(20):
        assert (await client.answer()).status == 200


@over_tls()
async def test_large_bodies_and_answers_pass(stand: Stand, issued: Issued) -> None:
    text = b"x" * 900_000
    client = await connected(stand, issued.trust)
    await client.send(post(b'{"input": "%b"}' % text))
    assert (await client.answer()).json["output"] == text.decode().upper()


@over_tls()
async def test_a_refused_upload_gets_its_answer_although_it_goes_on_sending(stand: Stand, issued: Issued) -> None:
    client = await connected(stand, issued.trust)
    await client.send(post("", length=50_000_000))
    with contextlib.suppress(ConnectionError):  # asyncio's client closes when it hears the end in TLS.
        for _ in range(20):
            await client.send(b"x" * 65_536)
    assert (await client.answer()).status == 413
    assert await client.ended()


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
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(post(BODY))
    [held] = stand.door._connections()
    await settled(lambda: held.unread.since > 0)
    assert held.transport.get_write_buffer_size() > 0
    stand.later(1000.0)
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await client.answer()


@pytest.mark.parametrize(
    ("begin", "status"), [(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n", 400), (b"\r\n", 400), (post(BODY), 400)]
)
@over_tls()
async def test_plain_http_is_told_to_speak_tls(stand: Stand, issued: Issued, begin: bytes, status: int) -> None:
    client = await stand.connect()
    await client.send(begin)
    answer = await client.answer()
    assert (answer.status, answer.error) == (status, "BAD_REQUEST")
    assert "https://" in answer.json["message"]
    assert await client.ended()
    assert issued.certificates.counts.failures["public", "plain"] == 1


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


# Certificates of clients.


def test_clients_have_to_show_a_certificate(tmp_path: Path) -> None:
    clients = Authority(tmp_path, "clients")
    issued = Issued(tmp_path, clients.file)
    shown = issued.authority.trust(clients.issue("client"))
    other = issued.authority.trust(issued.authority.issue("stranger"))

    async def main(stand: Stand) -> None:
        client = await connected(stand, shown)
        await client.send(post(BODY))
        assert (await client.answer()).status == 200
        for trust, reason in ((issued.trust, "no_certificate"), (other, "bad_certificate")):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                client = await connected(stand, trust)
                await client.send(post(BODY))
                await client.answer()
            assert issued.certificates.counts.failures["public", reason] == 1
        assert len(stand.gateway.asked) == 1

    with structlog.testing.capture_logs() as lines:
        issued.serve(main)
    [line] = (line for line in lines if line["event"] == "clients fail at the TLS handshake")
    assert line["times"] == {"no_certificate": 1}


def test_a_refused_client_gets_to_read_why(tmp_path: Path) -> None:
    """Although it has sent its request by then: to its side the handshake was done."""
    issued = Issued(tmp_path, Authority(tmp_path, "clients").file)

    async def main(stand: Stand) -> None:
        client = await connected(stand, issued.trust)
        await client.send(post(b'{"input": "%b"}' % (b"x" * 200_000)))
        with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
            await client.answer()

    issued.serve(main)


# Handshakes that hang.


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
        await client.send(post(BODY, "/v1/inference", "Authorization: Bearer k"))
        assert (await client.answer()).status == 200
    assert len(stand.door._connections()) <= 21


@over_tls(max_connections=1)
async def test_a_connection_too_many_is_told_so_in_tls(stand: Stand, issued: Issued) -> None:
    first = await connected(stand, issued.trust)
    await first.send(post(BODY))
    assert (await first.answer()).status == 200
    client = await connected(stand, issued.trust)
    answer = await client.answer()
    assert (answer.status, answer.error) == (503, "SERVICE_OVERLOADED")
    assert await client.ended()


async def test_addresses_take_turns_at_handshakes() -> None:
    served_: list[str] = []

    class Waiting:
        def __init__(self, name: str) -> None:
            self.name = name

        def take_turn(self) -> None:
            served_.append(self.name)

    line = FairTurns(budget=MILLISECOND, rests=False)
    for number in range(5):
        line.wait("10.0.0.1", Waiting(f"flood {number}").take_turn)
    line.wait("10.0.0.2", Waiting("other").take_turn)
    await settled(lambda: len(served_) == 6)
    assert served_ == ["flood 0", "other", "flood 1", "flood 2", "flood 3", "flood 4"]


@pytest.mark.parametrize(("milliseconds", "each"), [(5.0, 1), (0.4, 3), (0.1, 10)])
async def test_a_turn_of_the_loop_is_given_to_handshakes_for_a_millisecond(milliseconds: float, each: int) -> None:
    now, turns = [0.0], list[int]()

    class Waiting:
        def take_turn(self) -> None:
            now[0] += milliseconds / 1000
            turns[-1] += 1

    line = FairTurns(lambda: now[0], budget=MILLISECOND, rests=False)
    for number in range(20):
        line.wait(f"10.0.0.{number}", Waiting().take_turn)
    while sum(turns) < 20:
        turns.append(0)
        await asyncio.sleep(0)
    served = [one for one in turns if one]
    assert max(served) <= each + 1
    assert served[0] in (each, each + 1), "the last one begins before the millisecond is over"


async def test_who_comes_to_the_line_in_a_turn_waits_for_the_next() -> None:
    served: list[int] = []
    line = FairTurns(lambda: 0.0, budget=MILLISECOND, rests=False)

    class Again:
        def take_turn(self) -> None:
            served[-1] += 1
            if sum(served) < 5:
                line.wait("10.0.0.1", self.take_turn)

    line.wait("10.0.0.1", Again().take_turn)
    while sum(served) < 5:
        served.append(0)
        await asyncio.sleep(0)
    assert max(served) == 1


def test_a_client_that_resets_its_failed_handshake_holds_up_no_other(issued: Issued) -> None:
    loop = mock.Mock(time=lambda: 0.0)
    port = TlsPort(issued.certificates, "http/1.1", "public", loop)
    port.line._clock = lambda: 0.0  # One turn has time for both.
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


# New certificates.


async def _ask_on(stand: Stand, trust: ssl.SSLContext, seen: list[str], stop: asyncio.Event, keep: bool) -> int:
    """Ask again and again, over one connection or a new one each time; every answer must be right."""
    count, client = 0, await connected(stand, trust)
    while not stop.is_set():
        await client.send(post(BODY))
        answer = await client.answer()
        assert (answer.status, answer.json["output"]) == (200, "ABC")
        seen.append(serial(client))
        count += 1
        if not keep:
            client.leave()
            client = await connected(stand, trust)
    return count


@over_tls()
async def test_certificates_change_under_load_without_a_failed_request(stand: Stand, issued: Issued) -> None:
    stop, kept, fresh = asyncio.Event(), [], []  # type: ignore[var-annotated]
    load = [asyncio.create_task(_ask_on(stand, issued.trust, kept, stop, True)) for _ in range(3)]
    load += [asyncio.create_task(_ask_on(stand, issued.trust, fresh, stop, False)) for _ in range(3)]
    await settled(lambda: bool(fresh))
    for number in range(1, 5):
        issued.authority.issue()  # The certificate first, then its key: for a moment they do not fit.
        await settled_look(issued.certificates)
        await settled(lambda: len(set(fresh)) > number)  # noqa: B023 - awaited here
    stop.set()
    assert all(await asyncio.gather(*load))
    assert len(set(fresh)) == 5
    assert len(set(kept)) == 3 or len(set(kept)) == 1  # Each kept connection has the one that it began with.


async def settled_look(certificates: Certificates) -> None:
    for _ in range(2):
        await certificates.look()
