"""Limits, framing and deadlines of a connection, and clients that are slow or disconnect."""

import pytest
import structlog

from headway.config import Settings
from headway.http.server.connection import IDLE
from headway.http.server.reader import MOST_BUFFERED
from tests.http.stand import LAST, Stand, chunked, get, on_stand, post, settled

BODY = b'{"input": "abc"}'


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (b"hello\n", 400, "BAD_REQUEST"),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 405, "METHOD_NOT_ALLOWED"),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 4000, 431, "HEADERS_TOO_LARGE"),
        (post("", length=2_000_000), 413, "PAYLOAD_TOO_LARGE"),
        (chunked(end=b"zz\r\n"), 400, "BAD_REQUEST"),
        (chunked(end=b"1;" + b"x" * 20_000), 431, "HEADERS_TOO_LARGE"),
        (b"GET /livez?" + b"a=1&" * 100 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 400, "BAD_REQUEST"),
        (b"GET http:///%% HTTP/1.1\r\nHost: a\r\n\r\n", 400, "BAD_REQUEST"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_ends_the_connection(stand: Stand, request_: bytes, status: int, code: str) -> None:
    client = await stand.connect()
    answer = await client.ask(request_)
    assert (answer.status, answer.error) == (status, code)
    assert answer.header["connection"] == "close"
    assert answer.header["x-should-retry"] == "false"
    assert await client.ended()
    assert stand.gateway.asked == []


@pytest.mark.parametrize(
    ("begin", "says", "event"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "plain HTTP", "a client speaks TLS to a plain port"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "gRPC has its own port", "a client speaks HTTP/2 to the HTTP port"),
    ],
    ids=["TLS", "HTTP/2"],
)
async def test_another_protocol_is_told_so_and_logged_once_a_minute(
    stand: Stand, begin: bytes, says: str, event: str
) -> None:
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            answer = await stand.ask(begin)
            assert (answer.status, says in answer.json["message"]) == (400, True)
    [line] = lines
    assert (line["event"], line["port"], line["times"]) == (event, "public", 1)


@on_stand(max_body_bytes=100)
async def test_heads_and_bodies_are_refused_from_the_first_byte_over_the_limit(stand: Stand) -> None:
    def head(size: int) -> bytes:
        start = b"GET /livez HTTP/1.1\r\nHost: a\r\nX: "
        return start + b"x" * (size - len(start) - 4) + b"\r\n\r\n"

    assert (await stand.ask(head(Settings.max_header_bytes))).status == 200
    assert (await stand.ask(head(Settings.max_header_bytes + 1))).status == 431
    assert (await stand.ask(post(b" " * 84 + BODY))).status == 200
    assert (await stand.ask(post(b" " * 85 + BODY))).status == 413
    assert (await stand.ask(chunked(b" " * 84, BODY, end=LAST))).status == 200
    assert (await stand.ask(chunked(b" " * 85, BODY, end=LAST))).status == 413


async def test_a_refused_upload_gets_its_answer_although_it_goes_on_sending(stand: Stand) -> None:
    client = await stand.connect()
    await client.send(post("", length=50_000_000))
    for _ in range(40):
        await client.send(b"x" * 65_536)
    assert (await client.answer()).status == 413
    assert await client.ended()
    stand.later(2.0)
    with pytest.raises(ConnectionError):
        while True:
            await client.send(b"x" * 65_536)


