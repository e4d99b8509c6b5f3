"""A Redis Cluster: shards on several nodes, and what happens to the others when one is gone."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.brokers.redis import function_library, shard_router
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.dead_letters import RedisDeadLetters
from headway.brokers.redis.fleet import RedisFleet
from headway.errors import BrokerUnavailable, SettingError
from headway.model import EntryState, ItemResult, Lease, Limit, NoWork, QueueName
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, ask, attend, beat, failed, ids, output, slot
from tests.contracts.dedup_keys import key, task
from tests.e2e.client import wait_until
from tests.redis.stand import Steady, brokers, hasty, heard, opened, refused, until
from tests.servers.cluster import ClusterSetup
from tests.servers.ports import LOOPBACK
from tests.servers.redis import TESTED, RedisServer

SHARDS = 4
WORKERS = tuple(f"gpu-{number:02}" for number in range(16))


@pytest.fixture(scope="module", params=TESTED)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSetup]:
    with ClusterSetup(request.param, tmp_path_factory.mktemp("cluster")) as setup:
        yield setup


@pytest.fixture
def clock() -> Steady:
    """The servers' clock. With a real one, slots would lose their home shard after a short gap in their heartbeats."""
    return Steady()


@pytest.fixture
def cluster(running: ClusterSetup, monkeypatch: pytest.MonkeyPatch) -> ClusterSetup:
    monkeypatch.setattr(shard_router, "CENSUS_AGE", 0.0)
    for server in running.servers:
        server.command("FLUSHALL")
    return running


async def beaten(broker: RedisBroker) -> None:
    """Send the heartbeats of all slots twice, as none knows the others the first time."""
    for worker in 2 * WORKERS:
        await beat(broker, worker)


async def drained(broker: RedisBroker) -> list[Lease]:
    leases = []
    for worker in WORKERS:
        while isinstance(claimed := await broker.claim(slot(worker), AT_ONCE), Lease):
            leases.append(claimed)
            await broker.complete(claimed, [ItemResult(output(rider.input)) for rider in claimed.entries])
    return leases


async def claimed(broker: RedisBroker, worker: str) -> Lease | NoWork:
    return await until(lambda: broker.claim(slot(worker), AT_ONCE))


def nodes_of(cluster: ClusterSetup) -> list[RedisServer]:
    return [cluster.of(f"headway:{{m:{shard}}}:") for shard in range(SHARDS)]


async def test_entries_on_all_nodes_are_run_withdrawn_and_answered(cluster: ClusterSetup, clock: Steady) -> None:
    assert set(nodes_of(cluster)) == set(cluster.servers)
    async with brokers(cluster.url, count=2, shards=SHARDS, clock=clock) as [here, there]:
        await beaten(there)
        for server in cluster.servers:
            assert function_library.VERSION in str(server.command("FUNCTION", "LIST"))
        reading = asyncio.create_task(heard(here, "g", 3 * MAX_BATCH))
        entries = [ask() for _ in range(4 * MAX_BATCH)]
        assert await here.enqueue(entries) == [None] * len(entries)
        assert min(server.command("DBSIZE") for server in cluster.servers) > 0
        assert await there.state("t", entries[-1].id) is EntryState.QUEUED
        await there.withdraw([("t", entry.id, 0) for entry in entries[:MAX_BATCH]], "g")
        leases = await drained(there)
        wanted = set(ids(entries[MAX_BATCH:]))
        assert {rider.id for lease in leases for rider in lease.entries} == wanted
        assert {lease.fence % 256 for lease in leases} == set(range(SHARDS))
        assert set(await reading) == wanted
        assert len(await here.workers()) == len(WORKERS)
        assert (await here.loads())[QueueName("m")].slots == len(WORKERS)
        assert await here.reap() > 0.0


