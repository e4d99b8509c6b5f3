"""A gateway's lanes: which requests may use them, what closes them, and that both paths lead to the same results."""

import asyncio
from typing import Any

import msgspec
import pytest

from headway import errors
from headway.gateway.pending import FutureSink, Lane
from headway.model import (
    CostLine,
    CostShape,
    DedupKind,
    EntryState,
    Limit,
    Principal,
    Reply,
    RequestOptions,
    TraceContext,
    WorkerInfo,
    WorkerStatus,
)
from headway.runtime.request_id import new_id
from tests.core.test_versions import worker
from tests.services.calls import failure_of, offered
from tests.services.fake_backend import ANYBODY
from tests.services.fleet import Asked, Fleet
from tests.services.requests import request
from tests.services.stand import Stand, served
from tests.virtual_time import Clock

PLAIN = RequestOptions(4.0, 1)
SPAN = TraceContext(b"a" * 16, b"b" * 8, 1)
ONE = Limit("user-1", "user", 60.0, 1.0)


async def entered(stand: Stand, principal: Principal = ANYBODY, options: RequestOptions = PLAIN) -> Reply:
    lane = stand.gateway.lane(principal, options, None)
    assert lane.open
    sink = FutureSink()
    stand.gateway.enter(sink, lane, new_id(), "a", b"")
    [reply] = await sink.replies
    return reply


@pytest.mark.parametrize(
    "wants",
    [
        {"key": "k"}, {"task": True}, {"chosen": True}, {"version": "2"}, {"whole": b"w"}, {"count": 0}, {"trace": SPAN},
        {"replays": SPAN},
    ],
    ids=str,
)  # fmt: skip
async def test_who_asks_for_something_rare_goes_the_longer_way(stand: Stand, wants: dict[str, Any]) -> None:
    assert not stand.gateway.lane(ANYBODY, RequestOptions(4.0, 1, **wants), None).open


async def kept(stand: Stand, text: str, principal: Principal = ANYBODY, **wants: Any) -> Reply:
    """Return the reply to a request that uses the lane for tasks or keys."""
    options, sink = RequestOptions(4.0, 1, **wants), FutureSink()
    lane = stand.gateway.lane(principal, options, None)
    assert lane.keeps
    stand.gateway.take_in(sink, lane, options, new_id(), text, b"")
    [reply] = await sink.replies
    return reply


@pytest.mark.parametrize("more", [{"chosen": True}, {"version": "2"}, {"trace": SPAN}, {"task": True}], ids=str)
async def test_a_key_shares_its_lane_unless_it_is_rare(stand: Stand, more: dict[str, Any]) -> None:
    lanes = [stand.gateway.lane(ANYBODY, RequestOptions(4.0, 1, key=key), None) for key in "ab"]
    assert lanes[0] is lanes[1]
    assert (lanes[0].open, lanes[0].rows, lanes[0].keeps) == (False, False, True)
    assert not stand.gateway.lane(ANYBODY, RequestOptions(4.0, 1, **{"key": "k", **more}), None).keeps


async def test_a_key_on_a_lane_replays_joins_and_is_bound_to_what_it_asked(stand: Stand) -> None:
    first, joined = await asyncio.gather(kept(stand, "a", key="k"), kept(stand, "a", key="k"))
    assert (first.output, first.shared, joined.output, joined.shared) == ("A", None, "A", DedupKind.KEY)
    again, other, apart = [await kept(stand, text, key=key) for text, key in (("a", "k"), ("b", "k"), ("b", "l"))]
    assert (again.output, again.kept) == ("A", True)
    assert failure_of(other).code == errors.IDEMPOTENCY_MISUSE
    assert apart.output == "B"
    assert stand.counters.gateway.shared == {("m", "key", "joined"): 1, ("m", "key", "kept"): 1}
    assert stand.backends[0].batches == [["a"], ["b"]]
    assert (stand.gateway.pending, len(stand.broker._entries)) == (0, 0)
    assert stand.counters.gateway.requests["m", "paid", "ok"] == 4


