"""`headway status`: show the state of a running service and its fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from headway.cli.admin import Admin, AdminError, as_json, pretty, table, with_admin
from headway.cli.commands import command
from headway.cli.terminal import narrowed

_AWAY = 503
STARTING = "starting"
SORTS: dict[str, tuple[str, bool]] = {  # Sortable columns: field in the answer, and True if the largest comes first.
    "WORKER": ("worker_id", False),
    "STATUS": ("status", False),
    "BUSY": ("utilisation", True),
    "IN FLIGHT": ("in_flight", True),
    "RESTARTS": ("restarts", True),
}
FAILED = 0.02  # The workers' table shows shares of failed inputs if one of them is at least this large.
STALE = 10.0  # Age in seconds above which the summary shows how old a capacity is.


class Sort(NamedTuple):
    """Order of the workers, by a column of SORTS."""

    column: str = "WORKER"
    reverse: bool = False


BY_NAME = Sort()


@command()
@with_admin
@as_json
def status(port: Admin, json: bool) -> None:
    """Show the state of a running service: load, queue, capacity, processes and workers.

    You can ask the admin port of any process, because each knows the whole fleet.

    Exit codes: 0 the process serves, 1 it does not, or is unreachable.
    """
    state = look(port)
    click.echo(pretty(state) if json else overview(state))
    if not serves(state):
        raise click.exceptions.Exit(1)


def look(port: Admin) -> dict[str, Any]:
    """Return the state of a process and of the fleet (as last known if the broker is unreachable). Raises AdminError."""
    try:
        health = port.get("/internal/health")
    except AdminError as exc:  # A 503 because of an unreachable broker also contains the health.
        if exc.status != _AWAY or not isinstance(exc.answer, dict) or "role" not in exc.answer:
            raise
        health = exc.answer
    state: dict[str, Any] = {**health, "workers": [], "members": [], "capacities": []}
    try:
        if state["status"] == STARTING:  # The broker may not have been checked yet.
            state["workers"] = port.get("/internal/workers")["workers"]
            return state
        fleet = port.get("/internal/snapshot")
    except AdminError as exc:
        if exc.status != _AWAY:
            raise
        state.setdefault("message", str(exc))
        return state
    state |= {name: fleet[name] for name in ("workers", "members", "capacities")}
    # Processes of earlier versions lack these.
    state |= {"departed": fleet.get("departed", []), "scaling": fleet.get("scaling", {})}
    if fleet.get("away"):
        state |= {"message": fleet["away"], "age_seconds": fleet["age_seconds"], "dead_letters": fleet["dead_letters"]}
    return state


def serves(state: dict[str, Any]) -> bool:
    """Return True if the process accepts requests, or does the work of a role without clients."""
    return state["status"] in ("ok", "degraded")


def overview(state: dict[str, Any]) -> str:
    """Format the state that `look` returned."""
    parts = [_summary(state)]
    if state["broker"] and state["members"]:
        parts.append(members_table(state["members"]))
    if state["workers"]:
        parts += [workers_table(state["workers"]), *gpus_table(state["workers"]), *reasons(state["workers"])]
        parts += costs(state["workers"])
    parts += departed_table(state.get("departed", []))
    return "\n\n".join(parts)


def _summary(state: dict[str, Any]) -> str:
    from headway.runtime.log import escape

    away = "message" in state
    others = [] if away else [member for member in state["members"] if member["id"] != state["id"]]
    rate = state["requests_per_second"] + sum(member["requests_per_second"] for member in others)
    held = state["pending"] + sum(member["pending"] for member in others)
    lines = {"status": state["status"]}
    if away:
        lines["broker away"] = state["message"]
        known = "age_seconds" in state
        lines["fleet"] = f"as it was {state['age_seconds']:.0f} s ago" if known else "not known"
    if state["broker"]:
        lines["asked"] = f"{state['role']} {state['id']}"
        lines["broker"] = state["broker"]
    lines["load"] = f"{rate:g} requests/s, {held} held{' by this process' if away else ''}"
    if "queues" in state:
        waiting = ", ".join(_depths(state["queues"]))
        lines["workers busy"] = f"{state['gpu_utilization']:.0%}"
        lines["waiting"] = f"{waiting or 'nothing'}, oldest {state['queue_oldest_seconds'] * 1000:.0f} ms"
    if lines_waiting := sum(queue["waiting"] for queue in state.get("bulk", ())):
        delayed = sum(queue["delayed"] for queue in state["bulk"])
        lines["bulk"] = (
            f"{lines_waiting} lines are waiting for spare capacity; they have delayed {delayed} requests so far"
        )
    if "dead_letters" in state:
        lines["dead letters"] = f"{state['dead_letters']}"
    if state["capacities"]:
        lines["capacity"] = "; ".join(map(capacity_text, state["capacities"]))
    if state.get("expected_workers") and not away:  # Processes of earlier versions lack it.
        healthy = sum(worker["status"] == "healthy" for worker in state["workers"])
        lines["workers"] = f"{healthy} of {state['expected_workers']} expected are healthy"
    present = {worker["model"] for worker in state["workers"] if worker["status"] != "offline"}
    wanted = {model: scaling for model, scaling in state.get("scaling", {}).items() if scaling["desired"]}
    if missing := [missing_text(model, scaling) for model, scaling in wanted.items() if model not in present]:
        lines["missing"] = "; ".join(missing)
    lines |= {name.replace("_", " "): state[name] for name in ("ledger", "keys", "bulk_folder") if state.get(name)}
    lines["policy"] = state["policy"]
    lines["version"] = state["version"]
    return "\n".join(f"{name:<13} {escape(value)}" for name, value in lines.items())


def _depths(queues: Sequence[dict[str, Any]]) -> list[str]:
    filled = [queue for queue in queues if queue["depth"]]
    versions = {_queue(queue) for queue in queues if queue.get("version")}
    several = max(map(len, (set(map(_queue, filled)), versions, {queue["model"] for queue in queues}))) > 1
    return [f"{queue['depth']} {queue['tier']}{' of ' + _queue(queue) if several else ''}" for queue in filled]


def _queue(queue: dict[str, Any]) -> str:
    version = queue.get("version")  # Processes of earlier versions lack it.
    return f"{queue['model']}{f' version {version}' if version else ''}"


def missing_text(model: str, scaling: dict[str, Any]) -> str:
    """Describe the workers that the autoscaler has requested for a model that has none yet."""
    late = ", longer than a start should take" if scaling["late"] else ""
    return f"{model}: {scaling['desired']} wanted, on the way for {scaling.get('awaited_seconds', 0.0):.0f} s{late}"


def capacity_text(capacity: dict[str, Any]) -> str:
    """Describe the capacity of a model."""
    slots = f"{capacity['healthy']} healthy"
    if capacity["degraded"]:
        slots += f", {capacity['degraded']} degraded"
    if capacity.get("drained"):
        slots += f", {capacity['drained']} drained"
    if capacity.get("scarce"):  # Processes of earlier versions lack it.
        slots += ", the broker's memory is scarce"
    if rollout := capacity.get("rollout"):
        slots += f", {rollout}"
    if capacity["age_seconds"] > STALE:
        slots += f", {capacity['age_seconds']:.0f} s ago"
    if not capacity["items_per_second"]:
        return f"{capacity['model']}: not measured yet, {slots}"
    maximum, usable = capacity["items_per_second"], capacity["usable_per_second"]
    of = f"{usable:.0f} of {maximum:.0f}" if usable < maximum else f"{maximum:.0f}"
    estimated = " (estimated)" if capacity.get("estimated") else ""
    return f"{capacity['model']}: {of} inputs/s{estimated}, {slots}"


def members_table(members: Sequence[dict[str, Any]], width: int = 0, rates: Mapping[str, float] | None = None) -> str:
    """Return a table of the processes. A `width` of 0 means no limit. `rates` overrides the requests per second, by process id."""
    head = ("PROCESS", "ROLE", "HOST", "PID", "HELD", "REQUESTS/S", "LEADS", "VERSION", "ADMIN", "SEEN")
    rows = [
        (member["id"], member["role"], member["host"], str(member["pid"]), str(member["pending"]),
         f"{member['requests_per_second'] if rates is None else rates.get(member['id'], 0.0):g}", "yes" if member["leads"] else "-",
         member["version"], member["admin"], f"{member['age_seconds']:.1f} s ago")
        for member in sorted(members, key=lambda member: (member["role"], member["id"]))
    ]  # fmt: skip
    return table(*narrowed(head, rows, width, ("VERSION", "PID", "ADMIN", "HOST", "LEADS", "ROLE", "SEEN", "HELD")))


def departed_table(departed: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the processes that ended recently, newest first, or an empty list if there are none."""
    rows = [
        (gone["id"], gone["ending"], f"{gone['age_seconds']:.0f} s ago", gone["role"], gone["host"], str(gone["pid"] or "-"),
         gone["reason"])
        for gone in departed
    ]  # fmt: skip
    return [table(("GONE", "HOW", "WHEN", "ROLE", "HOST", "PID", "WHY"), rows)] if rows else []


