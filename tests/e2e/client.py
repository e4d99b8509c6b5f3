"""Clients of a running service: raw connections, and requests that must get exactly one correct answer."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from headway import errors

PATIENCE = 60.0
"""Seconds before giving up. Longer than any request timeout."""

_T = TypeVar("_T")
_pause = threading.Event()


def wait_until(condition: Callable[[], _T | None], seconds: float = PATIENCE) -> _T:
    """Poll `condition` until its value is true, and return the value. Fails after `seconds`."""
    waited = 0.0
    while waited < seconds:
        asked = monotonic()
        if value := condition():
            return value
        # Sleep twice as long as the check took, to leave the CPU to the code under test.
        pause = min(max(0.01, 2.0 * (monotonic() - asked)), 0.1)
        _pause.wait(pause)
        waited += pause
    raise AssertionError(f"did not become true within {seconds:g} s")


@dataclass
class Answer:
    status: int
    header: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """Return the code of the problem document, which must be complete and match the status and header."""
        document = self.json
        assert self.header["content-type"] == "application/problem+json"
        assert document["status"] == self.status == errors.STATUS[document["error"]]
        assert document["detail"] == document["message"] != ""
        assert document["request_id"] == self.header["x-request-id"]
        if self.status in (429, 503):
            assert int(self.header["retry-after"]) >= 1
        return str(document["error"])

    @property
    def message(self) -> str:
        return str(self.json["message"])


class Connection:
    """A TCP connection that keeps every byte it receives."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.held = b""

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def answer(self) -> Answer:
        """Return the next response. Bytes after it are kept for later."""
        while (end := self.held.find(b"\r\n\r\n")) < 0:
            self._more()
        head, self.held = self.held[: end + 4], self.held[end + 4 :]
        line, _, fields = head.partition(b"\r\n")
        version, status, _ = line.split(b" ", 2)
        assert version == b"HTTP/1.1"
        header = http.client.parse_headers(io.BytesIO(fields))
        length = 0 if status in (b"100", b"204") else int(header["content-length"])
        while len(self.held) < length:
            self._more()
        body, self.held = self.held[:length], self.held[length:]
        return Answer(int(status), header, body)

    def ended(self) -> bool:
        """Return True if the server closes or resets the connection without sending another byte."""
        try:
            while data := self.sock.recv(1 << 16):
                self.held += data
        except ConnectionError:
            pass
        return not self.held

    def end(self) -> None:
        """Shut down the sending side, which Headway treats as a disconnect."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()

    def _more(self) -> None:
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionError(f"the server ended the connection within an answer; so far {self.held!r}")
        self.held += data


def request(body: bytes, path: str = "/v1/inference", *fields: str, method: str = "POST") -> bytes:
    """Build a request with a Content-Length."""
    lines = [f"{method} {path} HTTP/1.1", "Host: e2e", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


@dataclass
class Asked:
    """A request on its own connection, with an id chosen here. `outcome` is `ok`, an error code, `cancelled` if the
    client left, or empty while unknown."""

    text: str
    expected: str
    connection: Connection
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    outcome: str = ""

    def send(self, *fields: str, **members: Any) -> None:
        body = json.dumps({"input": self.text, **members}).encode()
        self.connection.send(request(body, "/v1/inference", f"X-Request-Id: req_{self.id}", *fields))

    def answer(self) -> Answer:
        """Return the answer. It must have the request's id, and either the output for its input or a valid error."""
        answer = self.connection.answer()
        assert answer.header["x-request-id"] == answer.json["request_id"] == f"req_{self.id}"
        if answer.status == 200:
            assert answer.json["output"] == self.expected
            self.outcome = "ok"
        else:
            self.outcome = answer.error
        return answer

    def output(self) -> str:
        """Return the output. The request must succeed."""
        answer = self.answer()
        assert answer.status == 200, answer.body
        return str(answer.json["output"])

    def refusal(self) -> str:
        """Return the error code. The request must fail."""
        answer = self.answer()
        assert answer.status != 200, answer.body
        return self.outcome

    def leave(self) -> None:
        self.outcome = "cancelled"
        self.connection.close()


class Gate:
    """A gate where batches of the target `gates` wait: a FIFO that is closed to let them go on."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self._path = folder / (name or f"gate-{uuid.uuid4().hex}")
        os.mkfifo(self._path)
        self._held: int | None = None

    def text(self, label: str = "") -> str:
        """Return an input that makes its batch wait here."""
        return f"gate {self._path} {label}".rstrip()

    def reached(self) -> None:
        """Wait until a batch is waiting at the gate. Any batch that arrived earlier must be dead."""
        before, self._held = self._held, wait_until(self._opened)
        if before is not None:
            os.close(before)

    def open(self) -> None:
        """Let the waiting batch go on."""
        assert self._held is not None
        os.close(self._held)
        self._held = None

    def dissolve(self) -> None:
        """Let all batches go on: those waiting, and those that arrive later."""
        passage = self._path.with_name(f"{self._path.name}-open")
        passage.touch()
        passage.replace(self._path)
        self.open()

    def _opened(self) -> int | None:
        try:
            return os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None


def process_state(pid: int) -> str:
    """Return the process state from /proc, or X if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
