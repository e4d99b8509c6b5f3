"""Calls at the wire level: the client writes its own frames and reads the replies frame by frame."""

import gzip
import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import pytest

from bench.load import http2
from headway.grpc.call_stream import PREFIX
from headway.grpc.call_stream import WINDOW as READ_AHEAD
from headway.grpc.connection import CallConnection
from headway.grpc.header_blocks import block_of
from headway.grpc.writer import ErrorCode
from tests.grpc.stand import PREDICT, Port, predict, predicted, served
from tests.grpc.wire import DATA, GOAWAY, HEADERS, PADDED, READ, Answer, Wire, connect
from tests.scenes import Played, scene


def on_the_wire(main: Callable[[Port, Wire], Awaitable[None]], hello: Sequence[bytes] = (http2.hello(), READ)) -> None:
    """Run `main` with a client that has sent `hello`."""

    async def run(port: Port) -> None:
        wire = await connect(port, *hello)
        try:
            await main(port, wire)
        finally:
            wire.writer.close()

    served(run, max_body_bytes=8 << 20)


@pytest.fixture
def wire() -> Played:
    return Played(on_the_wire)


def connection(port: Port) -> CallConnection:
    assert port.listener._connections is not None
    (one,) = port.listener._connections.open
    return one


def data(number: int, octets: bytes, *, end: bool = False) -> bytes:
    return http2.frame(DATA, int(end), http2.stream_of(number), octets)


def prefixed(body: bytes, packed: int = 0) -> bytes:
    return bytes((packed,)) + len(body).to_bytes(4, "big") + body


def output(answer: Answer) -> bytes:
    length = int.from_bytes(answer.data[1:5], "big")
    assert (answer.status, answer.data[:1], length) == ("0", b"\0", len(answer.data) - PREFIX)
    return bytes(predicted(answer.data[PREFIX:]).output)


async def test_a_message_comes_in_frames_of_any_size(port: Port, wire: Wire) -> None:
    octets = prefixed(predict("hello"))
    wire.send(http2.headers(0, PREDICT), *[data(0, bytes((octet,))) for octet in octets], data(0, b"", end=True))
    assert output(await wire.ended(0)) == b"HELLO"
    # Now with more padding than a stream's window, which must be given back.
    padded = [http2.frame(DATA, PADDED, 3, b"\xff" + bytes(255))] * 40
    padded += [http2.frame(DATA, PADDED, 3, b"\2" + octets[at : at + 1] + bytes(2)) for at in range(len(octets))]
    wire.send(http2.headers(1, PREDICT), *padded)
    assert output(await wire.ended(1)) == b"HELLO"
    assert wire.granted[3] >= 40 * 256


async def test_a_unary_call_with_several_messages_is_answered_for_the_first(port: Port, wire: Wire) -> None:
    wire.send(http2.headers(0, PREDICT), data(0, prefixed(predict("a")) + prefixed(predict("b")), end=True))
    assert output(await wire.ended(0)) == b"A"
    assert [asked.input for asked in port.gateway.asked] == ["a"]


async def test_a_message_that_is_cut_is_an_error(port: Port, wire: Wire) -> None:
    whole = prefixed(predict("hello"))
    for number in range(1, len(whole)):
        wire.send(http2.headers(number, PREDICT), data(number, whole[:number], end=True))
        assert (await wire.ended(number)).status == "13"


async def test_a_message_may_be_compressed_and_one_that_cannot_be_unpacked_is_an_error(port: Port, wire: Wire) -> None:
    plain = predict("hello")
    packed = gzip.compress(plain)
    for number, (encoding, flag, body, status) in enumerate(
        (
            ("gzip", 1, packed, "0"),
            ("deflate", 1, zlib.compress(plain), "0"),
            ("gzip", 0, plain, "0"),
            ("snappy", 1, b"a", "12"),
            ("identity", 1, plain, "13"),
            ("", 1, plain, "13"),
            ("gzip", 2, packed, "13"),
            ("gzip", 1, b"a", "13"),
            ("gzip", 1, packed[:-1], "13"),
            ("gzip", 1, packed + b"more", "13"),
        )
    ):
        encodings = [("grpc-encoding", encoding)] if encoding else []
        wire.send(http2.headers(number, PREDICT, encodings), data(number, prefixed(body, flag), end=True))
        answer = await wire.ended(number)
        assert (number, answer.status) == (number, status)
        # By the gRPC spec, the error for an unknown compression lists the known ones.
        assert status != "12" or answer.fields["grpc-accept-encoding"] == "identity, deflate, gzip"
        assert status != "0" or output(answer) == b"HELLO"
    assert len(port.gateway.asked) == 3


