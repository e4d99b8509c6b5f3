"""Promises of every fleet: one leader, the last publication, and a worker left for each model despite drains."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headway.admin.drains import routes
from headway.core.capacity import FORGOTTEN_AFTER
from headway.core.health import DEPARTED_SECONDS, MOST_DEPARTED, OFFLINE_AFTER, latest
from headway.errors import BadRequest
from headway.model import (
    Capacity,
    Departed,
    Drain,
    EndKind,
    ProcessInfo,
    Role,
    Rollout,
    RolloutState,
    VersionCounts,
    WorkerInfo,
    WorkerStatus,
)
from headway.model.rollout import Block, Evidence
from headway.ports import Fleet
from tests.contracts.brokers import Harness


def member(id: str = "gateway-1", role: Role = Role.GATEWAY, pending: int = 0) -> ProcessInfo:
    return ProcessInfo(
        id=id,
        role=role,
        host="host-1",
        pid=77,
        admin="http://10.0.0.1:8001",
        version="1.2.3",
        pending=pending,
        requests_per_second=333.5,
        leads=role is Role.CONTROLLER,
        last_seen=-1.0,
    )


def capacity(model: str = "m", healthy: int = 2) -> Capacity:
    return Capacity(
        model=model, healthy=healthy, degraded=1, items_per_second=1000.0, usable_per_second=850.0, measured_at=-1.0
    )


async def present(fleet: Fleet) -> dict[str, ProcessInfo]:
    members = await fleet.members()
    by_id = {one.id: one for one in members}
    assert len(by_id) == len(members)
    return by_id


async def leads(fleet: Fleet, candidate: str, seconds: float) -> bool:
    return await fleet.acquire_leadership(candidate, seconds) == 0.0


async def test_everybody_sees_who_attends_and_when(harness: Harness) -> None:
    assert await present(harness.fleet) == {}
    told = [member("gateway-1"), member("host-1", Role.WORKER), member("c", Role.CONTROLLER), member("s", Role.SERVE)]
    for one in told:
        await harness.fleet.heartbeat(msgspec.structs.replace(one, pending=5))
    await harness.advance(2.0)
    for one in told:
        await harness.fleet.heartbeat(one)
    seen = await present(harness.fleet_peer)
    for one in told:
        assert seen[one.id].last_seen == pytest.approx(harness.now(), abs=harness.grain)
        assert msgspec.structs.replace(seen[one.id], last_seen=-1.0) == one
    assert len(seen) == len(told)


async def test_who_falls_silent_is_forgotten_and_may_come_back(harness: Harness) -> None:
    await harness.fleet.heartbeat(member("silent"))
    await harness.fleet.heartbeat(member("talks"))
    for _ in range(3):
        await harness.advance(OFFLINE_AFTER / 3 - harness.grain)
        assert set(await present(harness.fleet_peer)) == {"silent", "talks"}
        await harness.fleet.heartbeat(member("talks"))
    await harness.advance(4 * harness.grain)
    assert set(await present(harness.fleet_peer)) == {"talks"}
    await harness.fleet.heartbeat(member("silent"))
    assert set(await present(harness.fleet)) == {"silent", "talks"}
    await harness.advance(10 * OFFLINE_AFTER)
    assert await present(harness.fleet) == {}


async def test_it_is_known_for_minutes_how_a_process_has_ended(harness: Harness) -> None:
    fleet, peer = harness.fleet, harness.fleet_peer
    for id in ("told", "silent", "stays", "back"):
        await fleet.heartbeat(member(id))
    heard = harness.now()
    told = Departed(id="told", role=Role.WORKER, host="h", pid=7, ending=EndKind.STOPPED, reason="told to by SIGTERM")
    await harness.advance(1.0)
    await fleet.depart(told)
    await fleet.leave("told")
    assert [msgspec.structs.replace(one, at=0.0) for one in await peer.departed()] == [told]
    await harness.advance(OFFLINE_AFTER + 1.0)
    for id in ("stays", "back"):
        await fleet.heartbeat(member(id))
    ended = {one.id: one for one in await peer.departed()}
    assert {id: one.ending for id, one in ended.items() if id not in ("stays", "back")} == {
        "told": EndKind.STOPPED,
        "silent": EndKind.LOST,
    }
    assert ended["silent"].at == pytest.approx(heard, abs=harness.grain)
    assert (ended["silent"].host, ended["silent"].pid) == ("host-1", 77)
    assert [one.id for one in latest(ended.values(), await peer.members())] == ["told", "silent"]
    await harness.advance(DEPARTED_SECONDS)
    assert {one.id for one in await fleet.departed()} <= {"stays", "back"}


async def test_a_bounded_number_of_ends_is_known_and_the_oldest_go_first(harness: Harness) -> None:
    for number in range(MOST_DEPARTED + 3):
        if number <= 3:
            await harness.advance(1.0)
        await harness.fleet.depart(
            Departed(id=f"p{number}", role=Role.WORKER, host="h", ending=EndKind.KILLED, reason="died of SIGKILL")
        )
    known = {one.id for one in await harness.fleet_peer.departed()}
    assert len(known) == MOST_DEPARTED
    assert known.isdisjoint({"p0", "p1", "p2"})


async def test_drains_stand_until_they_are_ended_and_each_process_hears_of_them(harness: Harness) -> None:
    fleet, peer = harness.fleet, harness.fleet_peer
    assert not await fleet.heartbeat(member("a"))
    one = Drain(name="a/gpu-0", process="a", host="host-1")
    whole = Drain(name="b", process="b", host="host-2")
    await peer.drain([one, whole])
    await fleet.drain([one])
    for _ in range(3):
        assert {*await fleet.heartbeat(member("a"))} == {*await peer.heartbeat(member("b"))} == {"a/gpu-0", "b"}
        assert sorted(await peer.drains(), key=lambda drain: drain.name) == [one, whole]
        await harness.advance(1500.0)
    await peer.leave("a")
    await peer.undrain(["b", "nobody"])
    await peer.undrain([])
    assert await fleet.drains() == [one]
    await fleet.undrain(["a/gpu-0"])
    assert not await fleet.drains()
    assert not await peer.heartbeat(member("b"))


async def test_a_drain_stands_only_where_no_other_came_since_the_look(harness: Harness) -> None:
    fleet, peer = harness.fleet, harness.fleet_peer
    one, two, three = (Drain(name=name, process=name, host="host-1") for name in ("a", "b", "c"))
    assert not await fleet.drain([one], ["b"])
    assert await fleet.drain([one], [])
    for seen in ([], ["b"], ["a", "b"]):
        assert not await peer.drain([two, three], seen)
    assert await fleet.drains() == [one]
    assert await peer.drain([two, three], {"a": 0})
    assert await fleet.drain([one], ["c", "b", "a"])
    assert len(await fleet.drains()) == 3


async def test_a_leader_leads_while_it_renews_and_another_takes_over_when_it_is_silent(harness: Harness) -> None:
    fleet, peer = harness.fleet, harness.fleet_peer
    assert await leads(fleet, "a", 60.0)
    assert await leads(fleet, "a", 3.0), "the last renewal says for how long"
    for _ in range(3):
        await harness.advance(2.0)
        assert await peer.acquire_leadership("b", 3.0) == pytest.approx(1.0, abs=harness.grain)
        assert await leads(fleet, "a", 3.0)
    await harness.advance(3.0 - harness.grain)
    assert not await leads(peer, "b", 3.0)
    await harness.advance(2 * harness.grain)
    assert await leads(peer, "b", 3.0)
    assert not await leads(fleet, "a", 3.0)


async def test_only_the_leader_makes_way_by_leaving(harness: Harness) -> None:
    for id in ("a", "b"):
        await harness.fleet.heartbeat(member(id, Role.CONTROLLER))
    assert await leads(harness.fleet, "a", 60.0)
    await harness.fleet.leave("b")
    for id in ("b", ""):
        assert not await leads(harness.fleet_peer, id, 60.0)
    assert await leads(harness.fleet_peer, "a", 60.0)
    await harness.fleet.leave("a")
    assert await leads(harness.fleet_peer, "b", 60.0)


async def test_the_capacity_of_a_model_is_what_was_published_last(harness: Harness) -> None:
    assert list(await harness.fleet.capacities()) == []
    await harness.fleet.publish(capacity("m", healthy=2))
    await harness.advance(1.0)
    await harness.fleet.publish(capacity("other"))
    await harness.advance(1.0)
    await harness.fleet_peer.publish(capacity("m", healthy=3))
    capacities = await harness.fleet.capacities()
    known = {one.model: one for one in capacities}
    assert len(known) == len(capacities) == 2
    assert known["m"].measured_at == pytest.approx(harness.now(), abs=harness.grain)
    assert known["other"].measured_at == pytest.approx(harness.now() - 1.0, abs=harness.grain)
    assert msgspec.structs.replace(known["m"], measured_at=-1.0) == capacity("m", healthy=3)
    assert msgspec.structs.replace(known["other"], measured_at=-1.0) == capacity("other")


async def test_a_capacity_is_forgotten_once_it_is_withdrawn_or_published_no_more(harness: Harness) -> None:
    async def known() -> set[str]:
        return {one.model for one in await harness.fleet.capacities()}

    for model in ("m", "n", "retired"):
        await harness.fleet.publish(capacity(model))
    for model in ("n", "n", "unknown"):
        await harness.fleet_peer.withdraw_capacity(model)
    assert await known() == {"m", "retired"}
    await harness.advance(FORGOTTEN_AFTER - harness.grain)
    await harness.fleet.publish(capacity("m"))
    await harness.fleet_peer.publish(capacity("n"))
    assert await known() == {"m", "n", "retired"}
    await harness.advance(2 * harness.grain)
    assert await known() == {"m", "n"}


async def test_a_rollout_is_kept_whole_and_changed_only_by_who_knows_the_last_revision(harness: Harness) -> None:
    assert list(await harness.fleet.rollouts()) == []
    new = VersionCounts(7, 2, {31: 7})
    evidence = Evidence(new, VersionCounts(700), (0.5, -1.0), (), Block(), Block(0.5, new), (0.1, 3))
    plan = Rollout(
        model="m", version="4", beside="3", steps=(1.0, 100.0), every=60.0, rollback_on=("p95",), slower=0.25,
        step=1, waited=7.5, evidence=evidence, before={"2": 0.0, "3": 100.0},
    )  # fmt: skip
    assert await harness.fleet.keep_rollout(plan)
    assert await harness.fleet_peer.keep_rollout(msgspec.structs.replace(plan, model="n", revision=9)), "none was there"
    after = msgspec.structs.replace(plan, state=RolloutState.ABORTED, reason="by an operator", revision=2)
    assert await harness.fleet_peer.keep_rollout(after)
    assert not await harness.fleet.keep_rollout(msgspec.structs.replace(plan, waited=8.0, revision=2))
    assert not await harness.fleet.keep_rollout(msgspec.structs.replace(plan, revision=4))
    await harness.advance(100_000.0)
    kept = {one.model: one for one in await harness.fleet.rollouts()}
    assert kept == {"m": after, "n": msgspec.structs.replace(plan, model="n", revision=9)}


async def test_one_process_at_a_time_may_load_a_model(harness: Harness) -> None:
    assert await harness.fleet.acquire_load("a", "host-1", 3.0)
    assert not await harness.fleet_peer.acquire_load("a", "host-2", 3.0)
    assert await harness.fleet_peer.acquire_load("b", "host-2", 3.0), "another model"
    assert await harness.fleet_peer.acquire_load("a", "host-1", 3.0), "renewed"
    assert await leads(harness.fleet, "host-2", 3.0), "controllers lead apart from that"
    await harness.advance(3.1)
    assert await harness.fleet_peer.acquire_load("a", "host-2", 3.0)


NAMES = ("a", "b")
STEPS = 5
"""Calls to the broker per order, at least: three to look, two to write."""


class Interrupted:
    """A fleet and a broker. Something else happens just before one of the calls to them."""

    def __init__(self, fleet: Fleet, before: int, other: Callable[[], Awaitable[None]]) -> None:
        self._fleet, self._left, self._other = fleet, before, other

    async def _asked(self) -> None:
        self._left -= 1
        if self._left == -1:
            await self._other()

    async def workers(self) -> list[WorkerInfo]:
        await self._asked()
        return [WorkerInfo(worker_id=f"{name}/gpu-0", model="m", status=WorkerStatus.HEALTHY) for name in NAMES]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def ask(*arguments: Any) -> Any:
            await self._asked()
            return await getattr(self._fleet, name)(*arguments)

        return ask


async def ordered(
    fleet: Fleet, name: str, before: int = -1, other: Callable[[], Awaitable[None]] | None = None
) -> bool:
    view: Any = Interrupted(fleet, before, other)  # type: ignore[arg-type]
    start = routes(SimpleNamespace(fleet=view, broker=view))[1]  # type: ignore[arg-type]
    try:
        await start.handler(SimpleNamespace(param={"name": name}.get))  # type: ignore[arg-type]
    except BadRequest as exc:
        assert str(exc).startswith("model m would have no healthy worker left")
        return False
    return True


async def test_of_two_orders_that_bare_a_model_just_one_is_taken(harness: Harness) -> None:
    for before in range(STEPS + 1):
        for name in NAMES:
            await harness.fleet.heartbeat(ProcessInfo(id=name, role=Role.WORKER, host=name, pid=1))
        taken: list[bool] = []

        async def other(taken: list[bool] = taken) -> None:
            taken.append(await ordered(harness.fleet_peer, "b"))

        taken.append(await ordered(harness.fleet, "a", before, other))
        if len(taken) == 1:
            assert before >= STEPS
            await other()
        assert sorted(taken) == [False, True]
        assert len(await harness.fleet.drains()) == 1
        await harness.fleet.undrain(NAMES)
