"""Tasks, idempotency keys and shared answers at gateways that share a broker, and what the journals record."""

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from headway import errors
from headway.errors import BrokerUnavailable
from headway.gateway import deadlines
from headway.gateway.broker_session import SETTLING
from headway.gateway.deadlines import LATE_SECONDS
from headway.gateway.pending import FutureSink
from headway.model import DedupKey, DedupKind, Entry, EntryState, Failure, Limit, Principal, Reply, Value
from headway.runtime.race import end
from headway.runtime.request_id import new_id
from tests.services.fake_backend import ANYBODY
from tests.services.fleet import Asked, Fleet
from tests.services.requests import request
from tests.services.troubled import Connection
from tests.virtual_time import Clock

TENANT = ANYBODY.tenant
pytestmark = pytest.mark.fleet(1.0, gateways=2, model="m")


def output(found: Reply | EntryState | None) -> Value | None:
    assert isinstance(found, Reply)
    return found.output


async def busy(fleet: Fleet) -> None:
    fleet.ask("busy")
    await asyncio.sleep(0.05)
    assert all(backend.busy for backend in fleet.backends)


async def admitted(fleet: Fleet, text: str, **how: Any) -> Asked:
    asked = fleet.ask(text, task=True, **how)
    await asked.was_admitted.wait()
    return asked


@pytest.mark.fleet(result_ttl_s=60.0)
async def test_a_task_can_be_asked_for_at_any_gateway_from_its_admission_on(fleet: Fleet, clock: Clock) -> None:
    here, there = fleet.gateways
    asked = fleet.ask("a", task=True)
    assert not asked.was_admitted.is_set()
    await asked.was_admitted.wait()
    assert clock() == asked.at
    assert isinstance(await here.outcome(TENANT, asked.id), EntryState)
    assert isinstance(await there.outcome(TENANT, asked.id), EntryState)
    assert await there.outcome("another", asked.id) is await here.outcome("another", asked.id) is None
    here.detach(TENANT, asked.id)
    await asyncio.sleep(1.5)
    assert asked.replies == []
    assert output(await here.outcome(TENANT, asked.id)) == output(await there.outcome(TENANT, asked.id)) == "A"
    assert await there.outcome("another", asked.id) is None
    assert fleet.journals[0].outcomes == [("a", "ok")]
    await asyncio.sleep(fleet.settings.result_ttl_s)
    assert await here.outcome(TENANT, asked.id) is await there.outcome(TENANT, asked.id) is None


async def test_who_follows_a_task_gets_its_outcome_in_time_or_nothing(fleet: Fleet, clock: Clock) -> None:
    asked = await admitted(fleet, "a")
    follows = [asyncio.ensure_future(gateway.follow(TENANT, asked.id, 5.0)) for gateway in fleet.gateways]
    began = clock()
    for gateway in fleet.gateways:
        assert await gateway.follow(TENANT, asked.id, 0.25) is None
    assert clock() - began == pytest.approx(0.5, abs=0.1)
    assert [output(await follow) for follow in follows] == ["A", "A"]
    assert output(await fleet.gateways[1].follow(TENANT, asked.id, 5.0)) == "A"
    assert await fleet.gateways[1].follow("another", asked.id, 5.0) is None
    assert await fleet.gateways[1].follow(TENANT, "unknown", 5.0) is None
    assert clock() - began < 1.2
    assert [journal.outcomes for journal in fleet.journals] == [[("a", "ok")], []]
    assert dict(fleet.counters.gateway.requests) == {("m", "paid", "ok"): 1}
    assert not fleet.counters.gateway.shared
    assert not fleet.counters.gateway.refusals
    assert [gateway.pending for gateway in fleet.gateways] == [0, 0]


async def test_who_stops_following_leaves_the_task_as_it_is(fleet: Fleet) -> None:
    asked = await admitted(fleet, "a")
    follow = asyncio.ensure_future(fleet.gateways[1].follow(TENANT, asked.id, 5.0))
    await asyncio.sleep(0.1)
    await end(follow)
    assert fleet.gateways[1].pending == 0
    assert await fleet.answered(asked) == ["ok"]
    [_, (_, _, followed)], [(_, _, left)] = fleet.server.named("enqueue"), fleet.server.named("withdraw")
    assert left == [one.submission for one in followed]


