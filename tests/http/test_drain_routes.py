"""Drains at the admin port: begun, listed, ended, and refused with the reason."""

from __future__ import annotations

import asyncio

from tests.http.test_admin import Port, on_admin
from tests.services.stand import Stand

START, END = "/internal/drains/start", "/internal/drains/end"


@on_admin()
async def test_a_worker_is_drained_listed_and_undrained(stand: Stand, port: Port) -> None:
    bare = await port.ask("POST", f"{START}?name=gpu-0")
    assert bare.status == 400
    assert bare.json["message"].startswith("model m would have no healthy worker left")
    begun = await port.ask("POST", f"{START}?name=gpu-0&force=true")
    process = stand.gateway.name
    line = {"name": "gpu-0", "process": process, "host": "here", "workers": ["gpu-0"]}
    assert (begun.status, begun.json) == (200, {"drains": [line]})
    assert (await port.get("/internal/drains")).json == {"drains": [line]}
    await asyncio.sleep(1.6)
    [worker] = (await port.get("/internal/workers")).json["workers"]
    assert (worker["status"], worker["reason"]) == ("drained", "by an operator")
    [capacity] = (await port.get("/internal/fleet")).json["capacities"]
    assert (capacity["healthy"], capacity["drained"]) == (0, 1)
    verbose = await port.get("/readyz?verbose")
    assert (verbose.status, verbose.json["checks"]["workers"]) == (503, "0 of 1 healthy, 1 drained")
    assert (await port.ask("POST", f"{END}?name=here")).json == {"drains": [line]}
    await asyncio.sleep(1.6)
    assert (await port.get("/readyz")).status == 200


@on_admin()
async def test_a_drain_that_cannot_be_is_refused_with_the_reason(stand: Stand, port: Port) -> None:
    async def refused(target: str) -> tuple[int, str]:
        answer = await port.ask("POST", target)
        return answer.status, answer.json["message"]

    missing = 400, "name is missing in the query: of a worker, a process or a host"
    assert await refused(START) == await refused(END) == missing
    near = f"near are gpu-0, here, {stand.gateway.name}"
    unknown = await refused(f"{START}?name=gpu-1")
    assert unknown == (404, "no worker, process or host 'gpu-1' is in the fleet; near are gpu-0"), near
    assert await refused(f"{END}?name=gpu-0") == (404, "nothing named 'gpu-0' is drained")
    await port.ask("POST", f"{START}?name=here&force=true")
    assert (await port.ask("POST", f"{END}?name={stand.gateway.name}")).status == 200