@scene(partial(on_the_wire, hello=(http2.hello(),)), tools=2)
async def test_a_message_goes_on_that_was_begun_before_its_client_knew_the_windows(port: Port, wire: Wire) -> None:
    octets, sent = prefixed(predict("a" * 60_000)), 3 << 14
    wire.send(http2.headers(0, PREDICT), *[data(0, octets[at : at + (1 << 14)]) for at in range(0, sent, 1 << 14)])
    await wire.settled()
    assert 1 not in wire.granted
    wire.send(READ)
    await wire.until(lambda: READ_AHEAD + wire.granted.get(1, 0) >= len(octets))
    wire.send(data(0, octets[sent:], end=True))
    assert output(await wire.ended(0)) == b"A" * 60_000


async def test_data_beyond_a_streams_window_end_that_stream_alone(port: Port, wire: Wire) -> None:
    port.gateway.hold = True
    for number in (0, 1):
        wire.send(http2.headers(number, PREDICT), http2.message(number, predict("a"), end=False))
    await port.gateway.until(lambda: len(port.gateway.waiting) == 2)
    wire.send(data(0, bytes(READ_AHEAD)))
    assert (await wire.ended(0)).code == ErrorCode.FLOW_CONTROL_ERROR
    port.gateway.release()
    assert output(await wire.ended(1)) == b"A"
    assert len(port.gateway.abandoned) == 1


def timed(number: int, timeout: str) -> bytes:
    return http2.headers(number, PREDICT, [("grpc-timeout", timeout)]) + http2.message(number, predict("a"))


UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6}


async def test_the_time_of_a_call_may_be_told_in_any_unit(port: Port, wire: Wire) -> None:
    for number, timeout in enumerate(("1H", "2M", "3S", "4000m", "5000000u", "0000003S", "99999999H")):
        wire.send(timed(number, timeout))
        assert (await wire.ended(number)).status == "0"
        most = min(int(timeout[:-1]) * UNITS[timeout[-1]], port.settings.request_timeout_ms / 1000)
        assert 0.9 * most - 0.1 < port.gateway.asked[-1].options.timeout <= most
    port.gateway.hold = True
    wire.send(timed(10, "0S"), timed(11, "9n"))
    assert (await wire.ended(10)).status == (await wire.ended(11)).status == "4"


async def test_a_time_that_is_malformed_is_an_error(port: Port, wire: Wire) -> None:
    for number, timeout in enumerate(("", "1", "S", "123456789S", "1s", "-1S", "+1S", "1 S", "1.5S", "1SS")):
        wire.send(timed(number, timeout))
        assert (timeout, (await wire.ended(number)).status) == (timeout, "13")
    assert port.gateway.asked == []


async def test_binary_metadata_are_ignored(port: Port, wire: Wire) -> None:
    more = [("grpc-trace-bin", "AAAB"), ("x-bin", "AA==,AA"), ("x-bin", "")]
    wire.send(http2.headers(0, PREDICT, more), http2.message(0, predict("a")))
    assert output(await wire.ended(0)) == b"A"


async def test_an_error_is_told_in_one_block_and_nothing_follows_it(port: Port, wire: Wire) -> None:
    wire.send(
        http2.headers(0, PREDICT),
        data(0, b"", end=True),
        http2.headers(1, "/nothing", end=True),
        http2.headers(2, PREDICT, end=True),
    )
    for number, status in enumerate(("3", "12", "3")):
        answer = await wire.ended(number)
        assert (answer.status, answer.fields[":status"]) == (status, "200")
        assert answer.fields["content-type"] == "application/grpc"
    await wire.settled()
    assert [answer.kinds for answer in wire.answers.values()] == [["end"]] * 3


