"""A key or task belongs to a tenant: whichever version gets a repeated request, there is one run and one answer."""

import asyncio

import pytest
from msgspec.structs import replace

from headway import errors
from headway.model import DedupKind, Entry, EntryState, ItemResult, Lease, Limit, ModelReport, Reply, Slot
from tests.contracts.brokers import (
    AT_ONCE,
    MAX_BATCH,
    Harness,
    answered,
    ask,
    drained,
    failure_of,
    holds,
    ids,
    outcome_of,
    output,
    slot,
)
from tests.contracts.dedup_keys import TTL, admit, came_by, code, key, nothing_runs, poll, refused, same, sharing, task

MOVES = [("3", "4"), ("", "4"), ("3", "")]
"""The first and the second choice of a version; empty: any, as before a gateway hears of a worker."""


def queue_of(version: str) -> str:
    return f"m@{version}" if version else "m"


async def run_first(harness: Harness, version: str, *expected: str) -> None:
    """Answer what waits for a version, and check that it is `expected`."""
    lease = await harness.claim(model=queue_of(version))
    assert ids(lease.entries) == list(expected)
    await harness.answer(lease)


async def heard(harness: Harness, gateway: str = "g", after: int = 0) -> dict[str, Reply]:
    """All replies for a gateway after a cursor, from all queues."""
    replies: dict[str, Reply] = {}
    while more := await drained(harness, gateway, after + len(replies)):
        replies |= more
    return replies


@pytest.mark.parametrize(("first", "then"), MOVES)
async def test_a_repeated_key_joins_the_first_in_whichever_version(harness: Harness, first: str, then: str) -> None:
    another = sharing("another", key(digest=b"another"), version=then)
    await admit(harness, sharing("first", key(), version=first))
    await admit(harness, sharing("waiting", key(), version=then))
    lease = await harness.claim(model=queue_of(first))
    assert ids(lease.entries) == ["first"]
    assert await harness.peer().enqueue([sharing("running", key(), version=then, gateway="h")]) == [None]
    assert (await refused(harness, another)).code == errors.IDEMPOTENCY_MISUSE
    await nothing_runs(harness, queue_of(then))
    await harness.answer(lease)
    await admit(harness, sharing("kept", key(), version=then))
    assert (await refused(harness, another)).code == errors.IDEMPOTENCY_MISUSE
    await nothing_runs(harness, queue_of(then))
    replies = await heard(harness)
    replies |= {reply.id: reply for reply in (await harness.peer().replies("h", 0))[0]}
    assert {id: (reply.output, *came_by(reply)) for id, reply in replies.items()} == {
        "first": (output("asked"), None, False),
        "waiting": (output("asked"), DedupKind.KEY, False),
        "running": (output("asked"), DedupKind.KEY, False),
        "kept": (output("asked"), DedupKind.KEY, True),
    }
    await harness.advance(TTL + harness.grain)
    await admit(harness, another)  # The key has ended, and starts anew where it is sent.
    await run_first(harness, then, "another")
    await admit(harness, sharing("later", key(digest=b"another"), version=first))
    await nothing_runs(harness, queue_of(first))
    assert came_by((await heard(harness, after=3))["later"]) == (DedupKind.KEY, True)
    await admit(harness, sharing("model", key(digest=b"else"), model="other"))


async def test_who_has_joined_elsewhere_runs_when_the_first_was_too_late(harness: Harness) -> None:
    await admit(harness, sharing("first", key(), version="3", queue_timeout=1.0, timeout=1.0))
    await admit(harness, sharing("second", key(), version="4"))
    await harness.reaping(1.2)
    assert set(await heard(harness)) == {"first"}
    for version in ("3", "4"):
        claimed = await harness.broker.claim(slot(model=queue_of(version)), AT_ONCE)
        if isinstance(claimed, Lease):
            assert ids(claimed.entries) == ["second"]
            await harness.answer(claimed)
    assert (await heard(harness, after=1))["second"].output == output("asked")


async def test_an_id_that_its_client_chose_is_known_in_every_version(harness: Harness) -> None:
    await admit(harness, sharing("job", task("job", digest=b"asked"), version="3"))
    other = ask("asked", id="job", version="4", gateway="h", digest=b"asked", nonce=1)
    assert (await refused(harness, other)).code == errors.IDEMPOTENCY_CONFLICT
    await run_first(harness, "3", "job")
    await heard(harness)
    await admit(harness, other)
    await nothing_runs(harness, "m@4")
    assert came_by((await heard(harness, "h"))["job"]) == (DedupKind.TASK, True)
    another = ask("else", id="job", version="4", gateway="i", digest=b"else", nonce=2)
    assert (await refused(harness, another)).code == errors.IDEMPOTENCY_MISUSE


