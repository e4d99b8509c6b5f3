"""A remote batch API that answers in capitals, or as badly as it is told."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import NamedTuple

Mood = Callable[["Talk"], None]
"""Answers one call, or does not."""


class Call(NamedTuple):
    """One batch that came in, when (monotonic seconds), and with which credential."""

    inputs: list[str]
    at: float
    authorization: str


class Talk(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    api: Remote

    def setup(self) -> None:
        super().setup()
        self.api.connections.append(self.connection)

    def do_POST(self) -> None:
        inputs = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.call = Call(inputs, monotonic(), self.headers.get("Authorization", ""))
        self.api.calls.append(self.call)
        mood = self.api.script.popleft() if self.api.script else self.api.mood
        mood(self)

    def say(self, status: int, body: bytes, **header: str) -> None:
        self.send_response(status)
        for name, value in header.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Remote:
    """The API.

    Attributes:
        calls: all that came in, the warm-up included.
        script: how the next calls are answered, one mood each.
        mood: how all others are.
        over: set in the end; hanging calls wait for it.
        connections: all that clients have opened.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.script: deque[Mood] = deque()
        self.mood: Mood = well
        self.over = threading.Event()
        self.connections: list[socket.socket] = []
        self.url = ""


@contextmanager
def remote(port: int = 0) -> Iterator[Remote]:
    """A running API on loopback; `port` 0 lets the system choose."""
    api = Remote()
    server = ThreadingHTTPServer(("127.0.0.1", port), type("OwnTalk", (Talk,), {"api": api}))
    server.daemon_threads = False
    api.url = f"http://127.0.0.1:{server.server_address[1]}/batch"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield api
    finally:
        api.over.set()
        server.shutdown()
        thread.join()
        for connection in api.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()


def well(talk: Talk) -> None:
    talk.say(200, json.dumps([text.upper() for text in talk.call.inputs]).encode())


def status(code: int, **header: str) -> Mood:
    """Refuse with this status."""
    return lambda talk: talk.say(code, b"not\nnow", **header)


def body(text: str) -> Mood:
    """Answer this, whatever was asked."""
    return lambda talk: talk.say(200, text.encode())


def hang(talk: Talk) -> None:
    talk.close_connection = True
    talk.api.over.wait()


def trickle(talk: Talk) -> None:
    """A byte now and then, of an answer that would be good in the end."""
    talk.close_connection = True
    talk.send_response(200)
    talk.send_header("Content-Length", "1000")
    talk.end_headers()
    try:
        while not talk.api.over.wait(0.05):
            talk.wfile.write(b" ")
            talk.wfile.flush()
    except OSError:
        pass


def cut(talk: Talk) -> None:
    """Break off in the middle of the answer."""
    talk.close_connection = True
    talk.send_response(200)
    talk.send_header("Content-Length", "1000")
    talk.end_headers()
    talk.wfile.write(b'["')


def choosy(talk: Talk) -> None:
    """Refuse any batch that holds `bad`."""
    if "bad" in talk.call.inputs:
        talk.say(400, b"one of them is bad")
    else:
        well(talk)
