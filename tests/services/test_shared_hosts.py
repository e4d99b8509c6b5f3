"""Several hosts whose GPUs hold several models each: what each of them begins with, and what the fleet hears of it."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from headway.core.locality.placement import LEAST_OVERDUE
from headway.core.versions import read_weights
from headway.model import RequestOptions, WorkerInfo, WorkerStatus
from headway.runtime.request_id import new_id
from headway.worker.helping import StrayWatcher
from tests.services.fake_backend import ANYBODY
from tests.services.test_shared_gpus import BATCH, LOAD, Stand
from tests.virtual_time import Clock


@pytest.mark.parametrize(("room", "on"), [(1, {"a", "b", "c"}), (2, {"ab", "ac"})])
async def test_hosts_that_start_together_begin_with_different_models(room: int, on: set[str], clock: Clock) -> None:
    one = Stand(clock, "abc", 1, room)
    two = Stand(clock, "abc", 1, room, beside=one)
    three = Stand(clock, "abc", 1, room, beside=two)
    hosts = one, two, three
    await asyncio.gather(*(host.pool.start() for host in hosts))
    assert clock() >= LOAD
    assert {host.on[0] for host in hosts} == on
    await asyncio.gather(*(host.pool.stop() for host in hosts))


async def test_a_host_that_joins_begins_with_what_the_others_lack(clock: Clock) -> None:
    async with Stand(clock, "abc", 2, 1) as one:
        assert one.on == ["a", "b"]
        two = Stand(clock, "abc", 1, 1, beside=one)
        await two.pool.start()
        assert two.on == ["c"]
        await two.pool.stop()


async def test_what_a_host_is_to_keep_it_loads_whatever_the_others_have(clock: Clock) -> None:
    async with Stand(clock, "ab", 1, 1) as one:
        two = Stand(clock, "ab", 1, 1, beside=one, a=1)
        await two.pool.start()
        assert (one.on, two.on) == (["a"], ["a"])
        await two.pool.stop()


async def test_a_host_that_starts_a_model_anew_for_ever_does_not_keep_others_from_loading_it(
    clock: Clock,
) -> None:
    async with Stand(clock, "ab", 1, 1) as stand:
        assert stand.on == ["a"]

        async def start_on() -> None:
            for number in itertools.count():
                loading = number % 4 * LOAD / 4
                status = WorkerStatus.STARTING
                await stand.broker.heartbeat(
                    WorkerInfo(worker_id="alone/gpu-0", model="b", status=status, loading=loading)
                )
                await asyncio.sleep(LOAD / 4)

        starting, begun = asyncio.ensure_future(start_on()), clock()
        assert (await stand.ask("b")).output == "X"
        assert clock() - begun >= LEAST_OVERDUE, "it was waited for as long as it might have come"
        starting.cancel()


async def test_the_fleet_knows_the_models_that_are_cold_before_their_host_is_ready(clock: Clock) -> None:
    stand = Stand(clock, "abc", 1, 1)
    starting = asyncio.ensure_future(stand.pool.start())
    await asyncio.sleep(LOAD / 2)
    assert await stand.statuses() == {
        "a/gpu-0": WorkerStatus.STARTING,
        "b/gpu-0": WorkerStatus.COLD,
        "c/gpu-0": WorkerStatus.COLD,
    }
    await starting
    await stand.pool.stop()
    assert set((await stand.statuses()).values()) == {WorkerStatus.OFFLINE}


async def test_on_hosts_of_different_models_a_flood_costs_another_a_batch_and_uses_what_is_idle(
    clock: Clock,
) -> None:
    one = Stand(clock, "ab", 1, 2)
    two = Stand(clock, "bc", 1, 2, beside=one)
    three = Stand(clock, "ac", 1, 2, beside=two)
    async with one, two, three:
        calm = max([await one.latency("b") for _ in range(5)])
        flood = [asyncio.ensure_future(one.ask("a")) for _ in range(400)]
        await asyncio.sleep(BATCH / 2)
        flooded = max([await one.latency("b") for _ in range(10)])
        assert flooded <= calm + BATCH + 1e-6
        assert {"further-further-a/gpu-0", "a/gpu-0"} == {
            reply.ran.worker for reply in await asyncio.gather(*flood[:64]) if reply.ran
        }
        for waiting in flood:
            waiting.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def _asked_of(stand: Stand, model: str, version: str = "") -> str:
    """Version that answered a request, as the gateway goes by the workers of this instant."""
    workers = await stand.broker.workers()
    stand.gateway.served.learn(workers)
    options = RequestOptions(60.0, version=version)
    reply = await stand.gateway.ask(ANYBODY, new_id(), options, model, "x", b"")
    assert reply.ran is not None, reply.failure
    return reply.ran.version


async def test_the_hosts_of_two_versions_each_run_what_is_named_and_what_is_drawn(clock: Clock) -> None:
    one = Stand(clock, "ab", 1, 2, version="1")
    async with one, Stand(clock, "ab", 1, 2, beside=one, version="2"):
        assert [await _asked_of(one, "a", version) for version in "1212"] == ["1", "2", "1", "2"]
        one.gateway.served.weigh({"": read_weights("1=1")})
        assert [await _asked_of(one, "b") for _ in range(3)] == ["1", "1", "1"]


async def test_a_cold_version_is_loaded_when_it_is_named_and_not_for_what_another_version_answers(
    clock: Clock,
) -> None:
    one = Stand(clock, "ab", 1, 1, version="1")
    async with one, Stand(clock, "a", 1, 1, beside=one, version="2") as two:
        assert (one.on, two.on) == (["a"], ["a"])
        assert await _asked_of(one, "b", "1") == "1"
        assert one.on == ["b"], "a of version 1 made room"
        flood = [asyncio.ensure_future(_asked_of(one, "a", "2")) for _ in range(100)]
        await asyncio.sleep(3 * LOAD)
        assert one.on == ["b"], "a host loaded a version that none of these requests is for"
        assert set(await asyncio.gather(*flood)) == {"2"}
        assert await _asked_of(one, "a", "1") == "1"


async def test_a_cold_version_gets_its_weight(clock: Clock) -> None:
    one = Stand(clock, "ab", 1, 1, version="1")
    async with one, Stand(clock, "a", 1, 1, beside=one, version="2"):
        assert await _asked_of(one, "b", "1") == "1"
        assert (await one.statuses())["a/gpu-0"] is WorkerStatus.COLD
        one.gateway.served.weigh({"": read_weights("1=3,2=1")})  # A number of 0.5 draws the first of them.
        assert await _asked_of(one, "a") == "1"


async def test_a_shared_gpu_that_is_never_idle_helps_a_version_that_has_left(clock: Clock) -> None:
    one = Stand(clock, "ab", 1, 2, version="1")
    async with one, Stand(clock, "a", 1, 1, beside=one, version="2") as two:
        watcher = StrayWatcher(lambda: one.pool.batchers, one.broker, clock)
        workers = await one.broker.workers()
        one.gateway.served.learn(workers)
        one.gateway.served.weigh({"": read_weights("2=1")})
        waiting = [asyncio.ensure_future(one.ask("a")) for _ in range(20)]
        await asyncio.sleep(0)
        await two.pool.drain()
        one.gateway.served.weigh({"": read_weights("1=1")})
        flood = [asyncio.ensure_future(one.ask(model)) for model in "ab" for _ in range(200)]
        await asyncio.sleep(BATCH / 2)
        await watcher.look()
        versions = [reply.ran.version for reply in await asyncio.gather(*waiting) if reply.ran is not None]
        assert versions[-8:] == ["1"] * 8, "what waited for the version that has left was answered by the other"
        assert not [one for one in flood if one.cancelled()]
        assert sum(not one.done() for one in flood) > 100, "it was helped while the GPU was in demand"
        await asyncio.gather(*flood)
