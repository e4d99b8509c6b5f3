"""A planned failover is refused or given up cleanly: writes continue, and it says why."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import redis

from headway.brokers.redis import failover
from headway.brokers.redis.clients import nodes
from headway.errors import FailoverAborted, SettingError
from tests.e2e.client import wait_until
from tests.servers.ports import LOOPBACK
from tests.servers.redis import KINDS, RedisServer
from tests.servers.sentinel import SERVICE, SentinelSetup
from tests.virtual_time import Clock

Pair = tuple[RedisServer, RedisServer]
both_kinds = pytest.mark.parametrize("kind", KINDS, scope="module")
"""For what the two kinds do differently: replication and Sentinels."""


@pytest.fixture(scope="module")
def kind() -> str:
    return KINDS[0]


@pytest.fixture(scope="module")
def servers(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    lines, folder = ("repl-diskless-sync-delay 0", "repl-ping-replica-period 1"), tmp_path_factory.mktemp("pair")
    primary = RedisServer(kind, folder / "primary", *lines)
    replica = RedisServer(kind, folder / "replica", *lines, f"replicaof {LOOPBACK} {primary.port}")
    with primary, replica:
        yield primary, replica


@pytest.fixture
def pair(servers: Pair) -> Pair:
    """A primary and its replica, in sync. Repairs what the last test left behind."""
    primary, replica = servers
    if replica.command("ROLE")[0] == b"master":
        primary, replica = replica, primary
    if primary.command("ROLE")[0] != b"master":
        primary.command("REPLICAOF", "NO", "ONE")
    if replica.command("ROLE")[0] == b"master":
        replica.command("REPLICAOF", LOOPBACK, primary.port)
    wait_until(lambda: in_step(primary, replica))
    return primary, replica


@pytest.fixture(scope="module")
def sentinels(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelSetup]:
    with SentinelSetup(kind, tmp_path_factory.mktemp("sentinels")) as made:
        yield made


@pytest.fixture
def setup(sentinels: SentinelSetup) -> SentinelSetup:
    wait_until(sentinels.in_step)
    return sentinels


def in_step(primary: RedisServer, replica: RedisServer) -> bool:
    told, seen = primary.command("INFO", "replication"), replica.command("INFO", "replication")
    online = "online" in str(told.get("slave0")) and seen.get("master_link_status") == "up"
    return online and seen["slave_repl_offset"] >= told["master_repl_offset"]


async def refused(url: str, within: float = 5.0, timeout: float = 2.0, **how: str) -> tuple[str, list[str]]:
    said: list[str] = []
    with pytest.raises(FailoverAborted) as aborted:
        await failover.fail_over(nodes(url, timeout), within, said.append, **how)
    return str(aborted.value), said


@contextmanager
def suppress_where(word: str) -> Iterator[None]:
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
        assert why.endswith("has no replica that is connected and in sync (it has none); nothing was started")
        assert not said


async def test_what_cannot_be_done_is_refused_before_writes_are_paused(pair: Pair) -> None:
    primary, replica = pair
    at = {server: f"{LOOPBACK}:{server.port}" for server in pair}
    for lacks, where in (("client|pause", primary), ("replicaof", primary), ("replicaof", replica)):
        for server in pair:
            rights = f"-{lacks}" if server is where else "+ping"
            server.command("ACL", "SETUSER", "small", "reset", "on", ">pw", "~*", "&*", "+@all", rights)
        why, said = await refused(primary.url.replace("redis://", "redis://small:pw@"))
        assert f"is not allowed to do this on {'the replica ' if where is replica else ''}{at[where]}" in why
        assert "; nothing was started; pass a URL with an administrator" in why
        assert "writes are paused" not in said
    why, _ = await refused(f"redis://nobody:wrong@{at[primary]}")
    assert why.startswith(f"{at[primary]} refuses the user or password")
    assert why.endswith(
        "; nothing was started; pass a URL with an administrator's credentials in HEADWAY_BROKER or as --broker"
    )
    why, _ = await refused(replica.url)
    assert why == f"{at[replica]} is a replica of {at[primary]}; nothing was started"
    why, _ = await refused(primary.url, to="10.9.9.9:1")
    assert why.startswith("10.9.9.9:1 is not a replica in sync")
    with replica.silent():
        why, _ = await refused(primary.url, timeout=0.5)
    assert why.startswith(f"the replica {at[replica]} does not answer as expected: ")
    assert "; nothing was started; check the replica" in why
    assert writes(primary)
    assert replica.command("ROLE")[0] == b"slave"


async def test_servers_that_are_away_are_named() -> None:
    for url, begin in {
        f"redis://{LOOPBACK}:1": f"{LOOPBACK}:1 does not answer as expected: ",
        f"redis+sentinel://{LOOPBACK}:1/x": f"no Sentinel answers at {LOOPBACK}:1: ",
    }.items():
        why, _ = await refused(url)
        assert why.startswith(begin)
        assert why.endswith("; nothing was started; check HEADWAY_BROKER or --broker, and that this host can reach it")


@both_kinds
async def test_one_server_hands_over_all_that_was_written(pair: Pair) -> None:
    primary, replica = pair
    for number in range(100):
        primary.command("SET", f"k{number}", "x" * 1000)
    count, said = primary.command("DBSIZE"), list[str]()
    await failover.fail_over(nodes(primary.url, 2.0), 5.0, said.append)
    assert replica.command("ROLE")[0] == b"master"
    assert primary.command("ROLE")[0] == b"slave"
    assert replica.command("DBSIZE") == count
    assert said[-2] == f"{LOOPBACK}:{primary.port} is its replica, and accepts no writes"
    assert said[-1].endswith(f"lead to {LOOPBACK}:{replica.port}")


async def test_under_sentinels_the_pause_is_lifted_where_a_replica_does_not_catch_up_or_take_over(
    setup: SentinelSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary, replica = setup.primary, setup.replica
    caught_up = failover._caught_up

    async def never(*asked: Any) -> None:
        with replica.silent(), pytest.raises(Exception, match=r"Timeout|not caught up"):
            await caught_up(*asked)
        raise FailoverAborted("a replica has not caught up")

    with monkeypatch.context() as patched:
        patched.setattr(failover, "_caught_up", never)
        why, said = await refused(setup.url, 0.5, timeout=0.5)
        assert (why, said[-1]) == ("a replica has not caught up", "writes are paused")
        assert writes(primary)
    wait_until(setup.in_step)
    with monkeypatch.context() as patched:
        patched.setattr(failover, "_taken_over", AsyncMock(side_effect=FailoverAborted("no replica has taken over")))
        why, _ = await refused(setup.url)
        assert why == "no replica has taken over"
        assert writes(primary)
    assert setup.primary is primary


async def test_sentinels_that_refuse_or_do_not_know_the_primary_change_nothing(setup: SentinelSetup) -> None:
    primary = setup.primary
    why, _ = await refused(setup.url.replace(SERVICE, "other"))
    assert "other" in why or "No such master" in why
    for quorum in (9, 2):
        for sentinel in setup.sentinels:
            sentinel.command("SENTINEL", "SET", SERVICE, "quorum", quorum)
        if quorum == 9:
            why, said = await refused(setup.url)
            assert "NOQUORUM" in why
            assert not said
    assert writes(primary)


@both_kinds
async def test_an_order_to_end_in_the_pause_lifts_it_and_one_in_the_takeover_is_heeded_after_it(
    setup: SentinelSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary, replica = setup.primary, setup.replica
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if text == "writes are paused":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(FailoverAborted, match=r"^interrupted by SIGINT; the pause is lifted"):
        await failover.fail_over(nodes(setup.url, 5.0), 5.0, say)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    assert said[-1] == "writes are paused"
    assert writes(primary)
    assert setup.primary is primary
    taken_over = failover._taken_over

    async def told_to_end(*asked: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return await taken_over(*asked)

    monkeypatch.setattr(failover, "_taken_over", told_to_end)
    while setup.primary is primary:
        # A Sentinel starved of CPU time may think that the replica is down; see SentinelSetup.hand_over.
        with suppress_where("NOGOODSLAVE"):
            await failover.fail_over(nodes(setup.url, 5.0), 10.0, said.append)
    assert any(text.startswith("SIGTERM: the takeover was requested, and is finished first") for text in said)
    assert said[-1].endswith("is its replica, and accepts no writes")
    assert setup.primary is replica
    assert primary.command("ROLE")[0] == b"slave"


class Cluster:
    """A cluster of three hosts with a primary each. Replicas are at the next port; those in `lone` have none."""

    def __init__(self, lone: str = "") -> None:
        self.primaries = {f"10.0.0.{number}": 1 for number in (1, 2, 3)}
        self.lone = lone

    async def ask_beside(self, servers: object, address: tuple[str, int], *command: str, **how: object) -> Any:
        host, port = address
        match command:
            case ("CLUSTER", "INFO"):
                return b"cluster_state:ok"
            case ("CLUSTER", "SLOTS"):
                return [[0, 1, [one.encode(), at, b"id"]] for one, at in self.primaries.items()]
            case ("CLUSTER", "FAILOVER", "?"):
                raise redis.ResponseError("syntax error")
            case ("CLUSTER", "FAILOVER"):
                self.primaries[host] = port
        leads = self.primaries[host] == port
        slave = {"ip": host, "port": 3 - port, "state": "online", "offset": 7}
        replicas = {"slave0": slave} if leads and host != self.lone else {}
        return {"role": "master" if leads else "slave", "master_link_status": "up", **replicas}


async def test_the_primaries_of_a_host_or_of_all_hand_over_in_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, said = Cluster(), list[str]()
    monkeypatch.setattr(failover._Servers, "ask_beside", lambda *asked, **how: cluster.ask_beside(*asked, **how))
    url = "redis+cluster://10.0.0.1:1"
    await failover.fail_over(nodes(url, 2.0), 10.0, said.append, only="10.0.0.2:1")
    assert [*cluster.primaries.values()] == [1, 2, 1]
    assert len(said) == 1
    await failover.fail_over(nodes(url, 2.0), 10.0, said.append)
    assert [*cluster.primaries.values()] == [2, 1, 2]
    why, _ = await refused(url, only="10.9.9.9")
    assert why == "the cluster has no primary '10.9.9.9'; nothing was started"
    cluster = Cluster(lone="10.0.0.3")
    why, said = await refused(url)
    assert "has no replica that is connected and in sync" in why
    assert not said
    assert [*cluster.primaries.values()] == [1, 1, 1]


def killed_before(order: str, url: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a failover in its own process and kill it just before an order. Returns whether it got that far."""
    ask = failover._Servers.ask_beside

    async def ask_beside(servers: Any, address: Any, *command: Any, **how: Any) -> Any:
        if f"{' '.join(map(str, command))} ".startswith(order):
            os.kill(os.getpid(), signal.SIGKILL)
        return await ask(servers, address, *command, **how)

    with monkeypatch.context() as patched:
        patched.setattr(failover._Servers, "ask_beside", ask_beside)
        patched.setattr(failover, "PAUSE", 0.3)
        if not (child := os.fork()):
            try:
                asyncio.run(failover.fail_over(nodes(url, 2.0), 5.0, lambda text: None))
            finally:
                os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_writes_go_on_whatever_step_of_one_server_a_kill_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    primary, replica = pair
    for order in ("REPLICAOF NO", f"REPLICAOF {LOOPBACK}", "CLIENT UNPAUSE"):
        assert killed_before(order, primary.url, monkeypatch)
        if primary.command("ROLE")[0] == b"slave":
            primary, replica = replica, primary
        primary.command("SET", "order", order)
        if replica.command("ROLE")[0] == b"master":  # It was killed between the two orders.
            replica.command("REPLICAOF", LOOPBACK, primary.port)
        wait_until(lambda: in_step(primary, replica))  # noqa: B023 - it is waited for within the loop
        assert replica.command("GET", "order") == order.encode()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("order", [f"SENTINEL FAILOVER {SERVICE} ", f"REPLICAOF {LOOPBACK}"])
