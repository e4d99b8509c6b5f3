"""Drains: which workers a name means, and which models would be left without. Pure, apart from the route that uses it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from headway.core.excerpt import nearest
from headway.model import Drain, ProcessInfo, QueueName, WorkerInfo, WorkerStatus

NEAR = 3
"""Limit on the similar names listed for an unknown one."""


class NoDrain(Exception):
    """The drain is impossible; says why."""


class UnknownName(NoDrain):
    """No worker, process or host has the name."""


def wanted(name: str, workers: Sequence[WorkerInfo], members: Sequence[ProcessInfo]) -> list[Drain]:
    """Return drains for the worker with a name, or for all workers of the process or host with it.

    A worker that left counts if its process can bring it back, which then happens without a backend until it is undrained.

    Arguments:
        name: id of a worker or a process, or name of a host.
        workers: the worker registry.
        members: processes of the fleet.

    Raises:
        UnknownName: nothing with workers has the name; lists similar ones.
    """
    homes = {
        one.worker_id: home
        for one in workers
        if (home := _home(one.worker_id, members)) is not None
        and (one.status is not WorkerStatus.OFFLINE or one.model in home.scalable)
    }
    if (home := homes.get(name)) is not None:
        return [Drain(name=name, process=home.id, host=home.host)]
    runs = {home.id for home in homes.values()} | {one.id for one in members if one.scalable}
    found = [one for one in members if one.id in runs and name in (one.id, one.host)]
    if found:
        return [Drain(name=one.id, process=one.id, host=one.host) for one in found]
    asked = [one for one in members if name in (one.id, one.host)]
    if asked:
        raise UnknownName(f"{name!r} is a {asked[0].role.value} and has no workers to drain")
    names = {*homes, *runs, *(one.host for one in members if one.id in runs)}
    raise UnknownName(f"no worker, process or host {name!r} is in the fleet{_near(name, names)}")


def ended(
    name: str, drains: Sequence[Drain], workers: Iterable[WorkerInfo], members: Sequence[ProcessInfo]
) -> list[Drain]:
    """Return the drains that end when a name is undrained: those of that worker, or of that process or host.

    Raises:
        UnknownName: nothing with the name is drained; lists similar ones.
        NoDrain: it is a worker whose whole process is drained, with or without a drain of its own.
    """
    home = _home(name, members) if any(one.worker_id == name for one in workers) else None
    process = name.partition("/")[0] if home is None else home.id
    if name != process and any(one.name == one.process == process for one in drains):
        raise NoDrain(f"worker {name!r} is drained with its whole process; undrain {process!r}")
    found = [one for one in drains if name in (one.name, one.process, one.host)]
    if found:
        return found
    names = {name for one in drains for name in (one.name, one.process, one.host)}
    raise UnknownName(f"nothing named {name!r} is drained{_near(name, names)}")


def covered(drains: Collection[Drain], workers: Iterable[WorkerInfo], members: Sequence[ProcessInfo]) -> set[str]:
    """Return the ids of the workers that drains cover."""
    names = {one.name for one in drains}
    found = set()
    for one in workers:
        home = _home(one.worker_id, members)
        if one.worker_id in names or (home is not None and home.id in names):
            found.add(one.worker_id)
    return found


def bared(drained: Collection[str], workers: Iterable[WorkerInfo]) -> list[str]:
    """Return the models and versions, in words, whose healthy workers are all among these."""
    left: dict[QueueName, bool] = {}
    for one in workers:
        if one.status is WorkerStatus.HEALTHY:
            left[one.queue] = left.get(one.queue, False) or one.worker_id not in drained
    return sorted(
        f"version {queue.version} of model {queue.model}" if queue.version else f"model {queue.model}"
        for queue, serves in left.items()
        if not serves
    )


def outlived(drains: Iterable[Drain], members: Iterable[ProcessInfo]) -> list[str]:
    """Return the names of drains whose processes have disappeared."""
    there = {one.id for one in members}
    return [one.name for one in drains if one.process not in there]


def _home(worker: str, members: Sequence[ProcessInfo]) -> ProcessInfo | None:
    """Return the process of a worker; None if unknown. A process without a fleet doesn't put its name into its workers'."""
    process = worker.partition("/")[0]
    alone = members[0] if len(members) == 1 else None
    return next((one for one in members if one.id == process), alone)


def _near(name: str, names: Collection[str]) -> str:
    near = nearest(name, sorted(names), NEAR, 0.5) or sorted(names)[:NEAR]
    return f"; near are {', '.join(near)}" if near else ""