async def test_the_fleet_and_dead_letters_work_on_a_cluster_too(cluster: ClusterSetup, clock: Steady) -> None:
    async with brokers(cluster.url, shards=SHARDS, clock=clock) as [broker], opened(cluster.url, clock=clock) as link:
        fleet, letters = RedisFleet(link), RedisDeadLetters(link, [QueueName("m")], SHARDS)
        await attend(fleet, "a")
        assert [member.id for member in await fleet.members()] == ["a"]
        await beaten(broker)
        culprits = [ask() for _ in range(SHARDS)]
        for culprit in culprits:  # One after the other, as each goes into the next shard.
            await broker.enqueue([culprit])
        while any(depth.depth for depth in await broker.depths()):
            for worker in WORKERS:
                if isinstance(claimed := await broker.claim(slot(worker), AT_ONCE), Lease):
                    await broker.release(claimed, failed())
            await asyncio.sleep(0.01)
        assert await letters.count() == SHARDS
        assert {letter.entry.id for letter in await letters.list()} == set(ids(culprits))
        assert await letters.remove(culprits[0].id)
        assert list(await letters.find(culprits[0].id)) == []


async def test_a_node_that_lost_its_functions_gets_them_again(cluster: ClusterSetup, clock: Steady) -> None:
    async with brokers(cluster.url, shards=SHARDS, clock=clock) as [broker]:
        await beaten(broker)
        for server in cluster.servers:
            server.command("FUNCTION", "FLUSH")
            assert await broker.enqueue([ask() for _ in range(8)]) == [None] * 8
        assert sum(len(lease.entries) for lease in await drained(broker)) == 24


async def test_a_slot_is_left_alone_on_its_way_and_followed_once_it_has_moved(
    cluster: ClusterSetup, clock: Steady
) -> None:
    """While the slot moves, a function would see only half of what it needs."""
    async with brokers(cluster.url, shards=SHARDS, clock=clock) as [broker]:
        await beaten(broker)
        source, target = nodes_of(cluster)[2], cluster.servers[0]
        number = slot_of(cluster, 2)
        source.command("CLUSTER", "SETSLOT", number, "MIGRATING", target.command("CLUSTER", "MYID"))
        try:
            entries = [ask() for _ in range(8)]
            assert "are being moved to" in str(await refused(broker.enqueue(entries)))
        finally:
            source.command("CLUSTER", "SETSLOT", number, "STABLE")
        assert await broker.enqueue(entries) == [None] * 8
        assert sum(len(lease.entries) for lease in await drained(broker)) == 8
        with moved(cluster, 2, source, target):
            await beaten(broker)
            assert await broker.enqueue([ask() for _ in range(8)]) == [None] * 8
            assert target.command("EXISTS", "headway:{m:2}:q") == 1
            assert sum(len(lease.entries) for lease in await drained(broker)) == 8


async def test_another_node_in_the_place_of_one_that_is_silent_is_found(cluster: ClusterSetup, clock: Steady) -> None:
    """A failover happens that the old primary doesn't mention."""
    async with brokers(cluster.url, shards=SHARDS, clock=clock) as [broker]:
        await beaten(broker)
        source, target = nodes_of(cluster)[2], cluster.servers[0]
        source.pause()
        try:
            cluster.give(slot_of(cluster, 2), target)
            entries = [ask() for _ in range(8)]
            with hasty(broker):
                assert await until(lambda: broker.enqueue(entries)) == [None] * 8
            assert sum(len(lease.entries) for lease in await drained(broker)) == 8
        finally:
            source.resume()
            target.command("FLUSHALL")
            source.command("FLUSHALL")
            cluster.give(slot_of(cluster, 2), source)
            wait_until(cluster.whole)


def slot_of(cluster: ClusterSetup, shard: int) -> int:
    number: int = cluster.servers[0].command("CLUSTER", "KEYSLOT", f"headway:{{m:{shard}}}:")
    return number


@contextmanager
def moved(cluster: ClusterSetup, shard: int, source: RedisServer, target: RedisServer) -> Iterator[None]:
    source.command("FLUSHALL")
    cluster.give(slot_of(cluster, shard), target)
    try:
        yield
    finally:
        target.command("FLUSHALL")
        cluster.give(slot_of(cluster, shard), source)
        wait_until(cluster.whole)


