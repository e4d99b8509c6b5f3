"""A remote API that goes and comes back: it is used again, and its token is told nowhere."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.server import serving

UNHAPPY = {"batch failed", "probe failed", "the remote API answered no outputs"}


@contextmanager
def remote(port: int, tokens: list[str]) -> Iterator[None]:
    """An API on loopback, which answers in capitals; `tokens` gets what comes with each call."""

    class Talk(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            tokens.append(self.headers["Authorization"])
            inputs = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps([text.upper() for text in inputs]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", port), Talk) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def test_an_api_that_is_gone_and_comes_back_is_used_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        # Bound, it is nobody else's meanwhile; who does not listen there does not hinder who does.
        place = stack.enter_context(socket.socket())
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        port, tokens = place.getsockname()[1], list[str]()
        with remote(port, tokens):
            flags = ("--remote-token", "s3cret-canary", "--request-timeout-ms", "2000", "--gpu-timeout-ms", "1000")
            server = stack.enter_context(serving(tmp_path, *flags, target=f"http://127.0.0.1:{port}/batch"))
            server.expected = UNHAPPY
            server.ask("before").output()
            assert tokens[-1] == "Bearer s3cret-canary"
        # Nothing is sent, so that it waits for the API as long as it may.
        assert server.ask("meanwhile").refusal() in ("BACKEND_ERROR", "NO_WORKERS", "DEADLINE_EXCEEDED")
        with remote(port, tokens):
            server.ask("after").output()
        assert "s3cret-canary" not in server.log_text() + server.banner() + str(server.letters())
