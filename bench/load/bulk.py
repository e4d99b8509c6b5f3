"""What bulk jobs cost other requests, and how much they get done: each load without a job and with one, in turns.

    python bench/load/bulk.py                              all, 30 s of load each, twice
    python bench/load/bulk.py --seconds 8 --rounds 1       a first impression
    python bench/load/bulk.py --only spacing lone          some of them

spacing     H1: 1,000 requests/s on two GPUs (100 ms a batch of at most 100), during a job of 100,000 lines.
lone        single requests that never overlap, to one, two and eight GPUs that only bulk keeps busy.
idle        only a job: how full the batches are, and for what share of the time the GPUs run.

GPUs are emulated; load is open-loop, Poisson. The job is sent before the load begins.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.stand import lone as trips
from bench.stand import parts, stand
from bench.stand.findings import Findings
from bench.stand.generators import open_loop
from bench.stand.stand import Server

BATCH_MS, MAX_BATCH, RATE = 100.0, 100, 1_000.0
LINES = 100_000
WARM_UP = 5.0
LATER = 1.03
"""Maximum ratio of P95 beside a job."""
LONE_LATER = 1.05
"""Maximum ratio of the P99 of lone requests."""
SPARE = 800.0
"""Minimum lines per second beside H1."""
FULL = 0.95
"""Minimum share of the GPUs' time and batch room that a job alone uses."""

Start = Callable[[Path, str], AbstractContextManager[Server]]
"""Starts a service, given a folder for bulk jobs and a name."""


@dataclass(frozen=True, slots=True)
class Side:
    """A load, with or without a job: latencies in ms, answers and lines per second."""

    p50: float
    p95: float
    p99: float
    failures: float
    answered: float
    lines: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description="What bulk jobs cost the requests beside them, and what they get done."
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=2, help="of each pair (default %(default)d)")
    return parts.run(parser, PARTS, {name: f"bulk_{name}" for name in PARTS})


def spacing(findings: Findings, options: argparse.Namespace) -> None:
    start = emulated(2)
    sides = in_turns(options.rounds, "spacing", start, partial(_load, RATE, options.seconds), LINES)
    later = compare(findings, "1,000 requests/s on two GPUs", sides)
    findings.at_most("spacing: p95 with a job ÷ without", later.p95, LATER)
    findings.at_least("spacing: lines/s", _lines(sides), SPARE, "/s")


def lone(findings: Findings, options: argparse.Namespace) -> None:
    for gpus in (1, 2, 8):
        start = emulated(gpus)
        sides = in_turns(options.rounds, f"lone-{gpus}", start, partial(_alone, options.seconds), LINES * 3)
        later = compare(findings, f"Lone requests on {gpus} GPUs that are otherwise idle", sides)
        findings.at_most(f"lone, {gpus} GPUs: p99 with a job ÷ without", later.p99, LONE_LATER)


def idle(findings: Findings, options: argparse.Namespace) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        emulated(2)(Path(folder), "bulk-idle") as server,
        _job(server, Path(folder), LINES),
    ):
        _until_lines_run(server)
        time.sleep(WARM_UP)
        metrics = "headway_bulk_lines_total", "headway_batch_size_count"
        before, begun = [server.total(metric) for metric in metrics], time.monotonic()
        time.sleep(options.seconds)
        lines, batches = (server.total(metric) - count for metric, count in zip(metrics, before, strict=True))
        took = time.monotonic() - begun
    busy = batches * BATCH_MS / 1000 / (2 * took)
    row = {"lines/s": lines / took, "in a batch": lines / batches, "busy": busy}
    findings.table("A job alone on two GPUs", [row])
    findings.at_least("idle: share of the seats that are taken", lines / batches / MAX_BATCH, FULL)
    findings.at_least("idle: share of the time that GPUs run", busy, FULL)


def emulated(gpus: int) -> Start:
    def start(folder: Path, name: str) -> AbstractContextManager[Server]:
        room = ("--bulk-dir", str(folder / "bulk"))
        served: AbstractContextManager[Server] = stand.emulated(BATCH_MS, MAX_BATCH, gpus, *room, name=name)
        return served

    return start


