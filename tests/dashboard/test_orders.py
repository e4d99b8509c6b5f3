"""Rollouts and drains, controlled from the dashboard in a real browser."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.chromium import Page, browser
from tests.dashboard.stage import LIVE, TOKEN, enter, sign_in, tab_to
from tests.dashboard.test_page import axe, check
from tests.e2e.server import launched

pytestmark = pytest.mark.processes

SETTINGS = """
[models."m@3"]
target = "same.py:same"
[models."m@4"]
target = "same.py:same"
"""
OPEN, CLOSED = "document.querySelector('#dialog').open", "!document.querySelector('#dialog').open"


def says(selector: str, text: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).textContent.includes({json.dumps(text)})"


async def order(page: Page, name: str, *, sure: str) -> None:
    """Press a button using the keyboard, then confirm in the dialog."""
    await tab_to(page, name)
    await enter(page)
    await page.until(OPEN)
    await tab_to(page, sure)
    await enter(page)


async def fill(page: Page, label: str, value: str) -> None:
    script = """(() => {
      const [label] = [...document.querySelectorAll('#dialog label')].filter((one) => one.textContent.startsWith(%s));
      const input = label.querySelector('input, select');
      input.value = %s;
      input.dispatchEvent(new Event('change', { bubbles: true }));
      return input.value;
    })()"""
    assert await page.run(script % (json.dumps(label), json.dumps(value))) == value


async def rollouts(page: Page) -> None:
    await page.until("!document.querySelector('#rollout-start').disabled")
    await page.until(says("#rollouts", "There have been no rollouts."))
    await tab_to(page, "Start a rollout")
    await enter(page)
    await page.until(OPEN)
    await fill(page, "Share of", "10,5")
    await tab_to(page, "Start")
    await enter(page)
    await page.until(says("#dialog-error", "steps '10,5' must be increasing percentages"))
    assert await page.run(OPEN), "nothing that was filled in is lost"
    await fill(page, "Share of", "10,50")
    await page.run("document.querySelector('#dialog input[type=checkbox]').click()")
    await enter(page)
    await page.until(CLOSED)
    await page.until(says("#rollouts", "10 %"))
    shown = await page.text("#rollouts tbody")
    assert "running\t10 %\tstep 1 of 2" in shown and "\t4: 0 answered" in shown and "\t3: 0 answered" in shown, shown
    started = (await asked(page, "internal/rollouts"))["rollouts"][0]
    assert (started["rollback_on"], started["every"], started["slower"]) == (["p95"], 600.0, 0.25)
    await page.until("document.querySelector('#capacity').textContent.includes('version 4 at 10 %')")
    await order(page, "Promote m", sure="Promote")
    await page.until(says("#rollouts", "promoted"))
    await order(page, "Abort m", sure="Cancel")
    await page.until(CLOSED)
    assert "promoted" in await page.text("#rollouts"), "asked twice: nothing has happened"
    await order(page, "Abort m", sure="Abort")
    await page.until(says("#rollouts-note", "m: aborted."))
    await page.until(says("#rollouts", "by an operator"))


async def drains(page: Page) -> None:
    drained = "[...document.querySelectorAll('#workers tbody tr')].map((row) => row.textContent.includes('drained'))"
    workers = [one["worker_id"] for one in (await asked(page, "internal/workers"))["workers"]]
    await tab_to(page, "Drain …")
    await enter(page)
    await page.until(OPEN)
    await fill(page, "Workers", workers[0])
    await tab_to(page, "Drain")
    await enter(page)
    await page.until(says("#dialog-error", "would have no healthy worker left"))
    assert (await asked(page, "internal/drains"))["drains"] == []
    await tab_to(page, "Drain anyway")
    await enter(page)
    await page.until(says("#workers-note", f"{workers[0]} is drained."))
    await page.until(f"{drained}.filter(Boolean).length === 1")
    await order(page, "Undrain …", sure="Undrain")
    await page.until(says("#workers-note", f"{workers[0]} is no longer drained."))
    await page.until(f"!{drained}.some(Boolean)")
    await tab_to(page, "Undrain …")
    await enter(page)
    await page.until(says("#workers-note", "Nothing is drained."))


async def asked(page: Page, path: str) -> Any:
    return await page.run(f"fetch('{path}').then((told) => told.json())")


def test_an_operator_who_has_signed_in_starts_and_ends_rollouts_and_drains(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def same(inputs: list[str]) -> list[str]:\n    return inputs\n")
    (tmp_path / "headway.toml").write_text(SETTINGS)

    async def act(address: str) -> None:
        async with browser(tmp_path) as chromium:
            page = await chromium.open(address)
            page.expected = " 40[019] "  # Chromium logs each refused request to the console.
            await sign_in(page)
            await page.until(LIVE)
            await rollouts(page)
            await drains(page)
            await page.size(400, 800, mobile=True)
            await page.size(400, 800, mobile=True)
            assert await page.run("document.documentElement.scrollWidth") == 400
            assert not page.unexpected, page.unexpected
            await page.size(1280, 900)
            script = axe()
            for theme in ("light", "dark"):
                await page.prefer(prefers_color_scheme=theme)
                await page.until(f"document.documentElement.dataset.theme === '{theme}'")
                await check(page, script)
                await page.run("document.querySelector('#rollout-start').click()")
                await page.until(OPEN)
                await check(page, script)
                await page.press("Escape", 27)
                await page.until(CLOSED)

    with launched(tmp_path, "--admin-token", TOKEN, target="m") as server:
        server.ready()
        asyncio.run(act(f"http://127.0.0.1:{server.admin_port}/dashboard"))
