"""Orders of rollouts at the admin port that cannot be carried out."""

from __future__ import annotations

import asyncio

from headway.core.capacity import STALE_AFTER
from headway.model import WorkerStatus
from tests.core.test_rollout import PLAN
from tests.core.test_versions import worker
from tests.http.test_admin import Port, on_admin
from tests.services.stand import Stand

START = "/internal/rollouts/start?model=m&version=4&steps=1,100&every=60"


@on_admin()
async def test_an_order_that_cannot_be_carried_out_is_refused_with_the_reason(stand: Stand, port: Port) -> None:
    async def refused(target: str) -> tuple[int, str]:
        answer = await port.ask("POST", target)
        return answer.status, answer.json["message"]

    await asyncio.sleep(1.0)
    assert await refused("/internal/rollouts/start?model=m") == (400, "version is missing in the query")
    assert await refused(f"{START}&slower=x") == (400, "slower: 'x' is not a number")
    missing = "no worker serves version '4' of 'm'; its workers have no versions of their own"
    assert await refused(START) == (404, missing)
    assert await refused("/internal/rollouts/abort?model=m") == (404, "model 'm' has had no rollout")
    for version in ("3", "4"):
        await stand.broker.heartbeat(worker(version, WorkerStatus.COLD))
    assert (await port.ask("POST", START)).json["beside"] == "3"
    underway = "a rollout of version 4 of 'm' is under way; promote or abort it first"
    assert await refused(START) == (400, underway)
    assert [one["percent"] for one in (await port.get("/internal/rollouts")).json["rollouts"]] == [1.0]
    await stand.controller.stop()
    await asyncio.sleep(STALE_AFTER)
    none = "no controller leads the fleet, which moves rollouts on; start `headway controller`"
    assert await refused(START) == (400, none)


@on_admin()
async def test_an_order_that_loses_to_another_one_is_tried_again(stand: Stand, port: Port) -> None:
    for version in ("3", "4"):
        await stand.broker.heartbeat(worker(version, WorkerStatus.COLD))
    await stand.fleet.keep_rollout(PLAN)
    keep, lost = stand.fleet.keep_rollout, 2

    async def loses(rollout: object) -> bool:
        nonlocal lost
        lost -= 1
        return await keep(rollout) if lost < 0 else False  # type: ignore[arg-type]

    stand.fleet.keep_rollout = loses  # type: ignore[method-assign]
    assert (await port.ask("POST", "/internal/rollouts/promote?model=m")).json["state"] == "promoted"
    lost = 99
    assert (await port.ask("POST", "/internal/rollouts/abort?model=m")).status == 503
