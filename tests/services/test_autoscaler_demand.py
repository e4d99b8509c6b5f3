"""Demand by which the autoscaler goes: what a worker could have answered, and not what nobody waits for long enough."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from headway.controller.autoscaler import Autoscaler
from headway.gateway.capacity_watcher import CapacityWatcher
from headway.model import ProcessInfo
from headway.scaling.local import LocalScaling
from tests.services.fake_backend import FakeBackend
from tests.services.scaling_scene import QUICK
from tests.services.stand import Stand, codes
from tests.virtual_time import Clock

WORKERS = 4
BATCH = 0.5
"""Seconds of a batch of any size."""
SECONDS = 60


async def grown(clock: Clock, rate: int, timeout: float, leaves_after: float = -1.0, lowest: bool = False) -> int:
    """Workers after a minute of such requests beside a few honest ones, nearly all of which must be answered.

    Arguments:
        clock: virtual seconds.
        rate: requests per second.
        timeout: seconds for which each is wanted.
        leaves_after: seconds after which its client leaves; negative: it stays.
        lowest: whether they are of the lowest tier.
    """
    tier, limits = 2 if lowest else 1, replace(QUICK, most=WORKERS)
    async with Stand(
        clock, *(FakeBackend(BATCH) for _ in range(WORKERS)), slots=1, max_batch=4, policy="window"
    ) as stand:

        def member() -> ProcessInfo:
            rates = stand.gateway.limiter.throttles["m"].rates
            return msgspec.structs.replace(stand._member(), model="m", arrivals={"m": (rates.higher, rates.lowest)})

        stand.membership._describe = member
        CapacityWatcher(stand.gateway, stand.fleet, clock).start(stand.service._supervisor)
        stand.controller.autoscaler = Autoscaler(
            LocalScaling({"m": stand.pool}), lambda model: limits, stand.counters, clock, "local"
        )
        stand.controller.autoscaler.start(stand.service._supervisor)
        await asyncio.gather(*(stand.asking("first", timeout=20.0) for _ in range(8)))
        honest, others = [], []
        for number in range(rate * SECONDS):
            if number % (rate // 2) == 0:
                honest.append(stand.asking("honest", timeout=20.0))
            others.append(asked := stand.asking("x", timeout=timeout, tier=tier))
            if leaves_after >= 0:
                asyncio.get_running_loop().call_later(leaves_after, asked.cancel)
            await asyncio.sleep(1 / rate)
        size = stand.pool.size
        await asyncio.gather(*others, return_exceptions=True)
        answers = codes(await asyncio.gather(*honest))
        assert answers.count("ok") >= 0.9 * len(answers)
        return size


@pytest.mark.parametrize(
    ("timeout", "leaves_after", "lowest", "workers"),
    [
        (0.001, -1.0, False, 1),
        (20.0, 0.0, False, 1),
        (20.0, 0.01, False, 1),
        (0.001, -1.0, True, 1),
        (20.0, 0.01, True, 1),
        (20.0, -1.0, False, WORKERS),
        (1.2, -1.0, False, WORKERS),
        (20.0, 1.2, False, WORKERS),
        (1.2, -1.0, True, WORKERS),
    ],
)
async def test_what_a_worker_could_have_answered_in_time_asks_for_workers_and_nothing_else(
    timeout: float, leaves_after: float, lowest: bool, workers: int, clock: Clock
) -> None:
    assert await grown(clock, 40, timeout, leaves_after, lowest) == workers
