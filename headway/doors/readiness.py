"""Readiness of this process, as every port tells it.

Alive means that this process answers, whatever becomes of the broker. Ready depends on what it has:

    a gateway      a healthy worker is known, or one that is short of memory and works on, or a model that gets one as soon as
                   it is asked for; while the broker is out of
                   reach: requests are still held for it, or there is something to ask in its place. A broker that
                   answers again counts once requests go to it
    only batchers  one of its own slots is healthy, or works on
    neither        the broker answers

None is while it starts: its admin port answers from the first moment, so that what loads for minutes is known to live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

from headway.errors import BrokerUnavailable
from headway.model import Scaling, WorkerInfo, WorkerStatus
from headway.ports import Registry

SERVING = frozenset(("ok", "degraded"))
"""Words that mean ready."""

AGE = 0.5
"""Seconds for which an answer is good for all health checks, so that they do not multiply the calls to the broker."""
ANSWER_WITHIN = 0.8
"""Seconds that a route waits for the broker. Health checks usually give up after 1."""

AT_ZERO = "none, as nobody asks for one"

T = TypeVar("T")


def _never() -> bool:
    return False


@dataclass(slots=True)
class Readiness:
    """Readiness of one process.

    Attributes:
        broker: broker whose workers decide.
        leaving: whether the process is going down.
        slots: ids of the workers it runs.
        direct: fallback that serves in the place of a broker that is away; None: there is none.
        models: names of the models whose workers count; None: those of every model.
        holding: whether new requests go to the broker, and are held where it does not answer now, as it may be back in time; None: none come.
        needs_workers: whether it is ready only while a worker is healthy.
        needs_own: whether that has to be one of its own.
        starting: whether the process has not come up yet.
        told: is told of the workers at each look, so that a process that says that it is ready knows them.
        expected: healthy workers that the fleet should have; 0: nobody has said.
        at_zero: whether there is a model without workers that gets one as soon as it is asked for, as far as is known.
        awaited: models without workers that are asked for, with the workers that there should be.
        clock: monotonic seconds.
    """

    broker: Registry
    leaving: Callable[[], bool]
    slots: Collection[str] = ()
    direct: Registry | None = None
    models: Container[str] | None = None
    holding: Callable[[], bool] | None = None
    needs_workers: bool = True
    needs_own: bool = False
    starting: Callable[[], bool] = _never
    told: Callable[[Sequence[WorkerInfo]], None] | None = None
    expected: int = 0
    at_zero: Callable[[], bool] = _never
    awaited: Callable[[], Mapping[str, Scaling]] = dict
    clock: Callable[[], float] = monotonic
    _last_seen: Sequence[WorkerInfo] = field(default=(), init=False)
    """Registry as the broker last told it."""
    _seen_at: float | None = field(default=None, init=False)
    """Instant of that; None: it has told nothing yet."""

    async def look(self) -> tuple[str, dict[str, Any]]:
        """Word of readiness, and the workers that it comes from. Waits for the broker, but not for long."""
        if self.starting():  # The broker may not have been found fit yet.
            return "starting", {"starting": True, "draining": False}
        try:
            workers = await within_answer_time(self.broker.workers())
        except BrokerUnavailable:
            return await self.alone(), self._last_known() | await self._fallback() | {"broker": "out of reach"}
        self.learn(workers)
        if self.told is not None:
            self.told(workers)
        word, checks = self._look_at(workers)
        if self.passed_by:
            return await self.alone(), checks | await self._fallback() | {"broker": "answers, and is not used yet"}
        return word, checks

    @property
    def passed_by(self) -> bool:
        """Whether new requests do not go to the broker, as after an outage until the gateway has found that it is over."""
        return self.holding is not None and not self.holding()

    async def alone(self) -> str:
        """Word of readiness while the broker is out of reach.

        `degraded` as long as requests are held for the broker, or the fallback works.
        """
        word, _ = self._judge(await self._in_its_place())
        return self._alone(word)

    async def judge(self, workers: Sequence[WorkerInfo]) -> str:
        """Word of readiness by the broker's present registry."""
        self.learn(workers)
        return await self.alone() if self.passed_by else self._judge(workers)[0]

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of the broker's present registry, whoever has asked for it: it is what is known once the broker is away."""
        self._last_seen, self._seen_at = workers, self.clock()

    @property
    def _held(self) -> bool:
        """Whether new requests are held for the broker while it is out of reach."""
        return self.holding is not None and self.holding()

    def _last_known(self) -> dict[str, Any]:
        """Checks by the registry as it was before the broker went out of reach."""
        _, checks = self._look_at(self._last_seen)
        if self._seen_at is None:
            return checks | {"workers": "unknown"}
        age = self.clock() - self._seen_at
        return checks | {"workers": f"unknown; {checks['workers']} {age:.0f} s ago"}

    async def _fallback(self) -> dict[str, Any]:
        """Check of what answers in the place of the broker."""
        if self.direct is None:
            return {}
        return {"fallback": _healthy(await self.direct.workers())}

    def _alone(self, word: str) -> str:
        if word in ("draining", "starting"):
            return word
        serves = word in SERVING and (self.direct is not None or self._held)
        return "degraded" if serves else "unavailable"

    async def _in_its_place(self) -> Sequence[WorkerInfo]:
        """Workers that count while the broker is out of reach."""
        if self._held and self._last_seen:
            return self._last_seen
        return await self.direct.workers() if self.direct is not None else ()

    def _judge(self, workers: Sequence[WorkerInfo]) -> tuple[str, Sequence[WorkerInfo]]:
        """Word of readiness by some workers, and those of them that it comes from.

        `ok`: all that there should be. `degraded`: not every worker is healthy or drained, or fewer than expected are healthy.
        `unavailable`: none is, and none works on. `starting`: not up yet. `draining`: shutting down. A worker elsewhere
        that is offline has left, or is given up: it is not waited for.
        """
        counted = [worker for worker in workers if self._counts(worker)]
        if self.leaving():
            return "draining", counted
        if self.starting():
            return "starting", counted
        if not self.needs_workers:
            return "ok", counted
        healthy = sum(worker.status is WorkerStatus.HEALTHY for worker in counted)
        if not healthy:  # Out of a balancer, nobody would ask those that work on.
            if not counted and self.at_zero():
                return "degraded" if self._overdue(counted) else "ok", counted
            works = self.at_zero() or any(one.scarce and one.status is WorkerStatus.DEGRADED for one in counted)
            return "degraded" if works else "unavailable", counted
        drained = sum(worker.status is WorkerStatus.DRAINED for worker in counted)
        return "ok" if healthy + drained == len(counted) and not self._overdue(counted) and (
            self.needs_own or healthy >= self.expected
        ) else "degraded", counted

    def _missing(self, counted: Sequence[WorkerInfo]) -> list[Scaling]:
        """Workers that there should be of models of which nothing is heard."""
        there = {worker.model for worker in counted}
        return [scaling for model, scaling in self.awaited().items() if model not in there]

    def _overdue(self, counted: Sequence[WorkerInfo]) -> bool:
        return any(scaling.late for scaling in self._missing(counted))

    def _look_at(self, workers: Sequence[WorkerInfo]) -> tuple[str, dict[str, Any]]:
        word, counted = self._judge(workers)
        missing = self._missing(counted)
        shown = AT_ZERO if not counted and self.at_zero() and not missing else _healthy(counted)
        if missing:
            wanted, seconds = sum(one.desired for one in missing), max(one.awaited for one in missing)
            shown = f"{shown if counted else 'none'}; {wanted} wanted, on its way for {seconds:.0f} s"
        checks: dict[str, Any] = {"workers": shown, "draining": self.leaving()}
        if self.expected:
            checks["expected_workers"] = self.expected
        failed = {worker.model: worker.reason for worker in counted if worker.status is WorkerStatus.FAILED}
        return word, {**checks, "failed": failed} if failed else checks

    def _counts(self, worker: WorkerInfo) -> bool:
        if worker.status is WorkerStatus.COLD or (self.models is not None and worker.model not in self.models):
            return False
        own = worker.worker_id in self.slots
        return own if self.needs_own else own or worker.status is not WorkerStatus.OFFLINE


