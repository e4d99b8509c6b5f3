"""`headway status`: shows the state of a running service and of the fleet around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import typer

from headway.cli.admin import DEFAULT_URL, Admin, AdminError, AdminUrl, AsJson, Token, pretty, table
from headway.cli.screen import narrowed
from headway.cli.trust import Ca, Cert, CertKey

_AWAY = 503
STARTING = "starting"
"""Status of a process that has not come up yet."""
SORTS: dict[str, tuple[str, bool]] = {
    "WORKER": ("worker_id", False),
    "STATUS": ("status", False),
    "BUSY": ("utilisation", True),
    "IN FLIGHT": ("in_flight", True),
    "RESTARTS": ("restarts", True),
}
"""Columns by which workers can be sorted: the member of an answer, and whether the largest comes first."""
STALE = 10.0
"""Seconds after which a published capacity is no longer taken for the present one."""


class Sort(NamedTuple):
    """Order of the workers: a column of SORTS, and whether it is turned round."""

    column: str = "WORKER"
    reverse: bool = False


BY_NAME = Sort()


def status(
    admin: AdminUrl = DEFAULT_URL,
    token: Token = "",
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
    json: AsJson = False,
) -> None:
    """Show how a running service is doing: load, queue, capacity, processes, workers.

    The admin port of any process will do: each knows the whole fleet.

    Exit codes: 0 it serves, 1 it does not or cannot be reached.
    """
    found = look(Admin(admin, token, ca, cert, cert_key))
    typer.echo(pretty(found) if json else overview(found))
    if not serves(found):
        raise typer.Exit(1)


def look(port: Admin) -> dict[str, Any]:
    """Ask an admin port for its process and the fleet. While the broker is away, or the process starts, there is no fleet.

    Raises:
        AdminError: the port does not answer, or its process does not serve for want of a broker.
    """
    found = {**port.get("/internal/health"), "workers": [], "members": [], "capacities": []}
    try:
        found["workers"] = port.get("/internal/workers")["workers"]
        if found["status"] == STARTING:
            return found
        fleet = port.get("/internal/fleet")
        found["members"], found["capacities"] = fleet["members"], fleet["capacities"]
    except AdminError as exc:
        if exc.status != _AWAY:
            raise
        found["message"] = str(exc)
    return found


def serves(found: dict[str, Any]) -> bool:
    """Whether the process takes requests, or does its role's other work."""
    return found["status"] in ("ok", "degraded")


def overview(found: dict[str, Any], width: int = 0, sort: Sort = BY_NAME, more: str = "") -> str:
    """Answers of an admin port as text for people.

    Arguments:
        found: answers, see `look`.
        width: columns of the terminal, to which tables are narrowed; 0: as wide as they are.
        sort: order of the workers.
        more: text between the summary and the tables.
    """
    parts = [_summary(found)]
    if more:
        parts.append(more)
    if found["broker"] and found["members"]:
        parts.append(_members(found["members"], width))
    if found["workers"]:
        parts.append(_workers(found["workers"], width, sort))
        parts += _reasons(found["workers"])
    return "\n\n".join(parts)


def _summary(found: dict[str, Any]) -> str:
    from headway.runtime.log import escape

    others = [member for member in found["members"] if member["id"] != found["id"]]
    rate = found["requests_per_second"] + sum(member["requests_per_second"] for member in others)
    held = found["pending"] + sum(member["pending"] for member in others)
    lines = {"status": found["status"]}
    if "message" in found:
        lines["broker away"] = found["message"]
    if found["broker"]:
        lines["asked"] = f"{found['role']} {found['id']}"
        lines["broker"] = found["broker"]
    lines["load"] = f"{rate:g} requests/s, {held} held"
    if "queues" in found:
        waiting = ", ".join(_depths(found["queues"]))
        lines["workers busy"] = f"{found['gpu_utilization']:.0%}"
        lines["waiting"] = f"{waiting or 'nothing'}, oldest {found['queue_oldest_seconds'] * 1000:.0f} ms"
        lines["dead letters"] = f"{found['dead_letters']}"
    if found["capacities"]:
        lines["capacity"] = "; ".join(map(_capacity, found["capacities"]))
    if found.get("expected_workers") and "workers" in found:  # A process of an earlier version does not tell.
        healthy = sum(worker["status"] == "healthy" for worker in found["workers"])
        lines["workers"] = f"{healthy} of {found['expected_workers']} expected are healthy"
    lines["policy"] = found["policy"]
    lines["version"] = found["version"]
    return "\n".join(f"{name:<13} {escape(value)}" for name, value in lines.items())


