"""The dashboard in a real browser, over a fleet of real processes: one fleet and one browser for all tests here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.dead_letters import RedisDeadLetters
from headway.model import DeadLetter
from tests.clients.environments import FOLDER, REQUIRED
from tests.contracts.brokers import ask
from tests.dashboard.chromium import Chromium, Page, browser
from tests.e2e.fleet import Fleet, fleet
from tests.e2e.server import Server
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.processes

TARGET = "tests.targets.journal:Slow"
TOKEN = "s3cret-of-operators"
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
LIVE = "document.querySelector('#state-text').textContent === 'Live'"
DARK = "#171d27"
T = TypeVar("T")


class Stage:
    """The fleet, the browser, and the loop in which a test speaks to both."""

    def __init__(
        self, runner: asyncio.Runner, it: Fleet, guarded: Server, chromium: Chromium, link: RedisConnection
    ) -> None:
        self.runner, self.fleet, self.guarded, self.chromium, self.link = runner, it, guarded, chromium, link
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
        """Ask for ever, in two tiers; some inputs are refused by the model."""
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
        """Put a dead letter there whose every name is a script."""
        letters = RedisDeadLetters(self.link, ["default"])
        entry = ask(f"text of {id} {EVIL}", id=id, tenant=f"tenant {EVIL}", model="default")
        await letters.add(
            DeadLetter(entry=entry, error=f"error {EVIL}", cause="item", attempts=1, worker=EVIL, died_at=4e9)
        )


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("dashboard")
    with asyncio.Runner() as runner, ExitStack() as stack:
        held = AsyncExitStack()
        chromium = runner.run(held.enter_async_context(browser(folder)))
        stack.callback(lambda: runner.run(held.aclose()))
        redis = stack.enter_context(RedisServer("valkey", folder / "redis"))
        it = stack.enter_context(
            fleet(folder, redis, gateways=1, workers=2, controllers=1, target=TARGET, lawful=False, gateway_flags=())
        )
        it.expected |= {"batch failed", "worker process ended", "a browser could not sign in: wrong service token"}
        guarded = it.launch("controller", "--admin-token", TOKEN)
        guarded.ready()
        link = RedisConnection(redis.url, process="test")
        runner.run(link.open())
        try:
            yield Stage(runner, it, guarded, chromium, link)
        finally:
            runner.run(link.close())


@pytest.fixture(autouse=True)
def quiet(stage: Stage) -> Iterator[None]:
    """No page complains, and none asks another host."""
    yield
    pages, stage.pages = stage.pages, []
    for page in pages:
        stage.run(page.send("Page.close"))
    for page in pages:
        hosts = {url.split("/")[2] for url in page.requests if url.startswith("http")}
        assert hosts <= {f"127.0.0.1:{server.admin_port}" for server in (*stage.fleet.everybody(), stage.guarded)}
        assert not page.complaints, page.complaints


async def under_load(stage: Stage, act: Coroutine[Any, Any, T]) -> T:
    loading = asyncio.ensure_future(stage.load())
    try:
        return await act
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


MOVES = {
    "requests": "parseFloat(document.querySelector('#figures li b').textContent) > 0",
    "latency": "[...document.querySelectorAll('#latency tbody tr')].slice(1).every((row) => / m?s/.test(row.cells[3].textContent))",
    "capacity": "parseFloat(document.querySelector('#capacity tbody tr').cells[1].textContent) > 0",
    "queue": "document.querySelectorAll('#queue tbody tr').length === 3",
    "refusals": "document.querySelector('#refusals').textContent.includes('rejected_by_model')",
    "workers": "document.querySelectorAll('#workers tbody .dot.good').length === 2",
    "processes": "document.querySelectorAll('#processes tbody tr').length === 5",
    "busy": "[...document.querySelectorAll('#workers tbody tr')].every((row) => parseInt(row.cells[3].textContent) > 0)",
    "letters": "Number(document.querySelector('#letters-count').textContent) > 0",
}
PAINTED = """[...document.querySelectorAll('canvas')].every((canvas) => {
  const { width, height } = canvas, data = canvas.getContext('2d').getImageData(0, 0, width, height).data;
  return data.some((value, index) => index % 4 === 3 && value > 0);
})"""


@pytest.mark.parametrize("role", ["gateway", "worker"])
def test_every_panel_moves_under_load_at_any_process(stage: Stage, role: str) -> None:
    async def act() -> None:
        page = await stage.open(stage.gateway if role == "gateway" else stage.fleet.workers[0])
        await page.until(LIVE)
        await page.run("document.querySelector('#batches').open = true")
        for panel, moves in MOVES.items():
            await page.until(moves)
            assert panel
        workers = [stage.fleet.slot(worker) for worker in stage.fleet.workers]
        for worker in workers:
            await page.until(f"document.querySelector('#batches tbody').textContent.includes({json.dumps(worker)})")
        await page.until(f"document.querySelectorAll('.lane canvas').length === 2 && {PAINTED}")
        assert "free" in await page.text("#batches")

    stage.run(under_load(stage, act()))


def test_a_killed_worker_is_seen_and_its_return(stage: Stage) -> None:
    async def act() -> None:
        page = await stage.open(stage.gateway)
        await page.until(LIVE)
        worker = stage.fleet.workers[0]
        name = stage.fleet.slot(worker)
        http = aiohttp.ClientSession()
        async with http, http.get(f"http://127.0.0.1:{worker.admin_port}/internal/workers") as answer:
            pid = next(one["pid"] for one in (await answer.json())["workers"] if one["worker_id"] == name)
        os.kill(pid, signal.SIGKILL)
        await page.until(f"document.querySelector('#events').textContent.includes({json.dumps(name + ' is starting')})")
        back = json.dumps(f"{name} is healthy, after 1 restart")
        await page.until(f"document.querySelector('#events').textContent.includes({back})")

    stage.run(act())


def test_a_dead_letter_is_shown_as_text_replayed_and_purged_by_keyboard_alone(stage: Stage) -> None:
    async def act() -> None:
        for id in ("replayed", "purged"):
            await stage.letter(id)
        page = await stage.open(stage.gateway)
        await page.until("document.querySelector('#letters').textContent.includes('req_purged')")
        shown = await page.text("#letters")
        assert f"error {EVIL}" in shown and f"tenant {EVIL}" in shown, "names are text"
        await tab_to(page, "Show req_replayed")
        await enter(page)
        await page.until("document.querySelector('#dialog').open")
        body = await page.text("#dialog")
        assert f"text of replayed {EVIL}" in body and EVIL in body
        await page.press("Escape", 27)
        await page.until("!document.querySelector('#dialog').open")
        for act, id in (("Replay", "replayed"), ("Purge", "purged")):
            await tab_to(page, f"{act} req_{id}")
            await enter(page)
            await page.until("document.querySelector('#dialog').open")
            assert (await page.run("document.activeElement.textContent")) == "Cancel", (
                "the harmless answer has the focus"
            )
            await page.press("Escape", 27)
            await page.until("!document.querySelector('#dialog').open")
            assert f"req_{id}" in await page.text("#letters"), "asked twice: nothing has happened"
            await tab_to(page, f"{act} req_{id}")
            await enter(page)
            await page.until("document.querySelector('#dialog').open")
            await tab_to(page, act)
            await enter(page)
            await page.until(f"!document.querySelector('#letters').textContent.includes('req_{id}')")
        assert "taken" not in await page.run("document.title")
        assert (
            await page.run("document.querySelectorAll('main img, main script, dialog img, dialog script').length") == 0
        )

    stage.run(act())


async def tab_to(page: Page, name: str) -> None:
    """Press Tab until an element of this label or text has the focus, which has to be seen."""
    label = "(document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent)"
    for _ in range(200):
        if (await page.run(f"{label}")).startswith(name):
            assert await page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            return
        await page.press("Tab", 9)
    raise AssertionError(f"no Tab leads to {name}")


async def enter(page: Page) -> None:
    await page.press("Enter", 13, "\r")


def test_signing_in_and_out_by_keyboard_and_the_cookie_after_it(stage: Stage) -> None:
    async def act() -> None:
        page = await stage.open(stage.guarded)
        await page.until("!document.querySelector('#sign-in').hidden && document.activeElement.id === 'token'")
        await page.write("wrong")
        await enter(page)
        await page.until("document.querySelector('#sign-in-error').textContent.includes('not the service token')")
        page.complaints.clear()  # Chromium notes every 401 in the console.
        await page.write(TOKEN)
        await enter(page)
        await page.until(LIVE)
        assert await page.run("document.cookie") == ""
        assert not any(TOKEN in url for url in page.requests)
        cookies = (await page.send("Network.getCookies"))["cookies"]
        assert [(one["httpOnly"], one["sameSite"]) for one in cookies] == [(True, "Strict")]
        await page.until("document.querySelectorAll('#processes tbody tr').length === 5")
        stolen = {cookies[0]["name"]: cookies[0]["value"]}
        url = f"http://127.0.0.1:{stage.guarded.admin_port}/internal/dlq"
        async with aiohttp.ClientSession(cookies=stolen, cookie_jar=aiohttp.CookieJar(unsafe=True)) as thief:
            async with thief.get(url) as answer:
                assert answer.status == 200
            await tab_to(page, "Sign out")
            await enter(page)
            await page.until("!document.querySelector('#sign-in').hidden")
            async with thief.get(url) as answer:
                assert answer.status == 401

    stage.run(act())


def test_the_page_fits_400_pixels_and_heeds_theme_and_motion(stage: Stage) -> None:
    async def act() -> None:
        page = await stage.open(stage.gateway)
        await page.until(LIVE)
        await page.until("document.querySelectorAll('.lane').length === 2")
        await page.size(400, 800, mobile=True)
        assert await page.run("document.documentElement.scrollWidth") == 400
        assert await page.run(
            "[...document.querySelectorAll('main button')].every((one) => one.getBoundingClientRect().right <= 400)"
        )
        await page.prefer(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
        await page.until("document.documentElement.dataset.theme === 'dark'")
        panel = "getComputedStyle(document.documentElement).getPropertyValue('--panel')"
        assert await page.run(panel) == DARK
        await page.run("document.querySelector('#theme').click()")
        await page.until("document.documentElement.dataset.theme === 'light'")
        await page.run("document.querySelector('#theme').click()")
        await page.until("document.documentElement.dataset.theme === 'dark'")
        await page.run("localStorage.clear()")

    stage.run(act())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(stage: Stage, theme: str) -> None:
    script = FOLDER / "axe" / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        reason = "the environment of axe is not there; run `make clients`"
        if os.environ.get(REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)

    async def act() -> None:
        await stage.letter("seen")
        page = await stage.open(stage.gateway)
        await page.prefer(prefers_color_scheme=theme)
        await page.until(f"document.documentElement.dataset.theme === '{theme}'")
        await page.until("document.querySelector('#letters').textContent.includes('req_seen')")
        await page.run("document.querySelector('#batches').open = true")
        await check(page, script)
        await page.run("document.querySelector('#letters .danger').click()")
        await page.until("document.querySelector('#dialog').open")
        await check(page, script)
        guarded = await stage.open(stage.guarded)
        await guarded.prefer(prefers_color_scheme=theme)
        await guarded.until("!document.querySelector('#sign-in').hidden")
        await check(guarded, script)

    stage.run(act())


async def check(page: Page, script: Path) -> None:
    await page.run(await asyncio.to_thread(script.read_text))
    found = await page.run("axe.run(document, { resultTypes: ['violations'] }).then((told) => told.violations)")
    told = [(one["id"], one["impact"], [node["html"][:200] for node in one["nodes"]]) for one in found]
    assert not told, told
