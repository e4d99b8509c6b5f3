"""Drains: which workers a name stands for, and which models would have none left. Only the admin routes use it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from headway.core.excerpt import nearest
from headway.model import Drain, ProcessInfo, QueueName, WorkerInfo, WorkerStatus

NEAR = 3  # Limit on the similar names listed for an unknown one.


class NoDrain(Exception):
    """Raised if a drain is impossible, with the reason."""


class UnknownName(NoDrain):
    """No worker, process or host has the name."""


def wanted(name: str, workers: Sequence[WorkerInfo], members: Sequence[ProcessInfo]) -> list[Drain]:
    """Return drains for the worker with a name, or for all workers of a process or host with it.

    A worker that is offline counts if its process can start it again. It then starts without a backend until it is undrained. Raises
    UnknownName, with similar names, if nothing with workers has the name."""
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
    """Return the drains that end when a worker, process or host is undrained. Raises UnknownName, with similar names, if nothing
    with the name is drained, and NoDrain if it is a worker whose whole process is drained."""
    home = _home(name, members) if any(worker.worker_id == name for worker in workers) else None
    process = name.partition("/")[0] if home is None else home.id
    if name != process and any(drain.name == drain.process == process for drain in drains):
        raise NoDrain(f"worker {name!r} is drained with its whole process; undrain {process!r}")
    if meant := [drain for drain in drains if name in (drain.name, drain.process, drain.host)]:
        return meant
    names = {name for drain in drains for name in (drain.name, drain.process, drain.host)}
    raise UnknownName(f"nothing named {name!r} is drained{_near(name, names)}")


def covered(drains: Collection[Drain], workers: Iterable[WorkerInfo], members: Sequence[ProcessInfo]) -> set[str]:
    """Return the ids of the workers that drains cover."""
    names, ids = {drain.name for drain in drains}, [worker.worker_id for worker in workers]
    return {id for id in ids if id in names or ((home := _home(id, members)) is not None and home.id in names)}


def bared(drained: Collection[str], workers: Iterable[WorkerInfo]) -> list[str]:
    """Return the models and versions, in words, whose healthy workers are all drained."""
    left: dict[QueueName, bool] = {}
    for worker in workers:
        if worker.status is WorkerStatus.HEALTHY:
            left[worker.queue] = left.get(worker.queue, False) or worker.worker_id not in drained
    return sorted(
        f"version {queue.version} of model {queue.model}" if queue.version else f"model {queue.model}"
        for queue, serves in left.items()
        if not serves
    )


def outlived(drains: Iterable[Drain], members: Iterable[ProcessInfo]) -> list[str]:
    """Return the names of drains whose processes have disappeared."""
    there = {member.id for member in members}
    return [drain.name for drain in drains if drain.process not in there]


def _home(worker: str, members: Sequence[ProcessInfo]) -> ProcessInfo | None:
    """Return the process of a worker, if known. Without a fleet, workers have other names, and belong to the only process."""
    process = worker.partition("/")[0]
    alone = members[0] if len(members) == 1 else None
    return next((member for member in members if member.id == process), alone)


def _near(name: str, names: Collection[str]) -> str:
    near = nearest(name, sorted(names), NEAR, 0.5) or sorted(names)[:NEAR]
    return f"; near are {', '.join(near)}" if near else ""
