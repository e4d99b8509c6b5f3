"""A headless Chromium, driven through the DevTools protocol.

    async with browser(folder) as chromium:
        page = await chromium.open("http://127.0.0.1:9000/dashboard")
        await page.until("document.title.startsWith('Headway')")

`Page.until` doesn't poll: it waits for the document to change."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PATIENCE = 30.0
"""How many seconds to wait for anything."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
REQUIRED = "HEADWAY_TEST_REQUIRE_SERVERS"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--disable-extensions", "--disable-breakpad", "--remote-debugging-port=0", "--window-size=1280,900",
    "--force-color-profile=srgb", "--hide-scrollbars", "--host-resolver-rules=MAP evil.test 127.0.0.1",
)  # fmt: skip

_UNTIL = """
new Promise((resolve) => {
  const holds = () => { try { return Boolean(%s); } catch { return false; } };
  if (holds()) return resolve(true);
  const seen = new MutationObserver(() => { if (holds()) { seen.disconnect(); resolve(true); } });
  seen.observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
})
"""


class Page:
    """A browser tab. Records the requested URLs, console errors and warnings, and script exceptions."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.expected = "(?!)"  # Pattern of the complaints that a test expects.
        self._reading = asyncio.ensure_future(self._read())

    @property
    def unexpected(self) -> list[str]:
        return [complaint for complaint in self.complaints if not re.search(self.expected, complaint)]

    async def send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        return await asyncio.wait_for(answer, PATIENCE)

    async def begin(self) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.send(f"{domain}.enable")

    async def go(self, url: str) -> None:
        self._loaded.clear()
        await self.send("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), PATIENCE)

    async def run(self, script: str) -> Any:
        told = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise AssertionError(f"{script[:200]}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, condition: str) -> None:
        try:
            await self.run(_UNTIL % condition)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"{condition} does not come; the page says: {text}; {self.complaints}") from None

    async def text(self, selector: str) -> str:
        found: str = await self.run(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    async def press(self, key: str, code: int = 0, text: str = "") -> None:
        how = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **how, **({"text": text} if text else {}))
        await self.send("Input.dispatchKeyEvent", type="keyUp", **how)

    async def write(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def size(self, width: int, height: int, mobile: bool = False) -> None:
        """Set the page's size in CSS pixels."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    async def prefer(self, **features: str) -> None:
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.send("Emulation.setEmulatedMedia", features=listed)

    async def close(self) -> None:
        await self._socket.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if answer.done():
                    continue
                if "error" in told:
                    answer.set_exception(AssertionError(str(told["error"])))
                else:
                    answer.set_result(told["result"])
            else:
                self._heard(told["method"], told["params"])

    def _heard(self, method: str, told: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")


class Chromium:
    def __init__(self, http: aiohttp.ClientSession, port: int) -> None:
        self._http, self._port = http, port
        self._pages: list[Page] = []

    async def open(self, url: str) -> Page:
        async with self._http.put(f"http://127.0.0.1:{self._port}/json/new?about:blank") as answer:
            address = (await answer.json())["webSocketDebuggerUrl"]
        page = Page(await self._http.ws_connect(address, max_msg_size=1 << 28))
        self._pages.append(page)
        await page.begin()
        await page.go(url)
        return page

    async def close(self) -> None:
        for page in self._pages:
            await page.close()


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Chromium]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        reason = "there is no Chromium here: apt-get install chromium"
        if os.environ.get(REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)
    profile = folder / "profile"
    running = await asyncio.create_subprocess_exec(
        program, *FLAGS, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
    )  # fmt: skip
    try:
        port = await asyncio.wait_for(_port(running), 2 * PATIENCE)
        draining = asyncio.ensure_future(_drain(running))
        async with aiohttp.ClientSession() as http:
            chromium = Chromium(http, port)
            try:
                yield chromium
            finally:
                await chromium.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        await running.wait()
        with contextlib.suppress(UnboundLocalError):
            await draining


async def _port(running: asyncio.subprocess.Process) -> int:
    """Return the DevTools port that the browser prints."""
    assert running.stderr is not None
    said = b""
    async for line in running.stderr:
        said += line
        if b"DevTools listening on" in line:
            return int(line.rpartition(b"127.0.0.1:")[2].partition(b"/")[0])
    raise AssertionError(f"the browser did not start: {said[-2000:].decode(errors='replace')}")


async def _drain(running: asyncio.subprocess.Process) -> None:
    assert running.stderr is not None
    while await running.stderr.read(1 << 16):
        pass
