"""`headway status`: shows the state of a running service and of the fleet around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from headway.cli.admin import Admin, AdminError, as_json, pretty, table, with_admin
from headway.cli.commands import command
from headway.cli.screen import narrowed

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
FAILED = 0.02
"""Share of a worker's last inputs whose runs failed from which the table of workers has a column for it."""
"""Columns by which workers can be sorted: the member of an answer, and whether the largest comes first."""
STALE = 10.0
"""Seconds after which a published capacity is no longer taken for the present one."""


class Sort(NamedTuple):
    """Order of the workers: a column of SORTS, and whether it is turned round."""

    column: str = "WORKER"
    reverse: bool = False


BY_NAME = Sort()


@command()
@with_admin
@as_json
def status(port: Admin, json: bool) -> None:
    """Show how a running service is doing: load, queue, capacity, processes, workers.

    The admin port of any process will do: each knows the whole fleet.

    Exit codes: 0 it serves, 1 it does not or cannot be reached.
    """
    found = look(port)
    click.echo(pretty(found) if json else overview(found))
    if not serves(found):
        raise click.exceptions.Exit(1)


def look(port: Admin) -> dict[str, Any]:
    """Ask an admin port for its process and the fleet. While the broker is away the fleet is as it was last known, if it was.

    Raises:
        AdminError: the port does not answer.
    """
    found = {**_health(port), "workers": [], "members": [], "capacities": []}
    try:
        if found["status"] == STARTING:  # The broker may not have been found fit yet.
            found["workers"] = port.get("/internal/workers")["workers"]
            return found
        fleet = port.get("/internal/snapshot")
    except AdminError as exc:
        if exc.status != _AWAY:
            raise
        found.setdefault("message", str(exc))
        return found
    found |= {name: fleet[name] for name in ("workers", "members", "capacities")}
    found["departed"] = fleet.get("departed", [])  # A process of an earlier version does not tell.
    found["scaling"] = fleet.get("scaling", {})
    if fleet.get("away"):  # A process of an earlier version does not tell.
        found |= {"message": fleet["away"], "age_seconds": fleet["age_seconds"], "dead_letters": fleet["dead_letters"]}
    return found


def _health(port: Admin) -> dict[str, Any]:
    """Health of a process, also of one that does not serve for want of its broker."""
    try:
        health: dict[str, Any] = port.get("/internal/health")
    except AdminError as exc:
        if exc.status != _AWAY or not isinstance(exc.answer, dict) or "role" not in exc.answer:
            raise
        health = exc.answer
    return health


def serves(found: dict[str, Any]) -> bool:
    """Whether the process takes requests, or does its role's other work."""
    return found["status"] in ("ok", "degraded")


def overview(found: dict[str, Any]) -> str:
    """Answers of an admin port, see `look`, as text for people."""
    parts = [_summary(found)]
    if found["broker"] and found["members"]:
        parts.append(members_table(found["members"]))
    if found["workers"]:
        parts += [workers_table(found["workers"]), *gpus_table(found["workers"]), *reasons(found["workers"])]
        parts += costs(found["workers"])
    parts += departed_table(found.get("departed", []))
    return "\n\n".join(parts)


