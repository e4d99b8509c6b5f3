"""Sentinels: the primary is found, and found again after a change."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import ResponseError

from headway.brokers.redis import function_library
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.clients import Sentinels, deposed_by
from headway.brokers.redis.link import Address
from headway.errors import BrokerUnavailable
from headway.model import EntryState, Reply
from tests.contracts.brokers import answered, ask, ids, output, slot
from tests.e2e.client import PATIENCE, wait_until
from tests.redis.stand import brokers, hasty, opened, refused, served, until
from tests.servers.ports import LOOPBACK
from tests.servers.redis import KINDS, RedisServer
from tests.servers.sentinel import SERVICE, SentinelSetup


@pytest.fixture
def setup(kind: str, tmp_path: Path) -> Iterator[SentinelSetup]:
    with SentinelSetup(kind, tmp_path) as made:
        yield made


async def reply(broker: RedisBroker) -> Reply:
    replies, cursor = await until(lambda: broker.replies("g", 0))
    assert (len(replies), cursor) == (1, 1)
    return replies[0]


def waiting(server: RedisServer) -> set[str]:
    """The commands that a server's connections wait in, or sent last."""
    return set(re.findall(r"cmd=(\w+)", server.command("CLIENT", "LIST").decode()))


class Waits:
    """A broker that reads replies and listens for work, on connections that wait at the primary."""

    def __init__(self, broker: RedisBroker) -> None:
        self.broker, self.entry = broker, ask(id="a")
        self.reading = asyncio.create_task(reply(broker))
        self.listening = asyncio.create_task(broker.wait_for_work(slot(), None))

    async def at(self, server: RedisServer) -> None:
        while not waiting(server) >= {"blpop", "xread"}:  # noqa: ASYNC110 - only the server knows
            await asyncio.sleep(0.01)

    async def answered(self) -> None:
        lease = await until(lambda: answered(self.broker, slot()))
        assert ids(lease.entries) == ["a"]
        assert (await self.reading).output == output(self.entry.input)


@asynccontextmanager
async def let_in(setup: SentinelSetup) -> AsyncIterator[Waits]:
    """A broker whose entry is on both servers."""
    async with brokers(setup.url) as [broker]:
        waits = Waits(broker)
        assert await broker.enqueue([waits.entry]) == [None]
        await waits.at(setup.primary)
        wait_until(setup.in_step)
        yield waits


