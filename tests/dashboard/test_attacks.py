"""Attacks on the dashboard in a real browser: a rebound name, a page of another site, a stolen cookie."""

from __future__ import annotations

import pytest
from aiohttp import web

from tests.dashboard.stage import LIVE, Stage, enter, on_stage, quiet, sign_in, tab_to

__all__ = ["quiet"]

pytestmark = pytest.mark.processes

FETCHED = """
(async () => {
  const status = async (path, method) => { try { return (await fetch(path, { method })).status; } catch { return 0; } };
  const stream = await new Promise((resolve) => {
    const source = new EventSource("/internal/events");
    source.onopen = () => resolve("open");
    source.onerror = () => { source.close(); resolve("refused"); };
  });
  return [await status("/internal/health", "GET"), await status("/metrics", "GET"), await status("/internal/dlq", "GET"),
    await status("/internal/dlq/x/replay", "POST"), await status("/dashboard/session", "POST"), stream];
})()
"""


@on_stage
async def test_a_page_of_a_name_that_was_rebound_to_this_host_gets_nothing(stage: Stage) -> None:
    """The page is of http://evil.test, which by now means 127.0.0.1: to the browser all that it asks is its own site."""
    for server in (stage.gateway, stage.guarded):
        page = await stage.chromium.open(f"http://evil.test:{server.admin_port}/dashboard")
        assert '"status":403' in await page.text("body")
        assert await page.run("location.host") == f"evil.test:{server.admin_port}"
        assert await page.run(FETCHED) == [403, 403, 403, 403, 403, "refused"]
        assert (await page.send("Network.getCookies"))["cookies"] == []
        await page.send("Page.close")


def test_a_page_of_another_site_changes_nothing_for_who_is_signed_in(stage: Stage) -> None:
    async def act() -> None:
        await stage.letter("wanted")
        signed_in = await stage.open(stage.guarded)
        await sign_in(signed_in)
        admin = f"http://127.0.0.1:{stage.guarded.admin_port}"

        async def hostile(_: web.Request) -> web.Response:
            return web.Response(text="<title>hostile</title><iframe></iframe>", content_type="text/html")

        site = web.Application()
        site.router.add_get("/", hostile)
        runner = web.AppRunner(site)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        page = await stage.chromium.open(f"http://evil.test:{runner.addresses[0][1]}/")
        purge = f"{admin}/internal/dlq/req_wanted"
        for method, mode in (("POST", "no-cors"), ("DELETE", "cors"), ("GET", "cors")):
            asked = f"fetch('{purge}', {{method: '{method}', mode: '{mode}', credentials: 'include'}})"
            assert await page.run(f"{asked}.then((told) => told.type, () => 'blocked')") in ("opaque", "blocked")
        await page.run(
            f"new Promise((seen) => {{ const frame = document.querySelector('iframe'); frame.onload = seen; frame.src = '{admin}/dashboard'; }})"
        )
        assert (
            await page.run(
                "(() => { try { return document.querySelector('iframe').contentDocument; } catch { return null; } })()"
            )
            is None
        )
        assert (
            await page.run(
                f"new Promise((told) => {{ const one = new EventSource('{admin}/internal/events', {{withCredentials: true}}); one.onopen = () => told('open'); one.onerror = () => {{ one.close(); told('blocked'); }}; }})"
            )
            == "blocked"
        )
        await page.send("Page.close")
        await runner.cleanup()
        await signed_in.until("document.querySelector('#letters').textContent.includes('req_wanted')")
        await signed_in.until(LIVE)

    stage.run(act())


@on_stage
async def test_a_stolen_cookie_in_another_browser_ends_with_the_session(stage: Stage) -> None:
    victim = await stage.open(stage.guarded)
    await sign_in(victim)
    [cookie] = (await victim.send("Network.getCookies"))["cookies"]
    home = f"http://localhost:{stage.guarded.admin_port}"  # Cookies of 127.0.0.1 are none of this host.
    thief = await stage.chromium.open(f"{home}/dashboard")
    await thief.until("!document.querySelector('#sign-in').hidden")
    await thief.send("Network.setCookie", name=cookie["name"], value=cookie["value"], url=home, httpOnly=True)
    await thief.go(f"{home}/dashboard")
    await thief.until(LIVE)
    await tab_to(victim, "Sign out")
    await enter(victim)
    await thief.until("!document.querySelector('#sign-in').hidden")
    await thief.go(f"{home}/dashboard")
    await thief.until("!document.querySelector('#sign-in').hidden")
    asked = "fetch('internal/dlq').then((told) => told.status)"
    assert await thief.run(asked) == 401
    await thief.send("Page.close")
