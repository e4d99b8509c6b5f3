"""HTTP/2 on one connection, rule by rule: which events it reports, what it sends, and how it ends.
Cases are named after sections of RFC 9113 or, with an H, RFC 7541. h2spec checks most of these rules too."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from headway.grpc.header_blocks import RequestFields, block_of
from headway.grpc.reader import LARGEST_DATA, PREFACE, Http2Reader
from headway.grpc.writer import DEFAULT_WINDOW, Broken, Burden, ErrorCode, Http2Writer
from tests.fuzz.frames import frame

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION, UNKNOWN = range(11)
END = ACK = 1
WHOLE, PADDED, PRIORITISED = 4, 8, 0x20
STREAMS, AHEAD, MOST_HEADER = 4, 1 << 18, 512
LARGEST, LARGEST_FRAME = (1 << 31) - 1, 1 << 14

Heard = tuple[Any, ...]
Sent = tuple[int, int, int, bytes]
Step = bytes | Callable[[Http2Reader], object]
"""Frames of the client, or what the connection does meanwhile."""

_HEARD = ("oversized", "lost", "received", "was_reset", "settled", "pinged", "ponged", "left")


class Log:
    """Records a connection's events."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.heads: list[RequestFields] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *what: self.heard.append((name, *what)) if name in _HEARD else None

    def requested(self, number: int, head: RequestFields, ended: bool) -> None:
        self.heads.append(head)
        self.heard.append(("requested", number, ended))


class Watched(Http2Reader):
    """A reader that also logs the frames it ignores."""

    def _ignore(self) -> None:
        self._events.heard.append(("ignored",))  # type: ignore[attr-defined]
        super()._ignore()


def connection() -> tuple[Http2Reader, Log]:
    log = Log()
    return Watched(log, Http2Writer(Burden(), lambda: None), STREAMS, AHEAD, MOST_HEADER), log


def begun() -> tuple[Http2Reader, Log]:
    """Return a connection whose client has sent its settings."""
    http2, log = connection()
    receive(http2, PREFACE + frame(SETTINGS))
    http2.writer.take()
    return http2, log


def frames_of(data: bytes) -> list[Sent]:
    found, at = [], 0
    while at < len(data):
        end = at + 9 + int.from_bytes(data[at : at + 3], "big")
        number = int.from_bytes(data[at + 5 : at + 9], "big")
        found.append((data[at + 3], data[at + 4], number, data[at + 9 : end]))
        at = end
    return found


# Client frames.

PSEUDO = b"\x83\x86\x84"
"""`POST http /`."""
HEAD = PSEUDO + block_of((("content-type", "application/grpc"), ("te", "trailers")))


def fields(*names_and_values: tuple[str, str]) -> bytes:
    return block_of(names_and_values)


def ask(number: int, *, end: bool = False, block: bytes = HEAD) -> bytes:
    return frame(HEADERS, WHOLE | end, number, block)


def data(number: int, octets: bytes = b"abc", *, end: bool = False) -> bytes:
    return frame(DATA, int(end), number, octets)


def window(number: int, amount: int) -> bytes:
    return frame(WINDOW, 0, number, amount.to_bytes(4, "big"))


def reset(number: int) -> bytes:
    return frame(RESET, 0, number, bytes((0, 0, 0, 8)))


def priority(number: int, depends_on: int = 0) -> bytes:
    return frame(PRIORITY, 0, number, depends_on.to_bytes(4, "big") + b"\0")


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in pairs))


def named(name: str, value: str = "v") -> bytes:
    return ask(1, block=HEAD + fields((name, value)))


# Events and replies.


def asked(number: int, ended: bool = False) -> Heard:
    return "requested", number, ended


def came(number: int, octets: bytes = b"abc", *, amount: int | None = None, end: bool = False) -> Heard:
    return "received", number, octets, len(octets) if amount is None else amount, end


def passed() -> Heard:
    return ("ignored",)


def resets(number: int, code: ErrorCode) -> Sent:
    return RESET, 0, number, code.to_bytes(4, "big")


ACKED: Sent = (SETTINGS, ACK, 0, b"")
CLOSED, PROTOCOL, FLOW = ErrorCode.STREAM_CLOSED, ErrorCode.PROTOCOL_ERROR, ErrorCode.FLOW_CONTROL_ERROR
SIZE, COMPRESSION, REFUSED = ErrorCode.FRAME_SIZE_ERROR, ErrorCode.COMPRESSION_ERROR, ErrorCode.REFUSED_STREAM


