"""`headway status`: how a running service is doing."""

from __future__ import annotations

from typing import Any

import typer

from headway.cli.admin import DEFAULT_URL, Admin, AdminUrl, AsJson, Token, pretty, table


def status(admin: AdminUrl = DEFAULT_URL, token: Token = "", json: AsJson = False) -> None:
    """Show how a running service is doing: load, queue, workers.

    Exit codes: 0 it serves, 1 it does not or cannot be reached.
    """
    port = Admin(admin, token)
    health = port.get("/internal/health")
    workers = port.get("/internal/workers")["workers"]
    if json:
        typer.echo(pretty({**health, "workers": workers}))
    else:
        typer.echo(_summary(health))
        if workers:
            typer.echo("\n" + _workers(workers))
    if health["status"] not in ("ok", "degraded"):
        raise typer.Exit(1)


def _summary(health: dict[str, Any]) -> str:
    waiting = ", ".join(f"{queue['depth']} {queue['tier']}" for queue in health["queues"] if queue["depth"])
    lines = {
        "status": health["status"],
        "load": f"{health['requests_per_second']:g} requests/s, {health['pending']} held",
        "GPUs busy": f"{health['gpu_utilization']:.0%}",
        "waiting": f"{waiting or 'nothing'}, oldest {health['queue_oldest_seconds'] * 1000:.0f} ms",
        "dead letters": f"{health['dead_letters']}",
        "policy": health["policy"],
        "version": health["version"],
    }
    return "\n".join(f"{name:<13} {value}" for name, value in lines.items())


def _workers(workers: list[dict[str, Any]]) -> str:
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
    return table(head, rows)
