"""Drain routes: list, start and end drains. Each process learns about a drain with its next heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

from headway.admin.process import ProcessView
from headway.core.excerpt import nearest
from headway.core.health import heard
from headway.doors.readiness import within_answer_time
from headway.errors import BadRequest, BrokerUnavailable, NotFound
from headway.http.routing import Request, Route, RouteAnswer, as_json
from headway.model import Drain, ProcessInfo, QueueName, WorkerInfo, WorkerStatus
from headway.runtime.logger import get_logger

log = get_logger(__name__)

NEAR = 3  # Maximum number of similar names to suggest for an unknown one.


class NoDrain(Exception):
    """The drain is impossible. The message says why."""


class UnknownName(NoDrain):
    """No worker, process or host has this name."""


def wanted(name: str, workers: Sequence[WorkerInfo], members: Sequence[ProcessInfo]) -> list[Drain]:
    """Return drains for the worker with this name, or for all workers of the process or host with this name. Includes an offline
    worker that its process can restart; until the drain ends, that worker starts without a backend. Raises UnknownName, with
    similar names, if nothing with this name has workers."""
    homes = {
        worker.worker_id: home
        for worker in workers
        if (home := _home(worker.worker_id, members)) is not None
        and (worker.status is not WorkerStatus.OFFLINE or worker.model in home.scalable)
    }
    if (home := homes.get(name)) is not None:
        return [Drain(name=name, process=home.id, host=home.host)]
    runs = {home.id for home in homes.values()} | {member.id for member in members if member.scalable}
    named = [member for member in members if name in (member.id, member.host)]
    if drained := [member for member in named if member.id in runs]:
        return [Drain(name=member.id, process=member.id, host=member.host) for member in drained]
    if named:
        raise UnknownName(f"{name!r} is a {named[0].role.value} and has no workers to drain")
    names = {*homes, *runs, *(member.host for member in members if member.id in runs)}
    raise UnknownName(f"no worker, process or host {name!r} is in the fleet{_near(name, names)}")


def ended(
    name: str, drains: Sequence[Drain], workers: Iterable[WorkerInfo], members: Sequence[ProcessInfo]
) -> list[Drain]:
    """Return the drains to end for the worker, process or host with this name. Raises UnknownName, with similar names, if it isn't
    drained, or NoDrain if it is a worker whose entire process is drained."""
    home = _home(name, members) if any(worker.worker_id == name for worker in workers) else None
    process = name.partition("/")[0] if home is None else home.id
    if name != process and any(drain.name == drain.process == process for drain in drains):
        raise NoDrain(f"worker {name!r} is drained with its entire process; undrain {process!r}")
    if meant := [drain for drain in drains if name in (drain.name, drain.process, drain.host)]:
        return meant
    names = {name for drain in drains for name in (drain.name, drain.process, drain.host)}
    raise UnknownName(f"nothing named {name!r} is drained{_near(name, names)}")


def covered(drains: Collection[Drain], workers: Iterable[WorkerInfo], members: Sequence[ProcessInfo]) -> set[str]:
    """Return the ids of the workers that these drains apply to."""
    names, ids = {drain.name for drain in drains}, [worker.worker_id for worker in workers]
    return {id for id in ids if id in names or ((home := _home(id, members)) is not None and home.id in names)}


def bared(drained: Collection[str], workers: Iterable[WorkerInfo]) -> list[str]:
    """Describe the models and versions whose healthy workers are all drained."""
    serving: dict[QueueName, bool] = {}
    for worker in workers:
        if worker.status is WorkerStatus.HEALTHY:
            serving[worker.queue] = serving.get(worker.queue, False) or worker.worker_id not in drained
    return sorted(
        f"version {queue.version} of model {queue.model}" if queue.version else f"model {queue.model}"
        for queue, serves in serving.items()
        if not serves
    )


def outlived(drains: Iterable[Drain], members: Iterable[ProcessInfo]) -> list[str]:
    """Return the names of drains whose processes have disappeared."""
    there = {member.id for member in members}
    return [drain.name for drain in drains if drain.process not in there]


def _home(worker: str, members: Sequence[ProcessInfo]) -> ProcessInfo | None:
    """Return the process of a worker, or None if unknown. In a fleet, a worker's name begins with the id of its process.
    Outside a fleet, there is only one process."""
    process = worker.partition("/")[0]
    alone = members[0] if len(members) == 1 else None
    return next((member for member in members if member.id == process), alone)


def _near(name: str, names: Collection[str]) -> str:
    near = nearest(name, sorted(names), NEAR, 0.5) or sorted(names)[:NEAR]
    return f"; similar names are {', '.join(near)}" if near else ""


MOST_LOOKS = 20  # Maximum number of attempts to drain. An attempt fails if the drains have changed in the meantime.


def routes(process: ProcessView) -> list[Route]:
    """Return the routes at and below `/internal/drains`. Arguments are in the query."""
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
                    "use --force to drain it anyway"
                )
            stale = outlived(drains, members)
            await within_answer_time(self._fleet.undrain(stale))
            known = {drain.name for drain in drains}.difference(stale)
            if await within_answer_time(self._fleet.drain(named, known)):
                log.info("draining workers", name=name, drains=[drain.name for drain in named], bares=without)
                return self._shown(named, workers, members)
        raise BrokerUnavailable("other callers keep changing the drains; try again")

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
        raise BadRequest("the query lacks a name: that of a worker, a process or a host")
    return name