@pytest.mark.parametrize(
    ("request_", "closes"),
    [
        (post(BODY, "/v1/inference", "Connection: close"), True),
        (post(BODY, version="1.0"), True),
        (get("/livez", "Connection: close"), True),
        (post("{}", "/v1/inference", "Connection: close"), True),
        (post(BODY, "/v1/inference", "Connection: Upgrade", "Upgrade: h2c"), False),
        (get("/livez", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x"), False),
        (chunked(BODY, end=b"0\r\nX-Trailer: 1\r\n\r\n"), False),
    ],
)
async def test_connections_are_kept_or_closed_as_asked(stand: Stand, request_: bytes, closes: bool) -> None:
    client = await stand.connect()
    answer = await client.ask(request_)
    assert answer.header.get("connection") == ("close" if closes else None)
    if closes:
        assert await client.ended()
    else:
        assert (await client.ask(post('{"input": "next"}'))).json["output"] == "NEXT"


async def test_blank_lines_between_requests_in_any_pieces(stand: Stand) -> None:
    client = await stand.connect()
    for blank in ([b"\r\n"], [b"\r", b"\n"], [b"\r\n\r", b"\n"], [b"\r", b"\n\r", b"\n"]):
        assert (await client.ask(*blank[:-1], blank[-1] + post(BODY))).status == 200
    assert (await client.ask(b"\r", post(BODY))).status == 400
    assert len(stand.gateway.asked) == 4


async def test_a_client_that_expects_100_continue_gets_it_before_its_body(stand: Stand) -> None:
    client = await stand.connect()
    for path in ("/v1/inference", "/v1/inference"):
        assert (await client.ask(post(BODY, path, "Expect: 100-continue")[: -len(BODY)])).status == 100
        assert (await client.ask(BODY)).json["output"] == "ABC"
    await client.send(post(BODY, "/v1/inference", "Expect: 100-continue"))
    assert (await client.answer()).status == 200, "the body came along: no 100 is needed"
    answer = await client.ask(post("", "/nowhere", "Expect: 100-continue", length=5))
    assert (answer.status, answer.header["connection"]) == (404, "close")
    assert await client.ended(), "whether the body still comes is not known"
    assert (await stand.ask(post("", "/v1/inference", "Expect: 100-continue", length=5_000_000))).status == 413


async def test_a_body_nobody_waits_for_is_read_past_when_it_is_short(stand: Stand) -> None:
    client = await stand.connect()
    for path, status in (("/nowhere", 404), ("/livez", 405)):
        answer = await client.ask(post("", path, length=100))
        assert (answer.status, "connection" in answer.header) == (status, False)
        assert (await client.ask(b"x" * 100 + post(BODY))).json["output"] == "ABC"


@pytest.mark.parametrize("framing", [f"Content-Length: {MOST_BUFFERED + 1}", "Transfer-Encoding: chunked"])
async def test_an_answer_before_a_long_body_says_that_it_is_the_last(stand: Stand, framing: str) -> None:
    for path, status in (("/nowhere", 404), ("/livez", 200)):
        client = await stand.connect()
        answer = await client.ask(f"GET {path} HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n".encode())
        assert (answer.status, answer.header["connection"]) == (status, "close")
        assert await client.ended()


@pytest.mark.parametrize("slowly", [False, True])
async def test_a_client_that_reads_nothing_or_slowly_is_cut_off_in_time_and_asks_nothing_meanwhile(
    stand: Stand, slowly: bool
) -> None:
    stand.gateway.output = "x" * 8_000_000
    client = await stand.connect_deaf()
    await client.send(post(BODY) * 3)
    await stand.gateway.until(lambda: bool(stand.gateway.asked))
    connection = stand.connection
    await settled(lambda: bool(connection.unread.since))
    limit = stand.settings.read_timeout_ms / 1000 + (8_000_000 / 16_384 if slowly else 0)  # By the answer's size.
    for seconds, closing in ((limit - 1, False), (limit + 1, True)):
        connection.unread._left += slowly  # As if the client had read a byte since the last check.
        stand.later(seconds)
        assert connection.transport.is_closing() is closing
    assert len(stand.gateway.asked) == 1


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"", None),
        (b"POST /v1/infer", 408),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nX-Slow: ", 408),
        (post(BODY)[:-3], 408),
        (post(BODY, "/livez", "X: y")[:-3], 405),
        (chunked(end=b"10\r\n" + BODY[:3]), 408),
    ],
)
async def test_what_is_late_is_given_up(stand: Stand, start: bytes, status: int | None) -> None:
    client = await stand.connect()
    await client.send(start)
    if status == 405:
        assert (await client.answer()).status == 405
    else:
        await _arrived(stand, start)
    limit = stand.settings.read_timeout_ms / 1000
    stand.later(limit - 1)
    assert not stand.connection.transport.is_closing()
    stand.later(limit + 1)
    if status == 408:
        answer = await client.answer()
        assert (answer.status, answer.error) == (408, "REQUEST_TIMEOUT")
        assert "read_timeout_ms" in answer.json["message"]
    assert await client.ended()


async def _arrived(stand: Stand, start: bytes) -> None:
    def taken() -> bool:
        connections = stand.door._connections()
        return bool(connections) and (not start or connections[0].phase != IDLE)

    await settled(taken)


async def test_trickling_a_header_does_not_extend_its_deadline(stand: Stand) -> None:
    client = await stand.connect()
    await client.send(b"GET / HTTP/1.1\r\n")
    await _arrived(stand, b"G")
    connection = stand.connection
    begun = connection.since
    for _ in range(3):
        before = len(connection.reader.buffer)
        await client.send(b"X: y\r\n")
        await settled(lambda: len(connection.reader.buffer) != before)  # noqa: B023 - awaited immediately
    assert connection.since == begun


async def test_an_idle_connection_is_kept_for_its_time_and_then_closed(stand: Stand) -> None:
    client = await stand.connect()
    for request in (post(BODY), get("/livez")):
        await client.ask(request)
        stand.later(29.0)
        await client.ask(request)
    stand.later(31.0)
    assert await client.ended()


async def test_waiting_for_an_answer_is_not_idleness(stand: Stand) -> None:
    client = await stand.hold(post(BODY))
    stand.later(1000.0)
    stand.gateway.release()
    assert (await client.answer()).status == 200


@on_stand(max_connections=2)
async def test_too_many_connections_are_told_so(stand: Stand) -> None:
    for _ in range(2):
        assert (await stand.ask(get("/livez"))).status == 200
    third = await stand.connect()
    answer = await third.answer()
    assert (answer.status, answer.error, answer.header["connection"]) == (503, "SERVICE_OVERLOADED", "close")
    assert await third.ended()
    for client in (third, stand.clients[0]):
        client.leave()
    await settled(lambda: len(stand.door._connections()) == 1)
    assert (await stand.ask(get("/livez"))).status == 200
