import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import aiohttp
import pytest

from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.dead_letters import RedisDeadLetters
from headway.model import DeadLetter, QueueName
from tests.contracts.brokers import ask
from tests.dashboard.chromium import Chromium, Page
from tests.e2e.fleet import Fleet
from tests.e2e.server import Server
from tests.servers.redis import RedisServer

TARGET = "tests.targets.journal:Slow"
TOKEN = "s3cret-of-operators"
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
LIVE = "document.querySelector('#state-text').textContent === 'Live'"
T = TypeVar("T")


class Stage:
    """A real fleet and one Chromium, shared by all tests of the dashboard, and the event loop that drives both."""

    def __init__(
        self,
        runner: asyncio.Runner,
        it: Fleet,
        redis: RedisServer,
        guarded: Server,
        chromium: Chromium,
        link: RedisConnection,
    ) -> None:
        self.runner, self.fleet, self.guarded, self.chromium, self.link = runner, it, guarded, chromium, link
        self.redis = redis
        self.pages: list[Page] = []

    def run(self, act: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(act)

    async def open(self, server: Server) -> Page:
        page = await self.chromium.open(f"http://127.0.0.1:{server.admin_port}/dashboard")
        self.pages.append(page)
        return page

    @property
    def gateway(self) -> Server:
        return self.fleet.gateways[0]

    async def load(self) -> None:
        """Send requests in two tiers until cancelled. The model rejects some of them."""
        url, tiers = f"http://127.0.0.1:{self.gateway.port}/v1/inference", ("paid", "free")
        async with aiohttp.ClientSession() as client:

            async def one(number: int) -> None:
                count = number
                while True:
                    text = "exception" if count % 40 == 5 else f"text {count}"
                    headers = {"X-Request-Tier": tiers[count % 2]}
                    async with client.post(url, json={"input": text}, headers=headers) as answer:
                        await answer.read()
                    count += 8

            await asyncio.gather(*(one(number) for number in range(8)))

    async def letter(self, id: str) -> None:
        """Add a dead letter with a script in every field."""
        letters = RedisDeadLetters(self.link, [QueueName("default")])
        entry = ask(f"text of {id} {EVIL}", id=id, tenant=f"tenant {EVIL}", model="default")
        await letters.add(
            DeadLetter(entry=entry, error=f"error {EVIL}", cause="item", attempts=1, worker=EVIL, died_at=4e9)
        )


@pytest.fixture(autouse=True)
def quiet(stage: Stage) -> Iterator[None]:
    """Check that no page logged an unexpected error or contacted another host."""
    yield
    pages, stage.pages = stage.pages, []
    for page in pages:
        stage.run(page.send("Page.close"))
    for page in pages:
        hosts = {url.split("/")[2] for url in page.requests if url.startswith("http")}
        assert hosts <= {f"127.0.0.1:{server.admin_port}" for server in (*stage.fleet.everybody(), stage.guarded)}
        assert not page.unexpected, page.unexpected


async def under_load(stage: Stage, act: Coroutine[Any, Any, T]) -> T:
    loading = asyncio.ensure_future(stage.load())
    try:
        return await act
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


async def tab_to(page: Page, name: str) -> None:
    """Press Tab until the element with this label or text has the focus. The focus must be visible."""
    label = "(document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent)"
    for _ in range(200):
        if (await page.run(f"{label}")).startswith(name):
            assert await page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            return
        await page.press("Tab", 9)
    raise AssertionError(f"no Tab leads to {name}")


async def enter(page: Page) -> None:
    await page.press("Enter", 13, "\r")


async def sign_in(page: Page) -> None:
    """Sign in, unless this browser already has a session."""
    await page.until("!document.querySelector('#sign-in').hidden && document.activeElement.id === 'token' || " + LIVE)
    if not await page.run(LIVE):
        await page.write(TOKEN)
        await enter(page)
        await page.until(LIVE)
