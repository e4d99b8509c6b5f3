"""The gateway holds the client's side: who waits for what, until when.

Per request there is one small record and two dictionary operations; no task, no future, no timer of its own. The
record carries the way back, so that the answer is written by whoever brings it.

Requests go over a `Line` to the broker that the fleet shares. While that is away, they go over the direct line to
one of the gateway's own, if there is one, and are refused otherwise. A request is answered once whatever its lines
bring: the answer that comes first takes the record away.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog
import uuid_utils

from headway import errors
from headway.config import Settings
from headway.core import ratelimit
from headway.core.ratelimit import Quota
from headway.deadlines import DEADLINE_GRAIN, Deadlines
from headway.errors import BrokerUnavailable
from headway.line import Line
from headway.model import Caller, Entry, Failure, Reply, Stage, Standing
from headway.ports import Broker
from headway.supervisor import Supervisor
from headway.tally import Tally

log = structlog.get_logger(__name__)

RETRY_AFTER = (1.0, 30.0)
"""Least and most seconds after which a client is told to try again while the broker is away: as long as that lasts."""
REMEMBERED = 10_000
"""Answered requests that `status` still knows; their inputs and outputs are not kept."""


class Waiter(Protocol):
    """Where an answer goes."""

    def answer(self, reply: Reply) -> None:
        """Take the answer; called once, on a later turn of the loop than the `submit`."""
        ...


class _Held:
    """One request whose client waits."""

    __slots__ = ("deadline", "entry", "line", "since", "waiter")

    def __init__(self, waiter: Waiter, entry: Entry, since: float, deadline: float, line: Line) -> None:
        self.waiter = waiter
        self.entry = entry
        self.since = since
        self.deadline = deadline
        self.line = line


@dataclass(slots=True)
class _Told:
    """What is counted of the replies of one model and tier."""

    latencies: list[float]
    waits: list[float]
    failed: int = 0


class _Future:
    """A waiter for coroutines."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def answer(self, reply: Reply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


def new_id() -> str:
    """A fresh request id: UUIDv7 text (RFC 9562), so that ids sort by time."""
    return str(uuid_utils.uuid7())


