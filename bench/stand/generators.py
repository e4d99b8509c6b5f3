"""Load generators, each run as a process of its own on the core of load generators."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from bench.stand.stand import HERE, Broken, on_load_core
from headway.load.report import Report

_PATIENCE = 120.0
"""Seconds that a generator may take beyond its load."""
_EXIT_WRONG_ANSWERS = 1


class Service(Protocol):
    """What is put under load: a server, or a fleet of them."""

    @property
    def url(self) -> str:
        """Of its public port, or of one of them."""
        ...

    def usage(self) -> dict[str, float]:
        """CPU seconds so far by role."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """A load, and the CPU time that the server used meanwhile.

    Attributes:
        report: of the load.
        cpu_us: microseconds for each answered request, by role.
        core: share of one core that the server and its workers used while the load lasted.
    """

    report: Report
    cpu_us: dict[str, float]
    core: float

    @property
    def server_us(self) -> float:
        """Microseconds for each answered request, of all the server's processes."""
        return sum(self.cpu_us.values())

    @property
    def failures(self) -> int:
        """Requests without a right answer."""
        total = self.report.total
        return total.requests - total.answered + (self.report.mismatches or 0)

    @property
    def answered(self) -> float:
        """Share of the requests that were answered, 0 to 1."""
        return self.report.total.answered / self.report.total.requests

    def row(self, name: str) -> dict[str, object]:
        """Row of a table: the load's name, how many requests it had, and percentiles in milliseconds."""
        total, latency = self.report.total, self.report.total.latency_ms
        counts = {"what": name, "requests": total.requests, "answered": total.answered}
        return {**counts, "p50": latency.p50, "p95": latency.p95, "p99": latency.p99}


def open_loop(server: Service, rate: float, seconds: float, *flags: str, path: str = "") -> Measured:
    """`headway bench` on a server.

    Arguments:
        server: whose public port is asked.
        rate: mean requests per second.
        seconds: duration of the load.
        flags: further flags of `headway bench`.
        path: of the route, when it is not the one that `headway bench` asks by itself.

    Raises:
        Broken: it did not report.
    """
    command = [sys.executable, "-m", "headway", "bench", f"{server.url}{path}", "--json"]
    command += ["--rate", f"{rate:g}", "--duration", f"{seconds:g}", *flags]
    return _measure(server, command, seconds)


def spread(server: Service, urls: Sequence[str], rate: float, seconds: float, seed: int) -> Measured:
    """The same spread evenly over several gateways; answers are checked to be the input in capitals.

    Arguments:
        server: whose CPU time is counted.
        urls: of its gateways.
        rate: mean requests per second over all of them.
        seconds: duration of the load.
        seed: of the arrivals.

    Raises:
        Broken: it did not report.
    """
    command = [sys.executable, str(HERE / "spread.py"), "--rate", f"{rate:g}", "--seconds", f"{seconds:g}"]
    command += ["--seed", str(seed), *urls]
    return _measure(server, command, seconds)


def _measure(server: Service, command: Sequence[str], seconds: float) -> Measured:
    before = server.usage()
    done = subprocess.run(on_load_core(command), capture_output=True, timeout=seconds + _PATIENCE, check=False)
    after = server.usage()
    if done.returncode not in (0, _EXIT_WRONG_ANSWERS) or not done.stdout:
        raise Broken(f"the load ended with {done.returncode}: {done.stderr.decode(errors='replace')[-2000:]}")
    report = msgspec.json.decode(done.stdout, type=Report)
    cpu = spent(before, after)
    served = max(1, report.total.answered)
    return Measured(
        report,
        {role: seconds_used / served * 1e6 for role, seconds_used in cpu.items()},
        sum(cpu.values()) / report.elapsed_s,
    )


@dataclass(frozen=True, slots=True)
class Wrk:
    """What wrk says.

    Attributes:
        requests: answered.
        rate: of them per second.
        errors: of connections, and answers that were no 2xx.
        p95_ms, p99_ms: latency; closed loop, so a stall counts once for each connection only.
    """

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
    """Wrk with one thread, posting one body over and over on keep-alive connections, for whole seconds.

    Raises:
        Broken: it did not report.
        SystemExit: it is not installed.
    """
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
    told = done.stdout.rpartition("told ")[2].split()
    if done.returncode or len(told) != 5:
        raise Broken(f"wrk ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    rate, p95, p99 = (float(told[place]) for place in (1, 3, 4))
    return Wrk(int(told[0]), rate, int(told[2]), p95, p99)


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """CPU seconds between two usages, by role; roles that used nothing are left out."""
    difference = {role: after[role] - before.get(role, 0.0) for role in after}
    return {role: seconds for role, seconds in difference.items() if seconds > 0.0}
