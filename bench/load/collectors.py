"""What a collector of traces in trouble does to requests: their latency, the CPU time, and what is dropped.

    python bench/load/collectors.py                          six minutes
    python bench/load/collectors.py --rounds 1 --seconds 4   a first impression

One server with two emulated GPUs gets the same open load again and again, all of it sampled: with a collector that takes all, one that is dead, that
takes connections and never answers, that resets them, that wants to be asked later (503 with Retry-After: 2), and that takes 2 s for each
message; and without traces. Each is set beside the load without traces of its round, and the bounds are on the medians over the rounds; every
other round goes backwards.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bench.stand import generators, stand
from bench.stand.findings import Findings

BATCH_MS, MAX_BATCH, WORKERS, RATE = 20.0, 32, 2, 400.0
MOST_P95_MS = 3.0
"""Most milliseconds that a collector may add to P95; a load by itself varies by about 1."""
MOST_SHUTDOWN = 2.0
"""Most seconds that it may add to the end of the process."""


Row = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description="What a collector of traces in trouble does to requests.")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)d")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load (default %(default)g)")
    options = parser.parse_args()
    stand.end_in_order()
    conditions = {"rounds": options.rounds, "seconds": options.seconds, "rate": RATE, "pinning": stand.PINNING}
    findings = Findings("collectors", **conditions)
    names, rounds = ("off", *COLLECTORS), list[dict[str, Row]]()
    for number in range(options.rounds):
        order = names[::-1] if number % 2 else names
        rounds.append({name: _measure(name, options.seconds) for name in order})
    rows = [
        {"collector": name, **{key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]}}
        for name in names
    ]
    findings.table("one load with each collector, all requests sampled; medians", rows)
    for name in COLLECTORS:
        p95, end = (
            statistics.median([one[name][key] - one["off"][key] for one in rounds]) for key in ("p95 ms", "end s")
        )
        findings.at_most(f"{name}: added to the P95", p95, MOST_P95_MS, "ms")
        findings.at_most(f"{name}: added to the end", end, MOST_SHUTDOWN, "s")
        findings.none(f"{name}: requests not answered", sum(one[name]["not answered"] for one in rounds))
    return findings.close()


def _measure(name: str, seconds: float) -> Row:
    with COLLECTORS.get(name, _dead)() as url:
        flags = () if name == "off" else ("--trace",)
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "500"}
        environment |= {"EMULATED_MS": str(BATCH_MS), "EMULATED_MAX": str(MAX_BATCH)}
        shape = ("--workers", str(WORKERS), "--max-batch-size", str(MAX_BATCH), "--log-level", "error")
        name = f"collectors-{name.replace(' ', '-')}"
        with stand.headway(stand.EMULATED_GPU, *shape, *flags, name=name, environment=environment) as server:
            generators.open_loop(server, RATE, 1.0)
            found = generators.open_loop(server, RATE, seconds)
            dropped = {
                dict(labels)["reason"]: int(value)
                for (metric, labels), value in server.metrics().items()
                if metric == "headway_trace_spans_dropped_total"
            }
            rss = sum(server.rss().values()) / 1e6
            begun = time.monotonic()
            server.stop()
            ended = time.monotonic() - begun
    total = found.report.total
    latency, kinds = total.latency_ms, ("queue", "export")
    return {
        "requests": total.requests, "not answered": total.requests - total.answered, "p50 ms": latency.p50 or 0.0,
        "p95 ms": latency.p95 or 0.0, "CPU µs/request": found.server_us, "MB": rss, "end s": ended,
        **{f"dropped: {kind}": dropped[kind] for kind in kinds},
    }  # fmt: skip


@contextmanager
def _answering(status: int = 200, after: float = 0.0, rest: str = "") -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            time.sleep(after)
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            if rest:
                self.send_header("retry-after", rest)
            with suppress(ConnectionError):  # A process that ends does not wait for it.
                self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def _accepting(reset: bool) -> Iterator[str]:
    """Take connections and never answer; or reset each as soon as something has come."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    if reset:
                        connection.recv(100)
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        connection.close()
                    else:
                        held.append(connection)

        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    for connection in held:
        connection.close()


@contextmanager
def _dead() -> Iterator[str]:
    yield f"http://127.0.0.1:{stand.free_port()}"


COLLECTORS: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "good": _answering,
    "dead": _dead,
    "silent": lambda: _accepting(reset=False),
    "resets": lambda: _accepting(reset=True),
    "asks to wait": lambda: _answering(503, rest="2"),
    "slow": lambda: _answering(after=2.0),
}


if __name__ == "__main__":
    sys.exit(main())
