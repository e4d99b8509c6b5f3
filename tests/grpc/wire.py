"""A client for the gRPC port that writes its own frames, and reads replies frame by frame when the test asks."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from hpack import Decoder

from bench.load import http2
from headway.grpc.connection import PortConnections
from tests.grpc.stand import PREDICT, Port, predict

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END = ACK = 1
PADDED = 8
READ = http2.frame(SETTINGS, ACK, 0)
"""The client has read the settings."""


@dataclass
class Answer:
    """What arrived on one stream. `code` is from its reset."""

    kinds: list[str] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    code: int | None = None

    @property
    def status(self) -> str:
        return self.fields.get("grpc-status", "")


class Wire:
    """A client. `answers` go by call number and `granted` windows by stream number. `goaways` are last stream numbers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self.answers: dict[int, Answer] = {}
        self.granted: dict[int, int] = {}
        self.goaways: list[int] = []
        self._known = 0

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    def ask(self, *numbers: int) -> None:
        self.send(*(http2.headers(number, PREDICT) + http2.message(number, predict("a")) for number in numbers))

    async def ended(self, number: int) -> Answer:
        """Wait for a call to end, and return its answer."""
        answer = self.answers.setdefault(number, Answer())
        await self.until(lambda: answer.kinds[-1:] in (["end"], ["reset"]))
        return answer

    async def settled(self) -> None:
        """Wait until the server has read everything sent and its immediate replies have arrived."""
        for _ in range(2):
            known = self._known
            self.send(http2.frame(SETTINGS, 0, 0))
            await self.until(lambda: self._known > known)  # noqa: B023

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await self.frame()

    async def next(self, kind: int, flags: int = 0) -> bytes:
        while True:
            found, given, payload = await self.frame()
            if (found, given) == (kind, flags):
                return payload

    async def left(self) -> list[int]:
        """Wait for the server to close the connection, and return the last stream numbers from its GOAWAYs."""
        while True:
            try:
                await self.frame()
            except asyncio.IncompleteReadError:
                return self.goaways

    async def frame(self) -> tuple[int, int, bytes]:
        """Read a frame and record it. Return its type, flags and payload."""
        head = await self._reader.readexactly(9)
        payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        answer = self.answers.setdefault(stream // 2, Answer()) if stream else Answer()
        if kind == HEADERS:
            answer.fields |= {name.decode(): value.decode() for name, value in Decoder().decode(payload, raw=True)}
            answer.kinds.append("end" if flags & END else "fields")
        elif kind == DATA:
            answer.data += payload
            answer.kinds.append("data")
        elif kind == RESET:
            answer.code = int.from_bytes(payload, "big")
            answer.kinds.append("reset")
        elif kind == WINDOW:
            self.granted[stream] = self.granted.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == GOAWAY:
            self.goaways.append(int.from_bytes(payload[:4], "big"))
        elif kind == SETTINGS:
            self._known += flags & ACK
        return kind, flags, payload


async def connect(port: Port, *hello: bytes) -> Wire:
    wire = Wire(*await asyncio.open_connection("127.0.0.1", port.listener.port))
    wire.send(*hello)
    return wire


async def greeted(port: Port) -> tuple[Wire, PortConnections]:
    """Return a client that has had one call answered, and the port's connections."""
    wire = await connect(port, http2.hello())
    wire.ask(0)
    await wire.ended(0)
    assert port.listener._connections is not None
    return wire, port.listener._connections
