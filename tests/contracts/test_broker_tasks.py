"""Promises of every broker on tasks that are asked anew or cancelled, and on followers whose time, or whose original's, is over."""

import pytest

from headway import errors
from headway.model import ItemResult
from tests.contracts.brokers import Harness, ask, drained, ids
from tests.contracts.dedup_keys import admit, code, key, nothing_runs, poll, refused, sharing, task


@pytest.mark.parametrize("running", [False, True])
async def test_a_cancelled_task_tells_its_gateway_and_runs_for_its_key(harness: Harness, running: bool) -> None:
    led, plain = sharing("led", task("led"), key(), nonce=7), ask(id="plain")
    alone = sharing("alone", task("alone"), key("another"))
    await admit(harness, led, plain, alone, sharing("joined", key()), poll("poll", "led"))
    lease = await harness.claim() if running else None
    for id in ("led", "plain", "alone", "unknown"):
        await harness.peer().cancel_task("t", id)
    replies = await drained(harness)
    assert {id: (code(reply), reply.nonce) for id, reply in replies.items()} == {
        "led": (errors.NOT_FOUND, 7),
        "alone": (errors.NOT_FOUND, 0),
        "poll": (errors.NOT_FOUND, 0),
    }
    assert replies["led"].failure is not None
    assert replies["led"].failure.reason == "cancelled"
    assert await harness.broker.state("t", "led") is None
    assert await harness.broker.outcome("t", "led") is None
    if lease is None:
        lease = await harness.claim()
    assert set(ids(lease.entries)) - {"alone"} == {"led", "plain"}  # What is no task goes on.
    assert ("alone" in ids(lease.entries)) is running, "nobody else waits for it"
    await harness.broker.complete(lease, [ItemResult(f"output of {entry.id}") for entry in lease.entries])
    assert {id: reply.output for id, reply in (await drained(harness)).items() if id not in replies} == {
        "joined": "output of led",
        "plain": "output of plain",
    }
    await nothing_runs(harness)
    assert await harness.broker.outcome("t", "led") is None
    assert (await refused(harness, poll("again", "led"))).code == errors.NOT_FOUND
