"""An independent judge: MLPerf LoadGen decides whether a server meets a latency bound at a rate."""

import importlib.util
import math
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.stand.stand import HERE, Broken, on_load_core

LATE_SHARE = 0.02
"""Maximum that the client itself may add to P99, as a share of the bound."""
TRIES = 3
"""How often a run is tried if the client is late."""
WITHIN = 1.03
"""The search ends when the lowest failing rate is within this ratio of the highest that holds."""
STEP = 1.4
"""Factor between rates while only one of the two is known."""
WARM_UP = 3.0
LEAST_QUERIES = 700
"""With fewer queries, early stopping can't confirm any P99 unless all meet the bound."""
_PATIENCE = 120.0


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Body of a request, and octets that the right answer contains."""

    body: bytes
    expected: bytes


class Late(msgspec.Struct, frozen=True):
    """P99 in ms of the client's own delays: from due to issued, from issued to written, and until a received answer is read."""

    issue_ms: float
    write_ms: float
    read_ms: float

    @property
    def total_ms(self) -> float:
        return self.issue_ms + self.write_ms + self.read_ms


class Verdict(msgspec.Struct, frozen=True):
    """LoadGen's verdict, latencies since each query was due, and what its client saw.

    Attributes:
        result: VALID or INVALID.
        early_stopping_met: whether there were enough queries to know.
        scheduled_rate: rate at which queries were due.
        failures: numbers of queries without a right answer, which LoadGen doesn't see, by status or reason.
        resent: queries that were sent again, because the server had closed an idle connection.
    """

    result: str
    reason: str
    early_stopping_met: bool
    target_rate: float
    scheduled_rate: float
    queries: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    longest_ms: float
    failures: dict[str, int]
    resent: int
    late: Late

    @property
    def holds(self) -> bool:
        """True if it is VALID, and every answer was right."""
        return self.result == "VALID" and not self.failures

    def shown(self) -> str:
        failed = ", ".join(f"{count} × {why}" for why, count in self.failures.items())
        verdict = (
            f"{self.target_rate:,.0f}/s {self.result}, {self.queries:,} queries, p50 {self.p50_ms:.0f}, p95 {self.p95_ms:.0f}, "
            f"p99 {self.p99_ms:.0f} ms; client late by {self.late.total_ms:.2f} ms"
        )
        return "; ".join(filter(None, [verdict, failed, self.reason]))


class ClientLate(Broken):
    """Raised if the client was late in every try of a run, which then says nothing about the server."""


@dataclass(frozen=True, slots=True)
class Load:
    """The requests, and the bound on a latency percentile. `late_ms` None means LATE_SHARE of the bound."""

    questions: Sequence[Question]
    bound_ms: float
    percentile: float = 0.99
    seconds: float = 5.0
    seed: int = 1
    late_ms: float | None = None

    @property
    def most_late_ms(self) -> float:
        return LATE_SHARE * self.bound_ms if self.late_ms is None else self.late_ms


@dataclass(slots=True)
class Found:
    """A server's runs. `best` is the one with the highest rate that holds, `refused` is why there is nothing to report."""

    best: Verdict | None = None
    runs: list[Verdict] = field(default_factory=list)
    refused: str = ""


def absent() -> str:
    """Return why LoadGen can't judge here, or an empty string if it can."""
    if importlib.util.find_spec("mlperf_loadgen") is not None:
        return ""
    return (
        f"MLPerf LoadGen (mlcommons-loadgen) is not installed. It has wheels for Python 3.11 to 3.13 on Linux for x86_64, and this is "
        f"Python {platform.python_version()} on {platform.system()} for {platform.machine()}. Where it has one, `make bench` installs it."
    )


def judge(urls: Sequence[str], load: Load, rate: float) -> Verdict:
    """Judge a server at a rate. Raises ClientLate if the client was late in every try."""
    late = []
    for _ in range(TRIES):
        verdict = _run(urls, load, rate, load.seconds, LEAST_QUERIES)
        if verdict.late.total_ms <= load.most_late_ms:
            return verdict
        late.append(f"{verdict.late.total_ms:.1f}")
    raise ClientLate(
        f"the client itself was late by {', '.join(late)} ms (P99) at {rate:,.0f}/s, and {load.most_late_ms:.1f} is the most "
        f"that a run may have. Is the machine busy with something else?"
    )


def most(urls: Sequence[str], load: Load, start: float, steps: int, say: Callable[[str], None]) -> Found:
    """Find the highest rate at which a server meets the bound, by bisection with at most `steps`."""
    outcome = Found()
    low, high, rate = 0.0, math.inf, start
    _run(urls, load, start / 2, WARM_UP)
    for _ in range(steps):
        try:
            verdict = judge(urls, load, rate)
        except ClientLate as exc:
            outcome.refused = str(exc)
            say(f"  refused: {exc}")
            return outcome
        outcome.runs.append(verdict)
        say(f"  {verdict.shown()}")
        if verdict.holds:
            low, outcome.best = rate, verdict
        else:
            high = rate
        if high <= low * WITHIN:
            break
        rate = math.sqrt(low * high) if low and high < math.inf else rate * STEP if low else rate / STEP
    return outcome


def _run(urls: Sequence[str], load: Load, rate: float, seconds: float, queries: int = 1) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="headway-bench-loadgen-") as folder:
        requests = Path(folder) / "requests"
        requests.write_bytes(msgspec.msgpack.encode(load.questions))
        command = [sys.executable, str(HERE / "loadgen_client.py"), "--requests", str(requests), "--folder", folder]
        command += ["--rate", str(rate), "--seconds", str(seconds), "--bound-ms", str(load.bound_ms)]
        command += ["--percentile", str(load.percentile), "--seed", str(load.seed), "--queries", str(queries), *urls]
        patience = max(seconds, queries / rate) + _PATIENCE
        done = subprocess.run(on_load_core(command), capture_output=True, timeout=patience, check=False)
        if done.returncode or not done.stdout:
            raise Broken(
                f"LoadGen's client ended with {done.returncode}: {done.stderr.decode(errors='replace')[-2000:]}"
            )
        return msgspec.json.decode(done.stdout, type=Verdict)
