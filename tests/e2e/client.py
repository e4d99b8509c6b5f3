"""Clients of a running service: raw connections, and requests that are held to the law of one true answer."""

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
"""Seconds after which what does not happen is given up; more than any time-out of a request."""

_T = TypeVar("_T")
_pause = threading.Event()


def wait_until(condition: Callable[[], _T | None], seconds: float = PATIENCE) -> _T:
    """The first true value of `condition`, which is asked again and again. An AssertionError when none comes within
    `seconds`.
    """
    waited = 0.0
    while waited < seconds:
        asked = monotonic()
        if value := condition():
            return value
        # Twice as long as the question took: the machine is there for what is waited for.
        pause = min(max(0.01, 2.0 * (monotonic() - asked)), 0.1)
        _pause.wait(pause)
        waited += pause
    raise AssertionError(f"did not become true within {seconds:g} s")


@dataclass
class Answer:
    """One HTTP response."""

    status: int
    header: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """Code of the problem document, which must be whole and agree with the status and the header."""
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
    """A TCP connection that keeps every byte it gets."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.held = b""

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def answer(self) -> Answer:
        """The next response; whatever comes after it is held."""
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
        """Whether the server ends the connection without a further byte; a reset is an end too."""
        try:
            while data := self.sock.recv(1 << 16):
                self.held += data
        except ConnectionError:
            pass
        return not self.held

    def end(self) -> None:
        """Send nothing any more; Headway takes that as leaving."""
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
    """A request with a counted body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: e2e", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


@dataclass
class Asked:
    """One request on a connection of its own, with an id that is chosen here.

    `outcome` is `ok`, an error code, `cancelled` when it was left, or empty as long as none is known.
    """

    text: str
    expected: str
    connection: Connection
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    outcome: str = ""

    def send(self, *fields: str, **members: Any) -> None:
        body = json.dumps({"input": self.text, **members}).encode()
        self.connection.send(request(body, "/v1/inference", f"X-Request-Id: req_{self.id}", *fields))

    def answer(self) -> Answer:
        """Answer of the request, which must be its own: its id, and the output of its input or a proper error."""
        answer = self.connection.answer()
        assert answer.header["x-request-id"] == answer.json["request_id"] == f"req_{self.id}"
        if answer.status == 200:
            assert answer.json["output"] == self.expected
            self.outcome = "ok"
        else:
            self.outcome = answer.error
        return answer

    def output(self) -> str:
        """Output of the request, which must get one."""
        answer = self.answer()
        assert answer.status == 200, answer.body
        return str(answer.json["output"])

    def refusal(self) -> str:
        """The code of its error; it must get one."""
        answer = self.answer()
        assert answer.status != 200, answer.body
        return self.outcome

    def leave(self) -> None:
        """Close the connection without having read an answer."""
        self.outcome = "cancelled"
        self.connection.close()


class Gate:
    """Gate at which batches of the target `gates` wait: a FIFO that is closed when they may go on."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self._path = folder / (name or f"gate-{uuid.uuid4().hex}")
        os.mkfifo(self._path)
        self._held: int | None = None

    def text(self, label: str = "") -> str:
        """An input whose batch waits here."""
        return f"gate {self._path} {label}".rstrip()

    def reached(self) -> None:
        """Return when a batch has come to the gate; it waits from then on. One that came before must be dead."""
        before, self._held = self._held, wait_until(self._opened)
        if before is not None:
            os.close(before)

    def open(self) -> None:
        """Let the batch that has come go on."""
        assert self._held is not None
        os.close(self._held)
        self._held = None

    def dissolve(self) -> None:
        """Let every batch go on that has come, is about to come, or comes later."""
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
    """State of a process as Linux tells it; X of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
