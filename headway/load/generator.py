"""Load generator: sends requests when they are due, and gives each request exactly one outcome.

1. The generator sends a request when it is due, even if earlier requests have no answers yet (open loop).
2. If no connection is free, it opens another one, up to the limit. Until one is free, the request waits in the backlog.
3. Latency and timeout are measured from the due time, so they include this wait.
4. A request is never sent twice. Its outcome is its answer, the loss of its connection, or the timeout.

Requests have no timers of their own. The generator sends due requests whenever an answer arrives, and when the alarm for the
next due time rings, which is at most once per millisecond."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import secrets
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat, takewhile
from math import inf
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import msgspec
import uvloop

from headway.core.arrivals import instants, poisson, replay, uniform
from headway.errors import SettingError
from headway.load.connection import IDLE, Connection, ConnectionPool
from headway.load.report import Record, report_on
from headway.load.spec import LoadSpec
from headway.runtime.race import end

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)


class TraceFile:
    """Times in seconds from a CSV file as described in `headway.core.arrivals`. Each iteration rereads the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[float]:
        """Yield the times. Raises SettingError if the file cannot be read, or is not a trace."""
        shown = str(self._path)
        try:
            with self._path.open(encoding="utf-8-sig", newline="") as lines:
                yield from instants(lines, shown, "--arrivals")
        except OSError as exc:
            hint = "Use poisson, uniform, or the path of a trace in CSV."
            raise SettingError("--arrivals", shown, f"cannot be read: {exc.strerror}", hint) from None
        except UnicodeDecodeError:
            raise SettingError("--arrivals", shown, "is not UTF-8 text", "Save it as UTF-8.") from None


def due_times(spec: LoadSpec) -> Iterator[float]:
    """Yield the due times of a load test in seconds from its start. Raises SettingError for an unusable trace."""
    if spec.arrivals == "poisson":
        stream = poisson(spec.rate, random.Random(spec.seed))  # noqa: S311 - the same seed, the same load
    elif spec.arrivals == "uniform":
        stream = uniform(spec.rate)
    else:
        stream = replay(TraceFile(Path(spec.arrivals)), spec.rate)
    return takewhile(float(spec.duration).__gt__, stream)