async def test_who_follows_tasks_takes_nothing_from_requests(fleet: Fleet) -> None:
    await busy(fleet)
    asked = await admitted(fleet, "a", timeout=30.0)
    await asyncio.sleep(0.1)
    rate = fleet.gateway.requests_per_second
    held = [asyncio.ensure_future(fleet.gateway.follow(TENANT, asked.id, 20.0)) for _ in range(30)]
    await admitted(fleet, "b", timeout=30.0)
    [alone, followers] = fleet.server.named("enqueue")[-2:]
    assert [entry.input for entry in alone[2]] == ["b"]
    assert len(followers[2]) == 30
    await asyncio.sleep(0.1)
    assert fleet.gateway.requests_per_second <= rate + 2.0
    await fleet.server.become("refuse")
    session = fleet.gateway._shared
    session.room = 20
    more = [asyncio.ensure_future(fleet.gateway.follow(TENANT, asked.id, 20.0)) for _ in range(30)]
    await asyncio.sleep(0.5)
    assert not session.full(20)
    assert session.full(61)
    await fleet.server.become("fine")
    assert [output(await follow) for follow in (*held, *more)] == ["A"] * 60
    assert (session.followers, fleet.gateway.pending) == (0, 0)


async def test_who_follows_a_task_waits_through_an_outage_in_which_nothing_is_said_of_it(fleet: Fleet) -> None:
    await busy(fleet)
    asked = await admitted(fleet, "a", timeout=30.0)
    before = asyncio.ensure_future(fleet.gateway.follow(TENANT, asked.id, 20.0))
    await asyncio.sleep(0.1)
    await fleet.server.become("refuse")
    during = asyncio.ensure_future(fleet.gateway.follow(TENANT, asked.id, 20.0))
    left = asyncio.ensure_future(fleet.gateway.follow(TENANT, asked.id, 0.2))
    await asyncio.sleep(0.3)
    assert await left is None
    for ask in (fleet.gateway.outcome, fleet.gateways[1].outcome, fleet.gateways[1].cancel):
        with pytest.raises(BrokerUnavailable):
            await ask(TENANT, asked.id)
    await fleet.server.become("fine")
    assert await fleet.answered(asked) == ["ok"]
    assert [output(await follow) for follow in (before, during)] == ["A", "A"]
    assert fleet.gateway.pending == 0


@pytest.mark.fleet(max_batch=1)
async def test_who_follows_a_lost_task_gets_the_outcome_of_its_second_run(fleet: Fleet, clock: Clock) -> None:
    await busy(fleet)
    asked = await admitted(fleet, "a", timeout=30.0)
    follow = asyncio.ensure_future(fleet.gateway.follow(TENANT, asked.id, 20.0))
    await asyncio.sleep(0.1)
    fleet.server.lose_everything(cut=True)
    assert await fleet.answered(asked) == ["ok"]
    ended = clock()
    assert output(await follow) == "A"
    assert clock() == pytest.approx(ended, abs=0.1)
    assert fleet.runs("a") == 1


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.fleet(max_batch=1)
async def test_a_task_cancelled_before_it_runs_is_unknown_everywhere(fleet: Fleet, at: int) -> None:
    await busy(fleet)
    asked = await admitted(fleet, "a")
    fleet.gateway.detach(TENANT, asked.id)
    follow = asyncio.ensure_future(fleet.gateways[1 - at].follow(TENANT, asked.id, 5.0))
    await asyncio.sleep(0.1)
    await fleet.gateways[at].cancel(TENANT, asked.id)
    assert await follow is None
    for gateway in fleet.gateways:
        assert await gateway.outcome(TENANT, asked.id) is None
    await asyncio.sleep(0.1)
    assert fleet.gateway.pending == 1, "the busy one: who holds a task hears that it was cancelled"
    await asyncio.sleep(5.0)
    assert fleet.runs("a") == 0
    assert asked.replies == []
    for gateway in fleet.gateways:
        assert await gateway.outcome(TENANT, asked.id) is None
    assert [outcome for text, outcome in fleet.journals[0].outcomes if text == "a"] == [errors.CANCELLED]


