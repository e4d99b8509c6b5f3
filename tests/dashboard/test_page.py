import asyncio
import json
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from headway.brokers.redis.board import RedisBoard
from headway.model.board import Notice, ScalingChange
from tests.clients.environments import FOLDER, REQUIRED
from tests.dashboard.chromium import Page
from tests.dashboard.stage import EVIL, LIVE, TOKEN, Stage, enter, quiet, tab_to, under_load

__all__ = ["quiet"]

pytestmark = pytest.mark.processes

DARK = "#171d27"
MOVES = {
    "requests": "parseFloat(document.querySelector('#figures li b').textContent) > 0",
    "latency": "[...document.querySelectorAll('#latency tbody tr')].slice(1).every((row) => / m?s/.test(row.cells[3].textContent))",
    "capacity": "parseFloat(document.querySelector('#capacity tbody tr').cells[1].textContent) > 0",
    "queue": "document.querySelectorAll('#queue tbody tr').length === 3",
    "refusals": "document.querySelector('#refusals').textContent.includes('rejected_by_model')",
    "workers": "document.querySelectorAll('#workers tbody .dot.good').length === 2",
    "processes": "document.querySelectorAll('#processes tbody tr').length === 5",
    "busy": "[...document.querySelectorAll('#workers tbody tr')].every((row) => parseInt(row.cells[3].textContent) > 0)",
    "scaling": "document.querySelectorAll('#scaling tbody tr').length === 1",
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
        page.expected = "getImageData"
        await page.until(LIVE)
        await page.run("document.querySelector('#batches').open = true")
        for moves in MOVES.values():
            await page.until(moves)
        workers = [stage.fleet.slot(worker) for worker in stage.fleet.workers]
        for worker in workers:
            await page.until(f"document.querySelector('#batches tbody').textContent.includes({json.dumps(worker)})")
        await page.until(f"document.querySelectorAll('.lane canvas').length === 2 && {PAINTED}")
        assert "free" in await page.text("#batches")

    stage.run(under_load(stage, act()))


def test_no_table_is_cut_on_a_desktop(stage: Stage) -> None:
    cut = """[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth)
        .map((one) => one.getAttribute('aria-label'))"""

    async def act() -> None:
        page = await stage.open(stage.gateway)
        await page.until(LIVE)
        for moves in MOVES.values():
            await page.until(moves)
        for width in (1280, 1440, 1600, 1920, 2560):
            await page.size(width, 900)
            assert await page.run(cut) == [], width

    stage.run(under_load(stage, act()))


async def test_the_lines_of_the_charts_have_no_tiers_colour(stage: Stage) -> None:
    colours = """(() => {
      const of = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
      const lines = [...document.querySelectorAll('#latency-chart .swatch, #arrivals-chart .swatch')].map((one) => one.style.background);
      const tiers = [0, 1, 2, 3, 4, 5, 6, 7].map((tier) => of(`tier-${tier}`));
      return [lines, lines.filter((line) => tiers.includes(of(line.replace(/var\\(--|\\)/g, ''))))];
    })()"""
    page = await stage.open(stage.gateway)
    await page.until(LIVE)
    lines, shared = await page.run(colours)
    assert (len(lines), shared) == (8, [])


async def test_a_killed_worker_is_seen_and_its_return(stage: Stage) -> None:
    page = await stage.open(stage.gateway)
    await page.until(LIVE)
    worker = stage.fleet.workers[0]
    name = stage.fleet.slot(worker)
    http = aiohttp.ClientSession()
    async with http, http.get(f"http://127.0.0.1:{worker.admin_port}/internal/workers") as answer:
        pid = next(one["pid"] for one in (await answer.json())["workers"] if one["worker_id"] == name)
    os.kill(pid, signal.SIGKILL)
    killed = json.dumps(f"{name} is starting: died of SIGKILL")
    await page.until(f"document.querySelector('#events').textContent.includes({killed})")
    back = json.dumps(f"{name} is healthy, after 1 restart")
    await page.until(f"document.querySelector('#events').textContent.includes({back})")


async def test_a_dead_letter_is_shown_as_text_replayed_and_purged_by_keyboard_alone(stage: Stage) -> None:
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
        assert await page.run("document.activeElement.textContent") == "Cancel", "the harmless answer has the focus"
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
    assert await page.run("document.querySelectorAll('main img, main script, dialog img, dialog script').length") == 0


async def test_signing_in_and_out_by_keyboard(stage: Stage) -> None:
    page = await stage.open(stage.guarded)
    page.expected = " 401 "  # Chromium logs each 401 to the console.
    await page.until("!document.querySelector('#sign-in').hidden && document.activeElement.id === 'token'")
    await page.write("wrong")
    await enter(page)
    await page.until("document.querySelector('#sign-in-error').textContent.includes('not the service token')")
    await page.write(TOKEN)
    await enter(page)
    await page.until(LIVE)
    assert await page.run("document.cookie") == ""
    assert not any(TOKEN in url for url in page.requests)
    cookies = (await page.send("Network.getCookies"))["cookies"]
    assert [(one["httpOnly"], one["sameSite"]) for one in cookies] == [(True, "Strict")]
    await page.until("document.querySelectorAll('#processes tbody tr').length === 5")
    await tab_to(page, "Sign out")
    await enter(page)
    await page.until("!document.querySelector('#sign-in').hidden")


async def test_the_page_fits_400_pixels_and_heeds_theme_and_motion(stage: Stage) -> None:
    page = await stage.open(stage.gateway)
    await page.until(LIVE)
    await page.until("document.querySelectorAll('.lane').length === 2")
    await page.size(400, 800, mobile=True)
    assert await page.run("document.documentElement.scrollWidth") == 400
    assert await page.run(
        "[...document.querySelectorAll('main button')].every((one) => one.getBoundingClientRect().right <= 400)"
    )
    for table in ("latency", "queue", "refusals"):
        await page.run("for (const cell of document.querySelectorAll('#latency td.n')) cell.textContent = '999 ms'")
        assert await page.run(
            f"document.querySelector('#{table}').scrollWidth <= document.querySelector('#{table}').parentElement.clientWidth"
        ), table
    await page.prefer(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    await page.until("document.documentElement.dataset.theme === 'dark'")
    panel = "getComputedStyle(document.documentElement).getPropertyValue('--panel')"
    assert await page.run(panel) == DARK
    await page.run("document.querySelector('#theme').click()")
    await page.until("document.documentElement.dataset.theme === 'light'")
    await page.run("document.querySelector('#theme').click()")
    await page.until("document.documentElement.dataset.theme === 'dark'")
    await page.run("localStorage.clear()")


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_axe_finds_nothing_serious(stage: Stage, theme: str) -> None:
    script = axe()
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


def axe() -> Path:
    script = FOLDER / "axe" / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        reason = "the environment of axe is not there; run `make clients`"
        if os.environ.get(REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)
    return script


async def check(page: Page, script: Path) -> None:
    await page.run(await asyncio.to_thread(script.read_text))
    found = await page.run("axe.run(document, { resultTypes: ['violations'] }).then((told) => told.violations)")
    told = [(one["id"], one["impact"], [node["html"][:200] for node in one["nodes"]]) for one in found]
    assert not told, told


async def test_decisions_of_the_autoscaler_are_shown_with_their_reasons_as_text(stage: Stage) -> None:
    page = await stage.open(stage.gateway)
    await page.until("document.querySelector('#scaling tbody tr').cells[0].textContent === 'default'")
    await page.until("document.querySelector('#decisions').textContent.includes('No decision in the last 30 minutes.')")
    change = ScalingChange("default", 2, 4, "up", f"queue above 500 for 30 s {EVIL}")
    await RedisBoard(stage.link).post(Notice("of a test", scalings=(change,)))
    told = f"default: 2 → 4, queue above 500 for 30 s {EVIL}"
    await page.until(f"document.querySelector('#decisions').textContent.includes({json.dumps(told)})")
    later = await stage.open(stage.fleet.workers[0])
    await later.until(f"document.querySelector('#decisions').textContent.includes({json.dumps(told)})")
    assert "taken" not in await page.run("document.title")


async def test_figures_of_gpus_are_shown_where_there_are_any(stage: Stage) -> None:
    shown = """import(new URL('panels.js', document.querySelector('script[src]').src)).then(({ tables }) => {
      const worker = { worker_id: 'w', model: 'm', status: 'healthy', reason: '', failed: 0, utilisation: 0, restarts: 0 };
      const gpu = { memory_used_bytes: 60 * 2 ** 30, memory_total_bytes: 80 * 2 ** 30, utilisation: 0.734, power_watts: 310.5,
        temperature_celsius: 61, ecc_errors: 2, xids: { 31: 1, 94: 2 } };
      const nothing = Object.fromEntries(Object.keys(gpu).map((key) => [key, null]));
      const see = (...figures) => {
        const workers = figures.map((gpu_figures, number) => ({ ...worker, worker_id: `w${number}`, gpu_figures }));
        tables({ tiers: [], failed: {}, retries: {} }, { workers, capacities: [], queues: [], members: [], departed: [], age_seconds: 0 }, [], 200);
        const cells = [...document.querySelectorAll('#workers .gpu')];
        return cells.filter((one) => getComputedStyle(one).display !== 'none').map((one) => one.textContent);
      };
      return [see(null, undefined), see(gpu, { ...nothing, xids: {} }, null)];
    })"""
    page = await stage.open(stage.gateway)
    await page.until(LIVE)
    none, some = await page.run(shown)
    assert none == []
    assert some == ["GPU", "75 % of 80 GiB, computes 73 %, 311 W, 61 °C, 2 ECC errors, Xid 31, 94", "–", "–"]


async def test_what_a_call_of_a_model_takes_is_shown_once_it_is_known(stage: Stage) -> None:
    shown = """import(new URL('panels.js', document.querySelector('script[src]').src)).then(({ tables }) => {
      const worker = { worker_id: 'w', model: 'm', status: 'healthy', reason: '', failed: 0, utilisation: 0, restarts: 0, gpu_figures: null };
      const capacity = { model: 'm', healthy: 2, degraded: 0, items_per_second: 9, usable_per_second: 9, age_seconds: 0 };
      const line = { alpha: 0.0081, beta: 1.184e-6, longest: 900, error: 0.02 };
      return [null, ...['number', 'weight', 'padded'].map((shape) => ({ ...line, shape }))].map((cost) => {
        const workers = [{ ...worker, cost: null }, { ...worker, worker_id: 'w2', cost }];
        tables({ tiers: [], failed: {}, retries: {} }, { workers, capacities: [capacity], queues: [], members: [], departed: [], age_seconds: 0 }, [], 200);
        return document.querySelector('#capacity tbody tr').cells[4].textContent;
      });
    })"""
    page = await stage.open(stage.gateway)
    await page.until(LIVE)
    unknown, *known = await page.run(shown)
    assert unknown == "2 healthy"
    each = ["input", "unit of weight", "input and unit of the longest's weight"]
    assert known == [f"2 healthy; a call takes 8.1 ms and 1.18 µs for each {unit}" for unit in each]


async def test_without_the_broker_the_fleet_is_shown_as_it_was_and_a_loss_of_its_data_afterwards(stage: Stage) -> None:
    redis = stage.redis
    stage.fleet.expected.add("the broker is out of reach")
    before = await stage.open(stage.gateway)
    await before.until(LIVE)
    for page in (before, await stage.open(stage.fleet.workers[0])):  # The fleet may have only just started.
        page.expected = "internal/(dlq|rollouts)"  # These lists need the broker, and Chromium logs each 503.
        await page.until("document.querySelectorAll('#workers tbody .dot.good').length === 2")
        await page.until("document.querySelectorAll('#processes tbody tr').length === 5")
    await asyncio.to_thread(redis.pause)
    try:
        later = await stage.open(stage.fleet.workers[0])  # This worker has its own snapshot of the fleet.
        later.expected = before.expected
        for page in (before, later):
            await page.until("document.querySelector('#state-text').textContent.includes('unreachable')")
            await page.until(
                "/^The fleet is shown as it was [0-9.]+ s ago/.test(document.querySelector('#age-note').textContent)"
            )
            await page.until("document.querySelectorAll('#workers tbody tr').length === 2")
            await page.until("document.querySelectorAll('#processes tbody tr').length === 5")
    finally:
        await asyncio.to_thread(redis.resume)
    for page in (before, later):
        await page.until(f"{LIVE} && document.querySelector('#age-note').hidden")
    await asyncio.to_thread(redis.command, "FLUSHALL")
    await before.until("document.querySelector('#lost-note').textContent.startsWith('The broker lost its data at ')")
    fresh = await stage.open(stage.fleet.controllers[0])
    await fresh.until("document.querySelector('#events').textContent.startsWith('None since ')")
    await fresh.until("!document.querySelector('#lost-note').hidden")
