"""Promises of every driver of the autoscaler.

A further driver is a line in PLATFORMS: it makes the driver, with one worker of model `m`, and says how to have
its platform refuse and be away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest

from headway.errors import ScalingRefused, ScalingUnavailable
from headway.ports import ScalingDriver
from headway.scaling.local import LocalScaling
from headway.scaling.none import NoScaling
from tests.services.fake_scaling import FakeScaling


@dataclass
class Platform:
    """Platform under test.

    Attributes:
        driver: driver of it.
        first: workers of model `m` at first.
        knows: whether it can tell what it was asked for; otherwise that is always 0.
        stranger: name of a model that it does not know; empty: it knows all.
        refuse, be_away: have it refuse, or not answer, from now on; None: it cannot.
    """

    driver: ScalingDriver
    first: int = 1
    knows: bool = True
    stranger: str = "stranger"
    refuse: Callable[[], None] | None = None
    be_away: Callable[[], None] | None = None


@asynccontextmanager
async def fake() -> AsyncIterator[Platform]:
    driver = FakeScaling({"m": 1})

    def refuse() -> None:
        driver.trouble = ScalingRefused("another owns the replicas. Remove it.")

    def be_away() -> None:
        driver.trouble = ScalingUnavailable("no answer within 5 s")

    yield Platform(driver, refuse=refuse, be_away=be_away)


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


Make = Callable[[], AbstractAsyncContextManager[Platform]]

PLATFORMS: dict[str, Make] = {
    "fake": fake,
    "none": none,
    "local": local,
}


@pytest.fixture(params=PLATFORMS)
def make(request: pytest.FixtureRequest) -> Make:
    return PLATFORMS[request.param]


async def test_what_was_asked_for_is_current_at_once(make: Make) -> None:
    async with make() as platform:
        driver = platform.driver
        assert await driver.current("m") == platform.first
        for workers in (3, 2, 2, 1):
            await driver.scale("m", workers)
            assert await driver.current("m") == (workers if platform.knows else 0)


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


def test_a_platform_that_refuses_says_why(make: Make) -> None:
    async def main() -> None:
        async with make() as platform:
            if platform.refuse is None:
                return
            platform.refuse()
            with pytest.raises(ScalingRefused, match=r"\. [A-Z].*\.$"):
                await platform.driver.scale("m", 2)

    asyncio.run(main())


def test_a_platform_that_does_not_answer_is_told_from_one_that_refuses(make: Make) -> None:
    async def main() -> None:
        async with make() as platform:
            if platform.be_away is None:
                return
            platform.be_away()
            with pytest.raises(ScalingUnavailable):
                await platform.driver.scale("m", 2)

    asyncio.run(main())
