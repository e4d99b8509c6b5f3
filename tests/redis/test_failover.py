"""A failover on purpose is refused or given up in order: writes go on, and it says why."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from headway.brokers.redis import failover
from headway.brokers.redis.clients import nodes
from headway.errors import FailoverAborted, SettingError
from tests.e2e.client import PATIENCE, wait_until
from tests.e2e.server import ROOT
from tests.servers.cluster import ClusterSetup
from tests.servers.ports import LOOPBACK
from tests.servers.redis import KINDS, RedisServer
from tests.servers.sentinel import SERVICE, SentinelSetup
from tests.virtual_time import Clock

pytestmark = pytest.mark.parametrize("kind", KINDS)
"""The two part ways in replication, in clusters and in Sentinels."""


@pytest.fixture
def pair(tmp_path: Path, kind: str) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary and its replica, which is in sync."""
    lines = ("repl-diskless-sync-delay 0", "repl-ping-replica-period 1")
    primary = RedisServer(kind, tmp_path / "primary", *lines)
    replica = RedisServer(kind, tmp_path / "replica", *lines, f"replicaof {LOOPBACK} {primary.port}")
    with primary, replica:
        wait_until(lambda: in_step(primary, replica))
        yield primary, replica


def in_step(primary: RedisServer, replica: RedisServer) -> bool:
    told, seen = primary.command("INFO", "replication"), replica.command("INFO", "replication")
    online = "online" in str(told.get("slave0")) and seen.get("master_link_status") == "up"
    return online and seen["slave_repl_offset"] >= told["master_repl_offset"]


async def refused(url: str, within: float = 5.0, **how: str) -> tuple[str, list[str]]:
    said: list[str] = []
    with pytest.raises(FailoverAborted) as aborted:
        await failover.fail_over(nodes(url, 2.0), within, said.append, **how)
    return str(aborted.value), said


@contextmanager
def suppress_where(word: str) -> Iterator[None]:
    """Have a refusal with this word in it be none."""
    try:
        yield
    except FailoverAborted as exc:
        if word not in str(exc):
            raise


def writes(server: RedisServer) -> bool:
    begun = monotonic()
    server.command("SET", "probe", "1")
    return monotonic() - begun < 1.0


async def test_without_a_replica_nothing_is_begun(tmp_path: Path, kind: str) -> None:
    with RedisServer(kind, tmp_path) as alone:
        why, said = await refused(alone.url)
        assert why.endswith("has no replica that is connected and in sync (it has none); nothing was begun")
        assert not said
        alone.command("ACL", "SETUSER", "small", "on", ">pw", "~*", "+@read", "+info", "-@dangerous")
        why, _ = await refused(alone.url.replace("redis://", "redis://small:pw@"))
        assert "may not do this" in why or "no replica" in why


@pytest.mark.parametrize(("lacks", "at"), [("client|pause", 0), ("replicaof", 0), ("replicaof", 1)])
async def test_a_user_without_the_rights_is_refused_before_writes_are_paused(
    pair: tuple[RedisServer, RedisServer], lacks: str, at: int
) -> None:
    for server in pair:
        rights = f"-{lacks}" if server is pair[at] else "+ping"
        server.command("ACL", "SETUSER", "small", "on", ">pw", "~*", "&*", "+@all", rights)
    said: list[str] = []
    with pytest.raises(FailoverAborted) as aborted:
        await failover.fail_over(nodes(pair[0].url.replace("redis://", "redis://small:pw@"), 2.0), 5.0, said.append)
    assert f"may not do this at {'the replica ' if at else ''}{LOOPBACK}:{pair[at].port}" in str(aborted.value)
    assert "; nothing was begun; give the URL of an administrator" in str(aborted.value)
    assert "writes are paused" not in said
    assert writes(pair[0])
    assert pair[1].command("ROLE")[0] == b"slave"


