"""Large payloads: CPU time of a request over all processes, copies in memory, and small requests beside them.

    python bench/cost/payload.py                              about three minutes
    python bench/cost/payload.py --seconds 3 --ways arena     a first impression

Two GPUs made of 100 ms of sleep get 5 MB and answer with its length, or get a number and answer with 5 MB, over `POST /v1/predict` as octets: in one
process with the arena, and in a fleet over Redis. After `make triton` Triton gets the same octets in the binary form of its own protocol.

Copies are those of one request on one GPU: the most memory that each process takes while large requests come one after the other, less what it
took before, in multiples of the payload. Small requests come 20 times a second, alone, beside four small ones in hand, and beside four large
ones. Any load makes them wait for the next departure, so large ones cost them the difference of the last two.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from bench.stand import fleet, parts, processes, stand, triton_server
from bench.stand.findings import Findings
from bench.stand.stand import Broken, Server

SIZE = 5_000_000
SMALL = 100
SMALL_EVERY = 0.05
ALONE = 6
"""Large requests of which the copies are counted."""
MOST_MS = 4.0
"""Most milliseconds of CPU time of a large request in one process with its workers."""
MOST_COPIES = 2.0
BODY_LIMIT = 16 << 20
TARGETS = "bench/stand/targets.py"
FLAGS = ("--max-body-bytes", str(BODY_LIMIT), "--max-batch-size", "8", "--log-level", "warning")
DEADLINES = ("--request-timeout-ms", "30000", "--queue-timeout-ms", "20000")


class Request(NamedTuple):
    path: str
    body: bytes
    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class Way:
    """One way of a payload: its URL, a large and a small request, its processes by role, and CPU seconds so far by role."""

    url: str
    large: Request
    small: Request
    pids: dict[int, str]
    usage: Callable[[], dict[str, float]]


Start = Callable[[str, int], contextlib.AbstractContextManager[Way]]
"""Takes a direction and a number of GPUs."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Large payloads: CPU time, copies, small requests beside.")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load (default %(default)g)")
    parser.add_argument("--in-hand", type=int, default=4, help="large requests (default %(default)g)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    stand.pin_to_load_core()
    return parts.run(parser, {"payload": cost})


def cost(findings: Findings, options: argparse.Namespace) -> None:
    """Measure each way in both directions."""
    rows: list[dict[str, object]] = []
    for name in options.ways:
        for direction in ("in",) if name == "triton" else ("in", "out"):
            with WAYS[name](direction, 1) as way:
                copies = _copies(way)
            with WAYS[name](direction, 2) as way:
                rows.append(_measure(findings, name, direction, way, copies, options))
    findings.table(f"{SIZE / 1e6:g} MB, {options.in_hand} in hand, 2 GPUs of 100 ms", rows)


def _measure(
    findings: Findings, name: str, direction: str, way: Way, copies: dict[str, float], options: argparse.Namespace
) -> dict[str, object]:
    seconds, in_hand = options.seconds, options.in_hand
    start, done = way.usage(), [0]
    calm = _small_beside(way, seconds, contextlib.nullcontext)
    middle = way.usage()
    beside = _small_beside(way, seconds, partial(_load_beside, way.url, way.large, in_hand, done))
    end = way.usage()
    control = _small_beside(way, seconds, partial(_load_beside, way.url, way.small, in_hand, [0]))
    each: dict[str, float] = {}
    for role, used in end.items():
        idle = middle[role] - start.get(role, 0.0)  # The second phase has the same small requests, and takes as long.
        each[role] = (used - middle.get(role, 0.0) - idle) / max(1, done[0]) * 1000
    total = sum(each.values())
    if name == "arena":
        findings.at_most(f"CPU time of a request, {direction}, embedded", total, MOST_MS, "ms")
        findings.at_most(f"copies of a payload in a process, {direction}", max(copies.values()), MOST_COPIES)
    shown = ", ".join(f"{role} {used:.2f}" for role, used in sorted(each.items()) if used > 0.005)
    return {
        "way": name, "5 MB": direction, "requests": done[0], "CPU ms": total, "by role": shown,
        "copies": ", ".join(f"{role} {count:.1f}" for role, count in sorted(copies.items())),
        "P95 small alone, ms": _p95(calm), "beside small, ms": _p95(control), "beside large, ms": _p95(beside),
    }  # fmt: skip


def _copies(way: Way) -> dict[str, float]:
    """Payloads that fit into the memory that each process took at most for one request, by role."""
    with contextlib.closing(_client(way.url)) as client:
        for _ in range(3):
            _ask(client, way.small)
        before = {pid: _memory(pid, "VmRSS") for pid in way.pids}
        for pid in way.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        for _ in range(ALONE):
            _ask(client, way.large)
    copies: dict[str, float] = {}
    for pid, role in way.pids.items():
        count = max(0, _memory(pid, "VmHWM") - before[pid]) / SIZE
        copies[role] = max(copies.get(role, 0.0), count)
    return copies


def _memory(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def _small_beside(
    way: Way, seconds: float, beside: Callable[[], contextlib.AbstractContextManager[object]]
) -> list[float]:
    """Seconds of each small request, while something goes on beside."""
    times: list[float] = []
    with beside(), contextlib.closing(_client(way.url)) as client:
        begun = time.monotonic()
        for number in range(int(seconds / SMALL_EVERY)):
            time.sleep(max(0.0, begun + number * SMALL_EVERY - time.monotonic()))
            sent = time.monotonic()
            _ask(client, way.small)
            times.append(time.monotonic() - sent)
            if time.monotonic() - begun > 2 * seconds:
                break
    return times


@contextlib.contextmanager
def _load_beside(url: str, request: Request, in_hand: int, done: list[int]) -> Iterator[None]:
    """Send requests in a closed loop, so many at a time; `done` counts them."""
    over = threading.Event()

    def run() -> None:
        with contextlib.closing(_client(url)) as client:
            while not over.is_set():
                _ask(client, request)
                done[0] += 1

    threads = [threading.Thread(target=run) for _ in range(in_hand)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _client(url: str) -> HTTPConnection:
    return HTTPConnection(urlsplit(url).netloc, timeout=60)


def _ask(client: HTTPConnection, request: Request) -> None:
    client.request("POST", request.path, request.body, request.fields)
    answer = client.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise Broken(f"{answer.status} {content[:500].decode(errors='replace')}")


def asked(direction: str) -> tuple[str, Request, Request]:
    """Return the target, a large request and a small one."""
    path, fields = "/v1/predict?model_id=default", {"Content-Type": "application/octet-stream"}
    if direction == "in":
        large, small = (Request(path, os.urandom(size), fields) for size in (SIZE, SMALL))
        return f"{TARGETS}:Measure", large, small
    fields |= {"Accept": "application/octet-stream"}
    large, small = (Request(path, str(size).encode(), fields) for size in (SIZE, SMALL))
    return f"{TARGETS}:Grow", large, small


@contextlib.contextmanager
def _serve(direction: str, workers: int) -> Iterator[Way]:
    target, large, small = asked(direction)
    with stand.headway(target, "--workers", str(workers), *FLAGS, *DEADLINES, name="payload") as server:
        yield Way(server.url, large, small, _pids(server), server.usage)


@contextlib.contextmanager
def _redis(direction: str, workers: int) -> Iterator[Way]:
    target, large, small = asked(direction)
    with fleet.fleet(
        target,
        "--max-batch-size",
        "8",
        name="payload",
        gateway_flags=("--max-body-bytes", str(BODY_LIMIT), *DEADLINES),
        worker_flags=("--workers", str(workers)),
    ) as made:
        pids = {pid: role for server in made.every() for pid, role in _pids(server).items()}
        pids[made.redis.server.pid] = "redis"
        made.gateways[0].wait_for(lambda: takes(made.url, small))
        yield Way(made.url, large, small, pids, made.usage)


@contextlib.contextmanager
def _triton(direction: str, workers: int) -> Iterator[Way]:
    with triton_server.upper(batch_ms=100.0) as server:
        large, small = (_tensor(os.urandom(size)) for size in (SIZE, SMALL))
        yield Way(server.url, large, small, _pids(server), server.usage)


def _tensor(octets: bytes) -> Request:
    """A request with one element, in the binary form of Triton's protocol."""
    size = {"binary_data_size": 4 + len(octets)}
    tensor = {"name": "octets", "shape": [1, 1], "datatype": "BYTES", "parameters": size}
    head = json.dumps({"inputs": [tensor]}).encode()
    body = head + len(octets).to_bytes(4, "little") + octets
    return Request("/v2/models/measure/infer", body, {"Inference-Header-Content-Length": str(len(head))})


def takes(url: str, request: Request) -> bool:
    """Whether a gateway knows by now what its workers take."""
    with contextlib.closing(_client(url)) as client:
        try:
            _ask(client, request)
        except Broken:
            return False
    return True


def _pids(server: Server) -> dict[int, str]:
    return {
        process.pid: server.role_of(process)
        for process in processes.family(server.pid)
        if stand.GUARD not in process.command
    }


def _p95(times: list[float]) -> float:
    return statistics.quantiles(times, n=20)[-1] * 1000 if len(times) > 1 else 0.0


WAYS: dict[str, Start] = {
    "arena": _serve,
    "redis": _redis,
    **({"triton": _triton} if triton_server.is_installed() else {}),
}

if __name__ == "__main__":
    sys.exit(main())
