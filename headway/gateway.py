"""The gateway holds the client's side: who waits for what, until when.

Per request there is one small record and two dictionary operations; no task, no future, no timer of its own.
What gathered while the last call to the broker was under way goes as one call. The record carries the way
back, so that the answer is written by whoever brings it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
import uuid_utils

from headway import errors
from headway.config import Settings
from headway.core import ratelimit
from headway.core.ratelimit import Quota
from headway.core.service_model import ArrivalRate
from headway.model import Caller, Entry, Failure, Reply, Stage, Standing
from headway.ports import Broker
from headway.supervisor import Supervisor
from headway.tally import Tally

log = structlog.get_logger(__name__)

WORTH_GATHERING = 2.0
"""Entries gather between calls to the broker only when at least so many arrive meanwhile: a lone one goes at once."""
DEADLINE_GRAIN = 0.02
"""Width in seconds of the slots that deadlines are gathered in; a 504 is at most this late."""
REMEMBERED = 10_000
"""Answered requests that `status` still knows; their inputs and outputs are not kept."""


class Waiter(Protocol):
    """Where an answer goes."""

    def answer(self, reply: Reply) -> None:
        """Take the answer; called once, on a later turn of the loop than the `submit`."""
        ...


class _Held:
    """One request whose client waits."""

    __slots__ = ("deadline", "entry", "since", "waiter")

    def __init__(self, waiter: Waiter, entry: Entry, since: float, deadline: float) -> None:
        self.waiter = waiter
        self.entry = entry
        self.since = since
        self.deadline = deadline


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
        settings: for time-outs and tier names.
        models: names that are served.
        broker: where entries go.
        tally: counts outcomes.
        clock: monotonic seconds.

    Attributes:
        draining: shutting down: no longer ready, but what still comes over open connections is served.
        closed: every further request is refused.
    """

    def __init__(
        self,
        settings: Settings,
        models: Sequence[str],
        broker: Broker,
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.tally = tally
        self.draining = False
        self.closed = False
        self.name = f"gateway-{new_id()}"
        self._models = frozenset(models)
        self._broker = broker
        self._clock = clock
        self._tiers = settings.tier_names
        self._queue_timeout = settings.queue_timeout_ms / 1000
        self._held: dict[tuple[str, str], _Held] = {}
        self._outbox: list[Entry] = []
        self._departed: list[tuple[str, str]] = []
        self._work = asyncio.Event()
        self._gathered = 0.0
        """Until this instant it may pay to wait for more before the broker is called again."""
        self._rate = ArrivalRate()
        self._limits: dict[str, tuple[Quota, float]] = {}
        """Of each key: its quota, and its theoretical arrival time."""
        self._due: dict[int, list[tuple[str, str]]] = {}
        self._due_order: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._recent: deque[tuple[str, float, Failure | None]] = deque(maxlen=REMEMBERED)
        self._cursor = 0
        self._emptied = asyncio.Event()

    def start(self, supervisor: Supervisor) -> None:
        """Start its two loops: what goes to the broker, and what comes back."""
        supervisor.start("gateway intake", self._intake)
        supervisor.start("gateway returns", self._returns)

    @property
    def pending(self) -> int:
        """Requests held now."""
        return len(self._held)

    @property
    def requests_per_second(self) -> float:
        """Requests handed to the broker, averaged over about a second."""
        return self._rate.at(self._clock())

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
        held = _Held(waiter, entry, now, now + timeout)
        self._held[key] = held
        self._watch(key, held.deadline)
        if not self._outbox:
            self._work.set()
        self._outbox.append(entry)

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
                stage = await self._broker.stage(tenant, id)
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

    async def _intake(self) -> None:
        while True:
            await self._work.wait()
            now = self._clock()
            gather = self._broker.gather
            if now < self._gathered and self._rate.at(now) * gather >= WORTH_GATHERING:
                await asyncio.sleep(gather)
            self._gathered = self._clock() + gather
            self._work.clear()
            if self._departed:
                departed, self._departed = self._departed, []
                await self._broker.cancel(departed)
            if self._outbox:
                entries, self._outbox = self._outbox, []
                self._rate.observe(len(entries), self._clock())
                await self._hand_over(entries)

    async def _hand_over(self, entries: list[Entry]) -> None:
        verdicts = await self._broker.enqueue(entries)
        for entry, failure in zip(entries, verdicts, strict=True):
            if failure is not None and (held := self._held.get((entry.tenant, entry.id))) is not None:
                self.tally.refusals[failure.reason, self._tiers[entry.tier]] += 1
                self._settle(held, failure, admitted=False)

    async def _returns(self) -> None:
        while True:
            replies, self._cursor = await self._broker.replies(self.name, self._cursor)
            self._bring_back(replies)

    def _bring_back(self, replies: Sequence[Reply]) -> None:
        """Tell each waiter; what is counted is counted for all of them together."""
        now = self._clock()
        told: dict[tuple[str, int], _Told] = {}
        sampled = None
        for reply in replies:
            held = self._held.pop((reply.tenant, reply.id), None)
            if held is None:
                continue  # Answered by its deadline, or the client left.
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
        if not self._held:
            self._emptied.set()

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
        self._departed.append((held.entry.tenant, held.entry.id))
        self._work.set()
        if not self._held:
            self._emptied.set()

    def _watch(self, key: tuple[str, str], deadline: float) -> None:
        """Note a deadline in its slot; one timer is set for the first slot that holds any."""
        slot = int(deadline / DEADLINE_GRAIN) + 1
        gathered = self._due.get(slot)
        if gathered is not None:
            gathered.append(key)
            return
        self._due[slot] = [key]
        heapq.heappush(self._due_order, slot)
        if self._due_order[0] == slot:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._due_order:
            delay = self._due_order[0] * DEADLINE_GRAIN - self._clock()
            self._timer = asyncio.get_running_loop().call_later(max(delay, 0.001), self._overdue)

    def _overdue(self) -> None:
        now = self._clock()
        while self._due_order and self._due_order[0] * DEADLINE_GRAIN <= now:
            for key in self._due.pop(heapq.heappop(self._due_order)):
                held = self._held.get(key)
                if held is not None and held.deadline <= now:
                    message = f"the total deadline of {held.entry.timeout * 1000:.0f} ms passed"
                    self._settle(held, Failure(errors.DEADLINE_EXCEEDED, message, None, "total"))
                    self._withdraw(held)
        self._set_timer()