async def test_a_replica_is_no_primary_and_another_one_cannot_be_chosen(pair: tuple[RedisServer, RedisServer]) -> None:
    primary, replica = pair
    why, _ = await refused(replica.url)
    assert why == f"{LOOPBACK}:{replica.port} is a replica of {LOOPBACK}:{primary.port}; nothing was begun"
    why, _ = await refused(primary.url, to="10.9.9.9:1")
    assert why.startswith("10.9.9.9:1 is not a replica in sync")


async def test_one_server_hands_over_all_that_was_written(pair: tuple[RedisServer, RedisServer]) -> None:
    primary, replica = pair
    for number in range(100):
        primary.command("SET", f"k{number}", "x" * 1000)
    said: list[str] = []
    await failover.fail_over(nodes(primary.url, 2.0), 5.0, said.append)
    assert replica.command("ROLE")[0] == b"master"
    assert primary.command("ROLE")[0] == b"slave"
    assert replica.command("DBSIZE") == 100
    assert said[-2] == f"{LOOPBACK}:{primary.port} is its replica, and takes no writes"
    assert said[-1].endswith(f"lead to {LOOPBACK}:{replica.port} now")


async def test_a_replica_that_stands_still_at_first_is_named(pair: tuple[RedisServer, RedisServer]) -> None:
    primary, replica = pair
    replica.pause()
    try:
        with pytest.raises(FailoverAborted) as aborted:
            await failover.fail_over(nodes(primary.url, 1.0), 5.0, lambda text: None)
    finally:
        replica.resume()
    why = str(aborted.value)
    assert why.startswith(f"the replica {LOOPBACK}:{replica.port} does not answer as it should: ")
    assert "; nothing was begun; look at the replica" in why


async def test_one_server_goes_on_where_its_replica_stands_still(pair: tuple[RedisServer, RedisServer]) -> None:
    primary, replica = pair
    servers = nodes(primary.url, 2.0)
    before = failover._hand_over

    async def stands_still(*asked: object) -> None:
        replica.pause()
        primary.command("SET", "unread", "1")
        await before(*asked)  # type: ignore[arg-type]

    failover._hand_over = stands_still  # type: ignore[assignment]
    try:
        with pytest.raises(FailoverAborted, match=rf"{LOOPBACK}:{replica.port} does not answer.*the pause is lifted"):
            await failover.fail_over(servers, 0.5, lambda text: None)
    finally:
        failover._hand_over = before
        replica.resume()
    assert primary.command("ROLE")[0] == b"master"
    assert writes(primary)


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


async def test_the_primaries_of_a_host_or_of_all_hand_over_in_a_cluster(tmp_path: Path, kind: str) -> None:
    with ClusterSetup(kind, tmp_path, replicas=True) as setup:
        first = setup.servers[0]
        wait_until(
            lambda: all("online" in str(one.command("INFO", "replication").get("slave0")) for one in setup.servers)
        )
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


async def test_an_order_to_end_in_the_pause_lifts_it_and_one_in_the_takeover_is_heeded_after_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SentinelSetup(kind, tmp_path) as setup:
        primary, replica = setup.primary, setup.replica
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            if text == "writes are paused":
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(FailoverAborted, match=r"^ended by SIGINT; the pause is lifted"):
            await failover.fail_over(nodes(setup.url, 5.0), 5.0, say)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        assert said[-1] == "writes are paused"
        assert writes(primary)
        assert setup.primary is primary
        taken_over = failover._taken_over

        async def told_to_end(*asked: object) -> object:
            signal.raise_signal(signal.SIGTERM)
            return await taken_over(*asked)  # type: ignore[arg-type]

        monkeypatch.setattr(failover, "_taken_over", told_to_end)
        while setup.primary is primary:
            # A Sentinel that had no time of this machine holds the replica for gone just now; see SentinelSetup.hand_over.
            with suppress_where("NOGOODSLAVE"):
                await failover.fail_over(nodes(setup.url, 5.0), 10.0, said.append)
        assert any(text.startswith("SIGTERM: the takeover was asked for, and is finished first") for text in said)
        assert said[-1].endswith("is its replica, and takes no writes")
        assert setup.primary is replica
        assert primary.command("ROLE")[0] == b"slave"


