"""The page /docs in a browser, where there is one: it fits a phone."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import headway
from headway.config import Settings
from headway.http.openapi import document

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGE = (Path(headway.__file__).parent / "http" / "docs.html").read_text(encoding="utf-8")
FRAME = """<!doctype html><iframe src="/docs" width="{width}" height="800" style="border: 0"></iframe><pre></pre><script>
const frame = document.querySelector("iframe");
const look = () => {{
  const page = frame.contentDocument, root = page?.documentElement;
  if (!page?.querySelector("#errors tr")) return setTimeout(look, 20);
  const wide = [...page.querySelectorAll("body *")].filter((one) => one.getBoundingClientRect().right > root.clientWidth + 1);
  const lines = (one) => {{ const range = page.createRange(); range.selectNodeContents(one); return range.getClientRects().length; }};
  const torn = [...page.querySelectorAll("td")].filter((one) => /^[A-Za-z]{{1,20}}$/.test(one.textContent) && lines(one) > 1);
  document.querySelector("pre").textContent = JSON.stringify(
    {{over: root.scrollWidth - root.clientWidth, torn: torn.map((one) => one.textContent), wide: [...new Set(wide.map((one) => one.tagName + " " + one.textContent.slice(0, 30)))]}});
}};
look();
</script>"""


@pytest.fixture
def address() -> Iterator[str]:
    """A server with the page, what it asks for, and a frame around it that measures it."""
    contract = json.dumps(document(Settings()))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            frame = re.fullmatch(r"/frame/(\d+)", self.path)
            text = contract if self.path == "/openapi.json" else PAGE
            self.send_response(200)
            self.send_header("content-type", "application/json" if self.path == "/openapi.json" else "text/html")
            self.end_headers()
            self.wfile.write((FRAME.format(width=frame[1]) if frame else text).encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.processes
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
@pytest.mark.parametrize("width", [320, 700])
def test_the_page_fits_its_window_and_no_word_is_torn(width: int, address: str, tmp_path: Path) -> None:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--window-size=1300,900", "--virtual-time-budget=20000", "--dump-dom", f"{address}/frame/{width}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    found = re.search(r"<pre>(\{.*\})</pre>", done.stdout)
    assert found, done.stderr
    assert json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&")) == {
        "over": 0,
        "torn": [],
        "wide": [],
    }


def test_tables_are_stacked_on_a_narrow_page() -> None:
    """What keeps the page within a phone, for where there is no browser to try it."""
    narrow = re.search(r"@media \(max-width: 40rem\) \{(.*?)\n\}", PAGE, re.DOTALL)
    assert narrow
    assert "td { display: block" in narrow[1]