async def test_a_task_on_a_lane_is_admitted_and_its_outcome_kept_for_who_asks_and_who_follows(stand: Stand) -> None:
    gateway, tenant = stand.gateway, ANYBODY.tenant
    options, sink, id = RequestOptions(4.0, 1, task=True), Asked("a", stand._clock), new_id()
    gateway.take_in(sink, gateway.lane(ANYBODY, options, None), options, id, "a", b"")
    told_at_once = sink.was_admitted.is_set()
    states = [await gateway.outcome(tenant, id)]
    following = asyncio.ensure_future(gateway.follow(tenant, id, 2.0))
    await asyncio.sleep(0)
    assert (states, told_at_once, sink.was_admitted.is_set()) == ([EntryState.QUEUED], False, True)
    gateway.detach(tenant, id)
    followed, found = await following, await gateway.outcome(tenant, id)
    assert isinstance(found, Reply)
    assert followed is not None
    assert (found.output, followed.output, sink.replies) == ("A", "A", [])
    await gateway.cancel(tenant, id)
    assert await gateway.outcome(tenant, id) is None


@pytest.mark.parametrize("settings", [{"cache": True}, {"collapse": True}, {"max_batch_weight": 9}], ids=str)
async def test_where_a_setting_is_about_every_request_there_is_no_lane(settings: Any, clock: Clock) -> None:
    async with served(clock, **settings) as stand:
        assert not stand.gateway.lane(ANYBODY, PLAIN, None).open


async def test_a_model_that_is_not_there_or_not_for_the_credential_has_no_lane(stand: Stand) -> None:
    other = Principal("u", "t", 1, models=frozenset({"other"}))
    assert not stand.gateway.lane(ANYBODY, PLAIN, "unknown").open
    assert "unknown" not in stand.gateway.limiter.throttles  # A client can invent any number of names.
    assert not stand.gateway.lane(other, PLAIN, None).open


async def test_lanes_close_with_what_they_were_decided_by(stand: Stand) -> None:
    gateway = stand.gateway
    before = gateway.facts
    gateway.learn()
    assert gateway.facts is before, "nothing has changed"
    gateway.served.learn([WorkerInfo(worker_id="w", model="m", status=WorkerStatus.HEALTHY, takes="bytes")])
    gateway.learn()
    assert gateway.facts is not before
    assert not gateway.lane(ANYBODY, PLAIN, None).open
    gateway.served.learn([WorkerInfo(worker_id="w", model="m", status=WorkerStatus.HEALTHY)])
    gateway.learn()
    between = gateway.facts
    assert gateway.lane(ANYBODY, PLAIN, None).open
    gateway.closed = True
    assert gateway.facts is not between
    assert not gateway.lane(ANYBODY, PLAIN, None).open


@pytest.mark.parametrize(
    "told", [{"per_call": ("t",)}, {"cost": CostLine(CostShape.PADDED, 0.01, 0.001)}], ids=["per call", "padded"]
)
async def test_lanes_close_as_entries_get_a_shape_or_a_weight(stand: Stand, told: dict[str, Any]) -> None:
    gateway = stand.gateway
    for how in ({}, told, {}):
        gateway.served.learn(
            [WorkerInfo(worker_id="w", model="m", status=WorkerStatus.HEALTHY, takes="text", gives="text", **how)]
        )
        gateway.learn()
        assert gateway.lane(ANYBODY, PLAIN, None).open is not bool(how)


async def test_in_a_fleet_a_sole_version_has_a_lane_and_drawn_versions_have_none(fleet: Fleet) -> None:
    gateway = fleet.gateway

    def lane_among(*workers: WorkerInfo) -> Lane:
        gateway.served.learn(workers)
        gateway.learn()
        return gateway.lane(ANYBODY, PLAIN, None)

    first, second = (msgspec.structs.replace(worker(version), model=gateway.served.default) for version in "34")
    lane = lane_among(first)
    assert lane.open
    gateway.enter(FutureSink(), lane, new_id(), "a", b"")
    gateway.submit(FutureSink(), request(model=lane.model))
    await asyncio.sleep(0.05)
    assert [entry.version for entry in offered(fleet)] == ["3", "3"]
    assert not lane_among(first, second).open
    gateway.served.weigh({"": {"4": 1.0}})
    gateway.learn()
    lane = gateway.lane(ANYBODY, PLAIN, None)
    assert lane.open
    assert lane.pattern.version == "4"


