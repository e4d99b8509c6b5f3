"""What a lone request costs on an idle system, compared with a round trip to the simplest possible server.

A blocking client calls Headway and a socket that answers anything, in turns. Both wake from sleep for each request, so the difference is what
Headway adds, including its GPU process. An open-loop generator doesn't help here: it wakes up as late as the delays it should measure.
"""

import random
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import msgspec

from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.generators import Service
from bench.stand.stand import Server

GAP = 0.05
"""Mean pause before each request, seconds."""
_ECHO = """
import asyncio, uvloop
class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n{}")
async def main():
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    print("port", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
uvloop.run(main())
"""


class Trip(msgspec.Struct):
    """Milliseconds of a round trip, and the part that the server reports as its own."""

    total: float
    server: float


def alternate(server: Service, seconds: float, seed: int = 0) -> tuple[list[Trip], list[Trip]]:
    """Call `server` and the bare one in turns. Returns the trips of both."""
    stand.pin_to_load_core()
    rng = random.Random(seed)
    ours: list[Trip] = []
    bare: list[Trip] = []
    with _bare_server() as port, _client(urlsplit(server.url).port or 0) as headway, _client(port) as other:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            text = f"lone {len(ours)}"
            for client, trips in ((headway, ours), (other, bare)):
                time.sleep(rng.uniform(0.5, 1.5) * GAP)
                begun = time.perf_counter()
                body = _ask(client, text)
                total = (time.perf_counter() - begun) * 1000
                answer = msgspec.json.decode(body)
                if client is headway and answer["output"] != text.upper():
                    raise stand.Broken(f"{text!r} was answered by {answer['output']!r}")
                trips.append(Trip(total, answer["metadata"]["latency_ms"] if client is headway else 0.0))
    return ours, bare


def measure(findings: Findings, server: Service, seconds: float, what: str, most: float) -> None:
    """Show the trips, and check the milliseconds added at P99."""
    ours, bare = alternate(server, seconds)
    findings.keep("lone", {"headway": ours, "bare": bare})
    totals, floor = [trip.total for trip in ours], [trip.total for trip in bare]
    rows = [
        row("headway, round trip", totals),
        row("of it the server, run included", [trip.server for trip in ours]),
        row("a bare socket server, round trip", floor),
    ]
    findings.table("Lone requests, in turns to Headway and to a server that does nothing; ms", rows)
    findings.at_most(what, percentile(totals, 99) - percentile(floor, 99), most, "ms")


def row(name: str, values: Sequence[float]) -> dict[str, object]:
    """Return percentiles of latencies in ms as a table row."""
    return {"": name, "requests": len(values)} | {f"p{p:g}": percentile(values, p) for p in (50, 90, 95, 99, 100)}


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@contextmanager
def _bare_server() -> Iterator[int]:
    with Server("lone-bare", [sys.executable, "-c", _ECHO], lambda _: "front") as bare:
        bare.wait_for(lambda: bare.output.startswith("port ") and bare.output.endswith("\n"))
        yield int(bare.output.split()[1])


@contextmanager
def _client(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(20):
            _ask(client, "warm")
        yield client


def _ask(client: socket.socket, text: str) -> bytes:
    body = msgspec.json.encode({"input": text})
    client.sendall(b"POST /v1/inference HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    answer = b""
    while True:
        answer += client.recv(65_536)
        head, end, rest = answer.partition(b"\r\n\r\n")
        if end and len(rest) == int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return rest
