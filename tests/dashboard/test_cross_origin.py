"""A page of another site asks the public port as docs/http.md shows it, in a real browser, which keeps to the rules of CORS."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.chromium import browser
from tests.docs.pages import ROOT, blocks
from tests.e2e.server import launched
from tests.identity.writing import entry, key_of

pytestmark = pytest.mark.processes


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """Origin of a site of another port."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("<!doctype html><title>app</title>")
    handler = partial(Quiet, directory=str(tmp_path / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(60)


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
