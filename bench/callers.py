"""Clients behind a load balancer, and the history of what became of each request.

Load is open-loop. Each request is a text of its own, goes to one gateway chosen by lot, and has one outcome:

    ok             the right answer
    an error       status and code of a refusal or failure, such as `503 no_workers`
    wrong          an answer that is not the right one to this very text
    reset          its gateway was killed; nothing is owed
    cut            a gateway that lives, or was told to end after the request was sent, closed the connection instead
    silent         no answer within PATIENCE
    unreachable    a gateway that lives took no connection
    nowhere        there was no gateway to ask

A request that was never sent, because its gateway was killed or told to end before there was a connection, goes to
another one, as a load balancer does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from array import array
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast
from urllib.parse import urlsplit

PATIENCE = 40.0
"""Seconds after which a request counts as never answered; longer than any deadline of the service."""
LOOK_EVERY = 0.5
"""Seconds between two looks for requests that were never answered."""
IDLE_SECONDS = 5.0
"""Age at which an unused connection is closed; well before the service would."""
SHOWN = 8
"""Violations that are kept word for word."""


class Standing(Enum):
    """Where a gateway stands, in the eyes of the load balancer."""

    OPEN = "open"
    ENDING = "ending"
    KILLED = "killed"


class Gate:
    """A gateway, and the connections to it.

    Attributes:
        name: of its process.
        standing: see Standing; whoever kills it or tells it to end says so here first.
    """

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.standing = Standing.OPEN
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.head = f"POST /v1/inference HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: ".encode()
        self.idle: list[_Connection] = []
        self.open: set[_Connection] = set()


@dataclass(slots=True)
class Request:
    """One request. `sent` and `ended` are instants of the loop's clock, 0 when it was not."""

    text: str
    due: float
    sent: float = 0.0
    ended: float = 0.0
    gate: str = ""
    outcome: str = ""