async def test_one_over_its_limit_is_refused_on_every_way_and_nothing_is_left(stand: Stand) -> None:
    limited = Principal("u", "t", 1, (ONE,))
    assert (await entered(stand, limited)).output == "A"
    ways = entered(stand, limited), stand.ask("a", caller=limited), kept(stand, "a", limited, key="k")
    for reply in [await way for way in ways]:
        assert failure_of(reply).code == errors.RATE_LIMITED
        assert failure_of(reply).retry_after == pytest.approx(0.9, abs=0.11)
    assert stand.counters.gateway.refusals["rate", "paid", "m"] == 3
    assert stand.gateway.pending == 0


@pytest.mark.stand(max_queue=1)
async def test_one_that_the_queue_has_no_room_for_is_refused_and_counted_as_demand(stand: Stand) -> None:
    asked = [asyncio.ensure_future(entered(stand)) for _ in range(40)]
    codes = {reply.failure.code for reply in [await one for one in asked] if reply.failure is not None}
    assert codes <= {errors.SERVICE_OVERLOADED, errors.SHED}
    assert stand.gateway.limiter.throttles["m"].higher == 40


async def test_a_client_that_leaves_frees_its_place_and_who_comes_then_is_served(stand: Stand) -> None:
    lane, sink, id = stand.gateway.lane(ANYBODY, PLAIN, None), FutureSink(), new_id()
    stand.gateway.enter(sink, lane, id, "left", b"")
    stand.gateway.abandon(sink, ANYBODY.tenant, id)
    assert (await entered(stand)).output == "A"
    assert stand.gateway.pending == 0
    assert not stand.broker._entries


async def test_a_batch_whose_members_have_left_or_are_overdue_is_matched_one_by_one(stand: Stand) -> None:
    lane, ids = stand.gateway.lane(ANYBODY, PLAIN, None), [new_id() for _ in range(3)]
    sinks = [FutureSink() for _ in ids]
    for sink, id in zip(sinks, ids, strict=True):
        stand.gateway.enter(sink, lane, id, id, b"")
    held = [stand.gateway.held[ANYBODY.tenant, id] for id in ids]
    replies = [Reply(id, ANYBODY.tenant, "out", nonce=one.entry.nonce) for id, one in zip(ids, held, strict=True)]
    stand.gateway.abandon(sinks[0], ANYBODY.tenant, ids[0])
    held[1].deadline = stand._clock() - 1.0
    stand.gateway._shared._delivered(replies, held)
    late, answered = (await sinks[1].replies)[0], (await sinks[2].replies)[0]
    assert (failure_of(late).code, answered.output) == (errors.DEADLINE_EXCEEDED, "out")
    assert not sinks[0].replies.done()
    assert stand.gateway.pending == 0
    assert stand.counters.gateway.requests["m", "paid", "ok"] == 1
    assert stand.counters.gateway.requests["m", "paid", "cancelled"] == 1


async def test_requests_of_several_tiers_and_tenants_in_one_batch_are_each_counted_and_known(stand: Stand) -> None:
    asked = [(Principal("u", f"t{number % 3}", 1), RequestOptions(4.0, 1 + number % 2)) for number in range(6)]
    sinks = []
    for principal, options in asked:
        lane, sink = stand.gateway.lane(principal, options, None), FutureSink()
        assert lane is stand.gateway.lane(principal, options, None), "requests that ask alike have one in common"
        stand.gateway.enter(sink, lane, new_id(), "a", b"")
        sinks.append(sink)
    replies = [(await sink.replies)[0] for sink in sinks]
    assert [stand.counters.gateway.requests["m", tier, "ok"] for tier in ("paid", "free")] == [3, 3]
    found = [await stand.gateway.status(reply.id) for reply in replies]
    assert [(one.tenant, one.tier) for one in found if one is not None] == [
        (principal.tenant, options.tier) for principal, options in asked
    ]
