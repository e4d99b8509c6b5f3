"""Promises of every broker on the memory of kept outcomes: budgets by tenant and in all."""

from __future__ import annotations

import pytest

from headway import errors
from headway.model import DedupKind, ItemResult, Reply
from tests.contracts.brokers import KEPT_LIMITS, Harness, drained, slot, story
from tests.contracts.dedup_keys import TTL, admit, came_by, key, poll, refused, same, sharing, task

LARGE = "x" * 10_000
HUGE = "x" * KEPT_LIMITS.largest


async def keep(harness: Harness, id: str, tenant: str, output: str = LARGE, keep: float = TTL) -> None:
    """Run a request of a tenant that is a task and has a key, so that its outcome is kept twice."""
    await admit(harness, sharing(id, task(id, keep), key(id, keep=keep), tenant=tenant, tier=2, gateway="keeps"))
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult(output) for _ in lease.entries])


async def is_kept(harness: Harness, id: str, tenant: str) -> bool:
    return isinstance(await harness.peer().outcome(tenant, id), Reply)


@story
async def test_what_one_tenant_keeps_costs_no_other_an_answer_or_a_task(harness: Harness) -> None:
    for n in range(3):
        await keep(harness, f"own {n}", "enterprise", "small")
    for n in range(90):
        await keep(harness, f"flood {n}", "free")
        await harness.broker.reap()
    assert [n for n in range(90) if await is_kept(harness, f"flood {n}", "free")] == list(range(86, 90))
    for n in range(3):
        assert await is_kept(harness, f"own {n}", "enterprise")
        await admit(harness, sharing(f"again {n}", key(f"own {n}"), tenant="enterprise"))
    replies = await drained(harness)
    assert {id: came_by(reply) for id, reply in replies.items()} == {
        f"again {n}": (DedupKind.KEY, True) for n in range(3)
    }


@story
async def test_of_all_that_is_kept_the_tenant_that_keeps_most_loses_its_oldest(harness: Harness) -> None:
    """Five tenants fill their budgets one after the other: there is room for four in all, so each loses its oldest."""
    for tenant in "abcde":
        for n in range(4):
            await keep(harness, f"{n}", tenant)
    for tenant in "abcde":
        assert [n for n in range(4) if await is_kept(harness, f"{n}", tenant)] == [1, 2, 3]
    await keep(harness, "modest", "f", "small")
    assert await is_kept(harness, "modest", "f")


@story
async def test_outputs_for_identical_requests_go_before_tasks_and_keys(harness: Harness) -> None:
    await keep(harness, "task", "t")
    for n in range(20):
        await admit(harness, sharing(f"same {n}", same(f"{n}"), gateway="keeps"))
        await harness.broker.complete(await harness.claim(), [ItemResult(LARGE)])
    assert await is_kept(harness, "task", "t")
    await admit(harness, sharing("newest", same("19")), sharing("oldest", same("0")))
    assert set(await drained(harness)) == {"newest"}


@story
async def test_a_task_whose_output_is_too_large_to_be_kept_says_so(harness: Harness) -> None:
    """Whoever waits gets the output; who asks later is told why it is not there."""
    await admit(harness, sharing("huge", task("huge")), poll("waits", "huge"))
    await harness.broker.complete(await harness.claim(), [ItemResult(HUGE)])
    replies = await drained(harness)
    assert [replies[id].output for id in ("huge", "waits")] == [HUGE, HUGE]
    recalled = await harness.peer().outcome("t", "huge")
    assert isinstance(recalled, Reply)
    assert recalled.failure is not None
    assert (recalled.id, recalled.output, recalled.failure.code) == ("huge", None, errors.PAYLOAD_TOO_LARGE)
    assert "too large to be kept" in recalled.failure.message
    await admit(harness, poll("later", "huge", gateway="h"))
    assert (await drained(harness, "h"))["later"].failure == recalled.failure


@pytest.mark.parametrize("kind", [DedupKind.KEY, DedupKind.SAME])
@story
async def test_an_output_that_is_too_large_to_be_kept_runs_again(harness: Harness, kind: DedupKind) -> None:
    share = key() if kind is DedupKind.KEY else same()
    for id in ("first", "second"):
        await admit(harness, sharing(id, share))
        await harness.broker.complete(await harness.claim(), [ItemResult(HUGE)])
    replies = await drained(harness)
    assert [came_by(replies[id]) for id in ("first", "second")] == [(None, False)] * 2
    assert harness.broker.kept.largest < len(HUGE) + 1000


@story
async def test_what_ended_or_was_forgotten_makes_room(harness: Harness) -> None:
    for n in range(4):
        await keep(harness, f"short {n}", "t", keep=10.0)
    await harness.reaping(11.0)
    for n in range(2):
        await keep(harness, f"long {n}", "t", keep=60.0)
    assert await is_kept(harness, "long 0", "t")
    await harness.broker.cancel_task("t", "long 0")
    assert not await is_kept(harness, "long 0", "t")
    for n in range(2, 5):
        await keep(harness, f"long {n}", "t", keep=60.0)
    assert [n for n in range(5) if await is_kept(harness, f"long {n}", "t")] == [1, 2, 3, 4]


@story
async def test_a_kept_outcome_refuses_nobody(harness: Harness) -> None:
    for n in range(30):
        await keep(harness, f"{n}", f"tenant {n}")
    assert not harness.broker.memory_pressure
    await admit(harness, *(sharing(f"in {n}", tier=n % 3) for n in range(40)))
    verdict = await refused(harness, sharing("misused", key("29", b"another"), tenant="tenant 29"))
    assert verdict.code == errors.IDEMPOTENCY_MISUSE
    assert len((await harness.claim("gpu-1")).entries) == slot().max_batch