def test_writes_go_on_whatever_step_under_sentinels_a_kill_ends(
    setup: SentinelSetup, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It ends earlier if Sentinels think that the replica is down.
    wait_until(lambda: killed_before(order, setup.url, monkeypatch))
    wait_until(setup.in_step)  # Sentinels notify a server that is no longer the primary.
    setup.primary.command("SET", "k", "v")


@pytest.mark.parametrize(
    ("before", "stands_still"),
    [("CLIENT PAUSE", 0), ("REPLICAOF NO", 0), ("REPLICAOF NO", 1), (f"REPLICAOF {LOOPBACK}", 0)],
)
async def test_writes_go_on_whichever_server_stands_still_at_any_step(
    pair: Pair, before: str, stands_still: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = pair[stands_still]
    ask = failover._Servers.ask_beside

    async def ask_beside(servers: Any, address: Any, *command: Any, **how: Any) -> Any:
        if " ".join(map(str, command)).startswith(before) and not victim.paused:
            victim.pause()
        return await ask(servers, address, *command, **how)

    monkeypatch.setattr(failover._Servers, "ask_beside", ask_beside)
    monkeypatch.setattr(failover, "PAUSE", 0.3)
    try:
        with suppress(FailoverAborted):
            await failover.fail_over(nodes(pair[0].url, 0.2), 0.5, lambda text: None)
        assert victim.paused
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
    clock: Clock, monkeypatch: pytest.MonkeyPatch, gives_up: int
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


async def test_a_pause_is_renewed_until_its_end(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []

    async def ask_beside(address: object, *command: Any) -> None:
        assert command[:2] == ("CLIENT", "PAUSE")
        asked.append((clock(), clock() + command[2] / 1000))

    monkeypatch.setattr(failover, "monotonic", clock)
    servers: Any = SimpleNamespace(ask_beside=ask_beside)
    until = clock() + 10.0
    with pytest.raises(AssertionError):  # The pause is lifted.
        async with failover._paused(servers, ("h", 1), until):
            await asyncio.sleep(100.0)
    ends = [end for _, end in asked]
    assert max(ends) == until and ends == sorted(ends)
    assert all(end - begun <= failover.PAUSE for begun, end in asked)
    assert all(begun < end - 1.0 for (begun, _), end in zip(asked[1:], ends[:-5], strict=False))


@pytest.mark.parametrize(
    ("url", "how", "said"),
    [
        ("redis+sentinel://h:1/x", {"to": "h:2"}, "--to = 'h:2': is only for a single server; Sentinels choose the replica"),
        ("redis+sentinel://h:1/x", {"only": "h"}, "--only = 'h': is only for a cluster"),
        ("redis://h:1", {"only": "h"}, "--only = 'h': is only for a cluster"),
        ("redis+cluster://h:1", {"to": "h:2"}, "--to = 'h:2': is only for a single server; a cluster has several primaries"),
        *(("redis://h:1", {"within": seconds}, f"--within = {seconds}: must be") for seconds in (0.0, -5.0, float("nan"))),
    ],
)  # fmt: skip
async def test_an_option_that_does_not_apply_is_refused(url: str, how: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError) as error:
        await failover.fail_over(nodes(url, 2.0), **{"within": 5.0, "say": print, **how})
    assert str(error.value).startswith(said)
