"""Clients of a closed loop: each sends its next request when it has the answer to the last one. Prints JSON.

    python bench/stand/closed_loop.py http://127.0.0.1:8000 --clients 16 --seconds 10 --warm-up 2

What came within the warm-up is left out. The exit code is 1 when an answer was no success.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from urllib.parse import urlsplit

import msgspec

_BODY = b'{"input": "the quick brown fox"}'
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Outcome(msgspec.Struct):
    """Latencies in seconds of what was answered after the warm-up, and the requests that failed."""

    latencies: list[float] = msgspec.field(default_factory=list)
    failed: int = 0


class Client(asyncio.Protocol):
    """Client with one connection.

    Arguments:
        host: for the Host header.
        outcome: outcomes of all clients.
        counts_from: instant from which on requests count.
    """

    def __init__(self, host: str, outcome: Outcome, counts_from: float) -> None:
        head = f"POST /v1/inference HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(_BODY)}\r\n\r\n"
        self._request = head.encode() + _BODY
        self._outcome = outcome
        self._counts_from = counts_from
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        """Take an answer, and send the next request."""
        self._received += data
        head, parted, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n")
        if not parted or length is None or len(body) < int(length[1]):
            return
        self._received = b""
        if self._sent_at >= self._counts_from:
            if head.startswith(b"HTTP/1.1 200"):
                self._outcome.latencies.append(time.monotonic() - self._sent_at)
            else:
                self._outcome.failed += 1
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._sent_at = time.monotonic()
        self._transport.write(self._request)


async def _run(url: str, clients: int, seconds: float, warm_up: float) -> Outcome:
    address, outcome, loop = urlsplit(url).netloc, Outcome(), asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    counts_from = time.monotonic() + warm_up
    transports = []
    for _ in range(clients):
        transport, _client = await loop.create_connection(
            lambda: Client(address, outcome, counts_from), host, int(port)
        )
        transports.append(transport)
    await asyncio.sleep(max(0.0, counts_from + seconds - time.monotonic()))
    for transport in transports:
        transport.abort()
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description="Clients of a closed loop.")
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=2.0)
    options = parser.parse_args()
    outcome = asyncio.run(_run(options.url, options.clients, options.seconds, options.warm_up))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
    return int(outcome.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
