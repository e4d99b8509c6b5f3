"""Readiness: should this process get traffic?

A process is live while its admin port answers, whatever the state of the broker. When it is ready depends on its role:

    gateway    A worker is healthy, or still works although it is short of memory, or will be started on demand. While the
               broker is unreachable, the gateway must hold requests for it or have a fallback. After an outage, the broker
               is only considered once the gateway sends requests to it again.
    worker     One of its own slots is healthy, or still works.
    others     The broker answers.

A process isn't ready while it is starting, but its admin port answers from the beginning, so that a slow load doesn't look like
a hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from headway.errors import BrokerUnavailable
from headway.model import Scaling, WorkerInfo, WorkerStatus
from headway.ports import Registry

if TYPE_CHECKING:
    from headway.gateway.fleet_watchers import Learner

SERVING = frozenset(("ok", "degraded"))

AGE = 0.5  # Seconds for which all health checks share an answer, to save broker calls.
ANSWER_WITHIN = 0.8  # Seconds that a route waits for the broker. Health checks usually give up after 1.

AT_ZERO = "none, as nobody asks for one"

T = TypeVar("T")


def _never() -> bool:
    return False


@dataclass(slots=True)
class Readiness:
    """Readiness of one process.

    It depends on the workers of `broker`, or only on those of `models`. The fallback `direct` may serve while the broker is
    unreachable. `holding` returns True while new requests go to the broker or wait for it; it is None in a process that handles
    no requests. If `needs_workers`, the process needs workers to be ready; if `needs_own`, only its own `slots` count. Each
    check passes the workers to the `learners`. `expected` is the number of healthy workers that the fleet should have, or 0.
    `at_zero` returns True if a model without workers will get one on demand. `awaited` returns the scaling of models that have
    demand but no workers."""

    broker: Registry
    leaving: Callable[[], bool]
    slots: Collection[str] = ()
    direct: Registry | None = None
    models: Container[str] | None = None
    holding: Callable[[], bool] | None = None
    needs_workers: bool = True
    needs_own: bool = False
    starting: Callable[[], bool] = _never
    learners: Sequence[Learner] = ()
    expected: int = 0
    at_zero: Callable[[], bool] = _never
    awaited: Callable[[], Mapping[str, Scaling]] = dict
    clock: Callable[[], float] = monotonic
    _last_seen: Sequence[WorkerInfo] = field(default=(), init=False)  # The workers as of the broker's last answer.
    _seen_at: float | None = field(default=None, init=False)  # When the broker last answered; None before.

    async def look(self) -> tuple[str, dict[str, Any]]:
        """Return the readiness status and its checks. Waits at most ANSWER_WITHIN for the broker."""
        if self.starting():  # The broker may not have been checked yet.
            return "starting", {"starting": True, "draining": False}
        try:
            workers = await within_answer_time(self.broker.workers())
        except BrokerUnavailable:
            return await self.alone(), self._last_known() | await self._fallback() | {"broker": "out of reach"}
        self.learn(workers)
        for learner in self.learners:
            learner.learn(workers)
        word, checks = self._look_at(workers)
        if self.passed_by:
            return await self.alone(), checks | await self._fallback() | {"broker": "answers, but is not used yet"}
        return word, checks

    @property
    def passed_by(self) -> bool:
        """True while new requests bypass the broker. After an outage, this lasts until the gateway notices its end."""
        return self.holding is not None and not self.holding()

    async def alone(self) -> str:
        """Return the status while the broker is unreachable: `degraded` if requests are held or the fallback works."""
        workers = self._last_seen if self._held else ()
        if not workers and self.direct is not None:
            workers = await self.direct.workers()
        word, _ = self._judge(workers)
        if word in ("draining", "starting"):
            return word
        serves = word in SERVING and (self.direct is not None or self._held)
        return "degraded" if serves else "unavailable"

    async def judge(self, workers: Sequence[WorkerInfo]) -> str:
        self.learn(workers)
        return await self.alone() if self.passed_by else self._judge(workers)[0]

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        self._last_seen, self._seen_at = workers, self.clock()

    @property
    def _held(self) -> bool:
        return self.holding is not None and self.holding()

    def _last_known(self) -> dict[str, Any]:
        _, checks = self._look_at(self._last_seen)
        if self._seen_at is None:
            return checks | {"workers": "unknown"}
        age = self.clock() - self._seen_at
        return checks | {"workers": f"unknown; {checks['workers']} {age:.0f} s ago"}

    async def _fallback(self) -> dict[str, Any]:
        if self.direct is None:
            return {}
        return {"fallback": _healthy(await self.direct.workers())}

    def _judge(self, workers: Sequence[WorkerInfo]) -> tuple[str, Sequence[WorkerInfo]]:
        """Return the readiness status, and the workers that it is based on. `degraded` means that a worker is neither healthy
        nor drained, or that fewer workers than expected are healthy. Offline workers of other processes are ignored, because
        they have left or were given up."""
        counted = [worker for worker in workers if self._counts(worker)]
        if self.leaving():
            return "draining", counted
        if self.starting():
            return "starting", counted
        if not self.needs_workers:
            return "ok", counted
        healthy = sum(worker.status is WorkerStatus.HEALTHY for worker in counted)
        if not healthy:  # If this process were not ready, the balancer would also drop workers that still work.
            if not counted and self.at_zero():
                return "degraded" if self._overdue(counted) else "ok", counted
            works = self.at_zero() or any(
                worker.scarce and worker.status is WorkerStatus.DEGRADED for worker in counted
            )
            return "degraded" if works else "unavailable", counted
        drained = sum(worker.status is WorkerStatus.DRAINED for worker in counted)
        complete = healthy + drained == len(counted) and not self._overdue(counted)
        return "ok" if complete and (self.needs_own or healthy >= self.expected) else "degraded", counted

    def _missing(self, counted: Sequence[WorkerInfo]) -> list[Scaling]:
        present = {worker.model for worker in counted}
        return [scaling for model, scaling in self.awaited().items() if model not in present]

    def _overdue(self, counted: Sequence[WorkerInfo]) -> bool:
        return any(scaling.late for scaling in self._missing(counted))

    def _look_at(self, workers: Sequence[WorkerInfo]) -> tuple[str, dict[str, Any]]:
        word, counted = self._judge(workers)
        missing = self._missing(counted)
        shown = AT_ZERO if not counted and self.at_zero() and not missing else _healthy(counted)
        if missing:
            wanted = sum(scaling.desired for scaling in missing)
            seconds = max(scaling.awaited for scaling in missing)
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
    """Readiness that is shared by all probes within AGE seconds."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness
        self._looking: asyncio.Task[tuple[str, dict[str, Any]]] | None = None
        self._since = 0.0
        self._known = False, False

    async def take(self) -> tuple[str, dict[str, Any]]:
        """Return a result of `Readiness.look` that is at most AGE seconds old. Changes within this process show immediately."""
        loop, known = asyncio.get_running_loop(), (self._readiness.leaving(), self._readiness.passed_by)
        looking, now = self._looking, loop.time()
        if looking is None or now - self._since > AGE or known != self._known:
            self._since, self._known = now, known
            looking = self._looking = loop.create_task(self._readiness.look())
        return await asyncio.shield(looking)

    async def serving(self) -> bool:
        word, _ = await self.take()
        return word in SERVING


async def within_answer_time(answer: Awaitable[T]) -> T:
    """Wait for the broker's answer. Raises BrokerUnavailable if it takes longer than ANSWER_WITHIN."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            return await answer
    except TimeoutError:
        raise BrokerUnavailable(f"the broker did not answer within {ANSWER_WITHIN * 1000:.0f} ms") from None
