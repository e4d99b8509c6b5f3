"""Clients behind a load balancer, and the history of what became of each request.

Load is open-loop. Each request is a text of its own and has one outcome:

    ok             the right answer
    an error       status and code of a refusal or failure, such as `503 no_workers`
    wrong          an answer that is not the right one to this very text
    cut            the connection was closed instead of an answer
    silent         no answer within PATIENCE
    unreachable    no connection was taken
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import ssl
from array import array
from collections import Counter
from dataclasses import dataclass
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


@dataclass(slots=True)
class Request:
    """One request. `sent` and `ended` are instants of the loop's clock, 0 when it was not."""

    text: str
    due: float
    sent: float = 0.0
    ended: float = 0.0
    outcome: str = ""


class History:
    """What became of all requests.

    Attributes:
        requests: all of them, in the order in which they fell due.
        twice: requests that got a second outcome; none may.
        unasked: bytes that came when no answer was due; none may.
        latencies: of right answers, seconds from the due instant.
        examples: the first violations, in words.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.twice = self.unasked = 0
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
            self.violation(f"{outcome}: {request.text!r}: {example}")

    def violation(self, text: str) -> None:
        """Keep one in words, if there is room."""
        if len(self.examples) < SHOWN:
            self.examples.append(text)


class Callers:
    """All clients. Build it in a running loop.

    Arguments:
        url: whom they ask.
        rate: mean requests per second, Poisson.
        seed: of the dice.
        trust: by which they check whom they ask, at https://.

    Attributes:
        history: so far.
    """

    def __init__(self, url: str, rate: float, seed: int, trust: ssl.SSLContext | None = None) -> None:
        self.history = History()
        self.idle: list[_Connection] = []
        self.open: set[_Connection] = set()
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._trust = trust
        self.head = f"POST /v1/inference HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: ".encode()
        self.loop = asyncio.get_running_loop()
        self._rate = rate
        self._seed = seed
        self._rng = random.Random(f"callers {seed}")
        self._held = 0
        self._end = math.inf
        self._done = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def end_load(self) -> None:
        """Send no more."""
        self._end = self.loop.time()

    async def run(self, seconds: float = math.inf) -> History:
        """Send for so many seconds, or until `end_load`; returns when each request has its outcome."""
        due = self.loop.time()
        self._end = due + seconds
        look = self.loop.create_task(self._look())
        try:
            while (due := due + self._rng.expovariate(self._rate)) < self._end:
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
            for connection in tuple(self.open):
                connection.close()
        return self.history

    def send(self, request: Request) -> None:
        """Send a request over a connection that is free or a new one."""
        while self.idle:
            if self.idle.pop().ask(request):
                return
        task = self.loop.create_task(self._connect(request))
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

    async def _connect(self, request: Request) -> None:
        connection = _Connection(self)
        try:
            async with asyncio.timeout(PATIENCE):
                await self.loop.create_connection(lambda: connection, self._host, self._port, ssl=self._trust)
        except (OSError, TimeoutError) as exc:
            self.end(request, "unreachable", repr(exc))
            return
        if not connection.ask(request):
            self.end(request, "cut", "as soon as it was open")

    async def _look(self) -> None:
        """End what was never answered, close what is not used, for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            now = self.loop.time()
            for connection in tuple(self.open):
                connection.look(now)


class _Connection(asyncio.Protocol):
    """A connection, with at most one request on it."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers
        self._transport: asyncio.Transport | None = None
        self._request: Request | None = None
        self._buffer = b""
        self._used = 0.0

    def ask(self, request: Request) -> bool:
        """Send a request; False when the connection is not there any more."""
        transport = self._transport
        if transport is None or transport.is_closing():
            self.close()
            return False
        self._request = request
        request.sent = self._callers.loop.time()
        body = json.dumps({"input": request.text}).encode()
        transport.write(self._callers.head + b"%d\r\n\r\n%b" % (len(body), body))
        return True

    def close(self) -> None:
        """Cut it."""
        if self._transport is not None:
            self._transport.abort()

    def look(self, now: float) -> None:
        """End a request that was never answered; close a connection nobody uses."""
        if self._request is None:
            if now - self._used > IDLE_SECONDS and self in self._callers.idle:
                self._callers.idle.remove(self)
                self.close()
        elif now - self._request.sent > PATIENCE:
            request, self._request = self._request, None
            self._callers.end(request, "silent", f"sent {now - request.sent:.1f} s ago")
            self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._callers.open.add(self)
        self._used = self._callers.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._callers.open.discard(self)
        with contextlib.suppress(ValueError):
            self._callers.idle.remove(self)
        request, self._request = self._request, None
        if request is None:
            return
        waited = self._callers.loop.time() - request.sent
        self._callers.end(request, "cut", f"{waited:.3f} s after it was sent; {exc!r}")

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
            self._callers.idle.append(self)

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
        self._callers.history.violation(f"unasked: {data[:200]!r}")