async def test_a_silent_node_does_not_keep_the_others_from_their_work(cluster: ClusterSetup, clock: Steady) -> None:
    async with brokers(cluster.url, shards=SHARDS, clock=clock) as [broker]:
        await beaten(broker)
        await broker.enqueue([ask() for _ in range(4 * SHARDS)])
        nodes = nodes_of(cluster)
        away = nodes[2]
        silent = [shard for shard, node in enumerate(nodes) if node is away]
        assert 0 < len(silent) < SHARDS
        assert away is not cluster.of("headway:{fleet}:")
        with away.silent(), hasty(broker):
            for shard, worker in enumerate(WORKERS[:SHARDS]):
                if shard not in silent:
                    assert isinstance(await claimed(broker, worker), Lease)
            for call in (
                lambda: broker.enqueue([ask() for _ in range(4 * SHARDS)]),
                broker.depths,
                broker.reap,
                lambda: broker.withdraw([("t", "unknown", 0)], "g"),
            ):
                await refused(call())
            await refused(broker.claim(slot(WORKERS[silent[0]]), AT_ONCE))
        assert isinstance(await claimed(broker, WORKERS[silent[0]]), Lease)
        wait_until(cluster.whole)


async def test_the_others_are_reaped_while_a_node_is_silent(cluster: ClusterSetup, clock: Steady) -> None:
    async with brokers(cluster.url, shards=SHARDS, clock=clock) as [broker]:
        await beaten(broker)
        await broker.enqueue([ask()])
        await drained(broker)
        _, cursor = await broker.replies("g", 0)
        entries = [ask(queue_timeout=0.05) for _ in range(4 * SHARDS)]
        await broker.enqueue(entries)
        away = nodes_of(cluster)[0]  # The first to be reaped.
        with away.silent():
            clock.skip(1.0)
            with hasty(broker):
                await refused(broker.reap())
                await refused(broker.reap())
            found, _ = await until(lambda: broker.replies("g", cursor))
            assert set(ids(found)) < set(ids(entries))


async def test_a_cluster_is_found_by_any_node_and_refused_where_it_would_evict_or_is_none(
    cluster: ClusterSetup, tmp_path: Path
) -> None:
    there = [f"{LOOPBACK}:{server.port}" for server in cluster.servers]
    async with opened(f"redis+cluster://{LOOPBACK}:1,{LOOPBACK}:2,{there[2]}") as link:
        assert await RedisFleet(link).members() == []
    with pytest.raises(BrokerUnavailable):
        async with opened(f"redis+cluster://{LOOPBACK}:1,{LOOPBACK}:2"):
            pass
    for server in cluster.servers:
        server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(SettingError, match="maxmemory-policy allkeys-lru"):
                async with opened(cluster.url):
                    pass
        finally:
            server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    with pytest.raises(SettingError, match=r"is a node of a cluster.*redis\+cluster://"):
        async with opened(cluster.url.replace("redis+cluster", "redis")):
            pass
    with RedisServer("valkey", tmp_path) as server, pytest.raises(SettingError, match=r"is not a cluster.*redis://"):
        async with opened(f"redis+cluster://{LOOPBACK}:{server.port}"):
            pass


async def test_limits_tasks_and_answers_in_common_are_shared_whatever_a_tenants_node(
    cluster: ClusterSetup, clock: Steady
) -> None:
    limit, spread = Limit("key:k", "key", 0.6, 3.0), Limit("tier:1", "tier", 60.0, 400.0)
    async with brokers(cluster.url, count=2, shards=SHARDS, clock=clock) as [here, there]:
        await beaten(there)
        for tenant in ("red", "green", "blue", "black"):
            asked = [ask("text", tenant=tenant, gateway=f"g {tenant}", dedup_keys=(key(),)) for _ in range(2)]
            assert await here.enqueue(asked[:1]) == [None]
            assert await there.enqueue(asked[1:]) == [None]
            [lease] = await drained(there)
            assert ids(lease.entries) == [asked[0].id]
            assert await heard(there, f"g {tenant}", 2) == dict.fromkeys([entry.id for entry in asked], output("text"))
        for tenant in ("red", "green", "blue", "black"):
            await here.enqueue([ask(id="job", tenant=tenant, dedup_keys=(task("job"),))])
            assert await there.outcome(tenant, "job") is EntryState.QUEUED
        counted = [ask(limits=(limit, spread)) for _ in range(5)]
        assert [verdict is None for verdict in await here.enqueue(counted)] == [True] * 3 + [False] * 2
        assert 100.0 < here.rate_limit_debt(limit) <= 300.0
        assert here.rate_limit_debt(spread) > 0.0
        assert there.rate_limit_debt(limit) == 0.0
        verdicts = await there.enqueue([ask(limits=(limit,))])
        assert verdicts[0] is not None, "the other process counts on the same node"
