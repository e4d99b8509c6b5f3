"""Costly but useless frames: the cost of each is limited, and clients that send too many are disconnected."""

import asyncio
import gc
import gzip
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from hpack import Encoder

from bench.load import http2
from headway import protos
from headway.grpc import call_stream, writer
from headway.grpc.call_stream import SHARE, CallStream
from headway.grpc.calls import Call
from headway.grpc.connection import LAST, LEAVING, CallConnection
from headway.grpc.header_blocks import HeaderReader
from headway.grpc.reader import PREFACE, Http2Reader
from headway.grpc.writer import Broken, Burden, Http2Writer
from tests.grpc.stand import PREDICT, Port, predict
from tests.grpc.test_open_inference import STREAM, request
from tests.grpc.test_reader import settings, window
from tests.grpc.wire import GOAWAY, greeted

CHECK, WATCH = f"/{protos.HEALTH}/Check", f"/{protos.HEALTH}/Watch"
REFLECT = f"/{protos.REFLECTION}/ServerReflectionInfo"


class Deaf:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def begun(*frames: bytes, streams: int = 1) -> Http2Reader:
    """Return a reader with open streams that has received some frames."""
    it = Http2Reader(Deaf(), Http2Writer(Burden(), lambda: None), 1000, 1 << 13, 1 << 14)
    calls = [http2.headers(number, PREDICT) for number in range(streams)]
    it.receive(b"".join((PREFACE, http2.frame(http2.SETTINGS, 0, 0), *calls, *frames)))
    return it


class LoopTurns:
    """Counts turns of the event loop once `count` is called."""

    number = 0

    def count(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self.count)


def test_a_frame_of_hundreds_of_settings_ends_the_connection() -> None:
    begun(settings(*[(4, 0)] * 32))
    with pytest.raises(Broken, match="ENHANCE_YOUR_CALM"):
        begun(settings(*[(4, 0)] * 33))


@pytest.mark.parametrize("change", [b"\x20", b"\x3f\xe1\x1f", b"\x3f\x80\x80\0"])
def test_the_size_of_the_table_changes_twice_at_most(change: bytes) -> None:
    fields = http2.headers(0, PREDICT)[9:]
    assert HeaderReader(1 << 15).read(2 * change + fields).fields[b":method"] == b"POST"
    with pytest.raises(Broken, match="COMPRESSION_ERROR"):
        begun(http2.frame(http2.HEADERS, 4, 1, 3 * change + fields), streams=0)


def test_a_call_counts_for_as_much_as_its_block_where_that_is_longer() -> None:
    block = Encoder().encode([(b"x", b"\xf9" * 100)], huffman=True)
    assert len(block) > 300
    assert HeaderReader(1 << 15).read(block).size == len(block)


def test_little_is_unpacked_between_two_looks_at_the_time() -> None:
    bomb = http2.headers(0, PREDICT)[9:] + b"\x40\1x\1y" + b"\xbe" * 500
    calls = [http2.frame(http2.HEADERS, 4, http2.stream_of(number), bomb) for number in range(5)]
    it, data, reads = begun(streams=0), b"".join(calls), []
    while data:
        reads.append(it.receive(data))
        data = data[reads[-1] :]
    assert reads == [len(call) for call in calls]
    assert it.last == http2.stream_of(4)


