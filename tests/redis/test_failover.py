"""A failover on purpose is refused or given up in order: writes go on, and it says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from headway.brokers.redis import failover
from headway.brokers.redis.clients import nodes
from headway.errors import FailoverAborted
from tests.e2e.client import wait_until
from tests.redis.stand import real
from tests.servers.cluster import ClusterSetup
from tests.servers.ports import LOOPBACK
from tests.servers.redis import KINDS, RedisServer
from tests.servers.sentinel import SERVICE, SentinelSetup

pytestmark = pytest.mark.parametrize("kind", KINDS)
"""The two part ways in replication, in clusters and in Sentinels."""


@pytest.fixture
def pair(tmp_path: Path, kind: str) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary and its replica, which is in sync."""
    lines = ("repl-diskless-sync-delay 0", "repl-ping-replica-period 1")
    primary = RedisServer(kind, tmp_path / "primary", *lines)
    replica = RedisServer(kind, tmp_path / "replica", *lines, f"replicaof {LOOPBACK} {primary.port}")
    with primary, replica:
        wait_until(lambda: replica.command("INFO", "replication")["master_link_status"] == "up")
        wait_until(lambda: "online" in str(primary.command("INFO", "replication").get("slave0")))
        yield primary, replica


async def refused(url: str, within: float = 5.0, **how: str) -> tuple[str, list[str]]:
    """Why a failover was not done, and what was said before."""
    said: list[str] = []
    with pytest.raises(FailoverAborted) as aborted:
        await failover.fail_over(nodes(url, 2.0), within, said.append, **how)
    return str(aborted.value), said


def writes(server: RedisServer) -> bool:
    """Whether a server takes a write at once."""
    begun = monotonic()
    server.command("SET", "probe", "1")
    return monotonic() - begun < 1.0


@real
async def test_without_a_replica_nothing_is_begun(tmp_path: Path, kind: str) -> None:
    with RedisServer(kind, tmp_path) as alone:
        why, said = await refused(alone.url)
        assert why.endswith("has no replica that is connected and in sync (it has none); nothing was begun")
        assert not said
        alone.command("ACL", "SETUSER", "small", "on", ">pw", "~*", "+@read", "+info", "-@dangerous")
        why, _ = await refused(alone.url.replace("redis://", "redis://small:pw@"))
        assert "may not do this" in why or "no replica" in why


@real
async def test_a_replica_is_no_primary_and_another_one_cannot_be_chosen(pair: tuple[RedisServer, RedisServer]) -> None:
    primary, replica = pair
    why, _ = await refused(replica.url)
    assert why == f"{LOOPBACK}:{replica.port} is a replica of {LOOPBACK}:{primary.port}; nothing was begun"
    why, _ = await refused(primary.url, to="10.9.9.9:1")
    assert why.startswith("10.9.9.9:1 is no replica that is in sync")


@real
async def test_one_server_hands_over_to_its_replica_with_all_that_was_written(
    pair: tuple[RedisServer, RedisServer],
) -> None:
    primary, replica = pair
    for number in range(100):
        primary.command("SET", f"k{number}", "x" * 1000)
    said: list[str] = []
    await failover.fail_over(nodes(primary.url, 2.0), 5.0, said.append)
    assert replica.command("ROLE")[0] == b"master"
    assert primary.command("ROLE")[0] == b"slave"
    assert replica.command("DBSIZE") == 100
    assert said[-1].endswith(f"{LOOPBACK}:{primary.port} is a replica")


@real
async def test_one_server_goes_on_where_its_replica_stands_still(pair: tuple[RedisServer, RedisServer]) -> None:
    primary, replica = pair
    servers = nodes(primary.url, 2.0)
    before = failover._in_sync

    async def stands_still(*asked: object) -> object:
        found = await before(*asked)  # type: ignore[arg-type]
        replica.pause()
        primary.command("SET", "unread", "1")
        return found

    failover._in_sync = stands_still  # type: ignore[assignment]
    try:
        with pytest.raises(FailoverAborted, match=r"has not taken over within 0\.5 s; writes go on"):
            await failover.fail_over(servers, 0.5, lambda text: None)
    finally:
        failover._in_sync = before
        replica.resume()
    assert primary.command("ROLE")[0] == b"master"
    assert writes(primary)


@real
async def test_under_sentinels_the_pause_is_lifted_where_a_replica_does_not_catch_up(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SentinelSetup(kind, tmp_path) as setup:
        primary, replica = setup.primary, setup.replica
        caught_up = failover._caught_up

        async def never(*asked: object) -> None:
            replica.pause()
            try:
                with pytest.raises(Exception, match=r"Timeout|not caught up"):
                    await caught_up(*asked)  # type: ignore[arg-type]
            finally:
                replica.resume()
            raise FailoverAborted("a replica has not caught up")

        monkeypatch.setattr(failover, "_caught_up", never)
        why, said = await refused(setup.url, 0.5)
        assert (why, said[-1]) == ("a replica has not caught up", "writes are paused")
        assert writes(primary)
        assert setup.primary is primary


@real
async def test_sentinels_that_refuse_or_do_not_know_the_primary_change_nothing(tmp_path: Path, kind: str) -> None:
    with SentinelSetup(kind, tmp_path) as setup:
        primary = setup.primary
        why, _ = await refused(setup.url.replace(SERVICE, "other"))
        assert "other" in why or "No such master" in why
        for one in setup.sentinels:
            one.command("SENTINEL", "SET", SERVICE, "quorum", 9)
        why, said = await refused(setup.url)
        assert "NOQUORUM" in why
        assert not said
        assert writes(primary)


@real
async def test_the_primaries_of_a_host_or_of_all_hand_over_in_a_cluster(tmp_path: Path, kind: str) -> None:
    with ClusterSetup(kind, tmp_path, replicas=True) as setup:
        first = setup.servers[0]
        wait_until(lambda: all("slave0" in one.command("INFO", "replication") for one in setup.servers))
        said: list[str] = []
        await failover.fail_over(nodes(setup.url, 2.0), 10.0, said.append, only=f"{LOOPBACK}:{first.port}")
        assert [one.command("ROLE")[0] for one in setup.replicas] == [b"master", b"slave", b"slave"]
        assert len(said) == 1
        why, _ = await refused(setup.url, only="10.9.9.9")
        assert why == "the cluster has no primary '10.9.9.9'; nothing was begun"
        setup.replicas[1].kill()
        wait_until(lambda: "slave0" not in setup.servers[1].command("INFO", "replication"))
        why, said = await refused(setup.url)
        assert "has no replica that is connected and in sync" in why
        assert not said