class History:
    """What became of all requests.

    Attributes:
        requests: all of them, in the order in which they fell due.
        twice: requests that got a second outcome; none may.
        unasked: bytes that came when no answer was due; none may.
        moved: requests that had to be taken to another gateway before they were sent.
        latencies: of right answers, seconds from the due instant.
        examples: the first violations, in words.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.twice = self.unasked = self.moved = 0
        self.latencies = array("d")
        self.examples: list[str] = []

    @property
    def outcomes(self) -> Counter[str]:
        """How many requests ended how; the empty outcome is that of requests without one."""
        return Counter(request.outcome for request in self.requests)

    def end(self, request: Request, outcome: str, now: float, example: str = "") -> None:
        """Note the outcome of a request; with `example`, it is a violation to be read."""
        if request.outcome:
            self.twice += 1
            self.violation(f"twice: {request.text!r} was {request.outcome}, then {outcome}")
            return
        request.outcome, request.ended = outcome, now
        if outcome == "ok":
            self.latencies.append(now - request.due)
        if example:
            self.violation(f"{outcome}: {request.text!r} at {request.gate}: {example}")

    def violation(self, text: str) -> None:
        """Keep one in words, if there is room."""
        if len(self.examples) < SHOWN:
            self.examples.append(text)


class Callers:
    """All clients. Build it in a running loop.

    Arguments:
        rate: mean requests per second, Poisson.
        seed: of the dice.

    Attributes:
        history: so far.
        gates: the gateways there are; change it as they come and go.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self.history = History()
        self.gates: list[Gate] = []
        self.loop = asyncio.get_running_loop()
        self._rate = rate
        self._seed = seed
        self._dice = random.Random(f"callers {seed}")
        self._held = 0
        self._done = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> History:
        """Send for so many seconds; returns when each request has its outcome."""
        due = self.loop.time()
        end = due + seconds
        look = self.loop.create_task(self._look())
        try:
            while (due := due + self._dice.expovariate(self._rate)) < end:
                pause = due - self.loop.time()
                if pause > 0.0:
                    await asyncio.sleep(pause)
                self._ask(due)
            if self._held:
                self._done.clear()
                await self._done.wait()
        finally:
            look.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(look, *self._tasks, return_exceptions=True)
            for gate in self.gates:
                for connection in tuple(gate.open):
                    connection.close()
        return self.history

    def send(self, request: Request) -> None:
        """Send a request to some gateway, over a connection that is free or a new one."""
        gates = [gate for gate in self.gates if gate.standing is Standing.OPEN]
        if not gates:
            self.end(request, "nowhere")
            return
        gate = self._dice.choice(gates)
        request.gate = gate.name
        while gate.idle:
            if gate.idle.pop().ask(request):
                return
        task = self.loop.create_task(self._connect(gate, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self, request: Request, outcome: str, example: str = "") -> None:
        """A request has its outcome."""
        self.history.end(request, outcome, self.loop.time(), example)
        self._held -= 1
        if not self._held:
            self._done.set()

    def _ask(self, due: float) -> None:
        history = self.history
        request = Request(f"caller {self._seed:08x}-{len(history.requests):09d} s'il vous plait", due)
        history.requests.append(request)
        self._held += 1
        self.send(request)

    async def _connect(self, gate: Gate, request: Request) -> None:
        connection = _Connection(self, gate)
        try:
            async with asyncio.timeout(PATIENCE):
                await self.loop.create_connection(lambda: connection, gate.host, gate.port)
        except (OSError, TimeoutError) as exc:
            if gate.standing is Standing.OPEN:
                self.end(request, "unreachable", repr(exc))
            else:
                self.history.moved += 1
                self.send(request)
            return
        if not connection.ask(request):
            self.history.moved += 1
            self.send(request)

    async def _look(self) -> None:
        """End what was never answered, close what is not used, for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            now = self.loop.time()
            for gate in self.gates:
                for connection in tuple(gate.open):
                    connection.look(now)


class _Connection(asyncio.Protocol):
    """A connection to one gateway, with at most one request on it."""

    def __init__(self, callers: Callers, gate: Gate) -> None:
        self._callers = callers
        self._gate = gate
        self._transport: asyncio.Transport | None = None
        self._request: Request | None = None
        self._buffer = b""
        self._used = 0.0

    def ask(self, request: Request) -> bool:
        """Send a request; False when the connection, or its gateway, is not there any more."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._gate.standing is not Standing.OPEN:
            self.close()
            return False
        self._request = request
        request.sent = self._callers.loop.time()
        body = json.dumps({"input": request.text}).encode()
        transport.write(self._gate.head + b"%d\r\n\r\n%b" % (len(body), body))
        return True

    def close(self) -> None:
        """Cut it."""
        if self._transport is not None:
            self._transport.abort()

    def look(self, now: float) -> None:
        """End a request that was never answered; close a connection nobody uses."""
        if self._request is None:
            if now - self._used > IDLE_SECONDS and self in self._gate.idle:
                self._gate.idle.remove(self)
                self.close()
        elif now - self._request.sent > PATIENCE:
            request, self._request = self._request, None
            self._callers.end(request, "silent", f"sent {now - request.sent:.1f} s ago")
            self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._gate.open.add(self)
        self._used = self._callers.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._gate.open.discard(self)
        with contextlib.suppress(ValueError):
            self._gate.idle.remove(self)
        request, self._request = self._request, None
        if request is None:
            return
        if self._gate.standing is Standing.KILLED:
            self._callers.end(request, "reset")
        else:
            waited = self._callers.loop.time() - request.sent
            self._callers.end(request, "cut", f"{self._gate.standing.value}, {waited:.3f} s after it was sent; {exc!r}")

    def data_received(self, data: bytes) -> None:
        request = self._request
        if request is None:
            self._unasked(data)
            return
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        if len(self._buffer) < end + 4 + length:
            return
        body, extra = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
        self._buffer, self._request = b"", None
        self._judge(request, int(head[9:12]), body)
        if extra:
            self._unasked(extra)
        self._used = self._callers.loop.time()
        if b"connection: close" in head:
            self.close()
        else:
            self._gate.idle.append(self)

    def _judge(self, request: Request, status: int, body: bytes) -> None:
        content: Any = None
        with contextlib.suppress(ValueError):
            content = json.loads(body)
        content = content if isinstance(content, dict) else {}
        if status != 200:
            self._callers.end(request, f"{status} {str(content.get('error', '')).lower()}".strip())
        elif content.get("output") == request.text.upper():
            self._callers.end(request, "ok")
        else:
            self._callers.end(request, "wrong", repr(body[:200]))

    def _unasked(self, data: bytes) -> None:
        self._callers.history.unasked += 1
        self._callers.history.violation(f"unasked, from {self._gate.name}: {data[:200]!r}")
