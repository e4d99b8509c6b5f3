"""Load generators, each in its own process on the load generators' core."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from bench.stand.stand import ROOT, Broken, on_load_core
from headway.load.report import Report

_PATIENCE = 120.0
"""Seconds that a generator may take beyond its load."""
_EXIT_WRONG_ANSWERS = 1


class Service(Protocol):
    @property
    def url(self) -> str: ...

    def usage(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """A load and the server's CPU use: microseconds per answer, by role, and its share of a core."""

    report: Report
    cpu_us: dict[str, float]
    core: float

    @property
    def failures(self) -> int:
        total = self.report.total
        return total.requests - total.answered + (self.report.mismatches or 0)


def open_loop(server: Service, rate: float, seconds: float, *flags: str, path: str = "") -> Measured:
    command = [sys.executable, "-m", "headway", "bench", f"{server.url}{path}", "--json"]
    command += ["--rate", f"{rate:g}", "--duration", f"{seconds:g}", *flags]
    before = server.usage()
    done = subprocess.run(on_load_core(command), capture_output=True, timeout=seconds + _PATIENCE, check=False)
    cpu = spent(before, server.usage())
    if done.returncode not in (0, _EXIT_WRONG_ANSWERS) or not done.stdout:
        raise Broken(f"the load ended with {done.returncode}: {done.stderr.decode(errors='replace')[-2000:]}")
    report = msgspec.json.decode(done.stdout, type=Report)
    served = max(1, report.total.answered)
    return Measured(
        report,
        {role: seconds_used / served * 1e6 for role, seconds_used in cpu.items()},
        sum(cpu.values()) / report.elapsed_s,
    )


@dataclass(frozen=True, slots=True)
class Wrk:
    """Result of wrk. `rate` is answers per second, `errors` counts broken connections and answers other than 2xx. Its loop is closed, so a stall
    counts only once for each connection."""

    requests: int
    rate: float
    errors: int
    p95_ms: float
    p99_ms: float


_WRK = """
wrk.method = "POST"
wrk.body = "{body}"
function done(summary, latency, requests)
  local wrong = summary.errors
  io.write("\\ntold ", summary.requests, " ", summary.requests / summary.duration * 1e6, " ",
    wrong.connect + wrong.read + wrong.write + wrong.timeout + wrong.status, " ",
    latency:percentile(95) / 1000, " ", latency:percentile(99) / 1000, "\\n")
end
"""


def closed_loop(url: str, body: bytes, seconds: float, connections: int = 128, headers: Sequence[str] = ()) -> Wrk:
    """Make wrk post one body repeatedly on kept connections, from one thread."""
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed. On Debian and Ubuntu: apt-get install wrk")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "post.lua"
        script.write_text(_WRK.format(body="".join(f"\\{byte:03d}" for byte in body)), encoding="ascii")
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1.0, seconds):.0f}s", "-s", str(script)]
        for header in ("Content-Type: application/json", *headers):
            command += ["-H", header]
        done = subprocess.run(
            on_load_core([*command, url]), capture_output=True, text=True, timeout=seconds + _PATIENCE, check=False
        )
    figures = done.stdout.rpartition("told ")[2].split()
    if done.returncode or len(figures) != 5:
        raise Broken(f"wrk ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    rate, p95, p99 = (float(figures[place]) for place in (1, 3, 4))
    return Wrk(int(figures[0]), rate, int(figures[2]), p95, p99)


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    difference = {role: after[role] - before.get(role, 0.0) for role in after}
    return {role: seconds for role, seconds in difference.items() if seconds > 0.0}


class Spent(NamedTuple):
    """CPU time of a request in µs: of the process that holds the connections, and of all the server's processes."""

    front: float
    whole: float


def measure(server: Service, load: Callable[[float], int], seconds: float) -> Spent:
    """Return the CPU time of a request. `load` runs for `seconds` and returns the number of answered requests."""
    before = server.usage()
    answered = load(seconds)
    used = spent(before, server.usage())
    each = 1e6 / max(1, answered)
    return Spent(used.get("front", 0.0) * each, sum(used.values()) * each)


def posts(url: str, body: bytes, seconds: float, *fields: str, in_hand: int) -> int:
    """Send posts in a closed loop. Returns how many were answered."""
    done = closed_loop(url, body, seconds, in_hand, fields)
    if done.errors:
        raise Broken(f"{done.errors} of {done.requests} posts failed")
    return done.requests


def calls(port: int, seconds: float, *more: str, in_hand: int) -> int:
    """Make gRPC calls in a closed loop. Returns how many were answered."""
    command = [sys.executable, "bench/stand/grpc_client.py", f"127.0.0.1:{port}", "--seconds", f"{seconds:g}", *more]
    command += ["--calls", str(in_hand)]
    done = subprocess.run(
        on_load_core(command), cwd=ROOT, capture_output=True, text=True, timeout=seconds + 90, check=False
    )
    if done.returncode:
        raise Broken(f"the calls ended with {done.returncode}: {done.stderr[-2000:]}")
    outcomes: dict[str, int] = json.loads(done.stdout)
    if outcomes["failed"]:
        raise Broken(f"{outcomes['failed']} calls failed")
    return outcomes["answered"]
