"""Large payloads: CPU time of a request over all processes, and copies in memory.

    python bench/cost/payload.py                  a minute
    python bench/cost/payload.py --seconds 3      a first impression

Two GPUs, emulated by 100 ms of sleep, get 5 MB and return its length, or get a number and return 5 MB, over `POST /v1/predict` as octets: in one
process with the arena, and in a fleet over Redis.

Copies are for one request at a time on one GPU: the peak memory of each process minus its memory before, in multiples of the payload.
neighbours.py measures what large requests cost other tenants' small ones; tensors.py compares with Triton.
"""

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from bench.stand import fleet, generators, parts, processes, stand
from bench.stand.findings import Findings
from bench.stand.stand import Broken, Server

SIZE = 5_000_000
SMALL = 100
IN_HAND = 4
ALONE = 6
"""Number of large requests when counting copies."""
MOST_MS = 4.0
"""Maximum milliseconds of CPU time of a large request, in one process with its workers."""
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
    """A way to send payloads: its URL, a large and a small request, its processes and CPU seconds so far by role."""

    url: str
    large: Request
    small: Request
    pids: dict[int, str]
    usage: Callable[[], dict[str, float]]


Start = Callable[[str, int], contextlib.AbstractContextManager[Way]]
"""Takes a direction and a number of GPUs."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Large payloads: CPU time and copies.")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load (default %(default)g)")
    stand.pin_to_load_core()
    return parts.run(parser, {"payload": cost})


def cost(findings: Findings, options: argparse.Namespace) -> None:
    rows: list[dict[str, object]] = []
    for (name, start), direction in itertools.product(WAYS.items(), ("in", "out")):
        with start(direction, 1) as way:
            copies = _copies(way)
        with start(direction, 2) as way:
            before, requests = way.usage(), _load(way.url, way.large, options.seconds)
            used = generators.spent(before, way.usage())
        each = {role: 1000 * seconds / max(1, requests) for role, seconds in used.items()}
        total = sum(each.values())
        if name == "arena":
            findings.at_most(f"CPU time of a request, {direction}, embedded", total, MOST_MS, "ms")
            findings.at_most(f"copies of a payload in a process, {direction}", max(copies.values()), MOST_COPIES)
        shown = ", ".join(f"{role} {took:.2f}" for role, took in sorted(each.items()) if took > 0.005)
        copied = ", ".join(f"{role} {count:.1f}" for role, count in sorted(copies.items()))
        rows.append(
            {"way": name, "5 MB": direction, "requests": requests, "CPU ms": total, "by role": shown, "copies": copied}
        )
    findings.table(f"{SIZE / 1e6:g} MB, {IN_HAND} in hand, 2 GPUs of 100 ms", rows)


def _copies(way: Way) -> dict[str, float]:
    """Return each role's peak memory for one request, in payloads."""
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


def _load(url: str, request: Request, seconds: float) -> int:
    """Send requests in a closed loop. Returns how many were answered."""
    until = time.monotonic() + seconds

    def run(done: int) -> int:
        with contextlib.closing(_client(url)) as client:
            while time.monotonic() < until:
                _ask(client, request)
                done += 1
        return done

    with ThreadPoolExecutor(IN_HAND) as threads:
        return sum(threads.map(run, [0] * IN_HAND))


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
    roomy, gpus = ("--max-body-bytes", str(BODY_LIMIT), *DEADLINES), ("--workers", str(workers))
    batch = ("--max-batch-size", "8")
    with fleet.fleet(target, *batch, name="payload", gateway_flags=roomy, worker_flags=gpus) as made:
        pids = {pid: role for server in made.every() for pid, role in _pids(server).items()}
        pids[made.redis.server.pid] = "redis"
        made.gateways[0].wait_for(lambda: takes(made.url, small))
        yield Way(made.url, large, small, pids, made.usage)


def takes(url: str, request: Request) -> bool:
    """Return True if a gateway already knows its workers' input type."""
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


WAYS: dict[str, Start] = {"arena": _serve, "redis": _redis}

if __name__ == "__main__":
    sys.exit(main())