@pytest.mark.parametrize("over", [True, False])
async def test_a_tasks_id_decides_before_its_key_in_any_version(harness: Harness, over: bool) -> None:
    await admit(harness, sharing("first", key(digest=b"keyed"), version="3"))
    await run_first(harness, "3", "first")
    await admit(harness, sharing("job", task("job", digest=b"other"), version="4"))
    if over:
        await run_first(harness, "4", "job")
    await heard(harness)
    late = sharing("job", task("job", digest=b"keyed"), key(digest=b"keyed"), version="3", gateway="h", nonce=9)
    expected = errors.IDEMPOTENCY_MISUSE if over else errors.IDEMPOTENCY_CONFLICT
    assert (await refused(harness, late)).code == expected
    assert await heard(harness, "h") == {}


def job(model: str, gateway: str = "g", nonce: int = 1) -> Entry:
    asked = sharing("job", task("job", digest=model.encode()), model=model, gateway=gateway, nonce=nonce)
    return replace(asked, claims=True)


async def test_an_id_that_a_client_chose_for_a_task_is_one_models(harness: Harness) -> None:
    first, second = job("m"), job("other", "h", 2)
    await admit(harness, first)
    assert (await refused(harness, second)).code == errors.IDEMPOTENCY_CONFLICT
    [told] = await harness.peer().enqueue([second])
    assert told is not None
    assert told.code == errors.IDEMPOTENCY_CONFLICT
    await run_first(harness, "", "job")
    await heard(harness)
    assert (await refused(harness, second)).code == errors.IDEMPOTENCY_MISUSE
    await harness.advance(30.0)
    assert (await refused(harness, second)).code == errors.IDEMPOTENCY_MISUSE
    assert (await outcome_of(harness.peer(), "job")).output == output("asked")
    await nothing_runs(harness, "other")
    await admit(harness, replace(second, tenant="u"))
    await harness.broker.cancel_task("t", "job")  # Once the task is forgotten, another model can use the id.
    await harness.advance(30.0)
    await admit(harness, second)
    assert (await refused(harness, job("m", nonce=3))).code == errors.IDEMPOTENCY_CONFLICT


async def test_of_tasks_of_several_models_that_come_at_once_under_one_id_one_is_let_in(harness: Harness) -> None:
    brokers = (harness.broker, harness.peer()) * 3
    asked = [job(("m", "other")[number % 2], f"g{number}", number + 1) for number in range(6)]
    told = await asyncio.gather(*(broker.enqueue([one]) for broker, one in zip(brokers, asked, strict=True)))
    codes = [failure.code if failure is not None else "" for [failure] in told]
    assert sorted(codes) == ["", *[errors.IDEMPOTENCY_CONFLICT] * 5]


async def test_one_that_is_refused_does_not_cut_short_the_claim_of_the_task_that_was_let_in(harness: Harness) -> None:
    both = [job("m", gateway, number) for number, gateway in enumerate(("g", "h"), 1)]
    told = await asyncio.gather(harness.broker.enqueue(both[:1]), harness.peer().enqueue(both[1:]))
    assert sorted(failure is not None for [failure] in told) == [False, True]
    assert (await refused(harness, replace(job("m", nonce=3), limits=(Limit("l", "key", 1.0, 0.5),)))) is not None
    await run_first(harness, "", "job")
    await heard(harness)
    await harness.advance(15.0)
    assert (await refused(harness, job("other", "i", 4))).code == errors.IDEMPOTENCY_MISUSE


async def test_a_task_that_is_refused_leaves_its_id_to_others(harness: Harness) -> None:
    limit = (Limit("l", "key", 1.0, 1.0),)
    await admit(harness, ask(limits=limit))
    assert (await refused(harness, replace(job("m"), limits=limit))).code == errors.RATE_LIMITED
    await harness.advance(30.0)
    mixed = [ask(), job("other", nonce=2), ask(), replace(job("other", nonce=3), id="else")]
    assert await harness.broker.enqueue(mixed) == [None] * 4
    await admit(harness, job("other", nonce=2))