def _summary(found: dict[str, Any]) -> str:
    from headway.runtime.log import escape

    away = "message" in found
    others = [] if away else [member for member in found["members"] if member["id"] != found["id"]]
    rate = found["requests_per_second"] + sum(member["requests_per_second"] for member in others)
    held = found["pending"] + sum(member["pending"] for member in others)
    lines = {"status": found["status"]}
    if away:
        lines["broker away"] = found["message"]
        known = "age_seconds" in found
        lines["fleet"] = f"as it was {found['age_seconds']:.0f} s ago" if known else "not known"
    if found["broker"]:
        lines["asked"] = f"{found['role']} {found['id']}"
        lines["broker"] = found["broker"]
    lines["load"] = f"{rate:g} requests/s, {held} held{' by this process' if away else ''}"
    if "queues" in found:
        waiting = ", ".join(_depths(found["queues"]))
        lines["workers busy"] = f"{found['gpu_utilization']:.0%}"
        lines["waiting"] = f"{waiting or 'nothing'}, oldest {found['queue_oldest_seconds'] * 1000:.0f} ms"
    if lines_waiting := sum(one["waiting"] for one in found.get("bulk", ())):
        delayed = sum(one["delayed"] for one in found["bulk"])
        lines["bulk"] = f"{lines_waiting} lines wait for empty seats; {delayed} requests have waited for them so far"
    if "dead_letters" in found:
        lines["dead letters"] = f"{found['dead_letters']}"
    if found["capacities"]:
        lines["capacity"] = "; ".join(map(capacity_text, found["capacities"]))
    if found.get("expected_workers") and not away:  # A process of an earlier version does not tell.
        healthy = sum(worker["status"] == "healthy" for worker in found["workers"])
        lines["workers"] = f"{healthy} of {found['expected_workers']} expected are healthy"
    there = {worker["model"] for worker in found["workers"] if worker["status"] != "offline"}
    wanted = {model: one for model, one in found.get("scaling", {}).items() if one["desired"]}
    if missing := [missing_text(model, one) for model, one in wanted.items() if model not in there]:
        lines["missing"] = "; ".join(missing)
    lines |= {name.replace("_", " "): found[name] for name in ("ledger", "keys", "bulk_folder") if found.get(name)}
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
    return f"{queue['model']}{f' version {version}' if version else ''}"


def missing_text(model: str, scaling: dict[str, Any]) -> str:
    """Workers of which nothing is heard that a model should have, as text for people."""
    late = ", longer than a start should take" if scaling["late"] else ""
    return f"{model}: {scaling['desired']} wanted, on the way for {scaling.get('awaited_seconds', 0.0):.0f} s{late}"


def capacity_text(capacity: dict[str, Any]) -> str:
    """Capacity of one model as text for people."""
    slots = f"{capacity['healthy']} healthy"
    if capacity["degraded"]:
        slots += f", {capacity['degraded']} degraded"
    if capacity.get("drained"):
        slots += f", {capacity['drained']} drained"
    if capacity.get("scarce"):  # A process of an earlier version does not tell.
        slots += ", the broker's memory is scarce"
    if rollout := capacity.get("rollout"):
        slots += f", {rollout}"
    if capacity["age_seconds"] > STALE:
        slots += f", {capacity['age_seconds']:.0f} s ago"
    if not capacity["items_per_second"]:
        return f"{capacity['model']}: not measured yet, {slots}"
    most, meant = capacity["items_per_second"], capacity["usable_per_second"]
    of = f"{meant:.0f} of {most:.0f}" if meant < most else f"{most:.0f}"
    sure = " (estimated)" if capacity.get("estimated") else ""
    return f"{capacity['model']}: {of} inputs/s{sure}, {slots}"


def members_table(members: Sequence[dict[str, Any]], width: int = 0, rates: Mapping[str, float] | None = None) -> str:
    """Table of the processes.

    Arguments:
        members: lines of the processes.
        width: columns of the terminal; 0: no limit.
        rates: requests per second of each process by its id; None: as the lines tell them.
    """
    head = ("PROCESS", "ROLE", "HOST", "PID", "HELD", "REQUESTS/S", "LEADS", "VERSION", "ADMIN", "SEEN")
    rows = [
        (
            member["id"],
            member["role"],
            member["host"],
            str(member["pid"]),
            str(member["pending"]),
            f"{member['requests_per_second'] if rates is None else rates.get(member['id'], 0.0):g}",
            "yes" if member["leads"] else "-",
            member["version"],
            member["admin"],
            f"{member['age_seconds']:.1f} s ago",
        )
        for member in sorted(members, key=lambda member: (member["role"], member["id"]))
    ]
    return table(*narrowed(head, rows, width, ("VERSION", "PID", "ADMIN", "HOST", "LEADS", "ROLE", "SEEN", "HELD")))


def departed_table(departed: Sequence[dict[str, Any]]) -> list[str]:
    """Table of the processes that have ended lately, newest first, as one text; none where none has."""
    rows = [
        (one["id"], one["ending"], f"{one['age_seconds']:.0f} s ago", one["role"], one["host"], str(one["pid"] or "-"),
         one["reason"])
        for one in departed
    ]  # fmt: skip
    return [table(("GONE", "HOW", "WHEN", "ROLE", "HOST", "PID", "WHY"), rows)] if rows else []