class Alarm:
    """Calls `ring` once after each `arm`. If `precise`, it uses a timerfd where the system has one. Close it after use."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None], *, precise: bool = True) -> None:
        self._loop, self._ring = loop, ring
        self._timer = _Timer.open() if precise else None
        self._handle: asyncio.TimerHandle | None = None
        if self._timer is not None:
            loop.add_reader(self._timer.fileno, self._on_timer)

    def arm(self, seconds: float) -> None:
        """Ring `seconds` from now, instead of at the time set by an earlier call."""
        if self._timer is not None:
            self._timer.set(seconds)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(seconds, 0.0), self._ring)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._timer is not None:
            self._loop.remove_reader(self._timer.fileno)
            self._timer.close()
            self._timer = None

    def _on_timer(self) -> None:
        if self._timer is not None and self._timer.expired():
            self._ring()


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class _Timer:
    def __init__(self, library: Any, fileno: int) -> None:
        self.fileno = fileno
        self._settime = library.timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._spec = _TimerSpec()
        self._value: Any = self._spec.value
        self._address = ctypes.addressof(self._spec)

    @classmethod
    def open(cls) -> _Timer | None:
        if sys.platform != "linux":
            return None
        library = ctypes.CDLL(None)
        fileno = library.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        return cls(library, fileno) if fileno >= 0 else None

    def set(self, seconds: float) -> None:
        nanoseconds = max(1, int(seconds * 1e9))  # Zero would disarm it.
        self._value.seconds, self._value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        self._settime(self.fileno, 0, self._address, None)

    def expired(self) -> bool:
        try:
            os.read(self.fileno, 8)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self.fileno)


_HOLE = "0f8fad5bd9cb469fa165"  # Random placeholder for the request's number in the encoded body.


class _Answer(msgspec.Struct, gc=False):
    output: str


class Payload:
    """Makes distinct requests, and checks their answers. Inputs contain `nonce`, so two runs never send the same
    request."""

    def __init__(self, spec: LoadSpec, nonce: str) -> None:
        body = dict(spec.body)
        text = str(body.get(spec.member, ""))
        if spec.member:
            body[spec.member] = f"{nonce}-{_HOLE} {text}"
        before, hole, after = msgspec.json.encode(body).partition(_HOLE.encode())
        length = len(before) + (9 if hole else 0) + len(after)
        self._templates = [
            (_escaped(_head(spec, tier, length) + before) + (b"%09d" if hole else b"") + _escaped(after + spec.data))
            for tier in spec.tiers
        ]
        self._counts = bool(hole)
        start, end = f"{nonce}-", f" {text}"
        self._right = (start.upper(), end.upper()) if spec.expect == "upper" else (start, end)
        self._decode = msgspec.json.Decoder(_Answer).decode

    def request(self, number: int, tier: int) -> bytes:
        """Return the bytes of request `number`, which is below 10^9. `tier` is the index of its tier."""
        template = self._templates[tier]
        return template % number if self._counts else template % ()

    def is_right(self, number: int, body: bytes) -> bool:
        try:
            output = self._decode(body).output
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        start, end = self._right
        return output == f"{start}{number:09d}{end}"


def _head(spec: LoadSpec, tier: str, length: int) -> bytes:
    target = spec.target
    lines = [
        f"POST {target.path} HTTP/1.1",
        f"Host: {target.authority}",
        "User-Agent: headway-bench",
        "Accept: application/json",
        f"Content-Type: application/{'octet-stream' if spec.data else 'json'}",
        f"Content-Length: {length + len(spec.data)}",
    ]
    if spec.data:
        lines.append(f"Inference-Header-Content-Length: {length}")
    key = spec.keys.get(tier) or spec.keys.get("")
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if spec.mix and tier not in spec.keys:
        lines.append(f"X-Request-Tier: {tier}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _escaped(piece: bytes) -> bytes:
    return piece.replace(b"%", b"%%")


_TICK = 0.001
_MOST_AT_ONCE = 256  # Maximum number of requests that a late generator sends before it reads answers again.
_WARM_SECONDS = 0.25  # Latency to assume when opening connections in advance, so the load doesn't begin with a burst.
_MOST_WARM = 2_500
_SHOWN_MISMATCHES = 3
_SHOWN_ERROR = 300


class _Problem(msgspec.Struct, gc=False):
    error: str | dict[str, object] | None = None
    message: object = None
    detail: object = None


class Generator:
    """Load test. Create it in a running loop, and call `run` once. Raises SettingError if its trace cannot be read. `nonce`
    makes each run's inputs different. Due times are relative to `started_at`, a time of `time.perf_counter` (infinity before
    the start)."""

    def __init__(self, spec: LoadSpec, nonce: str) -> None:
        self.record = Record(spec.tiers)
        self._spec = spec
        self._payload = Payload(spec, nonce)
        self._checks = spec.expect != "none"
        self._times = due_times(spec)
        self._tiers = _tier_draws(spec)
        self._backlog: deque[tuple[int, float, int]] = deque()
        self._pool = ConnectionPool(
            spec.target.host, spec.target.port, spec.connections, lambda: Connection(self), self._tried, spec.tls
        )
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._alarm = Alarm(self._loop, self._pump)
        self._problem = msgspec.json.Decoder(_Problem).decode
        self._number = 0
        self._outstanding = 0
        self.started_at = self._due = inf

    async def run(self) -> Record:
        """Send all requests, and return once every request has an outcome. Raises Unreachable."""
        spec, record = self._spec, self.record
        sweep = self._loop.create_task(self._sweep())
        try:
            await self._pool.warm(1 + int(min(spec.rate * _WARM_SECONDS, _MOST_WARM)))
            cpu = process_time()
            self.started_at = perf_counter()
            if not record.interrupted:
                self._due = self.started_at + next(self._times, inf)
            self._pump()
            self._settle()
            await self._done
            record.cpu = process_time() - cpu
            record.elapsed = perf_counter() - self.started_at
        finally:
            sweep.cancel()
            self._alarm.close()
            self._pool.close()
        return record

    def stop(self) -> None:
        """Stop sending. Requests without an outcome count as `interrupted`."""
        self.record.interrupted = True
        self._due = inf
        self._give_up(inf, "interrupted", "interrupted")
        self._settle()

    def _pump(self) -> None:
        times, tiers, record, idle = self._times, self._tiers, self.record, self._pool.idle
        due, start = self._due, self.started_at
        for _ in range(_MOST_AT_ONCE):
            now = perf_counter()
            if due > now:
                break
            number, tier = self._number, next(tiers)
            self._number = number + 1
            self._outstanding += 1
            record.lags.append(now - due)
            record.dues.append(due - start)
            record.sent[tier] += 1
            connection = self._pool.take(now) if idle else None
            if connection is not None:
                connection.send(self._payload.request(number, tier), number, due, tier)
            else:
                self._backlog.append((number, due, tier))
                record.waited += 1
            due = start + next(times, inf)
        self._due = due
        if self._backlog:
            self._pool.grow(len(self._backlog))
        if due < inf:
            self._alarm.arm(max(due - now, _TICK) if due > now else 0.0)

    # Called by connections.

    def ready(self, connection: Connection) -> None:
        pool, record = self._pool, self.record
        pool.open.add(connection)
        record.opened += 1
        record.peak = max(record.peak, len(pool.open))
        self._reuse(connection, perf_counter())

    def answered(self, connection: Connection, status: int, body: bytes, retry_after: bool, reusable: bool) -> None:
        now = perf_counter()
        number, record = connection.number, self.record
        connection.number = IDLE
        record.last_answer = now - self.started_at
        stream = record.streams[connection.tier]
        if 200 <= status < 300:
            stream.answered.append(now - connection.due)
            if self._checks and not self._payload.is_right(number, body):
                self._mismatch(number, body)
        else:
            stream.failed[self._label(status, body)] += 1
            if 400 <= status < 500 and status != 429 and not record.first_refused:
                record.first_refused = self._error_text(body)
            if status in (429, 503):
                stream.refused.append(now - connection.due)
                stream.refused_without_retry_after += not retry_after
        self._outstanding -= 1
        if reusable:
            self._reuse(connection, now)
        else:
            connection.retire()
        if self._due <= now:
            self._pump()
        if not self._outstanding:
            self._settle()

    def lost(self, connection: Connection, cause: str) -> None:
        self._pool.open.discard(connection)
        if connection.number != IDLE:
            connection.number = IDLE
            self._fail(connection.tier, cause)
        if self._backlog:
            self._pool.grow(len(self._backlog))

    def _reuse(self, connection: Connection, now: float) -> None:
        if self._backlog:
            number, due, tier = self._backlog.popleft()
            connection.send(self._payload.request(number, tier), number, due, tier)
        else:
            connection.idle_since = now
            self._pool.idle.append(connection)

    # Requests without an answer.

    def _tried(self, failure: str) -> None:
        """Handle the end of an attempt to connect. A failure becomes the outcome of the oldest request in the backlog."""
        if failure and self._backlog:
            _, _, tier = self._backlog.popleft()
            self._fail(tier, failure)
        if self._backlog:
            self._pool.grow(len(self._backlog))

    async def _sweep(self) -> None:
        timeout = self._spec.timeout
        while True:
            await asyncio.sleep(min(max(timeout / 50, 0.001), 0.05))
            self._give_up(perf_counter() - timeout, "timeout", "timeout before it was sent")

    def _give_up(self, before: float, sent: str, unsent: str) -> None:
        """End all requests due at `before` or earlier. `sent` is the outcome for sent requests, `unsent` for the others."""
        for connection in self._pool.open:
            if connection.number != IDLE and connection.due <= before:
                connection.number = IDLE
                connection.close(sent)
                self._fail(connection.tier, sent)
        while self._backlog and self._backlog[0][1] <= before:
            _, _, tier = self._backlog.popleft()
            self._fail(tier, unsent)

    def _fail(self, tier: int, label: str) -> None:
        self.record.streams[tier].failed[label] += 1
        self._outstanding -= 1
        self._settle()

    def _settle(self) -> None:
        if not self._outstanding and self._due == inf and not self._done.done():
            self._done.set_result(None)

    def _mismatch(self, number: int, body: bytes) -> None:
        record = self.record
        record.mismatches += 1
        if record.mismatches <= _SHOWN_MISMATCHES:
            record.mismatched.append(f"request {number}: {_printable(body[:200].decode(errors='replace'))}")

    def _error_text(self, body: bytes) -> str:
        """Return the message in the body of an error or, if there is none, the body itself."""
        try:
            problem = self._problem(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            problem = _Problem()
        inner = problem.error.get("message") if isinstance(problem.error, dict) else problem.error
        texts = [text for text in (problem.message, problem.detail, inner) if isinstance(text, str) and text]
        return _printable((texts or [body.decode(errors="replace")])[0][:_SHOWN_ERROR])

    def _label(self, status: int, body: bytes) -> str:
        try:
            error = self._problem(body).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            error = None
        if isinstance(error, dict):
            error = str(error.get("code") or error.get("type") or "")
        return f"{status} {_printable(error[:60])}" if error else str(status)


def run_load(spec: LoadSpec, progress: float | None = None) -> Record:
    """Run a load test in its own event loop. If Ctrl-C ends it early, return the outcomes so far. For `progress` see
    `every` in `report_on`. Raises SettingError if a trace cannot be read, or Unreachable if the first connection fails."""

    async def drive() -> Record:
        generator = Generator(spec, secrets.token_hex(4))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, generator.stop)
        elapsed = lambda: perf_counter() - generator.started_at  # noqa: E731
        progress_task = loop.create_task(report_on(generator.record, elapsed, spec.duration, progress))
        try:
            return await generator.run()
        finally:
            await end(progress_task)
            loop.remove_signal_handler(signal.SIGINT)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(drive())


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in text)


def _tier_draws(spec: LoadSpec) -> Iterator[int]:
    weights = list(spec.mix.values())
    if len(weights) < 2:
        return repeat(0)
    rng = random.Random(f"tiers of {spec.seed}")  # noqa: S311 - the same seed, the same load
    indices = range(len(weights))
    return chain.from_iterable(rng.choices(indices, weights, k=1024) for _ in repeat(None))