ENDED = """
import asyncio, os, sys
from headway.brokers.redis import failover
from headway.brokers.redis.clients import nodes

url, before, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
failover.PAUSE, failover.RENEW_EVERY, ask = 0.3, 0.05, failover._Servers.ask_beside

async def ask_beside(self, address, *command, **how):
    global before
    if before and " ".join(map(str, command)).startswith(before):
        before = ""
        os.kill(os.getpid(), number)
    return await ask(self, address, *command, **how)

failover._Servers.ask_beside = ask_beside
asyncio.run(failover.fail_over(nodes(url, 2.0), 5.0, print))
"""
"""Failover that sends itself a signal before an order."""


def end_before(order: str, url: str, number: signal.Signals) -> None:
    """Have a failover ended by a signal just before it gives an order."""
    command = [sys.executable, "-c", ENDED, url, order, str(int(number))]
    done = subprocess.run(command, timeout=PATIENCE, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode == -number) == (number == signal.SIGKILL), done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_writes_go_on_whatever_step_of_one_server_a_signal_ends(
    pair: tuple[RedisServer, RedisServer], kind: str, number: signal.Signals
) -> None:
    primary, replica = pair
    for order in ("INFO", "CLIENT PAUSE", "REPLICAOF NO", f"REPLICAOF {LOOPBACK}", "CLIENT UNPAUSE"):
        end_before(order, primary.url, number)
        if primary.command("ROLE")[0] == b"slave":
            primary, replica = replica, primary
        primary.command("SET", "order", order)
        if replica.command("ROLE")[0] == b"master":  # It was killed between the two orders.
            replica.command("REPLICAOF", LOOPBACK, primary.port)
        wait_until(lambda: in_step(primary, replica))  # noqa: B023 - it is waited for within the loop
        assert replica.command("GET", "order") == order.encode()


@pytest.mark.parametrize("order", ["SENTINEL FAILOVER", "REPLICAOF"])
def test_writes_go_on_whatever_step_under_sentinels_a_kill_ends(tmp_path: Path, kind: str, order: str) -> None:
    with SentinelSetup(kind, tmp_path) as setup:
        end_before(order, setup.url, signal.SIGKILL)
        wait_until(setup.in_step)  # Sentinels tell a primary that is none any more.
        setup.primary.command("SET", "k", "v")