@pytest.mark.parametrize("key", ["", "k"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.fleet(max_batch=1)
async def test_a_task_cancelled_while_offered_stays_unknown(fleet: Fleet, at: int, key: str) -> None:
    """The offer arrives only after the gateway has read and acknowledged the cancellation."""
    await busy(fleet)
    asked = await admitted(fleet, "a", key=key, timeout=30.0)
    fleet.gateway.detach(TENANT, asked.id)
    real, offered, arrives = fleet.server.inner.enqueue, asyncio.Event(), asyncio.Event()

    async def slow(entries: Sequence[Entry]) -> Sequence[Failure | None]:
        offered.set()
        await arrives.wait()
        return await real(entries)

    fleet.server.inner.enqueue = slow  # type: ignore[method-assign]
    fleet.server.cut()
    await offered.wait()
    await fleet.gateways[at].cancel(TENANT, asked.id)
    await asyncio.sleep(0.1)
    fleet.server.inner.enqueue = real  # type: ignore[method-assign]
    arrives.set()
    await asyncio.sleep(5.0)
    assert [await gateway.outcome(TENANT, asked.id) for gateway in fleet.gateways] == [None, None]
    assert asked.replies == []
    assert key or fleet.runs("a") == 0


@pytest.mark.parametrize("key", ["", "k"])
@pytest.mark.fleet(max_batch=1)
async def test_a_task_offered_again_after_another_took_its_id_and_both_were_deleted_is_gone(
    fleet: Fleet, key: str
) -> None:
    """The broker knows a submission again only until another one takes its id."""
    await busy(fleet)
    there = fleet.gateways[1]
    await fleet.server.fail("lose")
    asked = fleet.ask("a", task=True, key=key)
    await asyncio.sleep(0.1)
    [offer] = fleet.server.named("enqueue")[-1][2]
    other = msgspec.structs.replace(offer, input="b", gateway=there.name, nonce=offer.nonce + 1, dedup_keys=())
    broker, offers = fleet.server.inner, len(fleet.server.named("enqueue"))
    await broker.cancel_task(TENANT, asked.id)
    await broker.enqueue([other])
    await broker.withdraw([other.submission], there.name)
    fleet.server.script = lambda name: (
        "refuse" if name == "replies" and len(fleet.server.named("enqueue")) == offers else None
    )
    await fleet.server.become("fine")
    assert await fleet.answered(asked) == [errors.NOT_FOUND]
    await asyncio.sleep(0.1)
    assert [await gateway.outcome(TENANT, asked.id) for gateway in fleet.gateways] == [None, None]


async def test_who_waits_hears_of_a_delete_once_nobody_finds_the_task_any_more(fleet: Fleet) -> None:
    asked = await admitted(fleet, "a")
    broker, arrived, goes_on = fleet.gateway.broker, asyncio.Event(), asyncio.Event()
    cancel = broker.cancel_task

    async def slowly(tenant: str, id: str) -> None:
        arrived.set()
        await goes_on.wait()
        await cancel(tenant, id)

    with patch.object(broker, "cancel_task", slowly):
        deleting = asyncio.create_task(fleet.gateway.cancel(TENANT, asked.id))
        await arrived.wait()
        assert not asked.told.is_set(), "another gateway still finds it"
        assert isinstance(await fleet.gateways[1].outcome(TENANT, asked.id), EntryState)
        goes_on.set()
        await deleting
    assert await fleet.answered(asked) == [errors.NOT_FOUND]
    for gateway in fleet.gateways:
        assert await gateway.outcome(TENANT, asked.id) is None


@pytest.mark.fleet(max_batch=1)
async def test_a_lost_task_is_neither_unknown_nor_pending_until_offered_again(fleet: Fleet) -> None:
    await busy(fleet)
    asked = await admitted(fleet, "a")
    fleet.server.script = lambda name: (
        "refuse" if name == "enqueue" else None
    )  # It is back, but doesn't accept anything yet.
    fleet.server.lose_everything()
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            await fleet.gateway.outcome(TENANT, asked.id)
        await asyncio.sleep(0.3)
    fleet.server.script = lambda name: None
    await asyncio.sleep(1.0)
    assert isinstance(await fleet.gateway.outcome(TENANT, asked.id), EntryState)


@pytest.mark.fleet(max_batch=1)
async def test_a_task_is_not_said_to_be_forgotten_by_a_broker_that_had_just_lost_it(fleet: Fleet) -> None:
    await busy(fleet)
    asked = await admitted(fleet, "a", timeout=30.0)
    other = await admitted(fleet, "b", timeout=30.0)
    there = fleet.gateways[1]
    assert await there.outcome(TENANT, asked.id) is EntryState.QUEUED
    fleet.server.lose_everything()
    for call in (there.cancel(TENANT, asked.id), there.outcome(TENANT, other.id), there.cancel(TENANT, other.id)):
        with pytest.raises(BrokerUnavailable):
            await call
    await asyncio.sleep(1.5)
    assert isinstance(await there.outcome(TENANT, other.id), EntryState)
    found = await there.outcome(TENANT, asked.id)
    assert isinstance(found, EntryState), "its gateway has offered it again"
    await asyncio.sleep(SETTLING)
    await there.cancel(TENANT, asked.id)
    await asyncio.sleep(5.0)
    assert await there.outcome(TENANT, asked.id) is None


@pytest.mark.fleet(max_batch=1, cache=True, collapse=True)
async def test_a_broker_without_its_data_gets_leaders_and_followers_back(fleet: Fleet) -> None:
    await busy(fleet)
    first = fleet.ask("a", timeout=30.0, task=True)
    joined = [fleet.ask("a", timeout=30.0, gateway=number % 2, key=f"{number}") for number in range(6)]
    await asyncio.sleep(0.1)
    follow = asyncio.ensure_future(fleet.gateways[1].follow(TENANT, first.id, 20.0))
    await asyncio.sleep(0.1)
    assert fleet.runs("a") == 0
    fleet.server.lose_everything(cut=True)
    assert set(await fleet.answered(first, *joined)) == {"ok"}
    assert fleet.runs("a") == 1
    found = await follow
    assert found is None or found.output == "A"
    assert output(await fleet.gateways[1].outcome(TENANT, first.id)) == "A"
    outcomes = fleet.journals[0].outcomes + fleet.journals[1].outcomes
    assert outcomes.count(("a", "ok")) == 7


async def test_a_draining_gateway_brings_its_task_back_to_a_broker_without(fleet: Fleet) -> None:
    asked = await admitted(fleet, "a", timeout=600.0)
    fleet.gateway.detach(TENANT, asked.id)
    await fleet.server.fail()
    drained = asyncio.ensure_future(fleet.gateway.emptied())
    await asyncio.sleep(25.0)
    assert not drained.done()
    fleet.server.lose_everything()
    await fleet.server.become("fine")
    await drained
    assert output(await fleet.gateways[1].outcome(TENANT, asked.id)) == "A"


@pytest.mark.fleet(max_batch=1)
async def test_the_journal_is_told_once_of_every_request_whatever_becomes_of_it(fleet: Fleet) -> None:
    await busy(fleet)
    gateway = fleet.gateway
    limited = Principal("user", TENANT, 1, (Limit("key:k", "key", 60.0, 1.0),))
    answered = fleet.ask("answered")
    fleet.ask("drained")
    gone = fleet.ask("gone")
    expired = fleet.ask("expired", timeout=0.5)
    task = fleet.ask("task", task=True, timeout=0.7)
    fleet.ask("charged", caller=limited)
    await asyncio.sleep(0.1)
    over = fleet.ask("over", caller=limited)
    gateway.submit(unknown := FutureSink(), request("unknown", model="no such model"))
    gateway.abandon(gone, TENANT, gone.id)
    gateway.detach(TENANT, task.id)
    await fleet.answered(answered, expired, over)
    assert (await unknown.replies)[0].failure is not None
    gateway.refuse_all(Failure(errors.DRAINING, "shutting down"))
    await gateway.emptied()
    await asyncio.sleep(10.0)
    assert sorted(fleet.journals[0].outcomes) == sorted(
        [
            ("busy", "ok"),
            ("answered", "ok"),
            ("drained", errors.DRAINING),
            ("gone", errors.CANCELLED),
            ("expired", errors.DEADLINE_EXCEEDED),
            ("task", errors.DEADLINE_EXCEEDED),
            ("charged", errors.DRAINING),
            ("over", errors.RATE_LIMITED),
            ("unknown", errors.NOT_FOUND),
        ]
    )


@pytest.mark.fleet(fallback=0.1, gateways=1)
async def test_in_direct_mode_tasks_are_kept_and_told_and_noted_once_until_they_are_deleted(fleet: Fleet) -> None:
    gateway = fleet.gateway
    await fleet.go_direct()
    direct, deleted = [await admitted(fleet, text, timeout=30.0) for text in ("direct", "deleted")]
    assert isinstance(await gateway.outcome(TENANT, direct.id), EntryState)
    assert output(await gateway.follow(TENANT, direct.id, 5.0)) == "DIRECT"
    assert await fleet.answered(direct, deleted) == ["ok", "ok"]
    assert output(await gateway.outcome(TENANT, direct.id)) == "DIRECT"
    await gateway.cancel(TENANT, deleted.id)
    for ask in (gateway.outcome, gateway.cancel):
        with pytest.raises(BrokerUnavailable):
            await ask(TENANT, deleted.id)
    await fleet.server.become("fine")
    await asyncio.sleep(5.0)
    assert output(await gateway.outcome(TENANT, direct.id)) == "DIRECT"
    assert fleet.journals[0].outcomes[1:] == [("direct", "ok"), ("deleted", "ok")]
    await gateway.cancel(TENANT, direct.id)
    assert await gateway.outcome(TENANT, direct.id) is None


@pytest.mark.fleet(fallback=0.1, gateways=1)
async def test_a_task_that_the_broker_has_is_the_brokers_while_it_is_away_too(fleet: Fleet) -> None:
    gateway, there = fleet.gateway, Connection(fleet.server)
    deleted, task = (fleet.ask(text, task=True, timeout=30.0) for text in ("deleted", "task"))
    await task.was_admitted.wait()
    follows = asyncio.ensure_future(gateway.follow(TENANT, task.id, 20.0))
    await asyncio.sleep(0.1)
    await fleet.server.fail()
    await asyncio.sleep(3.0)
    assert gateway.broker is not gateway._shared.broker
    for one in (deleted, task):
        with pytest.raises(BrokerUnavailable):
            await gateway.outcome(TENANT, one.id)
    await fleet.server.become("fine")
    await there.cancel_task(TENANT, deleted.id)
    assert output(await follows) == "TASK"
    assert await gateway.outcome(TENANT, deleted.id) is None, "it was deleted at another gateway"
    assert output(await gateway.outcome(TENANT, task.id)) == "TASK"
    await there.cancel_task(TENANT, task.id)
    assert await gateway.outcome(TENANT, task.id) is None
    assert (fleet.runs("task"), fleet.runs("task", [fleet.fallback])) == (1, 0)


@pytest.mark.fleet(fallback=0.1, gateways=1)
async def test_a_task_on_its_way_waits_and_leaves_what_has_its_id_elsewhere(fleet: Fleet) -> None:
    """The client has heard nothing, so it asks again at another gateway."""
    await fleet.server.fail()
    held = fleet.ask("task", task=True, timeout=30.0)
    kept = DedupKey(DedupKind.TASK, held.id, b"asked elsewhere", 60.0)
    other = Entry(held.id, "m", "other", 1, TENANT, "elsewhere", 30.0, 30.0, dedup_keys=(kept,), nonce=7)
    assert await fleet.server.inner.enqueue([other]) == [None]
    await asyncio.sleep(2.0)
    assert not held.told.is_set()
    await fleet.server.become("fine")
    await asyncio.sleep(5.0)
    assert held.outcome in (errors.IDEMPOTENCY_CONFLICT, errors.IDEMPOTENCY_MISUSE)
    assert output(await fleet.gateway.outcome(TENANT, held.id)) == "OTHER"
    assert fleet.runs("task", [fleet.fallback]) == 0
    assert fleet.gateway._shared.in_sync


@pytest.mark.fleet(fallback=0.1, gateways=1)
async def test_the_id_of_a_direct_task_stands_when_the_broker_is_back(fleet: Fleet, clock: Clock) -> None:
    gateway = fleet.gateway
    await fleet.go_direct()
    direct = fleet.ask("direct", task=True, id=new_id())
    assert await fleet.answered(direct) == ["ok"]
    await fleet.server.become("fine")
    await asyncio.sleep(5.0)
    assert gateway.broker is not fleet.direct.broker  # type: ignore[union-attr]
    for text, code in (("direct", "ok"), ("another", errors.IDEMPOTENCY_MISUSE)):
        assert await fleet.answered(fleet.ask(text, id=direct.id, task=True, chosen=True)) == [code]
    assert output(await gateway.outcome(TENANT, direct.id)) == "DIRECT"
    kept = DedupKey(DedupKind.TASK, direct.id, b"other", 60.0)
    other = Entry(direct.id, "m", "other", 1, TENANT, "elsewhere", 30.0, 30.0, dedup_keys=(kept,), nonce=7)
    assert await fleet.server.inner.enqueue([other]) == [None]
    await gateway.cancel(TENANT, direct.id)
    assert await gateway.outcome(TENANT, direct.id) is None, "it is deleted wherever it was"


@pytest.mark.fleet(fallback=2.0, gateways=1)
async def test_a_task_that_runs_direct_is_deleted_and_followed_there(fleet: Fleet) -> None:
    await fleet.go_direct()
    direct = fleet.direct.broker  # type: ignore[union-attr]
    deleted, followed = [await admitted(fleet, text, timeout=30.0) for text in ("deleted", "followed")]
    await fleet.gateway.cancel(TENANT, deleted.id)
    assert await direct.outcome(TENANT, deleted.id) is None
    await fleet.server.become("fine")
    await asyncio.sleep(0.6)
    assert fleet.gateway.broker is not direct
    assert output(await fleet.gateway.follow(TENANT, followed.id, 10.0)) == "FOLLOWED"
    await asyncio.sleep(5.0)
    assert await fleet.gateway.outcome(TENANT, deleted.id) is None


async def late(fleet: Fleet) -> Asked:
    """Return a task that nobody waits for, just after its deadline and half a second before it ends."""
    asked = await admitted(fleet, "a", timeout=0.5)
    fleet.gateway.detach(TENANT, asked.id)
    await asyncio.sleep(0.55)
    return asked


@pytest.mark.fleet(gateways=1)
async def test_a_task_that_runs_on_beyond_its_deadline_is_noted_as_it_ends(fleet: Fleet) -> None:
    asked = await late(fleet)
    assert fleet.journals[0].outcomes == []
    await asyncio.sleep(1.0)
    assert output(await fleet.gateway.outcome(TENANT, asked.id)) == "A"
    assert fleet.journals[0].outcomes == [("a", "ok")]
    assert asked.replies == []
    await asyncio.sleep(2 * LATE_SECONDS)
    assert fleet.journals[0].outcomes == [("a", "ok")]


@pytest.mark.fleet(gateways=1, gpu_timeout_ms=600_000)
async def test_a_late_task_whose_outcome_never_comes_is_noted_as_late(fleet: Fleet) -> None:
    fleet.backends[0].seconds = 1000.0
    await late(fleet)
    await asyncio.sleep(LATE_SECONDS)
    assert fleet.journals[0].outcomes == [("a", "DEADLINE_EXCEEDED")]


@pytest.mark.fleet(gateways=1)
async def test_the_end_of_a_gateway_waits_for_no_late_task(fleet: Fleet, clock: Clock) -> None:
    await late(fleet)
    now = clock()
    await fleet.gateway.emptied()
    assert clock() == now
    assert fleet.journals[0].outcomes == [("a", "DEADLINE_EXCEEDED")]


@pytest.mark.parametrize(("bound", "most"), [("MOST", 3), ("MOST_BYTES", 3 * 5_000)])
@pytest.mark.fleet(gateways=1)
async def test_late_tasks_are_bounded(bound: str, most: int, monkeypatch: pytest.MonkeyPatch, fleet: Fleet) -> None:
    monkeypatch.setattr(deadlines, bound, most)
    texts = [f"{number}" * 3_900 for number in range(5)]
    await busy(fleet)
    for text in texts:
        asked = await admitted(fleet, text, timeout=1.5)
        fleet.gateway.detach(TENANT, asked.id)
    await asyncio.sleep(1.6)
    late = [(text, "DEADLINE_EXCEEDED") for text in texts[:2]]
    assert fleet.journals[0].outcomes == [("busy", "ok"), *late]
    await asyncio.sleep(1.5)
    assert fleet.journals[0].outcomes[3:] == [(text, "ok") for text in texts[2:]]
