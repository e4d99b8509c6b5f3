"""Routes of drains: list, start, end. Each process learns of drains with its next heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.admin.process import ProcessView
from headway.core.drains import NoDrain, UnknownName, bared, covered, ended, outlived, wanted
from headway.core.health import heard
from headway.doors.readiness import within_answer_time
from headway.errors import BadRequest, BrokerUnavailable, NotFound
from headway.http.requests import Request, RouteAnswer, as_json
from headway.http.routing import Route
from headway.model import Drain, ProcessInfo, WorkerInfo
from headway.runtime.logger import get_logger

log = get_logger(__name__)

MOST_LOOKS = 20
"""Maximum number of attempts at one drain. An attempt fails if another drain came in between, which it must take into account."""


def routes(process: ProcessView) -> list[Route]:
    """Make the routes `/internal/drains` and below. Arguments are in the query."""
    on = _Routes(process)
    return [
        Route("/internal/drains", on.listing),
        Route("/internal/drains/start", on.start, ("POST",)),
        Route("/internal/drains/end", on.end, ("POST",)),
    ]


class _Routes:
    def __init__(self, process: ProcessView) -> None:
        self._fleet, self._broker = process.fleet, process.broker

    async def listing(self, request: Request) -> RouteAnswer:
        drains, workers, members = await self._look()
        return self._shown(drains, workers, members)

    async def start(self, request: Request) -> RouteAnswer:
        name, force = _named(request), request.param("force") == "true"
        for _ in range(MOST_LOOKS):
            drains, workers, members = await self._look()
            try:
                named = wanted(name, workers, members)
            except UnknownName as exc:
                raise NotFound(str(exc)) from None
            without = bared(covered([*drains, *named], workers, members), workers)
            if without and not force:
                raise BadRequest(
                    f"{', '.join(without)} would have no healthy worker left, and its requests would be refused; "
                    "drain it all the same with --force"
                )
            gone = outlived(drains, members)
            await within_answer_time(self._fleet.undrain(gone))
            known = {drain.name for drain in drains}.difference(gone)
            if await within_answer_time(self._fleet.drain(named, known)):
                log.info("draining workers", name=name, drains=[drain.name for drain in named], bares=without)
                return self._shown(named, workers, members)
        raise BrokerUnavailable("other orders to drain came all the while; ask again")

    async def end(self, request: Request) -> RouteAnswer:
        name = _named(request)
        drains, workers, members = await self._look()
        try:
            ending = ended(name, drains, workers, members)
        except UnknownName as exc:
            raise NotFound(str(exc)) from None
        except NoDrain as exc:
            raise BadRequest(str(exc)) from None
        names = [drain.name for drain in ending]
        await within_answer_time(self._fleet.undrain(names))
        log.info("no longer draining workers", name=name, drains=names)
        return self._shown(ending, workers, members)

    async def _look(self) -> tuple[Sequence[Drain], Sequence[WorkerInfo], Sequence[ProcessInfo]]:
        answers = asyncio.gather(self._fleet.drains(), self._broker.workers(), self._fleet.members())
        drains, workers, members = await within_answer_time(answers)
        return drains, workers, heard(members)

    @staticmethod
    def _shown(drains: Sequence[Drain], workers: Sequence[WorkerInfo], members: Sequence[ProcessInfo]) -> RouteAnswer:
        lines = [
            {"name": drain.name, "process": drain.process, "host": drain.host,
             "workers": sorted(covered([drain], workers, members))}
            for drain in sorted(drains, key=lambda drain: drain.name)
        ]  # fmt: skip
        return as_json({"drains": lines})


def _named(request: Request) -> str:
    name = request.param("name")
    if not name:
        raise BadRequest("name is missing in the query: of a worker, a process or a host")
    return name
