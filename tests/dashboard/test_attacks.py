"""Other sites in a real browser: attacks on the dashboard, and cross-origin requests to the public port as in docs/http.md."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.scripted import scripted
from tests.dashboard.chromium import browser
from tests.dashboard.stage import LIVE, Stage, enter, quiet, sign_in, tab_to
from tests.docs.pages import ROOT, blocks
from tests.e2e.server import launched
from tests.identity.writing import entry, key_of

__all__ = ["quiet"]

pytestmark = pytest.mark.processes

HTML = {"Content-Type": "text/html"}
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


async def test_a_page_of_a_name_that_was_rebound_to_this_host_gets_nothing(stage: Stage) -> None:
    """DNS rebinding: evil.test now resolves to 127.0.0.1, so the browser considers its requests same-origin."""
    for server in (stage.gateway, stage.guarded):
        page = await stage.chromium.open(f"http://evil.test:{server.admin_port}/dashboard")
        assert '"status":403' in await page.text("body")
        assert await page.run("location.host") == f"evil.test:{server.admin_port}"
        assert await page.run(FETCHED) == [403, 403, 403, 403, 403, "refused"]
        assert (await page.send("Network.getCookies"))["cookies"] == []
        await page.send("Page.close")


async def test_a_page_of_another_site_changes_nothing_for_who_is_signed_in(stage: Stage, hostile: str) -> None:
    await stage.letter("wanted")
    signed_in = await stage.open(stage.guarded)
    await sign_in(signed_in)
    admin = f"http://127.0.0.1:{stage.guarded.admin_port}"

    page = await stage.chromium.open(hostile.replace("127.0.0.1", "evil.test"))
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
    await signed_in.until("document.querySelector('#letters').textContent.includes('req_wanted')")
    await signed_in.until(LIVE)


async def test_a_stolen_cookie_in_another_browser_ends_with_the_session(stage: Stage) -> None:
    victim = await stage.open(stage.guarded)
    await sign_in(victim)
    [cookie] = (await victim.send("Network.getCookies"))["cookies"]
    home = f"http://localhost:{stage.guarded.admin_port}"  # The browser doesn't send cookies of 127.0.0.1 to this host.
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
    assert await thief.run("fetch('internal/dlq').then((told) => told.status)") == 401
    await thief.send("Page.close")


@pytest.fixture
def hostile() -> Iterator[str]:
    with scripted((200, HTML, b"<title>hostile</title><iframe></iframe>")) as service:
        yield f"{service.url}/"


@pytest.fixture
def site() -> Iterator[str]:
    with scripted((200, HTML, b"<!doctype html><title>app</title>")) as service:
        yield service.url


def test_the_snippet_of_the_page_works_from_a_page_of_an_origin_that_is_named(tmp_path: Path, site: str) -> None:
    [snippet] = [block.text for block in blocks(ROOT / "docs" / "http.md") if "await fetch(" in block.text]
    (tmp_path / "keys.toml").write_text(entry("app"))
    flags = "--keys", "keys.toml", "--cors-origins", site
    with launched(tmp_path, *flags, target="tests.clients.targets:answer") as server:
        server.ready()

        async def asked(page_url: str, text: str) -> Any:
            async with browser(tmp_path / "browser") as chromium:
                page = await chromium.open(page_url)
                script = snippet.replace("localhost:8000", f"127.0.0.1:{server.port}").replace("KEY", key_of("app"))
                script = (
                    script.replace('"hello"', f'"{text}"')
                    .replace("console.log(", "return [")
                    .replace('id"));', 'id")];')
                )
                return await page.run(f"(async () => {{ {script} }})().catch((error) => String(error))")

        (tmp_path / "browser").mkdir()
        output, id = asyncio.run(asked(site, "hello"))
        assert (output, id[:4]) == ("HELLO", "req_")
        assert asyncio.run(asked(site, "bad")) == "Error: 422: ValueError: a bad input", "errors can be read, too"
        other = site.replace("127.0.0.1", "localhost")
        assert asyncio.run(asked(other, "hello")) == "TypeError: Failed to fetch"
        server.signal()
        server.ended()
