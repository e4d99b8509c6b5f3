"""Limits follow the available workers: gateways, workers and a controller together."""

import asyncio
import math
from typing import Any

import pytest

from headway.brokers.memory.broker import MemoryBroker
from headway.core.capacity import STALE_AFTER
from headway.gateway.gateway import Gateway
from headway.model import Capacity, Principal, ProcessInfo, Reply, Role
from tests.services.fake_backend import FakeBackend
from tests.services.fake_gpu import FakeGpu
from tests.services.requests import request
from tests.services.roles import MAX_BATCH, Cut, Fleets

BATCH_SECONDS = 0.2
PER_WORKER = MAX_BATCH / BATCH_SECONDS
USABLE = 0.7
TENANT = Principal("somebody", "acme", 0)
PAID, FREE = 1, 2


class Counting:
    """A waiter that counts answers, and refusals by reason."""

    def __init__(self) -> None:
        self.ok = 0
        self.refused: dict[str, int] = {}

    def admitted(self) -> None:
        raise AssertionError("none of them is a task")

    def answer(self, reply: Reply) -> None:
        if reply.failure is None:
            self.ok += 1
        else:
            reason = reply.failure.reason
            self.refused[reason] = self.refused.get(reason, 0) + 1


async def flood(gateway: Gateway, tier: int, rate: float, seconds: float, principal: Principal = TENANT) -> Counting:
    counting = Counting()
    for _ in range(int(rate * seconds)):
        gateway.submit(counting, request("text", principal, timeout=2.0, tier=tier))
        await asyncio.sleep(1.0 / rate)
    return counting


def levels(rates: list[float]) -> list[float]:
    """Return the levels in a series of rates. A new level differs by more than a tenth."""
    stood: list[float] = []
    for rate in rates:
        if not stood or abs(rate - stood[-1]) > 0.1 * stood[-1]:
            stood.append(rate)
    return stood


async def sampled(gateway: Gateway, seconds: float) -> list[float]:
    rates = []
    for _ in range(int(seconds * 10)):
        await asyncio.sleep(0.1)
        rates.append(gateway.limiter.throttles["m"].rate)
    return rates


async def up(fleets: Fleets, workers: int) -> tuple[Gateway, list[Cut]]:
    """Start a gateway and workers, and return the workers' connections, too. One that is `away` is like a killed worker."""
    broker = fleets.broker
    ways = []
    for number in range(workers):
        way = Cut(broker)
        fleets.broker = way  # type: ignore[assignment]
        await fleets.worker(f"host-{number}", FakeBackend(BATCH_SECONDS)).start()
        ways.append(way)
    fleets.broker = broker
    entrance, gateway = fleets.gateway()
    control, _ = fleets.controller("control")
    await control.start()
    await entrance.start()
    return gateway, ways


async def test_half_the_workers_gone_tightens_within_3_s_and_their_return_relaxes_in_one_step(fleets: Fleets) -> None:
    gateway, hosts = await up(fleets, 4)
    flooding = asyncio.ensure_future(flood(gateway, FREE, 200.0, 30.0))
    await asyncio.sleep(5.0)
    whole = 4 * PER_WORKER * USABLE
    assert gateway.limiter.throttles["m"].rate == pytest.approx(whole, rel=0.05)
    for host in hosts[:2]:
        host.away = True
    falling = await sampled(gateway, 3.0)
    assert falling[-1] == pytest.approx(whole / 2, rel=0.05)
    assert levels(falling) == pytest.approx([whole, whole / 2], rel=0.05)
    assert levels(await sampled(gateway, 8.0)) == pytest.approx([whole / 2], rel=0.05)
    for number in range(2):
        await fleets.worker(f"heir-{number}", FakeBackend(BATCH_SECONDS)).start()
    rising, depths = [], []
    for _ in range(60):
        rising += await sampled(gateway, 0.1)
        depths.append(sum(depth.depth for depth in await fleets.broker.depths()))
    assert rising[-1] == pytest.approx(whole, rel=0.05)
    assert levels(rising) == sorted(levels(rising)), "one step up for each worker that is back, and none down"
    assert max(rising) == pytest.approx(whole, rel=0.05)
    assert max(depths) <= 2 * whole
    free = await flooding
    assert set(free.refused) <= {"capacity", "total"}
    assert free.refused.get("total", 0) <= 2 * MAX_BATCH, "what the two ran when they were killed"


@pytest.mark.parametrize(
    ("floods", "flood_tier"), [("the other gateway", FREE), ("both gateways", FREE), ("both gateways", PAID)]
)
async def test_a_flood_of_the_lowest_tier_takes_from_nobody(floods: str, flood_tier: int, fleets: Fleets) -> None:
    """The flood comes from another free tenant, or from a paid tenant that asks for the free tier."""
    here, _ = await up(fleets, 2)
    entrance, there = fleets.gateway()
    await entrance.start()
    flooded = [there] if floods == "the other gateway" else [here, there]
    other = Principal("eve", "globex", flood_tier)
    for seconds in (4.0, 6.0):
        quiet, *loud = await asyncio.gather(
            flood(here, FREE, 7.0, seconds), *(flood(one, FREE, 5 * 2 * PER_WORKER, seconds, other) for one in flooded)
        )
    await asyncio.sleep(1.0)
    assert (quiet.ok, quiet.refused) == (42, {})
    assert all(set(one.refused) == {"capacity"} for one in loud)


def capacity(usable: float) -> Capacity:
    return Capacity(model="m", healthy=1, degraded=0, items_per_second=usable / 0.7, usable_per_second=usable)


