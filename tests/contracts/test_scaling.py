"""Promises of every driver of the autoscaler.

A further driver is a line in PLATFORMS: it makes the driver, with model `m` at one process of `slots` workers, and says
how to have its platform refuse and be away.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway.errors import ScalingRefused, ScalingUnavailable
from headway.ports import ScalingDriver
from headway.scaling.kubernetes import KubernetesApi, KubernetesScaling, ServiceAccount, read_target
from headway.scaling.local import LocalScaling
from headway.scaling.none import NoScaling
from tests.servers.kubernetes import EVERYTHING, Refusal, account, serving
from tests.services.fake_scaling import FakeScaling


@dataclass
class Platform:
    """Platform under test.

    Attributes:
        driver: driver of it.
        slots: workers of one process.
        first: workers of model `m` at first.
        knows: whether it can tell what it was asked for; otherwise that is always 0.
        stranger: name of a model that it does not know; empty: it knows all.
        refuse, be_away: have it refuse, or not answer, from now on; None: it cannot.
    """

    driver: ScalingDriver
    slots: int = 1
    first: int = 1
    knows: bool = True
    stranger: str = "stranger"
    refuse: Callable[[], None] | None = None
    be_away: Callable[[], None] | None = None


@asynccontextmanager
async def fake(slots: int = 1) -> AsyncIterator[Platform]:
    driver = FakeScaling({"m": slots}, slots)

    def refuse() -> None:
        driver.trouble = ScalingRefused("another owns the replicas. Remove it.")

    def be_away() -> None:
        driver.trouble = ScalingUnavailable("no answer within 5 s")

    yield Platform(driver, slots, slots, refuse=refuse, be_away=be_away)


@asynccontextmanager
async def none() -> AsyncIterator[Platform]:
    yield Platform(NoScaling(), first=0, knows=False, stranger="")


@dataclass
class FakePool:
    """Pool that takes any size."""

    size: int = 1
    most: int = 100
    serving: bool = True

    async def resize(self, size: int) -> None:
        self.size = size


@asynccontextmanager
async def local() -> AsyncIterator[Platform]:
    pool = FakePool()

    def refuse() -> None:
        pool.most = 1

    def be_away() -> None:
        pool.serving = False

    yield Platform(LocalScaling({"m": pool}), refuse=refuse, be_away=be_away)


@asynccontextmanager
async def kubernetes(slots: int = 1) -> AsyncIterator[Platform]:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as cluster:
        cluster.users["first"] = "controller", EVERYTHING
        cluster.workload("deployments", "workers", 1)
        api = KubernetesApi(cluster.url, ServiceAccount(account(Path(folder, "account"), cluster)), time.monotonic)
        driver = KubernetesScaling(api, {"m": read_target("deployment/workers", slots)})

        def refuse() -> None:
            cluster.users["first"] = "controller", []

        def be_away() -> None:
            cluster.instead.append(_broken)

        yield Platform(driver, slots, slots, refuse=refuse, be_away=be_away)


def _broken() -> None:
    raise Refusal(503, "ServiceUnavailable", "etcd is away")


Make = Callable[[], AbstractAsyncContextManager[Platform]]

PLATFORMS: dict[str, Make] = {
    "fake": fake,
    "fake of processes with 4 workers": lambda: fake(4),
    "none": none,
    "local": local,
    "kubernetes": kubernetes,
    "kubernetes of pods with 4 workers": lambda: kubernetes(4),
}


@pytest.fixture(params=PLATFORMS)
def make(request: pytest.FixtureRequest) -> Make:
    return PLATFORMS[request.param]


async def test_what_was_asked_for_is_current_at_once(make: Make) -> None:
    async with make() as platform:
        driver, slots = platform.driver, platform.slots
        assert await driver.current("m") == platform.first
        for workers in (3 * slots, 2 * slots, 2 * slots, slots):
            await driver.scale("m", workers)
            assert await driver.current("m") == (workers if platform.knows else 0)


async def test_a_number_that_whole_processes_do_not_have_is_rounded_up(make: Make) -> None:
    async with make() as platform:
        driver, slots, knows = platform.driver, platform.slots, platform.knows
        await driver.scale("m", 2 * slots + 1)
        assert await driver.current("m") == (3 * slots if slots > 1 else 3) * knows
        await driver.scale("m", 1)
        assert await driver.current("m") == slots * knows


def test_a_model_that_the_platform_does_not_have_is_refused_by_name(make: Make) -> None:
    async def main() -> None:
        async with make() as platform:
            if not platform.stranger:
                return
            for call in (platform.driver.scale(platform.stranger, 2), platform.driver.current(platform.stranger)):
                with pytest.raises(ScalingRefused, match=platform.stranger):
                    await call
            assert await platform.driver.current("m") == platform.first

    asyncio.run(main())


async def test_costs_of_processes_that_are_gone_do_no_harm(make: Make) -> None:
    async with make() as platform:
        await platform.driver.mark({})
        await platform.driver.mark({"nobody": 3})
        await platform.driver.mark({"nobody": 3})
        assert await platform.driver.current("m") == platform.first


def test_a_platform_that_refuses_says_why(make: Make) -> None:
    async def main() -> None:
        async with make() as platform:
            if platform.refuse is None:
                return
            platform.refuse()
            with pytest.raises(ScalingRefused, match=r"\. [A-Z].*\.$"):
                await platform.driver.scale("m", 2 * platform.slots)

    asyncio.run(main())


def test_a_platform_that_does_not_answer_is_told_from_one_that_refuses(make: Make) -> None:
    async def main() -> None:
        async with make() as platform:
            if platform.be_away is None:
                return
            platform.be_away()
            with pytest.raises(ScalingUnavailable):
                await platform.driver.scale("m", 2 * platform.slots)

    asyncio.run(main())
