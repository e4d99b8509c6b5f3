"""Clients that behave badly: they leave before their answer, tear requests apart, and send what makes a model fail.

Each client has a connection, a way into the service and a request at a time; those over gRPC (`crowd_calls.py`) share a few connections. Every
text is unique, and an answer counts only when it is the right one for that very text. Where a way takes lists, a request has several
texts. Each text that was sent whole has one outcome:

    ok          the right answer
    an error    the code of a refusal or failure, such as rejected_by_model
    let go      another text of its request has failed, so nothing was told of this one
    left        the client closed the connection while it waited (half of them politely, half by a reset), or cancelled the call
    cut         the server closed the connection instead of answering
    silent      no answer within PATIENCE
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from bench.promises.crowd_calls import Caller, Calls
from tests.promises import ways_in
from tests.promises.ways_in import WayIn, place_of_message

PATIENCE = 15.0
SHOWN = 5
"""Violations that are kept word for word."""

MOST = 4
"""Most texts of a request."""
ALL_WAYS = tuple(way for way in ways_in.WAYS_IN if not way.numbers)
"""Ways by which texts come back as texts."""
WAYS = {"all": ALL_WAYS, "native": (ways_in.NATIVE,)}
"""Ways into the service, by the names of the command line."""

_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Manners:
    """How clients behave.

    Attributes:
        leave, tear, reject, poison: shares of the requests whose client goes while it waits, that are broken off half-way, whose input the model
            refuses, and whose input makes its batch fail.
        stay: mean seconds until a client that leaves has left.
        pause: mean seconds between an answer and the client's next request.
    """

    leave: float = 0.1
    tear: float = 0.005
    reject: float = 0.005
    poison: float = 0.0001
    stay: float = 0.003
    pause: float = 0.0


class Tallied:
    """What became of all requests.

    Attributes:
        unsure: texts of calls that were cancelled, perhaps before they had left the client.
        torn: requests that were broken off, which have no outcome.
        by_way: right answers by way.
        wrong, unasked: answers to another request, and octets that came when no answer was due. None may be.
        blamed: fine inputs that were answered as failing.
        spared: failing inputs that were answered as fine. None may be.
    """

    def __init__(self) -> None:
        self.sent = self.unsure = self.torn = self.wrong = self.unasked = self.blamed = self.spared = 0
        self.outcomes: Counter[str] = Counter()
        self.by_way: Counter[str] = Counter()
        self.examples: list[str] = []

    def violation(self, text: str) -> None:
        """Keep a violation in words, if there is room."""
        if len(self.examples) < SHOWN:
            self.examples.append(text)


@dataclass(frozen=True, slots=True)
class Asked:
    """Texts of a request, each of them `plain`, `REJECT` or `POISON`."""

    way: WayIn
    texts: Sequence[str]
    kinds: Sequence[str]


class Crowd:
    """A crowd of clients for one server. Build it in a running loop, and call `run` once. The ways are dealt to the clients in turn."""

    def __init__(
        self,
        url: str,
        size: int,
        manners: Manners,
        seed: int,
        ways: Sequence[WayIn] = WAYS["native"],
        grpc_port: int = 0,
    ) -> None:
        self.counters = Tallied()
        self.manners = manners
        self.rng = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.netloc = parts.netloc
        self.nonce = f"{seed:08x}"
        self.left_to_send = 0
        self._calls = Calls(self, grpc_port)
        self._ways = [ways[number % len(ways)] for number in range(size)]
        self._clients: list[_Client | Caller] = []
        self._over = asyncio.Event()

    async def run(self, requests: int, seconds: float) -> Tallied:
        """Send until `requests` were sent or `seconds` are over; returns when each has its outcome."""
        self.left_to_send = requests
        stop = self.loop.call_later(seconds, self.stop)
        sweep = self.loop.create_task(self._sweep())
        try:
            self._clients = [
                _Client(self, way) if way.wire == "http" else Caller(self._calls, way) for way in self._ways
            ]
            for client in self._clients:
                client.connect()
            await self._over.wait()
        finally:
            stop.cancel()
            sweep.cancel()
            for client in self._clients:
                client.close()
            await self._calls.close()
        return self.counters

    def stop(self) -> None:
        """Send no more."""
        self.left_to_send = 0
        if all(client.idle for client in self._clients):
            self._over.set()

    def draw(self, way: WayIn) -> Asked:
        """Return texts for the next request."""
        rng, manners = self.rng, self.manners
        self.left_to_send -= 1
        texts, kinds = [], []
        for place in range(rng.randint(1, min(way.most, MOST))):
            luck = rng.random()
            kind = (
                "POISON" if luck < manners.poison else "REJECT" if luck < manners.poison + manners.reject else "plain"
            )
            kinds.append(kind)
            texts.append(f"{kind} {self.nonce}-{self.left_to_send:09d}.{place} Headway, s'il vous plait")
        return Asked(way, texts, kinds)

    def judge(self, asked: Asked, outputs: Sequence[str], code: str, blamed: int, answer: object) -> None:
        """Note the answer to a request. `blamed` is the place of the text that an error names, -1 if it names none."""
        counters, fine = self.counters, all(kind == "plain" for kind in asked.kinds)
        if outputs:
            self.count("ok", len(asked.texts))
            counters.by_way[asked.way.name] += 1
            if list(outputs) != [asked.way.input_of(text).upper() for text in asked.texts]:
                counters.wrong += 1
                counters.violation(f"wrong: {asked} got {answer!r}")
            elif not fine:
                counters.spared += 1
                counters.violation(f"spared: {asked}")
            return
        self.count(code.lower())
        self.count("let go", len(asked.texts) - 1)
        if code == "REJECTED_BY_MODEL" and (asked.kinds[blamed] == "plain" if blamed >= 0 else fine):
            counters.blamed += 1
            counters.violation(f"blamed: {asked} got {answer!r}")

    def count(self, outcome: str, times: int = 1) -> None:
        if times:
            self.counters.outcomes[outcome] += times

    def rest(self, client: _Client | Caller) -> None:
        """Note that a client has nothing more to do."""
        client.idle = True
        if self.left_to_send <= 0 and all(other.idle for other in self._clients):
            self._over.set()

    async def _sweep(self) -> None:
        while True:
            began = self.loop.time()
            await asyncio.sleep(PATIENCE / 10)
            now = self.loop.time()
            if now - began > PATIENCE / 5:
                continue  # This program was kept from running: what has come meanwhile is to be read first.
            for client in self._clients:
                client.lose_patience(now)


class _Client(asyncio.Protocol):
    """One of the crowd.

    offline ──connect──▶ free ──send──▶ waiting ──answer──▶ free
       ▲                                   │
       └───────── left · cut · silent ─────┘
    """

    __slots__ = ("_asked", "_buffer", "_crowd", "_leaving", "_timer", "_transport", "_waiting", "_way", "idle", "since")

    def __init__(self, crowd: Crowd, way: WayIn) -> None:
        self._crowd = crowd
        self._way = way
        self._asked = Asked(way, (), ())
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = self._leaving = False
        self._buffer = b""
        self.idle = False
        self.since = 0.0

    def connect(self) -> None:
        """Open a connection; the next request follows."""
        task = self._crowd.loop.create_task(self._connect())
        task.add_done_callback(lambda done: done.exception())

    async def _connect(self) -> None:
        while True:
            try:
                await self._crowd.loop.create_connection(lambda: self, self._crowd.host, self._crowd.port)
            except OSError:
                await asyncio.sleep(0.05)  # out of ports or of patience: the crowd is large
            else:
                return

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._buffer = b""
        if self._waiting:
            self._waiting = False
            self._count("left" if self._leaving else "cut")
        self._leaving = False
        self._go_on(self.connect)

    def data_received(self, data: bytes) -> None:
        if not self._waiting or self._leaving:
            if not self._leaving:
                self._crowd.counters.unasked += 1
                self._crowd.counters.violation(f"unasked: {data[:200]!r}")
            return
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = self._buffer[:end].decode("latin-1").lower().split("\r\n")[1:]
        fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(fields["content-length"])
        if len(self._buffer) < end + 4 + length:
            return
        status, body = int(self._buffer[9:12]), self._buffer[end + 4 : end + 4 + length]
        extra, self._buffer = self._buffer[end + 4 + length :], b""
        self._waiting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        answer = self._way.read(status, fields, body)
        blamed = -1 if answer.outputs else place_of_message(body.decode())
        self._crowd.judge(self._asked, answer.outputs, answer.code, blamed, body[:300])
        if extra:
            self._crowd.counters.unasked += 1
            self._crowd.counters.violation(f"unasked, behind an answer: {extra[:200]!r}")
        self._go_on(self._send)

    def lose_patience(self, now: float) -> None:
        """Give up a request that was never answered."""
        if self._waiting and not self._leaving and now - self.since > PATIENCE:
            self._waiting = False
            self._count("silent")
            self._crowd.counters.violation(f"silent: {self._asked}")
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _send(self) -> None:
        crowd, rng, manners = self._crowd, self._crowd.rng, self._crowd.manners
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # the server closed it; connection_lost goes on
        if crowd.left_to_send <= 0:
            self._crowd.rest(self)
            return
        self._asked = crowd.draw(self._way)
        path, fields, body = self._way.write(self._asked.texts)
        head = [f"POST {path} HTTP/1.1", f"Host: {crowd.netloc}", *fields, f"Content-Length: {len(body)}", "", ""]
        request = "\r\n".join(head).encode() + body
        if rng.random() < manners.tear:
            crowd.counters.torn += 1
            transport.write(request[: rng.randrange(1, len(request))])
            self._leave()
            return
        crowd.counters.sent += len(self._asked.texts)
        self._waiting = True
        self.since = crowd.loop.time()
        transport.write(request)
        if rng.random() < manners.leave:
            stay = max(0.001, rng.expovariate(1.0 / manners.stay))
            self._timer = crowd.loop.call_later(stay, self._leave)

    def _leave(self) -> None:
        transport, self._timer = self._transport, None
        if transport is None:
            return
        self._leaving = True
        if self._crowd.rng.random() < 0.5:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.close()

    def _go_on(self, step: Any) -> None:
        """Take the next step, after a pause if that is the manner; or be done."""
        crowd = self._crowd
        if crowd.left_to_send <= 0:
            self._crowd.rest(self)
        elif crowd.manners.pause > 0.0:
            crowd.loop.call_later(crowd.rng.expovariate(1.0 / crowd.manners.pause), step)
        else:
            step()

    def _count(self, outcome: str) -> None:
        self._crowd.count(outcome, len(self._asked.texts))


def loop_factory() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
