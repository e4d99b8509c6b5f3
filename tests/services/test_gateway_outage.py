"""A gateway while its broker is unreachable, and what it offers again once the broker is back."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from headway import errors
from headway.brokers.memory.fleet import MemoryFleet
from headway.core.health import STANDBY_EVERY
from headway.core.retry import BACKOFF_BASE
from headway.errors import BrokerUnavailable
from headway.fleet.pace import Pace
from headway.gateway.broker_session import CHUNK, PROBE_AFTER, SECOND_CHANCE, SPREAD, TAKEOVER, Replied
from headway.gateway.fleet_watchers import CapacityWatcher
from headway.model import Entry, EntryState, Failure, Limit, Principal, Reply
from headway.runtime.request_id import new_id
from headway.runtime.supervisor import Supervisor
from tests.services.calls import enqueue_takes, failure_of, offered, once
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.fleet import Fleet
from tests.services.troubled import CALL_TIMEOUT
from tests.virtual_time import Clock


@pytest.mark.parametrize("mode", ["fine", "refuse", "lose"])
async def test_a_call_without_an_answer_is_repeated_with_its_id_and_time_left(
    mode: str, fleet: Fleet, clock: Clock
) -> None:
    fleet.server.script = once("enqueue", mode)
    asked = fleet.ask("hello")
    assert await fleet.answered(asked) == ["ok"]
    assert clock() - asked.at < 0.15
    assert fleet.runs("hello") == 1
    first, *again = offered(fleet)
    assert bool(again) is (mode != "fine")
    assert again or not fleet.server.named("withdraw", "cancel_task", "probe")
    assert {entry.id for entry in again} <= {first.id}
    assert all(first.timeout - 0.1 < entry.timeout < first.timeout for entry in again)
    assert fleet.counters.gateway.refusals == {}


async def test_pauses_between_attempts_grow_up_to_a_bound(fleet: Fleet, clock: Clock) -> None:
    await fleet.answered(fleet.ask("before"))
    since = clock()
    await fleet.server.become("refuse")
    fleet.ask("x", timeout=30.0)
    await asyncio.sleep(10)
    attempts = [at for at, _, _ in fleet.server.named("withdraw", "probe", "enqueue") if at >= since]
    gaps = [later - sooner for sooner, later in itertools.pairwise(attempts)]
    assert gaps[0] <= BACKOFF_BASE
    assert min(gaps[8:]) >= 0.25 and max(gaps) <= 0.5


async def test_one_call_that_is_lost_is_no_outage_for_clients(fleet: Fleet) -> None:
    fleet.server.script = once("enqueue", "stall")
    asked = [fleet.ask("stalled")]
    await asyncio.sleep(0.98)
    for number in range(100):
        await asyncio.sleep(0.0005)
        asked.append(fleet.ask(f"behind {number}"))
    assert set(await fleet.answered(*asked)) == {"ok"}


async def test_while_the_broker_is_away_new_requests_are_refused_at_once_and_held_ones_wait(fleet: Fleet) -> None:
    await fleet.server.become("refuse")
    patient, hasty = fleet.ask("patient", timeout=30.0), fleet.ask("hasty", timeout=2.0)
    await asyncio.sleep(1.05)
    before = fleet.clock()
    refused = fleet.ask("refused")
    assert await fleet.answered(refused) == [errors.SERVICE_OVERLOADED]
    assert fleet.clock() == before
    failure = failure_of(refused.reply)
    assert failure.reason == "broker"
    assert failure.retry_after == pytest.approx(1.05, abs=0.01)
    assert fleet.counters.gateway.refusals == {("broker", "paid", "m"): 1}
    assert await fleet.answered(hasty) == [errors.DEADLINE_EXCEEDED]
    assert hasty.answered_at - hasty.at == pytest.approx(2.0, abs=0.021)
    await asyncio.sleep(8)
    await fleet.server.become("fine")
    assert await fleet.answered(patient) == ["ok"]
    assert await fleet.answered(fleet.ask("after")) == ["ok"]
    assert fleet.runs("hasty") == fleet.runs("refused") == 0


@pytest.mark.parametrize("mode", ["stall", "refuse"])
@pytest.mark.fleet(0.05, fallback=0.05, gateways=2, model="m")
async def test_nobody_is_refused_while_a_replica_takes_over(mode: str, fleet: Fleet) -> None:
    task = fleet.ask("task", task=True)
    deleted = fleet.ask("deleted", task=True)
    assert await fleet.answered(task, deleted) == ["ok", "ok"]
    await fleet.server.become(mode)
    fleet.server.paused = True
    asked = [fleet.ask("at first")]
    outcome = asyncio.ensure_future(fleet.gateways[1].outcome(ANYBODY.tenant, task.id))
    cancelled = asyncio.ensure_future(fleet.gateways[1].cancel(ANYBODY.tenant, deleted.id))
    for number in range(20):
        await asyncio.sleep(0.1)
        asked.append(fleet.ask(f"later {number}"))
    assert fleet.gateway.holding and not (outcome.done() or cancelled.done())
    await fleet.server.become("fine")
    assert set(await fleet.answered(*asked)) == {"ok"}
    found = await outcome
    assert isinstance(found, Reply) and found.output == "TASK"
    await cancelled
    assert await fleet.gateways[1].outcome(ANYBODY.tenant, deleted.id) is None
    assert (fleet.counters.gateway.refusals, fleet.counters.gateway.direct) == ({}, {})
    assert all(fleet.runs(one.text) == 1 for one in asked)


async def test_requests_are_held_for_a_takeover_for_some_seconds_only(fleet: Fleet) -> None:
    await fleet.server.become("stall")
    fleet.server.paused = True
    held = fleet.ask("held", timeout=30.0)
    await asyncio.sleep(TAKEOVER)
    assert fleet.gateway.holding
    await asyncio.sleep(2 * SECOND_CHANCE)
    assert await fleet.answered(fleet.ask("refused")) == [errors.SERVICE_OVERLOADED]
    with pytest.raises(BrokerUnavailable):
        await fleet.gateway.outcome(ANYBODY.tenant, new_id())
    await fleet.server.become("fine")
    assert await fleet.answered(held) == ["ok"]


async def test_a_server_that_dies_while_a_replica_takes_over_is_down_as_soon_as_any_other(fleet: Fleet) -> None:
    await fleet.server.become("stall")
    fleet.server.paused = True
    fleet.ask("held")
    await asyncio.sleep(1.5)
    assert fleet.gateway.holding
    fleet.server.paused = False
    await asyncio.sleep(CALL_TIMEOUT - 2 * SECOND_CHANCE)
    assert fleet.gateway.holding, "as the address may be moved just now"
    await asyncio.sleep(4 * SECOND_CHANCE)
    assert not fleet.gateway.holding


async def test_a_stall_is_known_for_one_as_soon_as_a_second_call_is_not_answered_either(fleet: Fleet) -> None:
    await fleet.server.become("stall")
    first = fleet.ask("first")
    await asyncio.sleep(1.15)
    assert await fleet.answered(fleet.ask("refused")) == [errors.SERVICE_OVERLOADED]
    await asyncio.sleep(1)
    await fleet.server.become("fine")
    assert await fleet.answered(first) == ["ok"]
    assert fleet.runs("first") == 1


@pytest.mark.fleet(0.5, max_batch=1)
async def test_what_was_given_up_in_a_stall_does_not_run_after_it(fleet: Fleet) -> None:
    running = fleet.ask("running")
    await asyncio.sleep(0.2)
    await fleet.server.become("stall")
    late = [fleet.ask(f"late {number}", timeout=0.5) for number in range(3)]
    assert set(await fleet.answered(*late)) == {errors.DEADLINE_EXCEEDED}
    await asyncio.sleep(1.5)
    await fleet.server.become("fine")
    assert await fleet.answered(running) == ["ok"]
    await asyncio.sleep(5)
    assert sum(fleet.runs(one.text) for one in late) <= 1  # One may have left before it could be withdrawn.


async def test_a_reply_of_another_tenant_is_nobodys(fleet: Fleet) -> None:
    asked = fleet.ask("mine", id=(id := new_id()), caller=Principal("u", "ours", 1))
    real = fleet.server.inner.replies

    async def forged(gateway: str, after: int) -> tuple[Sequence[Reply], int]:
        replies, cursor = await real(gateway, after)
        return [Reply(id, "theirs", "A SECRET"), *replies], cursor

    fleet.server.inner.replies = forged  # type: ignore[method-assign]
    fleet.server.cut()
    assert await fleet.answered(asked) == ["ok"]


@pytest.mark.fleet(0.05, max_queue=50)
async def test_what_is_not_handed_over_is_bounded(fleet: Fleet) -> None:
    await fleet.server.become("refuse")
    asked = [fleet.ask(f"text {number}") for number in range(80)]
    await asyncio.sleep(0.1)
    refused = [one for one in asked if one.replies]
    assert len(refused) == 30
    failures = [one.reply.failure for one in refused if one.reply.failure]
    assert {(failure.reason, failure.retry_after) for failure in failures} == {("overloaded", 1.0)}
    more = fleet.ask("more")
    await more.told.wait()
    assert failure_of(more.reply).reason == "broker"
    await fleet.server.become("fine")
    assert set(await fleet.answered(*(one for one in asked if one not in refused))) == {"ok"}


async def test_a_client_that_leaves_before_its_request_is_handed_over_never_reaches_a_gpu(fleet: Fleet) -> None:
    stays, at_once = fleet.ask("stays"), fleet.ask("at once")
    fleet.gateway.abandon(at_once, ANYBODY.tenant, at_once.id)
    assert await fleet.answered(stays) == ["ok"]
    assert [entry.input for entry in offered(fleet)] == ["stays"]
    assert not fleet.server.named("withdraw")
    await fleet.server.become("refuse")
    gone = fleet.ask("gone")
    await asyncio.sleep(0.5)
    fleet.gateway.abandon(gone, ANYBODY.tenant, gone.id)
    await fleet.server.become("fine")
    await asyncio.sleep(2)
    assert fleet.runs("at once") == fleet.runs("gone") == 0
    assert fleet.gateway.pending == 0


@pytest.mark.fleet(0.2)
async def test_an_answer_that_comes_long_after_the_deadline_is_not_given(fleet: Fleet) -> None:
    asked = fleet.ask("x", timeout=0.5)
    await asyncio.sleep(0.1)
    loop: Any = asyncio.get_running_loop()
    loop.now += 2.0  # The process was paused, so the answer and the deadline arrive together.
    fleet.gateway.on_event(fleet.gateway._shared, Replied([Reply(offered(fleet)[0].id, ANYBODY.tenant, "X")]))
    assert await fleet.answered(asked) == [errors.DEADLINE_EXCEEDED]


@pytest.mark.fleet(0.5)
async def test_status_is_told_without_the_broker(fleet: Fleet) -> None:
    fleet.ask("x", id=(id := new_id()))
    await asyncio.sleep(0.1)
    known = await fleet.gateway.status(id)
    assert known is not None and known.state is EntryState.PROCESSING
    await fleet.server.become("refuse")
    known = await fleet.gateway.status(id)
    assert known is not None and known.state is EntryState.QUEUED


@pytest.mark.fleet(0.5)
async def test_a_drain_ends_with_the_broker_away(fleet: Fleet) -> None:
    asked = [fleet.ask(f"text {number}") for number in range(5)]
    await asyncio.sleep(0.1)
    await fleet.server.fail("stall")
    async with asyncio.timeout(4.1):
        await fleet.gateway.emptied()
    assert set(await fleet.answered(*asked)) == {errors.DEADLINE_EXCEEDED}


async def test_the_log_tells_of_an_outage_once(fleet: Fleet) -> None:
    with capture_logs() as lines:
        await fleet.server.fail()
        asked = fleet.ask("x", timeout=30.0)
        await asyncio.sleep(20)
        await fleet.server.become("fine")
        await fleet.answered(asked)
    told = [line["event"] for line in lines if line.get("who") == "gateway"]
    assert told == ["the broker is out of reach", "the broker is back"]
    assert len([line for line in lines if line.get("who") == "gpu-0"]) == 2


@pytest.mark.fleet(0.5)
async def test_who_was_held_through_an_outage_is_not_shed_for_it(fleet: Fleet) -> None:
    await fleet.answered(*[fleet.ask(f"warm {number}") for number in range(24)])
    await fleet.server.become("refuse")
    asked = [fleet.ask(f"held {number}", tier=2) for number in range(100)]
    await asyncio.sleep(2.5)
    await fleet.server.become("fine")
    outcomes = Counter(await fleet.answered(*asked))
    assert outcomes["ok"]
    assert outcomes[errors.SERVICE_OVERLOADED]
    assert set(outcomes) <= {"ok", errors.SERVICE_OVERLOADED, errors.DEADLINE_EXCEEDED}
    assert not any(reason == "shed" for reason, _, _ in fleet.counters.gateway.refusals)


async def test_a_gateway_at_rest_finds_a_stalled_broker_within_a_beat_and_one_call(fleet: Fleet, clock: Clock) -> None:
    server, known = fleet.server, MemoryFleet(clock)
    watched: Any = SimpleNamespace(
        capacities=lambda: server.call("capacities", None, lambda _: known.capacities()),
        members=lambda: server.call("members", None, lambda _: known.members()),
    )
    watcher = CapacityWatcher(fleet.gateway, watched, clock, Pace(clock))
    supervisor = Supervisor()
    watcher.start(supervisor)
    await fleet.answered(fleet.ask("before"))
    await asyncio.sleep(20.03)
    holding = [fleet.gateway.holding]
    for mode, pause in (("stall", STANDBY_EVERY + CALL_TIMEOUT + SECOND_CHANCE + 0.02), ("fine", 1.0)):
        await fleet.server.become(mode)
        await asyncio.sleep(pause)
        holding.append(fleet.gateway.holding)
    assert holding == [True, False, True]
    await supervisor.stop()


async def test_a_call_of_others_that_fails_is_no_outage_for_a_gateway_that_was_answered_since(fleet: Fleet) -> None:
    began = fleet.clock()
    await asyncio.sleep(0.1)
    await fleet.answered(fleet.ask("answered"))
    with capture_logs() as logs:
        fleet.gateway.note_silence(began, BrokerUnavailable("timed out"))
        await asyncio.sleep(0.2)
    assert not fleet.server.named("probe") and not logs


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "half-open"])
@pytest.mark.fleet(0.3, max_batch=1)
async def test_what_the_broker_lost_is_offered_again_without_being_asked(cut: bool, fleet: Fleet, clock: Clock) -> None:
    await fleet.answered(fleet.ask("so that the cursor is not at its beginning"))
    asked = [fleet.ask(f"text {number}") for number in range(4)]
    await asyncio.sleep(0.5)
    fleet.server.lose_everything()
    if cut:
        fleet.server.cut()
    assert await fleet.answered(*asked) == ["ok"] * 4
    assert clock() - asked[0].at < 0.3 * 5 + PROBE_AFTER * 2 + SPREAD + 0.1
    assert all(fleet.runs(one.text) <= 2 for one in asked)


@pytest.mark.fleet(3.0, max_batch=100)
async def test_everything_is_offered_again_in_chunks_once_for_each_return(fleet: Fleet) -> None:
    count = 2 * CHUNK + 7
    asked = [fleet.ask(f"text {number}", timeout=25.0) for number in range(count)]
    await asyncio.sleep(0.1)
    before = len(fleet.server.named("enqueue"))
    for _ in range(9):  # The connections keep breaking, but the broker is reachable in between.
        fleet.server.cut()
        await asyncio.sleep(0.1)
    calls = fleet.server.named("enqueue")[before:]
    assert [len(entries) for _, _, entries in calls] == [CHUNK, CHUNK, 7]
    assert {entry.input for _, _, entries in calls for entry in entries} == {one.text for one in asked}
    assert not any(one.replies for one in asked)


@pytest.mark.fleet(3.0, gateways=3, max_batch=100)
async def test_gateways_do_not_return_all_at_once(fleet: Fleet) -> None:
    for number in range(3):
        fleet.ask(f"text {number}", gateway=number)
    await asyncio.sleep(0.1)
    fleet.server.lose_everything(cut=True)
    before = len(fleet.server.named("enqueue"))
    await asyncio.sleep(0.5)
    instants = sorted(at for at, _, _ in fleet.server.named("enqueue")[before:])
    assert len(instants) == 3
    assert instants[-1] - instants[0] > 0.05


@pytest.mark.fleet(3.0)
async def test_a_refusal_of_what_is_offered_again_is_the_answer(fleet: Fleet) -> None:
    asked = fleet.ask("x")
    await asyncio.sleep(0.1)
    full = Failure(errors.SERVICE_OVERLOADED, "full", 2.0, "overloaded")
    fleet.server.lose_everything()
    enqueue_takes(fleet, failure=full)
    assert await fleet.answered(asked) == [errors.SERVICE_OVERLOADED]
    assert asked.reply.failure == full
    assert fleet.gateway.pending == 0


@pytest.mark.parametrize("refused", [False, True], ids=["once", "twice"])
async def test_what_is_offered_again_is_not_charged_again(refused: bool, clock: Clock) -> None:
    limit = Limit("user-1", "user", 600.0, 10.0)
    caller = Principal("somebody", "acme", 1, (limit,))
    async with Fleet(clock, FakeBackend(2.0), max_batch=100) as fleet:
        asked = [fleet.ask(f"text {number}", caller=caller, timeout=20.0) for number in range(10)]
        await asyncio.sleep(1.0)
        asked += [fleet.ask(f"late {number}", caller=caller, timeout=20.0) for number in range(10)]
        await asyncio.sleep(0.1)
        assert [one.replies for one in asked] == [[]] * 20
        fleet.server.lose_everything()
        if refused:
            fleet.server.script = once("enqueue", "refuse")
        fleet.server.cut()
        assert await fleet.answered(*asked) == ["ok"] * 20
        assert fleet.server.inner.rate_limit_debt(limit) == 0.0


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
async def test_what_is_on_its_way_is_offered_once(large: bool, monkeypatch: pytest.MonkeyPatch, fleet: Fleet) -> None:
    """If a request were offered twice, its client and the broker could see different outcomes."""
    fleet.server.script = once("enqueue", "refuse")
    enqueue_takes(fleet, 0.6)
    if large:
        monkeypatch.setattr(type(fleet.server.inner), "apart_from", 10)
    text = "x" * 100
    assert await fleet.answered(fleet.ask(text)) == ["ok"]
    await asyncio.sleep(2.0)
    assert [entry.input for entry in offered(fleet)] == [text] * 2


async def test_what_was_never_charged_is_charged_when_it_is_offered_again(clock: Clock) -> None:
    limit = Limit("user-1", "user", 6.0, 10.0)
    caller = Principal("somebody", "acme", 1, (limit,))
    async with Fleet(clock, FakeBackend(0.1)) as fleet:
        fleet.server.script = once("enqueue", "refuse")
        assert await fleet.answered(fleet.ask("hello", caller=caller)) == ["ok"]
        assert fleet.server.inner.rate_limit_debt(limit) == pytest.approx(10.0, abs=0.3)


@pytest.mark.fleet(1.0)
async def test_a_broker_without_memory_may_refuse_what_it_has_and_is_not_believed(fleet: Fleet) -> None:
    held = fleet.ask("held")
    await asyncio.sleep(0.1)
    enqueue_takes(fleet, failure=Failure(errors.SHED, "no memory", 1.0, "memory"))
    fleet.server.cut()
    await asyncio.sleep(0.5)
    assert await fleet.answered(fleet.ask("new")) == [errors.SHED]
    assert await fleet.answered(held) == ["ok"]


async def test_a_task_that_is_refused_while_it_is_offered_again_does_not_run(clock: Clock) -> None:
    """Its first offer is still in flight when everything that may be lost is offered again."""
    caller = Principal("somebody", "acme", 1, (Limit("user-1", "user", 6.0, 10.0),))
    over = Failure(errors.RATE_LIMITED, "over the limit", 1.0, "rate")
    async with Fleet(clock, FakeBackend(0.2)) as fleet:
        running = fleet.ask("running")
        await asyncio.sleep(0.1)
        overtaken = list[Entry]()

        async def enqueue(entries: Sequence[Entry]) -> Sequence[Failure | None]:
            if any(entry.limits for entry in entries):
                await asyncio.sleep(0.8)
                return [over] * len(entries)
            overtaken.extend(entries)
            return [None] * len(entries)

        fleet.server.inner.enqueue = enqueue  # type: ignore[method-assign]
        fleet.server.cut()
        asked = fleet.ask("x", caller=caller, task=True)
        assert await fleet.answered(running, asked) == ["ok", errors.RATE_LIMITED]
        await asyncio.sleep(3.0)
        assert overtaken == [] and not asked.was_admitted.is_set()
        assert await fleet.gateway.outcome("acme", asked.id) is None
        assert fleet.runs("x") == 0


async def test_a_reply_that_is_read_again_is_not_told_again(fleet: Fleet) -> None:
    asked = fleet.ask("x")
    await fleet.answered(asked)
    fleet.gateway.on_event(fleet.gateway._shared, Replied(asked.replies * 3))
    assert await fleet.answered(asked) == ["ok"]
    assert fleet.counters.gateway.requests == {("m", "paid", "ok"): 1}


@pytest.mark.fleet(0.5, max_batch=1)
async def test_a_refusal_of_what_is_offered_beside_clients_that_leave_is_no_outage(fleet: Fleet) -> None:
    """Entries are also offered again alongside withdrawals, so this alone isn't a sign of an outage."""
    for number in range(6):
        fleet.ask(f"{number}", timeout=30.0, tier=2)
    await asyncio.sleep(0.6)
    leaves, hurried = fleet.ask("leaves", timeout=30.0), fleet.ask("hurried", timeout=0.2, tier=2)
    fleet.gateway.abandon(leaves, ANYBODY.tenant, leaves.id)
    await hurried.told.wait()
    assert failure_of(hurried.reply).reason != "broker"