def _depths(queues: Sequence[dict[str, Any]]) -> list[str]:
    filled = {_queue(queue) for queue in queues if queue["depth"]}
    versions = {_queue(queue) for queue in queues if queue.get("version")}
    several = max(map(len, (filled, versions, {queue["model"] for queue in queues}))) > 1
    return [
        f"{queue['depth']} {queue['tier']}{' of ' + _queue(queue) if several else ''}"
        for queue in queues
        if queue["depth"]
    ]


def _queue(queue: dict[str, Any]) -> str:
    """Model of a queue, and the version that it is for."""
    version = queue.get("version")  # A process of an earlier version does not tell.
    return f"{queue['model']} version {version}" if version else str(queue["model"])


def _capacity(capacity: dict[str, Any]) -> str:
    slots = f"{capacity['healthy']} healthy"
    if capacity["degraded"]:
        slots += f", {capacity['degraded']} degraded"
    if capacity.get("scarce"):  # A process of an earlier version does not tell.
        slots += ", the broker's memory is scarce"
    if capacity["age_seconds"] > STALE:
        slots += f", {capacity['age_seconds']:.0f} s ago"
    if not capacity["items_per_second"]:
        return f"{capacity['model']}: not measured yet, {slots}"
    most, meant = capacity["items_per_second"], capacity["usable_per_second"]
    of = f"{meant:.0f} of {most:.0f}" if meant < most else f"{most:.0f}"
    sure = " (estimated)" if capacity.get("estimated") else ""
    return f"{capacity['model']}: {of} inputs/s{sure}, {slots}"


def _members(members: Sequence[dict[str, Any]], width: int) -> str:
    head = ("PROCESS", "ROLE", "HOST", "PID", "HELD", "REQUESTS/S", "LEADS", "VERSION", "ADMIN", "SEEN")
    rows = [
        (
            member["id"],
            member["role"],
            member["host"],
            str(member["pid"]),
            str(member["pending"]),
            f"{member['requests_per_second']:g}",
            "yes" if member["leads"] else "-",
            member["version"],
            member["admin"],
            f"{member['age_seconds']:.1f} s ago",
        )
        for member in sorted(members, key=lambda member: (member["role"], member["id"]))
    ]
    return table(*narrowed(head, rows, width, ("VERSION", "PID", "ADMIN", "HOST", "LEADS", "ROLE", "SEEN", "HELD")))


def _reasons(workers: Sequence[dict[str, Any]]) -> list[str]:
    """Lines on the workers that are not healthy, as one text; none where there is nothing to say."""
    from headway.runtime.log import escape

    told = sorted((str(one["worker_id"]), one["status"], reason) for one in workers if (reason := one.get("reason")))
    lines = [f"{worker} is {status}: {escape(reason)}" for worker, status, reason in told]
    return ["\n".join(lines)] if lines else []


def _workers(workers: Sequence[dict[str, Any]], width: int, sort: Sort) -> str:
    name, descending = SORTS[sort.column]
    workers = sorted(workers, key=lambda worker: str(worker["worker_id"]))
    workers.sort(key=lambda worker: worker[name], reverse=descending is not sort.reverse)
    head = ("WORKER", "MODEL", "STATUS", "BUSY", "IN FLIGHT", "RESTARTS", "PID", "LAST HEARTBEAT")
    rows = [
        (
            worker["worker_id"],
            worker["model"],
            worker["status"],
            f"{worker['utilisation']:.0%}",
            str(worker["in_flight"]),
            str(worker["restarts"]),
            str(worker["pid"] or "-"),
            worker["last_heartbeat"],
        )
        for worker in workers
    ]
    return table(*narrowed(head, rows, width, ("LAST HEARTBEAT", "PID", "MODEL", "RESTARTS", "IN FLIGHT")))