def _healthy(workers: Sequence[WorkerInfo]) -> str:
    if not workers:
        return "none has come yet"
    drained = sum(worker.status is WorkerStatus.DRAINED for worker in workers)
    healthy = f"{sum(worker.status is WorkerStatus.HEALTHY for worker in workers)} of {len(workers)} healthy"
    return f"{healthy}, {drained} drained" if drained else healthy


class CachedReadiness:
    """Last look at a process, shared by all probes within AGE, so that further probes cost the broker nothing.

    Arguments:
        readiness: readiness of the process.
    """

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness
        self._looking: asyncio.Task[tuple[str, dict[str, Any]]] | None = None
        self._since = 0.0
        self._known = False, False

    async def take(self) -> tuple[str, dict[str, Any]]:
        """Result of the last `Readiness.look`, or of a new one. What the process knows by itself, as that it is leaving, it says at once."""
        loop, known = asyncio.get_running_loop(), (self._readiness.leaving(), self._readiness.passed_by)
        looking, now = self._looking, loop.time()
        if looking is None or now - self._since > AGE or known != self._known:
            self._since, self._known = now, known
            looking = self._looking = loop.create_task(self._readiness.look())
        return await asyncio.shield(looking)

    async def serving(self) -> bool:
        """Whether the process should get traffic; see `take`."""
        word, _ = await self.take()
        return word in SERVING


async def within_answer_time(asked: Awaitable[T]) -> T:
    """Answer of the broker.

    Raises:
        BrokerUnavailable: the broker does not answer within ANSWER_WITHIN.
    """
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            return await asked
    except TimeoutError:
        raise BrokerUnavailable(f"the broker does not answer within {ANSWER_WITHIN * 1000:.0f} ms") from None
