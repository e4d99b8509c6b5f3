"""Reused ids, clients that leave, and tasks at gateways that share a broker: each submission gets its own outcome."""

import asyncio

import pytest

from headway import errors
from headway.model import Reply
from headway.runtime.request_id import new_id
from tests.services.fake_backend import ANYBODY
from tests.services.fleet import Asked, Fleet
from tests.services.test_gateway_tasks import busy, output

TENANT = ANYBODY.tenant
pytestmark = pytest.mark.fleet(1.0, gateways=2, model="m")


async def let_pass(fleet: Fleet, asked: Asked, gateway: int = 0) -> None:
    fleet.gateways[gateway].abandon(asked, TENANT, asked.id)
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("task", [False, True])
@pytest.mark.parametrize("gateway", [0, 1])
async def test_an_id_used_again_while_its_first_request_runs_past_its_deadline_is_a_conflict(
    fleet: Fleet, gateway: int, task: bool
) -> None:
    first = fleet.ask("first", task=True, timeout=0.3)
    assert await fleet.answered(first) == [errors.DEADLINE_EXCEEDED]
    again = fleet.ask("other", id=first.id, gateway=gateway, task=task)
    assert await fleet.answered(again) == [errors.IDEMPOTENCY_CONFLICT]
    await asyncio.sleep(1.0)
    assert output(await fleet.gateway.outcome(TENANT, first.id)) == "FIRST"


@pytest.mark.parametrize("gateway", [0, 1])
async def test_an_id_reused_after_its_deadline_gets_its_answer(fleet: Fleet, gateway: int) -> None:
    first = fleet.ask("first", timeout=0.3)
    await first.told.wait()
    await asyncio.sleep(0.01)
    assert await fleet.answered(fleet.ask("again", id=first.id, gateway=gateway)) == ["ok"]
    assert len(first.replies) == 1


async def test_a_client_that_leaves_a_duplicate_takes_nothing_from_the_first(fleet: Fleet) -> None:
    first = fleet.ask("first")
    await asyncio.sleep(0.01)
    for gateway in (0, 1):
        second = fleet.ask("second", id=first.id, gateway=gateway)
        fleet.gateways[gateway].abandon(second, TENANT, first.id)  # Before it hears about the conflict.
        await asyncio.sleep(0.1)
    assert await fleet.answered(first) == ["ok"]
    assert fleet.runs("second") == 0


async def test_a_finished_task_outlives_a_client_that_uses_its_id_and_leaves(fleet: Fleet) -> None:
    task = fleet.ask("task", task=True)
    await fleet.answered(task)
    for gateway in (0, 1):
        for as_task in (False, True):
            await let_pass(fleet, fleet.ask("task", id=task.id, gateway=gateway, task=as_task), gateway)
    await asyncio.sleep(3.0)
    for holder in fleet.gateways:
        assert output(await holder.outcome(TENANT, task.id)) == "TASK"


async def test_a_task_outlives_a_broker_that_stalls_while_it_ends(fleet: Fleet) -> None:
    tasks = []
    for round in range(6):
        task = fleet.ask("task", task=True, timeout=2.0)
        admitted = asyncio.ensure_future(task.was_admitted.wait())
        await asyncio.wait({admitted, asyncio.ensure_future(task.told.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if not admitted.done():
            continue  # It was refused: its client never had a task.
        tasks.append(task)
        fleet.gateway.detach(TENANT, task.id)
        await asyncio.sleep(0.1 * round)
        await fleet.server.become("stall")
        await asyncio.sleep(1.3)
        await fleet.server.become("fine")
    await asyncio.sleep(3.0)
    assert len(tasks) > 3
    for task in tasks:
        for gateway in fleet.gateways:
            assert isinstance(await gateway.outcome(TENANT, task.id), Reply)


@pytest.mark.parametrize("gateway", [0, 1])
@pytest.mark.parametrize("task", [False, True])
@pytest.mark.parametrize("how", ["left", "late"])
async def test_a_keyed_request_joins_the_first(fleet: Fleet, how: str, task: bool, gateway: int) -> None:
    first = fleet.ask("text", key="k", timeout=30.0 if how == "left" else 0.4)
    await asyncio.sleep(0.3)
    conflict = fleet.ask("text", key="k", id=first.id, gateway=gateway)
    assert await fleet.answered(conflict) == [errors.IDEMPOTENCY_CONFLICT], "the first client still waits"
    if how == "left":
        await let_pass(fleet, first)
    else:
        await first.told.wait()
        await asyncio.sleep(0.01)
    again = fleet.ask("text", key="k", id=first.id, gateway=gateway, task=task)
    assert await fleet.answered(again) == ["ok"]
    assert fleet.runs("text") == 1
    other = fleet.ask("other", key="k", id=first.id, gateway=1 - gateway)
    assert await fleet.answered(other) == [errors.IDEMPOTENCY_MISUSE]


async def test_a_keyed_request_left_before_it_is_handed_on_does_not_run(fleet: Fleet) -> None:
    first = fleet.ask("text", key="k")
    fleet.gateway.abandon(first, TENANT, first.id)
    await asyncio.sleep(2.0)
    assert fleet.runs("text") == 0
    assert await fleet.answered(fleet.ask("text", key="k", id=first.id, gateway=1)) == ["ok"]


async def test_a_task_that_is_cancelled_on_its_way_does_not_run(fleet: Fleet) -> None:
    await busy(fleet)
    task = fleet.ask("task", task=True)
    await fleet.gateway.cancel(TENANT, task.id)
    await fleet.answered(task)
    await asyncio.sleep(3.0)
    assert fleet.runs("task") == 0
    assert await fleet.gateway.outcome(TENANT, task.id) is None


@pytest.mark.parametrize("gateway", [0, 1])
async def test_the_id_of_a_finished_task_stands_for_what_it_asked(fleet: Fleet, gateway: int) -> None:
    task = fleet.ask("text", task=True, id=new_id())
    await fleet.answered(task)
    throttle = fleet.gateways[gateway].limiter.throttles["m"]
    before = throttle.higher
    assert await fleet.answered(fleet.ask("text", id=task.id, gateway=gateway, chosen=True)) == ["ok"]
    assert throttle.higher == before, "an answer that was kept takes nothing of the capacity"
    assert await fleet.answered(fleet.ask("another", id=task.id, gateway=gateway, chosen=True)) == [
        errors.IDEMPOTENCY_MISUSE
    ]
    assert fleet.runs("text") == 1
    assert fleet.runs("another") == 0
    assert output(await fleet.gateway.outcome(TENANT, task.id)) == "TEXT"