def reasons(workers: Sequence[dict[str, Any]]) -> list[str]:
    """Lines on the workers that are not healthy, as one text; none where there is nothing to say."""
    from headway.runtime.log import escape

    told = sorted((str(one["worker_id"]), one["status"], reason) for one in workers if (reason := one.get("reason")))
    lines = [f"{worker} is {status}: {escape(reason)}" for worker, status, reason in told]
    return ["\n".join(lines)] if lines else []


def costs(workers: Sequence[dict[str, Any]]) -> list[str]:
    """Lines on what the calls of models cost whose time goes by more than the number of inputs, as one text; none without any."""
    each = {
        "weight": "for each unit of the inputs' weight",
        "padded": "for each input and unit of the longest's weight, up to which it fills all; inputs of like length ride together",
    }
    lines = {
        str(
            worker["model"]
        ): f"a call of {worker['model']} takes {line['alpha'] * 1000:.3g} ms and {line['beta'] * 1e6:.3g} µs "
        f"{each[line['shape']]} (mean error {line['error']:.0%})"
        for worker in workers
        if (line := worker.get("cost")) and line["shape"] in each and worker["status"] == "healthy"
    }
    return ["\n".join(lines[model] for model in sorted(lines))] if lines else []


def gpus_table(workers: Sequence[dict[str, Any]]) -> list[str]:
    """Table of the workers' GPUs, as one text; none where no figures are known."""
    # A process of an earlier version does not tell.
    found = [(one["worker_id"], gpu) for one in workers if (gpu := one.get("gpu_figures"))]
    head = ("WORKER", "GPU", "MEMORY", "COMPUTES", "POWER", "TEMPERATURE", "ECC ERRORS", "XIDS")
    rows = [
        (
            worker,
            gpu["name"] or "-",
            _memory(gpu),
            _told(gpu["utilisation"], ".0%"),
            _told(gpu["power_watts"], ".0f", " W"),
            _told(gpu["temperature_celsius"], ".0f", " °C"),
            _told(gpu["ecc_errors"], "d"),
            ", ".join(f"{xid} ({count})" for xid, count in gpu["xids"].items()) or "-",
        )
        for worker, gpu in sorted(found, key=lambda one: str(one[0]))
    ]
    return [table(head, rows)] if rows else []


def _memory(gpu: Mapping[str, Any]) -> str:
    used, total = gpu["memory_used_bytes"], gpu["memory_total_bytes"]
    return f"{used / total:.0%} of {total / (1 << 30):.0f} GiB" if used is not None and total else "-"


def _told(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def workers_table(workers: Sequence[dict[str, Any]], width: int = 0, sort: Sort = BY_NAME) -> str:
    """Table of the workers in the order of `sort`. `width`: columns of the terminal; 0: no limit."""
    name, descending = SORTS[sort.column]
    workers = sorted(workers, key=lambda worker: str(worker["worker_id"]))
    workers.sort(key=lambda worker: worker[name], reverse=descending is not sort.reverse)
    failed = any(worker.get("failed", 0.0) >= FAILED for worker in workers)  # One of an earlier version does not tell.
    versions = failed or len({worker.get("version") for worker in workers}) > 1
    head = (
        "WORKER",
        "MODEL",
        *(("VERSION",) if versions else ()),
        "STATUS",
        *(("FAILED",) if failed else ()),
        "BUSY",
        "IN FLIGHT",
        "RESTARTS",
        "PID",
        "LAST HEARTBEAT",
    )
    rows = [
        (
            worker["worker_id"],
            worker["model"],
            *((worker.get("version") or "-",) if versions else ()),
            worker["status"],
            *((f"{worker.get('failed', 0.0):.0%}",) if failed else ()),
            f"{worker['utilisation']:.0%}",
            str(worker["in_flight"]),
            str(worker["restarts"]),
            str(worker["pid"] or "-"),
            worker["last_heartbeat"],
        )
        for worker in workers
    ]
    return table(*narrowed(head, rows, width, ("LAST HEARTBEAT", "PID", "MODEL", "RESTARTS", "IN FLIGHT", "VERSION")))