async def test_a_client_that_never_ends_its_stream_is_answered_and_the_stream_is_closed(port: Port, wire: Wire) -> None:
    wire.send(http2.headers(0, PREDICT), http2.message(0, predict("a"), end=False), http2.headers(1, "/nothing"))
    for number, kinds in enumerate((["fields", "data", "end", "reset"], ["end", "reset"])):
        await wire.ended(number)
        await wire.settled()
        assert (wire.answers[number].kinds, wire.answers[number].code) == (kinds, ErrorCode.NO_ERROR)
    wire.send(data(0, b"abc"), data(1, b"abc", end=True), http2.headers(2, PREDICT), http2.message(2, predict("b")))
    assert output(await wire.ended(2)) == b"B"
    assert connection(port).silent


async def test_a_request_that_is_no_call_gets_a_status_of_http(port: Port, wire: Wire) -> None:
    call = {":method": "POST", ":scheme": "http", ":path": PREDICT, "content-type": "application/grpc"}
    for number, change in enumerate(({":method": "GET"}, {"content-type": "application/json"}, {"content-type": ""})):
        wire.send(http2.frame(HEADERS, 5, http2.stream_of(number), block_of((call | change).items())))
        answer = await wire.ended(number)
        await wire.settled()
        assert (answer.fields, answer.kinds) == ({":status": "415"}, ["end"])


async def test_a_call_has_as_many_bytes_as_it_says(port: Port, wire: Wire) -> None:
    octets = prefixed(predict("abc"))
    assert len(octets) == 10
    for number, length in enumerate(("10", "9", "11", "1e1", "")):
        headed = http2.headers(number, PREDICT, [("content-length", length)])
        wire.send(headed, data(number, octets[:4]), data(number, octets[4:], end=True))
        answer = await wire.ended(number)
        assert (answer.status, answer.code) == (("", ErrorCode.PROTOCOL_ERROR) if number else ("0", None))
    wire.send(http2.headers(9, PREDICT, [("content-length", "1")], end=True))
    assert (await wire.ended(9)).code == ErrorCode.PROTOCOL_ERROR


async def test_a_call_may_be_cancelled_at_any_point(port: Port, wire: Wire) -> None:
    whole = prefixed(predict("hello"))
    for number in range(len(whole)):
        wire.send(http2.headers(number, PREDICT), data(number, whole[:number]), http2.reset(number))
    await wire.settled()
    assert (port.gateway.asked, connection(port).silent) == ([], True)
    port.gateway.hold = True
    held, answered, late = 100, 101, 102
    wire.send(http2.headers(held, PREDICT), data(held, whole, end=True))
    await port.gateway.until(lambda: len(port.gateway.waiting) == 1)
    wire.send(http2.reset(held))
    await port.gateway.until(lambda: len(port.gateway.abandoned) == 1)
    port.gateway.hold = False
    wire.send(http2.headers(answered, PREDICT), data(answered, whole, end=True))
    assert output(await wire.ended(answered)) == b"HELLO"
    wire.send(http2.reset(answered), http2.reset(answered), http2.headers(late, PREDICT), data(late, whole, end=True))
    assert output(await wire.ended(late)) == b"HELLO"
    assert connection(port).silent


async def test_a_client_that_leaves_gets_the_answers_that_are_due(port: Port, wire: Wire) -> None:
    port.gateway.hold = True
    wire.ask(*range(3))
    wire.send(http2.frame(GOAWAY, 0, 0, bytes(8)))
    await port.gateway.until(lambda: len(port.gateway.waiting) == 3)
    await wire.settled()
    port.gateway.release()
    assert [output(await wire.ended(number)) for number in range(3)] == [b"A"] * 3
    port.listener.look_after()
    assert (await wire.left())[-1] == http2.stream_of(2)


async def test_after_too_many_trailers_calls_are_answered_and_the_client_must_leave(port: Port, wire: Wire) -> None:
    port.gateway.hold = True
    wire.send(
        *[http2.headers(number, PREDICT) + http2.message(number, predict("a"), end=bool(number)) for number in range(3)]
    )
    await port.gateway.until(lambda: len(port.gateway.waiting) == 3)
    bomb = b"\x40\1a\x7f\x81\x07" + b"a" * 1024 + b"\xbe" * 4000
    wire.send(http2.frame(HEADERS, 5, 1, bomb), http2.headers(3, PREDICT), http2.message(3, predict("b")))
    await wire.settled()
    assert wire.goaways == [http2.stream_of(2)], "the call behind it is for the client to send elsewhere"
    port.gateway.release()
    assert [output(await wire.ended(number)) for number in range(3)] == [b"A"] * 3
    port.listener.look_after()
    assert (await wire.left())[-1] == http2.stream_of(2)