class Gateway:
    """Takes requests in, hands them to the broker, and brings each answer to its waiter.

    Arguments:
        settings: for time-outs, bounds and tier names.
        models: names that are served.
        broker: where entries go.
        tally: counts outcomes.
        clock: monotonic seconds.
        direct: where they go while `broker` is away; without it they are refused then.
        dice: uniform in [0, 1), for pauses.

    Attributes:
        closed: every further request is refused.
    """

    def __init__(
        self,
        settings: Settings,
        models: Sequence[str],
        broker: Broker,
        tally: Tally,
        clock: Callable[[], float],
        *,
        direct: Broker | None = None,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self.settings = settings
        self.tally = tally
        self.closed = False
        self.name = f"{settings.name or 'gateway'}-{new_id()}"
        self._models = frozenset(models)
        self._clock = clock
        self._tiers = settings.tier_names
        self._queue_timeout = settings.queue_timeout_ms / 1000
        self._held: dict[tuple[str, str], _Held] = {}
        self._limits: dict[str, tuple[Quota, float]] = {}
        """Of each key: its quota, and its theoretical arrival time."""
        self._deadlines = Deadlines(clock, self._overdue)
        self._recent: deque[tuple[str, float, Failure | None]] = deque(maxlen=REMEMBERED)
        self._emptied = asyncio.Event()
        patience = settings.broker_timeout_ms / 1000
        self._shared = Line(broker, self.name, self, settings.max_queue, patience, clock, dice)
        self._direct = Line(direct, self.name, self, settings.max_queue, patience, clock, dice) if direct else None
        self._line = self._shared
        """The line that new requests go over."""

    def start(self, supervisor: Supervisor) -> None:
        """Start its loops: what goes to the brokers, and what comes back."""
        self._shared.start(supervisor, "gateway")
        if self._direct is not None:
            self._direct.start(supervisor, "gateway direct")

    @property
    def pending(self) -> int:
        """Requests held now."""
        return len(self._held)

    @property
    def broker(self) -> Broker:
        """Where requests that come now go: the shared broker or, in direct mode, the gateway's own."""
        return self._line.broker

    @property
    def requests_per_second(self) -> float:
        """Requests handed on, averaged over about a second."""
        now = self._clock()
        return self._shared.rate.at(now) + (self._direct.rate.at(now) if self._direct is not None else 0.0)

    def submit(
        self,
        waiter: Waiter,
        caller: Caller,
        id: str,
        model: str,
        input: str,
        parameters: bytes,
        tier: int,
        timeout: float,
    ) -> None:
        """Take a request in; its answer, also a refusal, goes to `waiter` on a later turn of the loop.

        Arguments:
            waiter: gets the reply, exactly once unless the request is abandoned.
            caller: who asks; limits are per caller.
            id: UUIDv7 text, unique within the tenant while the request is held.
            model: must be one that is served.
            input: the text for the model.
            parameters: text of a JSON object, or empty.
            tier: index of the tier to queue in.
            timeout: seconds until the answer is worthless.
        """
        key = (caller.tenant, id)
        failure = self._objection(caller, key, model)
        if failure is not None:
            self._refuse(waiter, caller.tenant, id, model, tier, failure)
            return
        entry = Entry(id, model, input, tier, caller.tenant, self.name, self._queue_timeout, timeout, parameters)
        now = self._clock()
        line = self._line
        held = _Held(waiter, entry, now, now + timeout, line)
        self._held[key] = held
        self._deadlines.watch(key, held.deadline)
        outbox = line.outbox
        if not outbox:
            line.wake()
        outbox.append(entry)

    def abandon(self, tenant: str, id: str) -> None:
        """The client left: its waiter hears nothing more, and the entry does not run if it has not yet."""
        held = self._held.pop((tenant, id), None)
        if held is not None:
            self._count(held.entry, "cancelled")
            self._withdraw(held)

    async def ask(
        self, caller: Caller, id: str, model: str, input: str, parameters: bytes, tier: int, timeout: float
    ) -> Reply:
        """`submit` for coroutines. A cancelled call abandons the request."""
        waiter = _Future()
        self.submit(waiter, caller, id, model, input, parameters, tier, timeout)
        try:
            return await waiter.reply
        except asyncio.CancelledError:
            self.abandon(caller.tenant, id)
            raise

    async def emptied(self) -> None:
        """Return as soon as no request is held."""
        while self._held:
            self._emptied.clear()
            await self._emptied.wait()

    def refuse_all(self, failure: Failure) -> None:
        """Answer every held request with `failure`; for a shutdown that may not wait."""
        for held in list(self._held.values()):
            self._settle(held, failure)

    async def status(self, id: str) -> Standing | None:
        """What is known of request `id`; None when it is not held and not among the last ones answered."""
        for (tenant, held_id), held in self._held.items():
            if held_id == id:
                stage = None
                with contextlib.suppress(BrokerUnavailable):
                    stage = await held.line.broker.stage(tenant, id)
                return Standing(stage or Stage.QUEUED, self._clock() - held.since)
        for answered, latency, failure in reversed(self._recent):
            if answered == id:
                return Standing(Stage.COMPLETED if failure is None else Stage.FAILED, latency, failure)
        return None

    def _objection(self, caller: Caller, key: tuple[str, str], model: str) -> Failure | None:
        if self.closed:
            return Failure(errors.DRAINING, "shutting down; ask another instance", 1.0, "draining")
        if model not in self._models:
            known = ", ".join(sorted(self._models))
            return Failure(errors.NOT_FOUND, f"no model named {model!r} is served here; there is: {known}")
        if key in self._held:
            return Failure(errors.IDEMPOTENCY_CONFLICT, f"a request with id {key[1]} is in flight; use a new id")
        line = self._line
        if len(line.outbox) >= line.room:
            return _no_room(line)
        if caller.rate > 0.0:
            quota, arrival = self._limits.get(caller.key) or (Quota(caller.rate, caller.burst), 0.0)
            verdict = ratelimit.check(quota, arrival, 1.0, self._clock())
            self._limits[caller.key] = (quota, verdict.tat)
            if not verdict.allowed:
                message = f"over the limit of {caller.rate:g} requests a minute"
                return Failure(errors.RATE_LIMITED, message, verdict.retry_after, "rate")
        return None

    def _refuse(self, waiter: Waiter, tenant: str, id: str, model: str, tier: int, failure: Failure) -> None:
        label = model if model in self._models else ""
        self.tally.requests[label, self._tiers[tier], failure.code.lower()] += 1
        if failure.reason:
            self.tally.refusals[failure.reason, self._tiers[tier]] += 1
        reply = Reply(id, tenant, None, failure)
        asyncio.get_running_loop().call_soon(waiter.answer, reply)

    def renewed(self, line: Line, entries: Sequence[Entry]) -> list[Entry]:
        """See Holder. What the broker was away for counts as time, but not as time in the queue."""
        now, fresh = self._clock(), []
        for entry in entries:
            held = self._held.get((entry.tenant, entry.id))
            if held is not None and held.line is line and (left := held.deadline - now) > 0.0:
                wait = min(held.entry.queue_timeout, left)
                fresh.append(msgspec.structs.replace(held.entry, timeout=left, queue_timeout=wait))
        return fresh

    def held_on(self, line: Line) -> list[Entry]:
        """See Holder."""
        return [held.entry for held in self._held.values() if held.line is line]

    def refused(self, line: Line, entry: Entry, failure: Failure) -> None:
        """See Holder."""
        held = self._held.get((entry.tenant, entry.id))
        if held is not None and held.line is line:
            self.tally.refusals[failure.reason, self._tiers[entry.tier]] += 1
            self._settle(held, failure, admitted=False)

    def away(self, line: Line) -> None:
        """See Holder. What is held goes direct at once, or waits on for the broker."""
        if line is not self._shared:
            return
        if self._direct is None:
            line.room = 0
            log.warning("requests are refused until the broker is back", held=len(self._held))
            return
        self._line = self._direct
        log.warning("direct mode until the broker is back", held=len(self._held))
        moved = [held for held in self._held.values() if held.line is line]
        for held in moved:
            held.line = self._direct
            line.withdraw((held.entry.tenant, held.entry.id))
        line.outbox.clear()
        self._direct.take_over([held.entry for held in moved])

    def back(self, line: Line) -> None:
        """See Holder. What went direct is answered there."""
        if line is self._shared:
            line.room = self.settings.max_queue
            self._line = line

    def brought(self, line: Line, replies: Sequence[Reply]) -> None:
        """See Holder. Tells each waiter; what is counted is counted for all of them together."""
        now = self._clock()
        overdue = now - DEADLINE_GRAIN
        told: dict[tuple[str, int], _Told] = {}
        sampled, strays = None, 0
        for reply in replies:
            held = self._held.pop((reply.tenant, reply.id), None)
            if held is None:
                strays += 1  # Answered by its deadline or by another line, or the client left.
                continue
            if (held.line is not line or held.deadline < overdue) and not self._fits(held, reply, overdue):
                continue
            entry, latency = held.entry, now - held.since
            series = told.get((entry.model, entry.tier))
            if series is None:
                series = told[entry.model, entry.tier] = _Told([], [])
            series.latencies.append(latency)
            series.waits.append(reply.queued)
            if reply.failure is not None:
                series.failed += 1
                self._count(entry, reply.failure.code.lower())
            if reply.ran is not sampled and reply.ran is not None:
                sampled = reply.ran
                self.tally.overhead_seconds.observe(max(0.0, latency - reply.queued - sampled.seconds))
            self._recent.append((reply.id, latency, reply.failure))
            self._tell(held.waiter, reply)
        for (model, tier), series in told.items():
            name = self._tiers[tier]
            self.tally.request_seconds[model, name].observe_all(series.latencies)
            self.tally.queue_seconds[model, name].observe_all(series.waits)
            self.tally.requests[model, name, "ok"] += len(series.latencies) - series.failed
            if line is self._direct:
                self.tally.direct[model] += len(series.latencies)
        if strays:
            log.debug("replies that nobody waits for", count=strays)
        if not self._held:
            self._emptied.set()

    def _fits(self, held: _Held, reply: Reply, overdue: float) -> bool:
        """Whether a reply that is not what was expected will do; if not, its request is held on or gets its 504."""
        self._held[held.entry.tenant, held.entry.id] = held
        if held.deadline < overdue:  # This process stood still; its client has long given up.
            self._expire(held)
            return False
        if reply.failure is not None:  # It comes by the line that the request has left; the other may do better.
            return False
        del self._held[held.entry.tenant, held.entry.id]
        held.line.withdraw((held.entry.tenant, held.entry.id))
        return True

    def _settle(self, held: _Held, failure: Failure, admitted: bool = True) -> None:
        """Answer a held request on the gateway's own account. A refusal at the door is no latency: it takes no
        time, and in an overload there are so many that they would hide how slow the others are."""
        entry = held.entry
        if self._held.pop((entry.tenant, entry.id), None) is None:
            return
        latency = self._clock() - held.since
        self._recent.append((entry.id, latency, failure))
        self._count(entry, failure.code.lower())
        if admitted:
            self.tally.request_seconds[entry.model, self._tiers[entry.tier]].observe(latency)
        self._tell(held.waiter, Reply(entry.id, entry.tenant, None, failure))
        if not self._held:
            self._emptied.set()

    def _tell(self, waiter: Waiter, reply: Reply) -> None:
        try:
            waiter.answer(reply)
        except Exception:
            log.exception("an answer could not be written", request_id=reply.id)

    def _count(self, entry: Entry, outcome: str) -> None:
        self.tally.requests[entry.model, self._tiers[entry.tier], outcome] += 1

    def _withdraw(self, held: _Held) -> None:
        held.line.withdraw((held.entry.tenant, held.entry.id))
        if not self._held:
            self._emptied.set()

    def _overdue(self, keys: Sequence[tuple[str, str]]) -> None:
        now = self._clock()
        for key in keys:
            held = self._held.get(key)
            if held is not None and held.deadline <= now:
                self._expire(held)

    def _expire(self, held: _Held) -> None:
        message = f"the total deadline of {held.entry.timeout * 1000:.0f} ms passed"
        self._settle(held, Failure(errors.DEADLINE_EXCEEDED, message, None, "total"))
        self._withdraw(held)


def _no_room(line: Line) -> Failure:
    """The refusal of a request that `line` has no room for. An outage is taken to last as long again as it has."""
    if line.silent > 0.0:
        least, most = RETRY_AFTER
        wait = min(max(line.silent, least), most)
        return Failure(errors.SERVICE_OVERLOADED, "the queue is out of reach; try again later", wait, "broker")
    return Failure(errors.SERVICE_OVERLOADED, "more requests wait than can be handed on", RETRY_AFTER[0], "overloaded")