async def test_identical_requests_share_answers_of_one_version_only_also_by_way_of_a_key(harness: Harness) -> None:
    await admit(harness, sharing("first", key(), same("asked@3"), version="3"))
    await admit(harness, sharing("second", key(), same("asked@4"), version="4"))
    await run_first(harness, "3", "first")
    await admit(harness, sharing("third", same("asked@4"), version="4"))
    await run_first(harness, "4", "third")
    replies = await heard(harness)
    assert [came_by(replies[id]) for id in ("second", "third")] == [(DedupKind.KEY, False), (None, False)]


async def test_a_process_that_has_not_heard_of_a_version_finds_the_key_there(harness: Harness) -> None:
    await harness.healthy("gpu-0", version="3")
    await admit(harness, sharing("first", key(), version="3"))
    await run_first(harness, "3", "first")
    peer = harness.peer()
    assert await peer.enqueue([sharing("again", key(), gateway="h")]) == [None]
    [reply] = (await peer.replies("h", 0))[0]
    assert (reply.output, reply.kept) == (output("asked"), True)
    holds(await peer.claim(Slot("gpu-1", "m", MAX_BATCH), AT_ONCE))


async def run_elsewhere(harness: Harness, waits_for: str, runs: str) -> None:
    """Have a slot of one version run what waits for another one that has no workers."""
    slot = Slot("helper", "m", MAX_BATCH, 0, ModelReport(runs), waits_for, helps=bool(waits_for))
    await answered(harness.broker, slot)


async def test_outputs_of_other_versions_are_for_their_key_and_not_for_identical_requests(harness: Harness) -> None:
    await admit(harness, sharing("first", key(), task("first"), same("asked@3"), version="3"))
    await admit(harness, sharing("meanwhile", same("asked@3"), version="3"))
    await run_elsewhere(harness, "3", "4")
    await admit(harness, sharing("again", key(), same("asked@3"), version="3"))
    await admit(harness, sharing("identical", same("asked@3"), version="3"))
    await run_first(harness, "3", "identical")
    await admit(harness, sharing("later", same("asked@3"), version="3"))
    replies = await heard(harness)
    assert {id: came_by(reply) for id, reply in replies.items()} == {
        "first": (None, False),
        "meanwhile": (DedupKind.SAME, False),
        "again": (DedupKind.KEY, True),
        "identical": (None, False),
        "later": (DedupKind.SAME, True),
    }
    ran = {id: reply.ran.version for id, reply in replies.items() if reply.ran is not None}
    assert ran == {"first": "4", "meanwhile": "4", "again": "4", "identical": "", "later": ""}
    assert isinstance(await harness.broker.outcome("t", "first"), Reply)


async def test_an_answer_of_any_version_is_kept_for_those_who_take_one_of_it(harness: Harness) -> None:
    for number, (label, runs, kept) in enumerate([("3", "3", True), ("3", "4", False), ("3,4", "4", True)]):
        await admit(harness, sharing(f"first {number}", same(f"{number}@{label}")))
        await run_elsewhere(harness, "", runs)
        await admit(harness, sharing(f"later {number}", same(f"{number}@{label}")))
        assert isinstance(await harness.broker.state("t", f"later {number}"), EntryState) is not kept


async def test_who_joins_by_a_key_keeps_no_answer_of_another_version_for_identical_requests(harness: Harness) -> None:
    await admit(harness, sharing("first", key(), same("asked@4")))
    await admit(harness, sharing("second", key(), same("asked@3")))
    await run_elsewhere(harness, "", "4")
    await admit(harness, sharing("third", same("asked@4")), sharing("fourth", same("asked@3")))
    await run_first(harness, "", "fourth")
    assert came_by((await heard(harness))["third"]) == (DedupKind.SAME, True)


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
    assert failure_of(replies["led"]).reason == "cancelled"
    assert await harness.broker.state("t", "led") is None
    assert await harness.broker.outcome("t", "led") is None
    if lease is None:
        lease = await harness.claim()
    assert set(ids(lease.entries)) - {"alone"} == {"led", "plain"}  # Entries that aren't tasks continue.
    assert ("alone" in ids(lease.entries)) is running, "nobody else waits for it"
    await harness.broker.complete(lease, [ItemResult(f"output of {entry.id}") for entry in lease.entries])
    assert {id: reply.output for id, reply in (await drained(harness)).items() if id not in replies} == {
        "joined": "output of led",
        "plain": "output of plain",
    }
    await nothing_runs(harness)
    assert await harness.broker.outcome("t", "led") is None
    assert (await refused(harness, poll("again", "led"))).code == errors.NOT_FOUND
