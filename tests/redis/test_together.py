"""Calls that a process makes at the same moment are sent as one, and entries gather while no slot is free."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from headway.brokers.redis.board import RedisBoard
from headway.brokers.redis.connection import Overdue
from headway.brokers.redis.fleet import RedisFleet
from headway.brokers.redis.together import MOST, Together
from headway.core.departure import Load, Rule
from headway.errors import BrokerUnavailable
from headway.model import Capacity, Lease, QueueName
from headway.model.board import Notice
from tests.contracts.brokers import ask, attend, beat, slot
from tests.redis.stand import Stand, brokers
from tests.servers.redis import RunningServer, SharedServers

Clock = Callable[[], float]


def calls(server: RunningServer) -> int:
    found: int = server.command("INFO", "commandstats").get("cmdstat_fcall", {}).get("calls", 0)
    return found


async def test_what_a_process_tells_and_asks_at_one_moment_is_one_call(servers: SharedServers, kind: str) -> None:
    server = servers.of(kind)
    async with brokers(server.url) as [broker]:
        fleet, board = RedisFleet(broker._connection), RedisBoard(broker._connection)
        capacity = Capacity(model="m", healthy=2, degraded=0, items_per_second=9.0, usable_per_second=9.0)
        before = calls(server)
        telling = asyncio.gather(
            beat(broker, "gpu-0"),
            beat(broker, "gpu-1"),
            attend(fleet, "host"),
            fleet.publish(capacity),
            broker.workers(),
            broker.reap(),
        )
        led, posted, _ = await asyncio.gather(
            fleet.acquire_leadership("host", 3.0), board.post(Notice("host")), telling
        )
        assert calls(server) - before == 1
        assert led == 0.0 and posted.records
        workers, loads, members, capacities = await asyncio.gather(
            broker.workers(), broker.loads(), fleet.members(), fleet.capacities()
        )
        assert calls(server) - before == 2
        assert {one.worker_id for one in workers} == {"gpu-0", "gpu-1"} and loads[QueueName("m")].slots == 2
        assert [one.id for one in members] == ["host"] and [one.model for one in capacities] == ["m"]


async def test_one_that_fails_keeps_no_other_from_its_answer(servers: SharedServers, kind: str) -> None:
    async with brokers(servers.of(kind).url) as [broker]:
        link, key = broker._connection, "headway:{fleet}:"
        found: tuple[Any, ...] = await asyncio.gather(
            link.join("lead", key, "", "a", "soon"),
            link.join("lead", key, "", "b", 3.0),
            link.join("look", broker._every[0]._key, "", broker._every[0]._head()[1], "1.0"),
            return_exceptions=True,
        )
        nonsense, lead, late = found
        assert float(lead) == 0.0
        assert isinstance(nonsense, BrokerUnavailable) and "the broker answers: " in str(nonsense)
        assert isinstance(late, Overdue) and late.now > 1.0


async def test_a_step_that_the_server_gets_to_too_late_is_made_again(servers: SharedServers, kind: str) -> None:
    async with brokers(servers.of(kind).url) as [broker]:
        [queue] = broker._every
        await queue.look()
        known = queue._steps.clock
        known._best, known._best_before = known._best - 100.0, -math.inf
        await asyncio.gather(beat(broker, "gpu-0"), broker.workers())
        assert (await broker.loads())[QueueName("m")].slots == 1


class Server:
    """A fake server that answers each call by its arguments, once allowed to."""

    def __init__(self, *, fails: bool = False, raves: bool = False) -> None:
        self.made: list[tuple[object, ...]] = []
        self.open, self.asked = asyncio.Event(), asyncio.Event()
        self._fails, self._raves = fails, raves

    async def call(self, *call: Any) -> Any:
        self.made.append(call)
        self.asked.set()
        await self.open.wait()
        if self._fails:
            raise BrokerUnavailable("away")
        function, _, *arguments = call
        if self._raves:
            return 7
        if function != "together":
            return 2 * arguments[0]
        answers, at = [], 0
        while at < len(arguments):
            answers.append([1, 2 * arguments[at + 3]])
            at += 3 + arguments[at + 2]
        return answers


def joined(server: Server, tags: bool = False) -> Together:
    def place(key: str) -> str:
        return key[: key.index("}")] if tags else ""

    return Together(server, place, BrokerUnavailable)


def gathered(together: Together, keys: list[str]) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(together.join("f", key, number)) for number, key in enumerate(keys)]


async def test_what_several_read_at_one_moment_is_one_call_but_for_its_last_argument(clock: Clock) -> None:
    server = Server()
    together = joined(server)
    reads = [(1, "until 5"), (1, "until 6"), (2, "until 6")]
    first, *others = [asyncio.ensure_future(together.share("f", "k", *read)) for read in reads]
    await asyncio.sleep(0)
    first.cancel()
    await server.asked.wait()
    assert server.made == [("together", "k", "f", "k", 2, 1, "until 5", "f", "k", 2, 2, "until 6")]
    later = asyncio.ensure_future(together.share("f", "k", *reads[0]))
    server.open.set()
    assert [await one for one in (*others, later)] == [2, 4, 2], "each has its answer, whoever has given up"
    assert len(server.made) == 2, "what is asked once the call is made is another one"


async def test_in_a_cluster_only_those_of_one_slot_go_together(clock: Clock) -> None:
    server = Server()
    server.open.set()
    keys = ["h:{a}:", "h:{b}:", "h:{a}@1:"]
    assert await asyncio.gather(*gathered(joined(server, tags=True), keys)) == [0, 2, 4]
    assert server.made == [("together", "h:{a}:", "f", "h:{a}:", 1, 0, "f", "h:{a}@1:", 1, 2), ("f", "h:{b}:", 1)]


async def test_many_are_several_calls_so_that_none_keeps_the_server_from_others(clock: Clock) -> None:
    server = Server()
    server.open.set()
    count = 2 * MOST + 1
    assert await asyncio.gather(*gathered(joined(server), ["k"] * count)) == [2 * n for n in range(count)]
    assert len(server.made) == 3


async def test_who_gives_up_costs_the_others_nothing(clock: Clock) -> None:
    server = Server()
    together = joined(server)
    first, second, third = gathered(together, ["k"] * 3)
    await asyncio.sleep(0)
    first.cancel()
    await server.asked.wait()
    assert server.made == [("together", "k", "f", "k", 1, 1, "f", "k", 1, 2)]
    second.cancel()
    server.open.set()
    assert await third == 4 and second.cancelled() and first.cancelled()


@pytest.mark.parametrize(("how", "way"), [("fails", "join"), ("fails", "share"), ("raves", "join")])
async def test_all_hear_of_a_server_that_gives_no_answers_and_the_next_are_asked_anew(
    clock: Clock, how: str, way: str
) -> None:
    server = Server(**{how: True})
    server.open.set()
    ask_together = getattr(joined(server), way)
    for _ in range(2):
        heard = await asyncio.gather(
            *(ask_together("f", "k", 1, number) for number in range(3)), return_exceptions=True
        )
        assert all(isinstance(one, BrokerUnavailable if how == "fails" else Exception) for one in heard)
    assert len(server.made) == 2


SHORTEST, LONGEST = 0.001, 0.004
BATCH = 0.01


class Spaced:
    """A policy that keeps a headway of some seconds between batches."""

    def __init__(self, headway: float) -> None:
        self._headway = headway

    def rule(self, load: Load) -> Rule:
        return Rule(1, self._headway)


async def serving(harness: Stand, *workers: str, model: str = "m", batch_seconds: float = BATCH) -> None:
    await harness.healthy(*workers, model=model, warm_up=((1, batch_seconds), (8, batch_seconds)))


async def test_entries_gather_while_no_slot_is_free_and_are_there_when_one_is(harness: Stand) -> None:
    await serving(harness, "gpu-0")
    await harness.broker.enqueue([ask()])
    assert harness.broker.linger == SHORTEST
    lease = await harness.claim()
    await harness.broker.enqueue([ask()])
    assert harness.broker.linger == LONGEST
    await harness.advance(0.006)
    assert harness.broker.linger == pytest.approx(BATCH - 0.006 - 0.001, abs=1e-4)
    await harness.advance(0.003)
    assert harness.broker.linger == SHORTEST
    await harness.answer(lease)
    await harness.broker.enqueue([ask()])
    assert harness.broker.linger == SHORTEST


async def test_of_several_slots_the_next_one_is_free_sooner_and_another_model_is_not_kept_waiting(
    harness: Stand,
) -> None:
    workers = ("gpu-0", "gpu-1", "gpu-2", "gpu-3")
    await serving(harness, *workers)
    await serving(harness, "other", model="other")
    for worker in workers:
        assert harness.broker.linger == SHORTEST
        await harness.broker.enqueue([ask()])
        await harness.claim(worker)
    await harness.broker.enqueue([ask()])
    assert harness.broker.linger == pytest.approx(BATCH / 4 - 0.001, abs=1e-4)
    await harness.broker.enqueue([ask(), ask(model="other")])
    assert harness.broker.linger == SHORTEST


@pytest.mark.parametrize(("headway", "gathered"), [(0.001, LONGEST), (0.016, 0.008), (0.5, 0.012)])
async def test_while_no_slot_is_free_entries_gather_for_half_a_headway_unless_another_model_may_be_asked(
    harness: Stand, headway: float, gathered: float
) -> None:
    alone = await harness.another(served=["m"])
    await serving(harness, "gpu-0", batch_seconds=1.0)
    await harness.broker.enqueue([ask()])
    assert isinstance(await harness.broker.claim(slot("gpu-0"), Spaced(headway)), Lease)
    for broker, most in ((alone, gathered), (harness.broker, LONGEST)):
        await broker.enqueue([ask()])
        assert broker.linger == pytest.approx(most, abs=1e-6)
