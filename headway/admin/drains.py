"""Drains over HTTP: listed, begun, ended. Each process hears of them with its next heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.admin.process import ProcessView
from headway.admin.rendering import as_json
from headway.core.drains import NoDrain, UnknownName, bared, covered, ended, outlived, wanted
from headway.core.health import heard
from headway.doors.readiness import within_answer_time
from headway.errors import BadRequest, BrokerUnavailable, NotFound
from headway.http.requests import Request, RouteAnswer
from headway.http.routing import Route
from headway.model import Drain, ProcessInfo, WorkerInfo
from headway.runtime.logger import get_logger

log = get_logger(__name__)

MOST_LOOKS = 20
"""Most looks of one order. It looks anew where another came between its look and its write: the later one sees the earlier."""


def routes(process: ProcessView) -> list[Route]:
    """Routes `/internal/drains` and below. Arguments are in the query."""
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
                found = wanted(name, workers, members)
            except UnknownName as exc:
                raise NotFound(str(exc)) from None
            without = bared(covered([*drains, *found], workers, members), workers)
            if without and not force:
                raise BadRequest(
                    f"{', '.join(without)} would have no healthy worker left, and its requests would be refused; "
                    "drain it all the same with --force"
                )
            gone = outlived(drains, members)
            await within_answer_time(self._fleet.undrain(gone))
            if await within_answer_time(self._fleet.drain(found, {one.name for one in drains}.difference(gone))):
                log.info("workers are to be drained", name=name, drains=[one.name for one in found], bares=without)
                return self._shown(found, workers, members)
        raise BrokerUnavailable("other orders to drain came all the while; ask again")

    async def end(self, request: Request) -> RouteAnswer:
        name = _named(request)
        drains, workers, members = await self._look()
        try:
            found = ended(name, drains, workers, members)
        except UnknownName as exc:
            raise NotFound(str(exc)) from None
        except NoDrain as exc:
            raise BadRequest(str(exc)) from None
        await within_answer_time(self._fleet.undrain([one.name for one in found]))
        log.info("workers are no longer to be drained", name=name, drains=[one.name for one in found])
        return self._shown(found, workers, members)

    async def _look(self) -> tuple[Sequence[Drain], Sequence[WorkerInfo], Sequence[ProcessInfo]]:
        asked = asyncio.gather(self._fleet.drains(), self._broker.workers(), self._fleet.members())
        drains, workers, members = await within_answer_time(asked)
        return drains, workers, heard(members)

    @staticmethod
    def _shown(drains: Sequence[Drain], workers: Sequence[WorkerInfo], members: Sequence[ProcessInfo]) -> RouteAnswer:
        lines = [
            {"name": one.name, "process": one.process, "host": one.host,
             "workers": sorted(covered([one], workers, members))}
            for one in sorted(drains, key=lambda one: one.name)
        ]  # fmt: skip
        return as_json({"drains": lines})


def _named(request: Request) -> str:
    name = request.param("name")
    if not name:
        raise BadRequest("name is missing in the query: of a worker, a process or a host")
    return name