def in_turns(
    rounds: int, name: str, start: Start, load: Callable[[Server, int], Side], lines: int
) -> tuple[list[Side], list[Side]]:
    """Measure the load without a job and with one, in turns, each on a new service. `load` gets a service and a seed, once lines run."""
    sides: tuple[list[Side], list[Side]] = [], []
    for number, beside in itertools.product(range(rounds), (False, True)):
        with (
            tempfile.TemporaryDirectory() as folder,
            start(Path(folder), f"bulk-{name}-{'with' if beside else 'without'}") as server,
        ):
            open_loop(server, 200, WARM_UP)
            with _job(server, Path(folder), lines) if beside else nullcontext():
                if beside:
                    _until_lines_run(server)
                sides[beside].append(load(server, number))
    return sides


def compare(findings: Findings, title: str, sides: tuple[list[Side], list[Side]]) -> Side:
    """Show both sides, as means over their rounds, and return the quotients, with ÷ without."""
    without, beside = (
        Side(*(statistics.mean(getattr(side, field) for side in both) for field in Side.__slots__)) for both in sides
    )
    rows: list[Mapping[str, object]] = [
        {"": name} | {field: getattr(side, field) for field in Side.__slots__}
        for name, side in (("without", without), ("with a job", beside))
    ]
    findings.table(f"{title}; ms, answers and lines per second", rows)
    findings.keep(title, sides)
    return Side(*(getattr(beside, field) / max(getattr(without, field), 1e-9) for field in Side.__slots__))


def _lines(sides: tuple[list[Side], list[Side]]) -> float:
    return statistics.mean(side.lines for side in sides[1])


def _load(rate: float, seconds: float, server: Server, seed: int) -> Side:
    before = server.total("headway_bulk_lines_total")
    measured = open_loop(server, rate, seconds, "--seed", str(seed))
    lines = (server.total("headway_bulk_lines_total") - before) / measured.report.elapsed_s
    total, latency = measured.report.total, measured.report.total.latency_ms
    answered = total.answered / measured.report.elapsed_s
    return Side(latency.p50, latency.p95, latency.p99, measured.failures, answered, lines)


def _alone(seconds: float, server: Server, seed: int) -> Side:
    """Run a blocking client that pauses before each request."""
    before, begun = server.total("headway_bulk_lines_total"), time.monotonic()
    ours, _ = trips.alternate(server, seconds, seed)
    took, times = time.monotonic() - begun, [trip.total for trip in ours]
    lines = (server.total("headway_bulk_lines_total") - before) / took
    p50, p95, p99 = (trips.percentile(times, percent) for percent in (50, 95, 99))
    return Side(p50, p95, p99, 0, len(times) / took, lines)


@contextmanager
def _job(server: Server, folder: Path, lines: int) -> Iterator[None]:
    """Run a job of `lines` short strings, sent by `headway bulk`, while the context lasts."""
    texts = folder / "texts.txt"
    with texts.open("w", encoding="ascii") as file:
        file.writelines(f"line {number}\n" for number in range(lines))
    command = [sys.executable, "-m", "headway", "bulk", "submit", str(texts), "--url", server.url]
    with (folder / "sent.txt").open("wb") as output:
        sender = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            sender.terminate()
            sender.wait()
    if sender.returncode not in (0, -15, 143):
        raise stand.Broken(f"the job was not taken: {(folder / 'sent.txt').read_text(encoding='utf-8')}")


def _until_lines_run(server: Server) -> None:
    patience = time.monotonic() + stand.START_SECONDS
    while not server.total("headway_bulk_lines_total"):
        if time.monotonic() > patience:
            raise stand.Broken("no line ran")
        time.sleep(0.05)


PARTS = {"spacing": spacing, "lone": lone, "idle": idle}

if __name__ == "__main__":
    stand.end_in_order()
    sys.exit(main())