def promote(setup: SentinelSetup, server: RedisServer) -> None:
    """Make a server the primary, and have the Sentinels name it without telling anybody."""
    for sentinel in setup.sentinels:
        sentinel.command("SENTINEL", "REMOVE", SERVICE)
        sentinel.command("SENTINEL", "MONITOR", SERVICE, LOOPBACK, server.port, 2)
    server.command("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_go_on_with_the_new_primary(setup: SentinelSetup) -> None:
    async with let_in(setup) as waits:
        broker, second = waits.broker, setup.replica
        assert function_library.VERSION in str(second.command("FUNCTION", "LIST"))  # It got them from the primary.
        second.command("CONFIG", "RESETSTAT")
        setup.primary.kill()
        await refused(broker.enqueue([ask()]))
        await refused(waits.listening)
        setup.fail_over()
        assert await until(lambda: broker.state("t", "a")) is EntryState.QUEUED
        assert setup.primary is second
        assert await broker.enqueue([waits.entry]) == [None]
        await waits.answered()
        assert second.command("ROLE")[0] == b"master"
        assert "cmdstat_function|load" not in second.command("INFO", "commandstats")


async def test_a_read_without_an_answer_during_a_takeover_does_not_tell_that_all_are_gone(setup: SentinelSetup) -> None:
    with pytest.raises(BrokerUnavailable, match="No master found for 'other'"):
        async with opened(setup.url.replace(f"/{SERVICE}", "/other")):
            pass
    async with brokers(setup.url) as [broker]:
        assert await broker.enqueue([ask(id="a")]) == [None]
        wait_until(setup.in_step)
        setup.hand_over()
        await until(lambda: broker.enqueue([ask(id="b")]))
        with ExitStack() as paused:
            for server in setup.servers:
                paused.enter_context(server.silent())
            assert await broker.takes_reads_only()


async def test_a_deposed_primary_that_still_speaks_is_left_with_its_first_refusal(setup: SentinelSetup) -> None:
    """Sentinels only turn a deposed primary into a replica after many seconds. Until then it answers reads."""
    async with let_in(setup) as waits:
        broker, first, second = waits.broker, setup.primary, setup.replica
        first.command("CONFIG", "SET", "min-replicas-to-write", 1)
        promote(setup, second)
        wait_until(lambda: first.command("INFO", "replication")["connected_slaves"] == 0)
        assert "NOREPLICAS" in str(await refused(broker.enqueue([ask(id="b")])))
        await refused(waits.listening)
        await waits.answered()
        assert first.command("ROLE")[0] == b"master"


async def test_a_primary_that_only_stalls_while_it_is_deposed_is_left_by_every_connection(
    setup: SentinelSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The primary answers nothing for a while, then goes on as before: a blocking read could stay there forever."""
    monkeypatch.setattr(Sentinels, "watch", lambda sentinels: None)  # There are no announcements.
    async with let_in(setup) as waits:
        broker, first, second = waits.broker, setup.primary, setup.replica
        first.command("CLIENT", "PAUSE", 3_600_000, "WRITE")
        promote(setup, second)
        with hasty(broker):
            await refused(broker.enqueue([ask(id="b")]))
        first.command("CLIENT", "UNPAUSE")
        await waits.answered()
        await refused(waits.listening)
        assert first.command("ROLE")[0] == b"master"


@pytest.mark.parametrize("silenced", [False, True], ids=["told", "asked"])
async def test_a_primary_is_left_as_soon_as_the_sentinels_know_of_another(setup: SentinelSetup, silenced: bool) -> None:
    """Also if it never hears of that itself and refuses nothing, and if Sentinels let nobody listen."""
    first, second = setup.primary, setup.replica
    first.command("ACL", "SETUSER", "default", "-slaveof", "-replicaof")
    for one in setup.sentinels:
        one.command("ACL", "SETUSER", "default", "resetchannels" if silenced else "allchannels")
        # For four of these they leave a server that calls itself the primary alone. The leader must see it first.
        one.command("SENTINEL", "DEBUG", "PUBLISH-PERIOD", 1000 if silenced else 5000)
    async with brokers(setup.url) as [broker]:
        waits = Waits(broker)
        await waits.at(first)
        setup.hand_over()
        # A connection cut between two reads listens to the new primary, and isn't refused.
        async with asyncio.timeout(PATIENCE):
            while not (waits.listening.done() or "blpop" in waiting(second)):  # noqa: ASYNC110 - only the server knows
                await asyncio.sleep(0.01)
        if waits.listening.done():
            await refused(waits.listening)
        waits.listening.cancel()
        assert await until(lambda: broker.enqueue([waits.entry])) == [None]
        await waits.answered()
        assert not waiting(first) & {"blpop", "xread"}
        assert second.command("ROLE")[0] == first.command("ROLE")[0] == b"master"


async def test_server_and_sentinels_have_passwords_of_their_own(tmp_path: Path) -> None:
    with RedisServer("valkey", tmp_path / "server", password="for/the:server") as server:
        watch = (
            f"sentinel monitor {SERVICE} {LOOPBACK} {server.port} 1",
            f"sentinel auth-pass {SERVICE} for/the:server",
        )
        sentinel = RedisServer("valkey", tmp_path / "sentinel", *watch, "requirepass other", sentinel=True)
        sentinel.url = sentinel.url.replace("//", "//:other@")
        with sentinel:
            place = f"redis+sentinel://:for%2Fthe%3Aserver@{LOOPBACK}:{sentinel.port}/{SERVICE}"
            await served(f"{place}?sentinel_password=other")
            with pytest.raises(BrokerUnavailable):
                await served(place)


A, B = ("10.0.0.1", 6379), ("10.0.0.2", 6379)


class Sentinel:
    """A fake Sentinel that names a primary, fails, or never answers."""

    def __init__(
        self, names: Address | Exception | None, *, config_epoch: int = 0, down: bool = False, silent: bool = False
    ) -> None:
        self._names = names
        self._config_epoch = config_epoch
        self._down = down
        self._silent = silent

    async def execute_command(self, *command: str) -> Any:
        assert command == ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "headway")
        if self._silent:
            await asyncio.Event().wait()
        if isinstance(self._names, Exception):
            raise self._names
        return None if self._names is None else [self._names[0].encode(), str(self._names[1]).encode()]

    async def sentinel_masters(self) -> dict[str, dict[str, Any]]:
        state = {
            "ip": A[0],
            "port": A[1],
            "is_sdown": self._down,
            "is_odown": False,
            "config-epoch": self._config_epoch,
        }
        return {"headway": state}


class Asked:
    """Sentinels that are asked for the primary; `left` are the addresses given up for another."""

    def __init__(self, avoiding: Address | None = None) -> None:
        self.left: list[Address] = []
        self._asks = Sentinels([], "headway", {}, self._leave)
        if avoiding is not None:
            self._asks.avoid(avoiding)

    def __call__(self, *sentinels: Sentinel) -> Address:
        async def main() -> Address:
            return await asyncio.wait_for(self._asks.discover_master("headway"), 5)

        self._asks.sentinels = list[Any](sentinels)
        return asyncio.run(main())

    async def _leave(self, address: Address) -> None:
        self.left.append(address)


def named(*sentinels: Sentinel, avoiding: Address | None = None) -> Address:
    return Asked(avoiding)(*sentinels)


@pytest.mark.parametrize(
    ("sentinels", "avoiding", "primary"),
    [
        ((Sentinel(A), Sentinel(B), Sentinel(A)), None, A),  # The majority is right.
        ((Sentinel(A), Sentinel(None, silent=True), Sentinel(A)), None, A),  # It doesn't wait for a silent one.
        # A primary to avoid is believed last, and used again when no other one is named.
        ((Sentinel(A), Sentinel(A), Sentinel(B)), A, B),
        ((Sentinel(A), Sentinel(A), Sentinel(NoConnection("gone"))), A, A),
        # The highest epoch outweighs the majority.
        ((Sentinel(A), Sentinel(B, config_epoch=1), Sentinel(A)), A, B),
        ((Sentinel(A), Sentinel(B, config_epoch=1), Sentinel(None)), B, B),
        # A primary that is down isn't named.
        ((Sentinel(A, down=True), Sentinel(A)), None, A),
        ((Sentinel(A, down=True), Sentinel(B, down=True)), None, B),
    ],
)
def test_the_primary_is_the_one_that_sentinels_name(
    sentinels: Sequence[Sentinel], avoiding: Address | None, primary: Address
) -> None:
    assert named(*sentinels, avoiding=avoiding) == primary


def test_what_most_have_missed_is_not_believed_while_one_knows_better_of_it() -> None:
    asked = Asked()
    for _ in range(2):
        assert asked(Sentinel(A)) == A
    assert asked(Sentinel(B, config_epoch=1), Sentinel(B, config_epoch=1)) == B
    assert asked(Sentinel(A), Sentinel(A), Sentinel(B, config_epoch=1)) == B
    assert asked.left == [A], "the old one is left once another is named"
    asked = Asked()
    assert asked(Sentinel(B, config_epoch=7)) == B
    assert asked(Sentinel(A), Sentinel(A), Sentinel(A)) == A


@pytest.mark.parametrize(
    "event", ["headway 10.0.0.1 6379 10.0.0.2 6379", "slave 10.0.0.2:6379 10.0.0.2 6379 @ headway 10.0.0.1 6379"]
)
def test_what_a_sentinel_publishes_names_the_deposed_primary(event: str) -> None:
    assert deposed_by(event, "headway") == A
    assert deposed_by(event, "other") is None


def test_when_none_is_named_or_it_is_no_sentinel_the_reasons_are_told() -> None:
    with pytest.raises(MasterNotFoundError):
        named(Sentinel(A, down=True), Sentinel(A, down=True))
    with pytest.raises(MasterNotFoundError, match="No master found for 'headway' : ConnectionError: gone"):
        named(Sentinel(None), Sentinel(NoConnection("gone")))
    with pytest.raises(ResponseError, match="unknown command"):
        named(Sentinel(ResponseError("unknown command 'SENTINEL'")))


async def test_those_who_ask_at_once_share_two_votes_and_hear_of_what_came_before_they_asked() -> None:
    """A vote that began before may not know yet."""

    async def leave(address: Address) -> None:
        pass

    asks, before, after = Sentinels([], "headway", {}, leave), Counted(A), Counted(B, config_epoch=1)
    asks.sentinels = list[Any]([before])
    first = [asyncio.ensure_future(asks.discover_master("headway")) for _ in range(10)]
    await before.asked.wait()
    asks.sentinels = list[Any]([after])
    late = [asyncio.ensure_future(asks.discover_master("headway")) for _ in range(10)]
    await asyncio.sleep(0)
    before.go.set()
    after.go.set()
    assert await asyncio.gather(*first, *late) == [A] + [B] * 19
    assert (before.times, after.times) == (1, 1)


class Counted(Sentinel):
    """A fake that answers when told to, and counts the questions."""

    def __init__(self, names: Address, config_epoch: int = 0) -> None:
        super().__init__(names, config_epoch=config_epoch)
        self.times, self.asked, self.go = 0, asyncio.Event(), asyncio.Event()

    async def sentinel_masters(self) -> dict[str, dict[str, Any]]:
        self.times += 1
        self.asked.set()
        await self.go.wait()
        return await super().sentinel_masters()