@pytest.mark.parametrize("stands_still", ["primary", "replica"])
@pytest.mark.parametrize("before", ["CLIENT PAUSE", "REPLICAOF NO", "REPLICAOF"])
async def test_writes_go_on_whichever_server_stands_still_at_any_step(
    pair: tuple[RedisServer, RedisServer], kind: str, before: str, stands_still: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary, replica = pair
    victim = primary if stands_still == "primary" else replica
    ask = failover._Servers.ask_beside

    async def ask_beside(servers: Any, address: Any, *command: Any, **how: Any) -> Any:
        if " ".join(map(str, command)).startswith(before) and not victim.paused:
            victim.pause()
        return await ask(servers, address, *command, **how)

    monkeypatch.setattr(failover._Servers, "ask_beside", ask_beside)
    monkeypatch.setattr(failover, "PAUSE", 0.3)
    try:
        with suppress(FailoverAborted):
            await failover.fail_over(nodes(primary.url, 0.2), 0.5, lambda text: None)
    finally:
        victim.resume()
    for server in pair:
        with suppress(redis.ReadOnlyError):
            server.command("SET", "k", "v")
            break
    else:
        raise AssertionError("no server takes writes")


@pytest.mark.parametrize("gives_up", [0, 1])
async def test_sentinels_or_a_cluster_that_give_up_are_asked_again(
    kind: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, gives_up: int
) -> None:
    old, new, asked = ("h", 1), ("h", 2), list[float]()

    def taken_over() -> bool:
        return len(asked) > gives_up and clock() > asked[-1] + 1.0

    async def ask(address: object, *command: str, sentinel: bool = False) -> Any:
        if "FAILOVER" in command:
            asked.append(clock())
        if command[1] == "MASTER":
            return {"flags": "failover_in_progress" if clock() < asked[-1] + 2.0 else ""}
        return new if taken_over() else old

    async def replication(address: object) -> dict[str, str]:
        return {"role": "master" if (address == new) == taken_over() else "slave"}

    monkeypatch.setattr(failover, "monotonic", clock)
    servers: Any = SimpleNamespace(ask=ask, replication=replication, nodes=SimpleNamespace(service="s"))
    begun = clock()
    assert await failover._taken_over(servers, old, old, 10.0, begun) == new
    assert len(asked) == gives_up + 1
    del asked[:]
    begun = clock()
    await failover._taken_over_part(servers, old, new, 10.0, begun)
    assert len(asked) == gives_up + 1
    del asked[:]
    gives_up = 100
    with pytest.raises(FailoverAborted, match="within 3 s"):
        await failover._taken_over_part(servers, old, new, 3.0, clock())


async def test_a_pause_is_renewed_until_its_end(kind: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []

    async def ask_beside(address: object, *command: Any) -> None:
        assert command[:2] == ("CLIENT", "PAUSE")
        asked.append((clock(), clock() + command[2] / 1000))

    monkeypatch.setattr(failover, "monotonic", clock)
    servers: Any = SimpleNamespace(ask_beside=ask_beside)
    until = clock() + 10.0
    with pytest.raises(AssertionError):  # It is lifted.
        async with failover._paused(servers, ("h", 1), until):
            await asyncio.sleep(100.0)
    ends = [end for _, end in asked]
    assert max(ends) == until and ends == sorted(ends)
    assert all(end - begun <= failover.PAUSE for begun, end in asked)
    assert all(begun < end - 1.0 for (begun, _), end in zip(asked[1:], ends[:-5], strict=False))


async def test_a_server_that_refuses_or_is_away_is_named(pair: tuple[RedisServer, RedisServer], kind: str) -> None:
    at = f"{LOOPBACK}:{pair[0].port}"
    why, _ = await refused(f"redis://nobody:wrong@{at}")
    assert why.startswith(f"{at} refuses the user or the password")
    assert why.endswith(
        "; nothing was begun; give the URL of an administrator of the servers in HEADWAY_BROKER, or as --broker"
    )
    for url, begin in {
        f"redis://{LOOPBACK}:1": f"{LOOPBACK}:1 does not answer as it should: ",
        f"redis+sentinel://{LOOPBACK}:1/x": f"no Sentinel answers at {LOOPBACK}:1: ",
    }.items():
        why, _ = await refused(url)
        assert why.startswith(begin)
        assert why.endswith("; nothing was begun; check HEADWAY_BROKER or --broker, and that this host reaches it")


@pytest.mark.parametrize(
    ("url", "how", "said"),
    [
        ("redis+sentinel://h:1/x", {"to": "h:2"}, "--to = 'h:2': is for one server; Sentinels choose the replica"),
        ("redis+sentinel://h:1/x", {"only": "h"}, "--only = 'h': is only for a cluster"),
        ("redis://h:1", {"only": "h"}, "--only = 'h': is only for a cluster"),
        ("redis+cluster://h:1", {"to": "h:2"}, "--to = 'h:2': is for one server; a cluster has a primary for each part"),
        *(("redis://h:1", {"within": one}, f"--within = {one}: must be") for one in (0.0, -5.0, float("nan"), float("inf"))),
    ],
)  # fmt: skip
async def test_an_option_that_does_not_apply_is_refused(kind: str, url: str, how: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError) as error:
        await failover.fail_over(nodes(url, 2.0), **{"within": 5.0, "say": print, **how})
    assert str(error.value).startswith(said)
