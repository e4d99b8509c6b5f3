import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOST = None
"""A script step that closes the connection without an answer."""

CUT = -1
"""The status of a step that sends less than its Content-Length, then closes the connection."""

Step = tuple[int, Mapping[str, str], bytes] | None


@dataclass
class Asked:
    method: str
    path: str
    header: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Scripted:
    """A fake service that follows a script and records its requests. The last step repeats forever."""

    script: list[Step | Callable[[Asked], Step]]
    asked: list[Asked] = field(default_factory=list)
    scheme: str = "http"
    port: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def step(self, asked: Asked) -> Step:
        with self.lock:
            self.asked.append(asked)
            step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return step(asked) if callable(step) else step


def ok(output: Any = "out", **header: str) -> Step:
    body = {"request_id": "req_1", "output": output, "metadata": {"latency_ms": 1.5}}
    return 200, header, json.dumps(body).encode()


def problem(status: int, code: str, header: Mapping[str, str] | None = None) -> Step:
    body = {"error": code, "message": f"told: {code}", "status": status, "request_id": "req_2"}
    return status, header or {}, json.dumps(body).encode()


@contextmanager
def scripted(*script: Step | Callable[[Asked], Step], tls: ssl.SSLContext | None = None) -> Iterator[Scripted]:
    service = Scripted(list(script), scheme="http" if tls is None else "https")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            step = service.step(Asked(self.command, self.path, dict(self.headers.items()), body))
            if step is LOST:
                self.close_connection = True
                return
            status, header, content = step
            if status == CUT:
                self.close_connection = True
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + content)
                return
            self.send_response(status)
            for name, value in header.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 - BaseHTTPRequestHandler requires these names

        def log_message(self, *parts: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    service.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
