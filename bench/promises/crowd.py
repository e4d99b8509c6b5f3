"""Clients that behave badly: they leave before their answer, tear requests apart, and send what makes a model fail.

Each client has one connection and one request at a time. Every text is unique, and an answer counts only when it is
the right one for that very text; whatever arrives unasked is noted. So each request that was sent whole has one
outcome here:

    ok          the right answer
    an error    the code of a refusal or failure, such as rejected_by_model
    left        the client closed the connection while it waited (half of them politely, half by a reset)
    cut         the server closed the connection instead of answering
    silent      no answer within PATIENCE
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

PATIENCE = 15.0
"""Seconds after which a request counts as never answered."""
SHOWN = 5
"""Violations that are kept word for word."""

_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Manners:
    """How clients behave. All but `pause` and `stay` are shares of the requests, 0 to 1.

    Attributes:
        leave: the client goes away while it waits.
        tear: the request is broken off half-way.
        reject: the input is one that the model refuses.
        poison: the input is one that makes its whole batch fail.
        stay: mean seconds until a client that leaves has left; at least one millisecond.
        pause: mean seconds between an answer and the client's next request; 0 for none.
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
        sent: requests sent whole.
        torn: requests broken off; they have no outcome.
        outcomes: of those sent whole.
        wrong: answers that are not the right answer to their request; none may be.
        unasked: bytes that came when no answer was due; none may be.
        blamed: requests with nothing wrong in them that were answered as if there were.
        spared: poisonous or rejected requests that were answered as if nothing were wrong; none may be.
        examples: the first violations, in words.
    """

    def __init__(self) -> None:
        self.sent = self.torn = self.wrong = self.unasked = self.blamed = self.spared = 0
        self.outcomes: Counter[str] = Counter()
        self.examples: list[str] = []

    def violation(self, text: str) -> None:
        """Keep one in words, if there is room."""
        if len(self.examples) < SHOWN:
            self.examples.append(text)


class Crowd:
    """A crowd of clients for one server. Build it in a running loop and call `run` once.

    Arguments:
        url: of the server.
        size: how many clients.
        manners: how they behave.
        seed: of their dice.
    """

    def __init__(self, url: str, size: int, manners: Manners, seed: int) -> None:
        self.counters = Tallied()
        self.manners = manners
        self.rng = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.template = (
            f"POST /v1/inference HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            'Content-Length: %d\r\n\r\n{"input": "%s"}'
        )
        self.nonce = f"{seed:08x}"
        self.left_to_send = 0
        self._size = size
        self._clients: set[_Client] = set()
        self._over = asyncio.Event()

    async def run(self, requests: int, seconds: float) -> Tallied:
        """Send until `requests` were sent or `seconds` are over; returns when each has its outcome."""
        self.left_to_send = requests
        stop = self.loop.call_later(seconds, self.stop)
        sweep = self.loop.create_task(self._sweep())
        try:
            self._clients = {_Client(self) for _ in range(self._size)}
            for client in self._clients:
                client.connect()
            await self._over.wait()
        finally:
            stop.cancel()
            sweep.cancel()
            for client in self._clients:
                client.close()
        return self.counters

    def stop(self) -> None:
        """Send no more."""
        self.left_to_send = 0
        if all(client.idle for client in self._clients):
            self._over.set()

    def went_idle(self) -> None:
        """A client has nothing more to do."""
        if self.left_to_send <= 0 and all(client.idle for client in self._clients):
            self._over.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(PATIENCE / 10)
            now = self.loop.time()
            for client in self._clients:
                client.lose_patience(now)


class _Client(asyncio.Protocol):
    """One of the crowd.

    offline ──connect──▶ free ──send──▶ waiting ──answer──▶ free
       ▲                                   │
       └───────── left · cut · silent ─────┘
    """

    __slots__ = ("_buffer", "_crowd", "_kind", "_leaving", "_text", "_timer", "_transport", "_waiting", "idle", "since")

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = self._leaving = False
        self._kind = self._text = ""
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
        at = self._buffer.lower().find(b"content-length: ", 0, end)
        line = self._buffer.find(b"\r\n", at)
        length = int(self._buffer[at + 16 : line])
        if len(self._buffer) < end + 4 + length:
            return
        status, body = int(self._buffer[9:12]), self._buffer[end + 4 : end + 4 + length]
        extra, self._buffer = self._buffer[end + 4 + length :], b""
        self._waiting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._judge(status, body)
        if extra:
            self._crowd.counters.unasked += 1
            self._crowd.counters.violation(f"unasked, behind an answer: {extra[:200]!r}")
        self._go_on(self._send)

    def lose_patience(self, now: float) -> None:
        """Give up a request that was never answered."""
        if self._waiting and not self._leaving and now - self.since > PATIENCE:
            self._waiting = False
            self._count("silent")
            self._crowd.counters.violation(f"silent: {self._text}")
            self.close()

    def close(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _send(self) -> None:
        crowd, rng, manners = self._crowd, self._crowd.rng, self._crowd.manners
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # the server closed it; connection_lost goes on
        if crowd.left_to_send <= 0:
            self._rest()
            return
        crowd.left_to_send -= 1
        luck = rng.random()
        self._kind = (
            "POISON" if luck < manners.poison else "REJECT" if luck < manners.poison + manners.reject else "plain"
        )
        self._text = f"{self._kind} {crowd.nonce}-{crowd.left_to_send:09d} Headway, s'il vous plait"
        request = (crowd.template % (len(self._text) + 13, self._text)).encode()
        if rng.random() < manners.tear:
            crowd.counters.torn += 1
            transport.write(request[: rng.randrange(1, len(request))])
            self._leave()
            return
        crowd.counters.sent += 1
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
            self._rest()
        elif crowd.manners.pause > 0.0:
            crowd.loop.call_later(crowd.rng.expovariate(1.0 / crowd.manners.pause), step)
        else:
            step()

    def _rest(self) -> None:
        self.idle = True
        self._crowd.went_idle()

    def _judge(self, status: int, body: bytes) -> None:
        counters = self._crowd.counters
        content: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            content = json.loads(body)
        if status == 200:
            self._count("ok")
            if content.get("output") != self._text.upper():
                counters.wrong += 1
                counters.violation(f"wrong: {self._text!r} got {body[:200]!r}")
            elif self._kind != "plain":
                counters.spared += 1
                counters.violation(f"spared: {self._text!r}")
            return
        code = str(content.get("error", status)).lower()
        self._count(code)
        if code == "rejected_by_model" and self._kind == "plain":
            counters.blamed += 1
            counters.violation(f"blamed: {self._text!r} got {body[:300]!r}")

    def _count(self, outcome: str) -> None:
        self._crowd.counters.outcomes[outcome] += 1


def loop_factory() -> asyncio.AbstractEventLoop:
    """The event loop that crowds run in."""
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