def reasons(workers: Sequence[dict[str, Any]]) -> list[str]:
    """Return a paragraph with the reasons why workers are not healthy, or an empty list if all are healthy."""
    from headway.runtime.log import escape

    states = sorted((str(worker["worker_id"]), worker["status"], worker.get("reason") or "") for worker in workers)
    lines = [f"{worker} is {status}: {escape(reason)}" for worker, status, reason in states if reason]
    return ["\n".join(lines)] if lines else []


def costs(workers: Sequence[dict[str, Any]]) -> list[str]:
    """Return a paragraph about models whose call times depend on more than the number of inputs, or an empty list."""
    units = {
        "weight": "for each unit of the inputs' weight",
        "padded": "for each input, times the weight of the longest; inputs of similar length are batched together",
    }
    lines = {}
    for worker in workers:
        cost = worker.get("cost")
        if cost and cost["shape"] in units and worker["status"] == "healthy":
            lines[str(worker["model"])] = (
                f"a call of {worker['model']} takes {cost['alpha'] * 1000:.3g} ms and {cost['beta'] * 1e6:.3g} µs "
                f"{units[cost['shape']]} (mean error {cost['error']:.0%})"
            )
    return ["\n".join(lines[model] for model in sorted(lines))] if lines else []


def gpus_table(workers: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the workers' GPUs, or an empty list if no worker reports GPU stats."""
    # Processes of earlier versions report none.
    gpus = [(worker["worker_id"], gpu) for worker in workers if (gpu := worker.get("gpu_figures"))]
    head = ("WORKER", "GPU", "MEMORY", "COMPUTES", "POWER", "TEMPERATURE", "ECC ERRORS", "XIDS")
    rows = [
        (worker, gpu["name"] or "-", _memory(gpu), _figure(gpu["utilisation"], ".0%"), _figure(gpu["power_watts"], ".0f", " W"),
         _figure(gpu["temperature_celsius"], ".0f", " °C"), _figure(gpu["ecc_errors"], "d"),
         ", ".join(f"{xid} ({count})" for xid, count in gpu["xids"].items()) or "-")
        for worker, gpu in sorted(gpus, key=lambda row: str(row[0]))
    ]  # fmt: skip
    return [table(head, rows)] if rows else []


def _memory(gpu: Mapping[str, Any]) -> str:
    used, total = gpu["memory_used_bytes"], gpu["memory_total_bytes"]
    return f"{used / total:.0%} of {total / (1 << 30):.0f} GiB" if used is not None and total else "-"


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def workers_table(workers: Sequence[dict[str, Any]], width: int = 0, sort: Sort = BY_NAME) -> str:
    """Return a table of the workers. A `width` of 0 means no limit."""
    name, descending = SORTS[sort.column]
    workers = sorted(workers, key=lambda worker: str(worker["worker_id"]))
    workers.sort(key=lambda worker: worker[name], reverse=descending is not sort.reverse)
    failed = any(worker.get("failed", 0.0) >= FAILED for worker in workers)  # Processes of earlier versions lack it.
    versions = failed or len({worker.get("version") for worker in workers}) > 1
    head = (
        "WORKER", "MODEL", *(("VERSION",) if versions else ()), "STATUS", *(("FAILED",) if failed else ()), "BUSY", "IN FLIGHT",
        "RESTARTS", "PID", "LAST HEARTBEAT",
    )  # fmt: skip
    rows = [
        (worker["worker_id"], worker["model"], *((worker.get("version") or "-",) if versions else ()), worker["status"],
         *((f"{worker.get('failed', 0.0):.0%}",) if failed else ()), f"{worker['utilisation']:.0%}", str(worker["in_flight"]),
         str(worker["restarts"]), str(worker["pid"] or "-"), worker["last_heartbeat"])
        for worker in workers
    ]  # fmt: skip
    return table(*narrowed(head, rows, width, ("LAST HEARTBEAT", "PID", "MODEL", "RESTARTS", "IN FLIGHT", "VERSION")))