@pytest.mark.parametrize(
    "nothing",
    [http2.frame(http2.PING, 1, 0, b"x" * 8), http2.frame(http2.SETTINGS, 1, 0), http2.frame(7, 0, 0, bytes(8)), settings((4, 9))],
    ids=["answers to pings", "answers to settings", "goodbyes", "settings"],
)  # fmt: skip
async def test_a_flood_of_empty_frames_is_cut_off(port: Port, nothing: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LIMIT", 100)
    client, _ = await greeted(port)
    with structlog.testing.capture_logs() as lines:
        client.send(nothing * 120)
        goodbye = b""
        while not goodbye.endswith(b"too_many_frames"):
            goodbye = await client.next(GOAWAY)
    assert port.counters.gateway.refusals["too_many_frames", "none", ""] == 1
    client.writer.close()
    assert [line["times"] for line in lines if line["event"] == "a client sends too many useless frames"] == [1]


async def test_calls_in_hand_outlive_a_flood_of_their_neighbours(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a proxy that sends many clients' calls over one connection."""
    monkeypatch.setattr(writer, "LIMIT", 100)
    client, _ = await greeted(port)
    port.gateway.hold = True
    client.ask(1)
    await port.gateway.until(lambda: len(port.gateway.waiting) == 1)
    for number in range(2, 20):
        client.send(http2.headers(number, PREDICT) + http2.reset(number))
    assert await client.next(GOAWAY) == LAST.to_bytes(4, "big") + bytes(4)
    port.gateway.release()
    await client.ended(1)
    client.send(http2.frame(http2.PING, 1, 0, LEAVING))
    assert dict(port.counters.gateway.refusals) == {}
    client.writer.close()


async def test_a_client_that_breaks_the_protocol_is_counted(port: Port) -> None:
    client, _ = await greeted(port)
    client.send(http2.frame(http2.DATA, 0, 0, b"x"))
    assert (await client.next(GOAWAY)).endswith(b"protocol_error")
    assert port.counters.gateway.refusals["protocol_error", "none", ""] == 1
    client.writer.close()


async def test_an_answer_taken_byte_by_byte_explains_no_frames(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LIMIT", 100)
    client, _ = await greeted(port)
    client.send(settings((4, 0)) + http2.headers(1, PREDICT) + http2.message(1, predict("a" * 500)))
    for _ in range(120):
        client.send(window(http2.stream_of(1), 1))
    # If the frames arrive in several reads, the first GOAWAY still lets the pending call end.
    goodbye = b""
    while not goodbye.endswith(b"too_many_frames"):
        goodbye = await client.next(GOAWAY)
    client.writer.close()


async def test_messages_are_unpacked_in_turns(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kilobyte of gzip can unpack to a megabyte, and a client may send hundreds together."""
    packed = gzip.compress(bytes(1_000_000))
    unpacked: list[int] = []
    unpack = call_stream._unpacked

    def slow(*asked: Any) -> bytes:
        unpacked.append(turns.number)
        now[0] += SHARE
        return unpack(*asked)

    now, turns = [0.0], LoopTurns()
    client, connections = await greeted(port)
    connections.turns.clock = lambda: now[0]
    monkeypatch.setattr(call_stream, "_unpacked", slow)
    turns.count()
    for number in range(1, 11):
        body = b"\1" + len(packed).to_bytes(4, "big") + packed
        client.send(http2.headers(number, CHECK, [("grpc-encoding", "gzip")]))
        client.send(http2.frame(http2.DATA, http2.END_STREAM, http2.stream_of(number), body))
    for number in range(1, 11):
        await client.ended(number)
    assert len(unpacked) == len(set(unpacked)) == 10
    client.writer.close()


def _asked(number: int, method: str, body: bytes, *, whole: bool = True) -> bytes:
    return http2.headers(number, method) + http2.message(number, body, end=whole)


def _calls_kept() -> list[Call | CallConnection]:
    return [one for one in gc.get_objects() if isinstance(one, Call | CallConnection)]


@pytest.mark.parametrize(
    "call",
    [
        lambda n: http2.headers(n, PREDICT),
        lambda n: _asked(n, PREDICT, predict("a")),
        lambda n: http2.headers(n, STREAM),
        lambda n: _asked(n, STREAM, request("a").SerializeToString(), whole=False),
        lambda n: _asked(n, WATCH, b""),
        lambda n: http2.headers(n, REFLECT),
    ],
    ids=["unsent", "unanswered", "silent stream", "stream", "watch", "reflection"],
)  # fmt: skip
async def test_calls_that_are_cut_off_leave_no_cycles(port: Port, call: Callable[[int], bytes]) -> None:
    """Collecting 300,000 objects of cancelled calls together used to block the event loop for 0.3 s."""
    port.gateway.hold = True
    _, writer = await asyncio.open_connection("127.0.0.1", port.listener.port)
    connections = port.listener._connections
    assert connections is not None
    gc.collect()
    gc.disable()
    try:
        writer.write(http2.hello() + b"".join(map(call, range(10))))
        while sum(len(one.streams) for one in connections.open) < 10:  # noqa: ASYNC110 - the port runs in this loop and has no event to await
            await asyncio.sleep(0)
        await port.gateway.until(lambda: True)
        writer.transport.abort()
        await connections.emptied()
        for turn in range(2_000):  # Calls are ended over several turns of the loop, more of them on a busy machine.
            await asyncio.sleep(0)
            if turn % 50 == 49 and not (left := _calls_kept()):
                break
    finally:
        gc.enable()
    port.gateway.waiting.clear()
    assert left == []


async def test_the_calls_of_a_client_that_left_end_in_turns(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending 9,000 calls of dropped connections in one turn used to block the event loop for 0.3 s."""
    ended: list[int] = []
    cancel, turns = CallStream.cancel, LoopTurns()

    def noted(stream: CallStream) -> None:
        ended.append(turns.number)
        cancel(stream)

    client, connections = await greeted(port)
    (it,) = connections.open
    client.send(b"".join(http2.headers(number, CHECK) for number in range(1, 201)))
    while len(it.streams) < 200:  # noqa: ASYNC110 - likewise
        await asyncio.sleep(0)
    monkeypatch.setattr(CallStream, "cancel", noted)
    turns.count()
    client.writer.transport.abort()
    await connections.emptied()
    while len(ended) < 200:  # noqa: ASYNC110 - likewise
        await asyncio.sleep(0)
    assert max(map(ended.count, ended)) <= 60