def answer(number: int) -> Callable[[Http2Reader], object]:
    return lambda http2: http2.writer.headers(number, b"\x88", end=True)


def give_up(number: int) -> Callable[[Http2Reader], object]:
    return lambda http2: http2.reset(number, ErrorCode.CANCEL)


BIG = data(1, bytes(2500), end=True)
READ = frame(SETTINGS, ACK)
LET: Sent = (WINDOW, 0, 0, (STREAMS * AHEAD - DEFAULT_WINDOW).to_bytes(4, "big"))
ANSWERED: Sent = (HEADERS, WHOLE | END, 1, b"\x88")
GIVEN_UP = resets(1, ErrorCode.CANCEL)
MALFORMED = ((passed(),), (resets(1, PROTOCOL),))
"""What is heard and said of a request that is malformed."""


class Case(NamedTuple):
    """What a client sends after its preface, in steps, with the expected events, replies and final error, if any."""

    name: str
    steps: Sequence[Step]
    heard: Sequence[Heard] = ()
    sent: Sequence[Sent] = ()
    end: ErrorCode | None = None


CASES = [
    # Frames.
    Case("4.1 a type that nobody knows", [frame(UNKNOWN, 0xFF, 7, b"x"), ask(1)], [passed(), asked(1)]),
    Case("4.1 flags that nobody knows", [frame(HEADERS, WHOLE | 0xD2, 1, HEAD), frame(PING, 0x16, 0, bytes(8))],
         [asked(1), ("pinged",)], [(PING, ACK, 0, bytes(8))]),
    Case("4.1 the reserved bit", [frame(HEADERS, WHOLE, 1 << 31 | 1, HEAD)], [asked(1)]),
    Case("4.2 the largest frame", [ask(1), data(1, bytes(LARGEST_FRAME))], [asked(1), came(1, bytes(LARGEST_FRAME))]),
    Case("4.2 a larger frame", [ask(1), frame(UNKNOWN, 0, 1, bytes(LARGEST_FRAME + 1))[:9]], [asked(1)], end=SIZE),
    Case("4.2 a larger frame of padded data", [ask(1), frame(DATA, PADDED, 1, bytes(LARGEST_FRAME + 1))[:9]], [asked(1)], end=SIZE),
    Case("4.2 a larger frame of data", [ask(1), data(1, bytes(LARGEST_FRAME + 1))], [asked(1), came(1, bytes(LARGEST_FRAME + 1))]),
    Case("4.2 the largest frame of data", [ask(1), READ, data(1, bytes(LARGEST_DATA))[:9]], [asked(1), ("settled",)],
         [LET, (WINDOW, 0, 0, LARGEST_DATA.to_bytes(4, "big"))]),
    Case("4.2 a frame of data that is larger still", [ask(1), READ, data(1, bytes(LARGEST_DATA + 1))[:9]],
         [asked(1), ("settled",)], [LET], SIZE),
    Case("4.2 data that come in pieces", [ask(1), BIG[:1009], BIG[1009:]], [asked(1), came(1, bytes(1000)), came(1, bytes(1500), end=True)]),
    Case("4.2 data of a stream that ends here meanwhile", [ask(1), BIG[:1009], give_up(1), BIG[1009:], ask(3)],
         [asked(1), came(1, bytes(1000)), passed(), asked(3)], [GIVEN_UP]),
    Case("4.2 such data that nobody wants", [ask(1), give_up(1), BIG[:9], BIG[9:], ask(3)], [asked(1), passed(), asked(3)], [GIVEN_UP]),
    Case("4.2 such data within a block", [frame(HEADERS, 0, 1, HEAD), BIG[:9]], end=PROTOCOL),
    Case("4.3 a block that cannot be read", [ask(1, block=b"\x40")], end=COMPRESSION),
    Case("4.3 such a block of a stream that was ended here", [ask(1), give_up(1), ask(1, end=True, block=b"\x80")], [asked(1)], [GIVEN_UP],
         COMPRESSION),
    # Stream states.
    Case("5.1 idle: data", [data(1)], end=PROTOCOL),
    Case("5.1 idle: a reset", [reset(1)], end=PROTOCOL),
    Case("5.1 idle: a window", [window(1, 1)], end=PROTOCOL),
    Case("5.1 idle: a priority", [priority(1), ask(1)], [passed(), asked(1)]),
    Case("5.1 idle: data on a stream of the server's", [ask(3), data(2)], [asked(3)], end=PROTOCOL),
    Case("5.1 idle: a reset of a stream of the server's", [ask(3), reset(2)], [asked(3)], end=PROTOCOL),
    Case("5.1 idle: a window of a stream of the server's", [ask(3), window(2, 1)], [asked(3)], end=PROTOCOL),
    Case("5.1 half closed: data", [ask(1, end=True), data(1)], [asked(1, True)], end=CLOSED),
    Case("5.1 half closed: header fields", [ask(1, end=True), ask(1, end=True)], [asked(1, True)], end=CLOSED),
    Case("5.1 half closed by trailers: data", [ask(1), ask(1, end=True, block=b""), data(1)], [asked(1), came(1, b"", end=True)], end=CLOSED),
    Case("5.1 half closed: a window, a priority and a reset", [ask(1, end=True), window(1, 9), priority(1), reset(1)],
         [asked(1, True), passed(), ("was_reset", 1)]),
    Case("5.1 closed by the client: data", [ask(1), reset(1), data(1)], [asked(1), ("was_reset", 1)], end=CLOSED),
    Case("5.1 closed by the client: a window, a priority and a reset", [ask(1), reset(1), window(1, 9), priority(1), reset(1)],
         [asked(1), ("was_reset", 1), passed(), ("was_reset", 1)]),
    Case("5.1 closed by both: data", [ask(1, end=True), answer(1), data(1)], [asked(1, True)], [ANSWERED], CLOSED),
    Case("5.1 ended here: all that was on its way", [ask(1), give_up(1), data(1), window(1, 9), priority(1), ask(1, end=True, block=b"")],
         [asked(1), passed(), passed(), passed()], [GIVEN_UP]),
    Case("5.1 ended here: data with padding take all of the window", [ask(1), give_up(1), frame(DATA, PADDED, 1, b"\2a\0\0")],
         [asked(1), passed()], [GIVEN_UP]),
    Case("5.1 ended here: data behind the client's own reset", [ask(1), give_up(1), reset(1), data(1)],
         [asked(1), ("was_reset", 1)], [GIVEN_UP], CLOSED),
    Case("5.1 answered, and the client sends on", [ask(1), answer(1), data(1, end=True)], [asked(1), came(1, end=True)], [ANSWERED]),
    Case("5.1 answered and ended here", [ask(1), answer(1), give_up(1), data(1)], [asked(1), passed()], [ANSWERED, GIVEN_UP]),
    # Stream numbers and limits.
    Case("5.1.1 the number 0", [ask(0)], end=PROTOCOL),
    Case("5.1.1 an even number", [ask(2)], end=PROTOCOL),
    Case("5.1.1 a number that was passed over", [ask(5), ask(3)], [asked(5)], end=CLOSED),
    Case("5.1.2 one stream too many", [*map(ask, (1, 3, 5, 7, 9)), data(9), data(7)],
         [*map(asked, (1, 3, 5, 7)), passed(), passed(), came(7)], [resets(9, REFUSED)]),
    Case("5.1.2 the fields of one too many are known all the same", [*map(ask, (1, 3, 5, 7)), ask(9, block=HEAD + b"\x40\x01a\x01b"), reset(1),
         ask(11, block=HEAD + b"\xbe")], [*map(asked, (1, 3, 5, 7)), passed(), ("was_reset", 1), asked(11)], [resets(9, REFUSED)]),
    Case("5.1.2 a stream that is answered leaves room", [ask(1, end=True), *map(ask, (3, 5, 7)), answer(1), ask(9)],
         [asked(1, True), *map(asked, (3, 5, 7, 9))], [ANSWERED]),
    Case("5.1.2 a stream that its client has ended counts", [*[ask(number, end=True) for number in (1, 3, 5, 7)], ask(9, end=True), window(9, 1)],
         [*[asked(number, True) for number in (1, 3, 5, 7)], passed()], [resets(9, REFUSED)]),
    # Data.
    Case("6.1 data on stream 0", [data(0)], end=PROTOCOL),
    Case("6.1 no data", [ask(1), data(1, b""), data(1, b"", end=True)], [asked(1), came(1, b""), came(1, b"", end=True)]),
    Case("6.1 padding", [ask(1), frame(DATA, PADDED, 1, b"\2abc\0\0")], [asked(1), came(1, amount=6)]),
    Case("6.1 nothing but padding", [ask(1), frame(DATA, PADDED | END, 1, b"\4" + bytes(4))], [asked(1), came(1, b"", amount=5, end=True)]),
    Case("6.1 more padding than there is", [ask(1), frame(DATA, PADDED, 1, b"\4abc")], [asked(1)], end=PROTOCOL),
    Case("6.1 no length of the padding", [ask(1), frame(DATA, PADDED, 1)], [asked(1)], end=PROTOCOL),
    # Header fields.
    Case("6.2 padding", [frame(HEADERS, WHOLE | PADDED, 1, b"\3" + HEAD + bytes(3))], [asked(1)]),
    Case("6.2 more padding than there is", [frame(HEADERS, WHOLE | PADDED, 1, b"\xff" + HEAD)], end=PROTOCOL),
    Case("6.2 a priority that is cut", [frame(HEADERS, WHOLE | PRIORITISED, 1, bytes(4))], end=PROTOCOL),
    Case("6.2 a stream that depends on itself", [frame(HEADERS, WHOLE | PRIORITISED, 1, b"\x80\0\0\1\0" + HEAD)], end=PROTOCOL),
    Case("6.3 a priority of stream 0", [priority(0)], end=PROTOCOL),
    Case("6.3 a priority of another size", [frame(PRIORITY, 0, 1, bytes(4))], end=SIZE),
    Case("6.3 a stream that depends on itself", [priority(3, 3)], end=PROTOCOL),
    Case("6.4 a reset of stream 0", [reset(0)], end=PROTOCOL),
    Case("6.4 a reset of another size", [ask(1), frame(RESET, 0, 1, bytes(3))], [asked(1)], end=SIZE),
    # Settings.
    Case("6.5 settings of a stream", [frame(SETTINGS, 0, 1)], end=PROTOCOL),
    Case("6.5 settings of another size", [frame(SETTINGS, 0, 0, bytes(7))], end=SIZE),
    Case("6.5 settings are acknowledged", [settings((3, 7), (4, 9))], sent=[ACKED]),
    Case("6.5 our settings are read", [READ, READ], [("settled",)], [LET]),
    Case("6.5 an acknowledgement with settings", [frame(SETTINGS, ACK, 0, bytes(6))], end=SIZE),
    Case("6.5.2 a setting that nobody knows", [settings((0, 1), (8, 1), (0xFFFF, LARGEST))], sent=[ACKED]),
    Case("6.5.2 pushes", [settings((2, 0), (2, 1))], sent=[ACKED]),
    Case("6.5.2 pushes beyond yes and no", [settings((2, 2))], end=PROTOCOL),
    Case("6.5.2 the largest window", [settings((4, LARGEST))], sent=[ACKED]),
    Case("6.5.2 a larger window", [settings((4, LARGEST + 1))], end=FLOW),
    Case("6.5.2 frames of any size that is allowed", [settings((5, 1 << 14)), settings((5, (1 << 24) - 1))], sent=[ACKED, ACKED]),
    Case("6.5.2 too small frames", [settings((5, (1 << 14) - 1))], end=PROTOCOL),
    Case("6.5.2 too large frames", [settings((5, 1 << 24))], end=PROTOCOL),
    Case("6.6 a push", [ask(1), frame(PUSH, WHOLE, 1, bytes((0, 0, 0, 2)) + HEAD)], [asked(1)], end=PROTOCOL),
    # Pings and GOAWAYs.
    Case("6.7 a ping is answered", [frame(PING, 0, 0, b"12345678")], [("pinged",)], [(PING, ACK, 0, b"12345678")]),
    Case("6.7 an answer to a ping", [frame(PING, ACK, 0, b"12345678")], [("ponged", b"12345678")]),
    Case("6.7 a ping of a stream", [frame(PING, 0, 1, bytes(8))], end=PROTOCOL),
    Case("6.7 a ping of another size", [frame(PING, 0, 0, bytes(7))], end=SIZE),
    Case("6.8 the client leaves, and its streams go on", [ask(1), frame(GOAWAY, 0, 0, bytes(8) + b"why"), data(1)],
         [asked(1), ("left",), came(1)]),
    Case("6.8 a client that leaves a stream", [frame(GOAWAY, 0, 1, bytes(8))], end=PROTOCOL),
    Case("6.8 a leave that is cut", [frame(GOAWAY, 0, 0, bytes(7))], end=SIZE),
    # Windows.
    Case("6.9 a window of another size", [frame(WINDOW, 0, 0, bytes(5))], end=SIZE),
    Case("6.9 no more room on the connection", [window(0, 0)], end=PROTOCOL),
    Case("6.9 no more room on a stream", [ask(1), window(1, 0), data(1)], [asked(1), ("was_reset", 1), passed()], [resets(1, PROTOCOL)]),
    Case("6.9 no more room on a stream that was answered", [ask(1, end=True), answer(1), window(1, 0)], [asked(1, True)], [ANSWERED]),
    Case("6.9.1 all the room that there may be", [ask(1), window(0, LARGEST - DEFAULT_WINDOW), window(1, LARGEST - DEFAULT_WINDOW)], [asked(1)]),
    Case("6.9.1 more room on the connection", [window(0, LARGEST - DEFAULT_WINDOW + 1)], end=FLOW),
    Case("6.9.1 more room on a stream", [ask(1), ask(3), window(1, LARGEST - DEFAULT_WINDOW + 1), data(3)],
         [asked(1), asked(3), ("was_reset", 1), came(3)], [resets(1, FLOW)]),
    Case("6.9.1 more room on a stream that settings have filled", [ask(1), settings((4, LARGEST)), window(1, 1)], [asked(1), ("was_reset", 1)],
         [ACKED, resets(1, FLOW)]),
    Case("6.9.1 data beyond the window of the connection", [ask(1), *[data(1, bytes(LARGEST_FRAME))] * 3, data(1, bytes(LARGEST_FRAME - 1)), data(1, b"a")],
         [asked(1), *[came(1, bytes(LARGEST_FRAME))] * 3, came(1, bytes(LARGEST_FRAME - 1))], end=FLOW),
    Case("6.9.1 data that nobody wants take of that window", [ask(1), give_up(1), *[data(1, bytes(LARGEST_FRAME))] * 4],
         [asked(1), *[passed()] * 3], [GIVEN_UP], FLOW),
    Case("6.9.2 settings that give a stream more than there may be", [ask(1), window(1, 1), settings((4, LARGEST))], [asked(1)], end=FLOW),
    # Blocks split across frames.
    Case("6.10 a block in pieces", [frame(HEADERS, END, 1, HEAD[:3]), frame(CONTINUATION, 0, 1, HEAD[3:9]), frame(CONTINUATION, 0, 1),
         frame(CONTINUATION, WHOLE, 1, HEAD[9:])], [passed(), passed(), passed(), asked(1, True)]),
    Case("6.10 trailers in pieces", [ask(1), frame(HEADERS, END, 1, fields(("a", "b"))[:2]), frame(CONTINUATION, WHOLE, 1, fields(("a", "b"))[2:])],
         [asked(1), passed(), came(1, b"", end=True)]),
    Case("6.10 a piece of nothing", [frame(CONTINUATION, WHOLE, 1, HEAD)], end=PROTOCOL),
    Case("6.10 a piece of another stream", [frame(HEADERS, 0, 1, HEAD), frame(CONTINUATION, WHOLE, 3)], end=PROTOCOL),
    Case("6.10 another frame within a block", [frame(HEADERS, 0, 1, HEAD), data(1)], end=PROTOCOL),
    # Requests.
    Case("8.1 trailers", [ask(1), data(1), ask(1, end=True, block=fields(("a", "b")))], [asked(1), came(1), came(1, b"", end=True)]),
    Case("8.1 trailers that do not end the stream", [ask(1), ask(1, block=fields(("a", "b"))), data(1)],
         [asked(1), ("was_reset", 1), passed()], [resets(1, PROTOCOL)]),
    Case("8.1 pseudo fields in trailers", [ask(1), ask(1, end=True)], [asked(1), ("was_reset", 1)], [resets(1, PROTOCOL)]),
    Case("8.2.1 capitals", [named("Te-st")], *MALFORMED),
    Case("8.2.1 a space in a name", [named("a b")], *MALFORMED),
    Case("8.2.1 a colon in a name", [named("a:b")], *MALFORMED),
    Case("8.2.1 a name beyond ASCII", [named("\u00e4")], *MALFORMED),
    Case("8.2.1 no name", [named("")], *MALFORMED),
    *[Case(f"8.2.2 {name}", [named(name)], *MALFORMED)
      for name in ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")],
    Case("8.2.2 te but for trailers", [ask(1, block=PSEUDO + fields(("te", "trailers, gzip")))], *MALFORMED),
    Case("8.2.2 a field of a connection in trailers", [ask(1), ask(1, end=True, block=fields(("upgrade", "h3")))],
         [asked(1), ("was_reset", 1)], [resets(1, PROTOCOL)]),
    Case("8.3 a pseudo field that nobody knows", [ask(1, block=PSEUDO + fields((":test", "a")))], *MALFORMED),
    Case("8.3 a pseudo field behind another field", [ask(1, block=PSEUDO[:2] + fields(("a", "b")) + PSEUDO[2:])], *MALFORMED),
    *[Case(f"8.3.1 no {name}", [ask(1, block=PSEUDO.replace(octet, b""))], *MALFORMED)
      for name, octet in ((":method", b"\x83"), (":scheme", b"\x86"), (":path", b"\x84"))],
    *[Case(f"8.3.1 {name} twice", [ask(1, block=PSEUDO + octet)], *MALFORMED)
      for name, octet in ((":method", b"\x83"), (":scheme", b"\x86"), (":path", b"\x84"))],
    Case("8.3.1 an empty :path", [ask(1, block=PSEUDO[:2] + fields((":path", "")))], *MALFORMED),
    Case("8.3.1 with an :authority", [ask(1, block=PSEUDO + fields((":authority", "a")))], [asked(1)]),
    Case("8.5 a tunnel", [ask(1, block=fields((":method", "CONNECT"), (":authority", "a")))], *MALFORMED),
    Case("8.1.1 what follows on a malformed request", [named("A"), data(1), ask(1, end=True, block=b""), ask(3)],
         [passed(), passed(), passed(), asked(3)], [resets(1, PROTOCOL)]),
    # Oversized blocks.
    Case("10.5.1 a frame with more fields than are read", [frame(HEADERS, WHOLE, 1, bytes(LARGEST_FRAME + 1)), frame(PING, 0, 0, bytes(8))],
         [("lost", 1), ("oversized", 1, False), ("pinged",)], [(PING, ACK, 0, bytes(8))]),
    Case("10.5.1 such a frame behind another", [frame(HEADERS, 0, 1, HEAD), frame(CONTINUATION, 0, 1, bytes(LARGEST_FRAME + 1)), frame(CONTINUATION, WHOLE, 1, b"x")],
         [passed(), ("lost", 1), ("oversized", 1, False), passed(), passed(), came(1, b"", end=True)]),
    Case("10.5.1 such a frame once more", [frame(HEADERS, WHOLE | END, 1, bytes(LARGEST_FRAME + 1)), frame(HEADERS, WHOLE, 3, bytes(LARGEST_FRAME + 1))],
         [("lost", 1), ("oversized", 1, True), passed()]),
    Case("10.5.1 such a frame behind nothing", [frame(CONTINUATION, WHOLE, 1, bytes(LARGEST_FRAME + 1))[:9]], end=PROTOCOL),
    Case("10.5.1 too many fields", [ask(1, block=HEAD + b"\x40\x01a\x01b" + b"\xbe" * 31), data(1)], [("lost", 1), ("oversized", 1, False), came(1)]),
    Case("10.5.1 too many pieces", [frame(HEADERS, END, 1, HEAD), frame(CONTINUATION, 0, 1, bytes(1000)), frame(CONTINUATION, WHOLE, 1, bytes(9))],
         [passed(), ("lost", 1), ("oversized", 1, True), passed(), passed()]),
    Case("10.5.1 too many fields behind data", [ask(1), ask(3), ask(1, end=True, block=b"\x40\x01a\x01b" + b"\xbe" * 31), data(3)],
         [asked(1), asked(3), ("lost", 3), passed(), came(1, b"", end=True), came(3)]),
    Case("10.5.1 behind such a block no stream begins, and the others go on",
         [ask(1), ask(3, end=True, block=HEAD + b"\x84" * 40), data(1), ask(5), data(5), window(5, 1), reset(5), ask(1, end=True, block=b"\xbe")],
         [asked(1), ("lost", 3), ("oversized", 3, True), came(1), passed(), passed(), ("was_reset", 5), passed(), came(1, b"", end=True)]),
    # Header tables.
    Case("H2.3.3 an index beyond the table", [ask(1, block=HEAD + b"\xbe")], end=COMPRESSION),
    Case("H3.2 a field that was told before", [ask(1, block=HEAD + b"\x40\x01a\x01b"), ask(3, block=HEAD + b"\xbe")], [asked(1), asked(3)]),
    Case("H4.2 a size at the end of a block", [ask(1, block=HEAD + b"\x20")], end=COMPRESSION),
    Case("H4.2 a size beyond that of our table", [ask(1, block=b"\x3f\xe2\x1f" + HEAD)], end=COMPRESSION),
    Case("H4.2 two sizes", [ask(1, block=b"\x20\x3f\xe1\x1f" + HEAD)], [asked(1)]),
    Case("H4.3 a table that was emptied", [ask(1, block=HEAD + b"\x40\x01a\x01b"), ask(3, block=b"\x20" + HEAD), ask(5, block=HEAD + b"\xbe")],
         [asked(1), asked(3)], end=COMPRESSION),
    Case("H5.1 a number without end", [ask(1, block=b"\xff" * 40)], end=COMPRESSION),
    Case("H5.2 a text that is cut", [ask(1, block=HEAD + b"\0\x05abc")], end=COMPRESSION),
    Case("H5.2 Huffman's padding", [ask(1, block=HEAD + b"\0\x81\x1f\x01a")], [asked(1)]),
    Case("H5.2 more than 7 bits of Huffman's padding", [ask(1, block=HEAD + b"\0\x82\x1f\xff\x01a")], end=COMPRESSION),
    Case("H5.2 zeros in Huffman's padding", [ask(1, block=HEAD + b"\0\x81\x18\x01a")], end=COMPRESSION),
    Case("H5.2 Huffman's end of a text", [ask(1, block=HEAD + b"\0\x84\xff\xff\xff\xff\x01a")], end=COMPRESSION),
    Case("H6.1 the index 0", [ask(1, block=HEAD + b"\x80")], end=COMPRESSION),
    Case("H6.2.3 a field that is never put into a table", [ask(1, block=HEAD + b"\x10\x01a\x01b")], [asked(1)]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_frames_are_handled_as_the_protocol_says(case: Case) -> None:
    http2, log = begun()
    end = None
    try:
        for step in case.steps:
            if isinstance(step, bytes):
                receive(http2, step)
            else:
                step(http2)
    except Broken as broken:
        end = broken.code
    assert (log.heard, frames_of(http2.writer.take()), end) == (list(case.heard), list(case.sent), case.end)


def receive(http2: Http2Reader, octets: bytes) -> None:
    while octets:
        octets = octets[http2.receive(octets) :]


@pytest.mark.parametrize(
    "raw",
    [b"GET / HTTP/1.1\r\n", PREFACE[:-1] + b"x", PREFACE + frame(PING, 0, 0, bytes(8)), PREFACE + ask(1)],
    ids=["another protocol", "a wrong last octet", "a ping behind it", "a request behind it"],
)
def test_a_wrong_preface_ends_the_connection(raw: bytes) -> None:
    http2, log = connection()
    with pytest.raises(Broken, match="PROTOCOL_ERROR"):
        receive(http2, raw)
    assert log.heard == []


def test_a_connection_begins_with_settings_both_ways() -> None:
    http2, _ = connection()
    receive(http2, PREFACE + settings((4, 100)))
    own = settings((3, STREAMS), (4, AHEAD), (5, LARGEST_DATA), (6, MOST_HEADER))
    assert http2.writer.take() == own + frame(SETTINGS, ACK)


def test_the_fields_of_a_request_are_told() -> None:
    http2, log = begun()
    encoder = Encoder()
    for number in (1, 3, 5):
        given = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/a"),
            ("te", "trailers"),
            ("x", str(number // 4)),
            ("x", "\t\u00e4 b"),
        ]
        receive(http2, ask(number, block=encoder.encode(given)))
        (head,) = log.heads
        log.heads.clear()
        assert [(name.decode(), value.decode()) for name, value in head.headers] == given
        assert (head.fields[b"x"], head.pseudo, head.illegal) == ("\t\u00e4 b".encode(), 3, False)
        assert head.size == sum(32 + len(name.encode()) + len(value.encode()) for name, value in given)


@pytest.mark.parametrize("value", ["a\0", "a\rb", "a\nb", "\x7f", "\x1b"])
def test_a_value_with_an_octet_that_none_may_have_is_marked(value: str) -> None:
    http2, log = begun()
    receive(http2, named("x", value))
    assert [head.illegal for head in log.heads] == [True]


@pytest.mark.parametrize("size", [0, 4095])
def test_a_client_with_a_smaller_table_is_told_that_none_is_used(size: int) -> None:
    http2, _ = begun()
    client = Decoder()
    receive(http2, ask(1) + ask(3) + settings((1, size)))
    client.max_allowed_table_size = size
    for number, sizes in ((1, [0]), (3, [])):
        http2.writer.headers(number, b"\x88", end=True)
        *_, (kind, _, stream, block) = frames_of(http2.writer.take())
        assert (kind, stream, dict(client.decode(block, raw=True))) == (HEADERS, number, {b":status": b"200"})
        assert [octet & 0x1F for octet in block if octet & 0xE0 == 0x20] == sizes


def test_a_client_with_a_larger_table_is_told_nothing() -> None:
    http2, _ = begun()
    receive(http2, ask(1) + settings((1, 4096), (1, 8192)))
    http2.writer.headers(1, b"\x88", end=True)
    assert frames_of(http2.writer.take())[1:] == [ANSWERED]


def test_the_connection_gives_room_once_half_of_it_is_used() -> None:
    http2, log = begun()
    receive(http2, ask(1) + READ)
    http2.writer.take()
    for _ in range(100):
        receive(http2, data(1, bytes(1 << 14)))
    assert frames_of(http2.writer.take()) == [(WINDOW, 0, 0, (33 << 14).to_bytes(4, "big"))] * 3
    assert len(log.heard) == 102


def test_only_the_latest_streams_that_ended_here_are_kept_in_mind() -> None:
    http2, log = begun()
    numbers = range(1, 2 * STREAMS + 2, 2)
    for number in numbers:
        receive(http2, ask(number))
        http2.reset(number, ErrorCode.CANCEL)
    for number in numbers[1:]:
        receive(http2, data(number))
    assert log.heard[len(numbers) :] == [passed()] * STREAMS
    with pytest.raises(Broken, match="STREAM_CLOSED"):
        receive(http2, data(numbers[0]))


_WORDS = [step for case in CASES for step in case.steps if isinstance(step, bytes) and len(step) < 200]


@given(st.lists(st.sampled_from(_WORDS), max_size=12), st.lists(st.integers(0, 400), max_size=8))
def test_frames_mean_the_same_however_their_bytes_come(words: list[bytes], cuts: list[int]) -> None:
    octets = PREFACE + frame(SETTINGS) + b"".join(words)
    whole, pieces = read_in([octets]), sorted({0, *(cut for cut in cuts if cut < len(octets)), len(octets)})
    assert read_in([octets[begin:end] for begin, end in pairwise(pieces)]) == whole


def read_in(pieces: Sequence[bytes]) -> tuple[list[Heard], bytes, ErrorCode | None]:
    """Return the events, replies and error for bytes that arrive in pieces."""
    http2, log = connection()
    end = None
    try:
        for piece in pieces:
            receive(http2, piece)
    except Broken as broken:
        end = broken.code
    return log.heard, http2.writer.take(), end


_AMOUNTS = st.one_of(st.integers(1, 30), st.integers(1, 70_000))
_MOVES = st.one_of(
    st.tuples(st.just("send"), st.sampled_from((1, 3)), _AMOUNTS),
    st.tuples(st.just("window"), st.sampled_from((0, 1, 3)), _AMOUNTS),
    st.tuples(st.just("settings"), st.just(0), st.integers(0, 70_000)),
)


@given(st.lists(_MOVES, max_size=30))
def test_no_more_data_are_sent_than_the_client_allows(moves: list[tuple[str, int, int]]) -> None:
    http2, _ = begun()
    receive(http2, ask(1) + ask(3))
    initial = DEFAULT_WINDOW
    lets = {0: DEFAULT_WINDOW, 1: initial, 3: initial}
    for move, number, amount in moves:
        if move == "send":
            room = min(http2.writer.room(number), amount)
            assert http2.writer.room(number) == min(lets[0], lets[number], LARGEST_FRAME)
            if room > 0:
                http2.writer.send(number, bytes(room))
                ((kind, _, stream, octets),) = frames_of(http2.writer.take())
                assert (kind, stream) == (DATA, number)
                lets[0] -= len(octets)
                lets[number] -= len(octets)
                assert min(lets[0], lets[number]) >= 0
        elif move == "window":
            receive(http2, window(number, amount))
            lets[number] += amount
        else:
            receive(http2, settings((4, amount)))
            assert frames_of(http2.writer.take()) == [ACKED]
            lets = {stream: left + (amount - initial if stream else 0) for stream, left in lets.items()}
            initial = amount