@pytest.mark.parametrize("silence", ["nobody publishes", "the broker is away"])
async def test_a_capacity_of_which_nothing_is_heard_any_more_throttles_nobody(silence: str, fleets: Fleets) -> None:
    known = fleets.fleet
    fleets.fleet = seen = Cut(known)
    entrance, gateway = fleets.gateway()
    await entrance.start()
    throttle = gateway.limiter.throttles["m"]
    await known.publish(capacity(100.0))
    await asyncio.sleep(1.0)
    assert throttle.rate == pytest.approx(100.0)
    seen.away = silence == "the broker is away"
    await asyncio.sleep(STALE_AFTER - 2.0)
    assert throttle.rate == pytest.approx(100.0)
    await asyncio.sleep(4.0)
    assert throttle.rate == math.inf
    seen.away = False
    await known.publish(capacity(50.0))
    await asyncio.sleep(1.5)
    assert throttle.rate == pytest.approx(50.0)


async def test_gateways_that_are_gone_have_no_share(fleets: Fleets) -> None:
    entrance, gateway = fleets.gateway()
    known, way = fleets.fleet, Cut(fleets.fleet)
    fleets.fleet = way
    other, _ = fleets.gateway()
    await entrance.start()
    await other.start()
    await fleets.fleet.publish(capacity(100.0))
    await asyncio.sleep(1.5)
    assert gateway.limiter.gateways == 2
    assert gateway.limiter.throttles["m"].rate == pytest.approx(50.0)
    way.away = True
    for _ in range(4):
        await asyncio.sleep(1.0)
        await known.publish(capacity(100.0))
    await asyncio.sleep(0.6)
    assert gateway.limiter.gateways == 1
    assert gateway.limiter.throttles["m"].rate == pytest.approx(100.0)


async def test_gateways_of_another_model_share_limits_and_no_capacity(fleets: Fleets) -> None:
    entrance, gateway = fleets.gateway()
    await entrance.start()
    other = ProcessInfo(
        id="other", role=Role.GATEWAY, host="there", pid=9, model="another", arrivals={"another": (0.0, 900.0)}
    )
    await fleets.fleet.heartbeat(other)
    await fleets.fleet.publish(capacity(100.0))
    await asyncio.sleep(1.0)
    assert gateway.limiter.gateways == 2
    assert gateway.limiter.throttles["m"].rate == pytest.approx(100.0)


@pytest.mark.parametrize("whose", ["the", "the GPU's"])
async def test_a_worker_whose_memory_is_scarce_works_on_and_counts_as_lost_capacity(whose: str, fleets: Fleets) -> None:
    gpu, used = FakeGpu(), 0.5
    backends = [FakeBackend(BATCH_SECONDS), FakeBackend(BATCH_SECONDS)]
    await fleets.worker("full", backends[0], memory=lambda: used, gpu=gpu).start()
    await fleets.worker("fine", backends[1]).start()
    entrance, gateway = fleets.gateway()
    control, _ = fleets.controller("control")
    await control.start()
    await entrance.start()

    async def seen(percent: int) -> tuple[Any, str, dict[str, str]]:
        """Return the throttle's rate and the workers' status and reasons, once this memory use has settled."""
        nonlocal used
        if whose == "the":
            used = percent / 100
        else:
            gpu.use(percent)
        await flood(gateway, FREE, 100.0, 3.0)
        workers = {one.worker_id: one for one in await fleets.broker.workers()}
        assert all(one.scarce is bool(one.reason) for one in workers.values())
        reasons = {id: one.reason for id, one in workers.items() if one.reason}
        return gateway.limiter.throttles["m"].rate, workers["full/gpu-0"].status.value, reasons

    whole = pytest.approx(2 * PER_WORKER * USABLE, rel=0.05), "healthy", dict[str, str]()
    half = pytest.approx(PER_WORKER * USABLE, rel=0.05), "degraded"
    told = f"% of {whose} memory is in use"
    assert await seen(50) == whole
    assert await seen(93) == (*half, {"full/gpu-0": f"93{told}"})
    assert await seen(87) == (*half, {"full/gpu-0": f"87{told}"}), "not ample yet"
    assert await seen(80) == whole
    gpu.settled = 0.96
    assert await seen(96) == (whole if whose != "the" else (*half, {"full/gpu-0": f"96{told}"}))
    await seen(99)
    before = len(backends[0].batches)
    await flood(gateway, PAID, 1.5 * PER_WORKER, 3.0)  # More than the other worker can handle.
    assert len(backends[0].batches) > before, "it goes on"


async def test_while_memory_is_scarce_the_lowest_tier_is_held(monkeypatch: pytest.MonkeyPatch, fleets: Fleets) -> None:
    short = False
    monkeypatch.setattr(MemoryBroker, "memory_pressure", property(lambda broker: short))
    gateway, _ = await up(fleets, 2)
    whole = 2 * PER_WORKER * USABLE
    await flood(gateway, FREE, 100.0, 3.0)
    assert gateway.limiter.throttles["m"].rate == pytest.approx(whole, rel=0.05)
    short = True
    await asyncio.sleep(1.0)
    free = await flood(gateway, FREE, 10.0, 1.0)
    assert (free.ok, free.refused) == (0, {"capacity": 10})
    [told] = await fleets.fleet.capacities()
    assert (told.scarce, told.healthy, told.usable_per_second) == (True, 2, 0.0)
    short = False
    await asyncio.sleep(1.0)
    assert gateway.limiter.throttles["m"].rate == pytest.approx(whole, rel=0.05)
