"""`headway drain` and `headway undrain`: take workers out of service, for example to patch their host, and put them back."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any
from urllib.parse import urlencode

import click

from headway.cli.admin import Admin, as_json, pretty, with_admin
from headway.cli.commands import command, option
from headway.errors import SettingError

LOOK_AT_DRAIN_EVERY = 0.25  # Seconds between requests for the state of the workers.
HEARD_WITHIN = 10.0  # Seconds in which every live worker receives the order, since it sends a heartbeat each second.
DRAINED = "drained"

_name = click.argument("name", metavar="WORKER|PROCESS|HOST", help="Id of a worker or a process, or name of a host.")
_wait = option("--wait", default=60.0, metavar="SECONDS", help="How long to wait for running batches; 0: not at all.")


@command()
@_name
@option("--force", is_flag=True, help="Drain even if a model is left without a healthy worker.")
@_wait
@with_admin
@as_json
def drain(port: Admin, name: str, force: bool, wait: float, json: bool) -> None:
    """Take a worker, or all workers of a process or host, out of service. The workers finish their batches, and claim no more.

    No request fails: waiting requests go to other workers. Limits and the autoscaler no longer count the drained workers. The
    command returns once they have finished. Then patch the host, and either restart its processes, which ends the drain, or
    undrain it.

    Exit codes: 0 drained; 1 refused, or a worker has not confirmed or still runs a batch; 3 a bad setting.
    """
    _check(wait)
    answer = port.post(f"/internal/drains/start?{urlencode({'name': name, 'force': str(force).lower()})}")
    workers = _wait_for(port, _workers(answer), drained=True, seconds=wait)
    late = {worker["worker_id"] for worker in workers if worker["status"] not in (DRAINED, "offline")}
    empty = all(map(_empty, workers))
    _show(workers, late, json, f"Patch it, then restart its processes or run: headway undrain {name}" if empty else "")
    if not empty:
        raise click.exceptions.Exit(1)


@command()
@_name
@_wait
@with_admin
@as_json
def undrain(port: Admin, name: str, wait: float, json: bool) -> None:
    """Put a drained worker, or all workers of a process or host, back to work. A worker process that has ended loads its model
    first.

    Exit codes: 0 the workers claim batches again, or are starting; 1 refused, or a worker has not confirmed; 3 a bad setting.
    """
    _check(wait)
    answer = port.post(f"/internal/drains/end?{urlencode({'name': name})}")
    workers = _wait_for(port, _workers(answer), drained=False, seconds=min(wait, HEARD_WITHIN))
    late = {worker["worker_id"] for worker in workers if worker["status"] == DRAINED}
    apart = [drain["name"] for drain in answer["drains"] if drain["name"] not in (name, drain["process"])]
    _show(workers, late, json, f"Separately requested drains have ended, too: {', '.join(apart)}" if apart else "")
    if late:
        raise click.exceptions.Exit(1)


def _check(wait: float) -> None:
    if not wait >= 0:
        raise SettingError("--wait", wait, "must be a number of seconds, 0 or more", "For example 60.")


def _workers(answer: Any) -> set[str]:
    return {worker for drain in answer["drains"] for worker in drain["workers"]}


def _wait_for(port: Admin, ids: Collection[str], *, drained: bool, seconds: float) -> list[dict[str, Any]]:
    until = time.monotonic() + seconds
    while True:
        workers = [worker for worker in port.get("/internal/workers")["workers"] if worker["worker_id"] in ids]
        done = all(map(_empty, workers)) if drained else all(worker["status"] != DRAINED for worker in workers)
        if done or time.monotonic() >= until:
            return workers
        time.sleep(LOOK_AT_DRAIN_EVERY)


def _empty(worker: dict[str, Any]) -> bool:
    return worker["status"] in (DRAINED, "offline") and not worker["in_flight"]


def _show(workers: list[dict[str, Any]], late: Collection[str], json: bool, then: str) -> None:
    from headway.runtime.log import escape

    if json:
        click.echo(pretty(workers))
        return
    for worker in sorted(workers, key=lambda worker: str(worker["worker_id"])):
        why = "ordered, but not confirmed yet" if worker["worker_id"] in late else worker["reason"]
        reason = f": {why}" if why else ""
        click.echo(escape(f"{worker['worker_id']} is {worker['status']}{reason}"))
    if then:
        click.echo(then)
