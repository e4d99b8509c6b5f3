"""CPU time for each request, side by side with mosec, the fastest batching server for Python that we know of.

    python bench/cost/peer.py                            about three minutes
    python bench/cost/peer.py --rounds 1 --seconds 5     a first impression

Both serve the same function (a text in capitals, no sleep) in one worker process, at most 64 in a batch, and get the
same 115-byte JSON POST. Headway runs with everything on: an API key looked up and its rate limit counted for every
request, metrics, the admin port. It is measured with the window policy at mosec's 2 ms, and with its default policy.
mosec knows no keys and no limits; it is measured as it comes, and with msgspec in place of the JSON it comes with.

The servers take turns, each round starting a fresh one. The figure that travels between machines is CPU time per
request, user and system, of all the processes of a server together; the ratio is of means over the rounds. wrk
loads them to the brim of one core; `headway bench` then cross-checks at a fixed rate, where batches are smaller.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from bench.stand import generators, stand
from bench.stand.findings import Findings
from bench.stand.processes import Process
from bench.stand.stand import Broken, Server

MAX_BATCH, WAIT_MS = 64, 2
BODY_BYTES = 115
BODY = b'{"input": "%s"}' % (b"the quick brown fox " * 6)[: BODY_BYTES - 13]
ROUTE = "/v1/inference"
WARM_UP = 2.0
MOSEC = "mosec"
MOSEC_FAST = "mosec, msgspec"
MOSEC_BATCH = "mosec_service_batch_size"
WINDOW = "headway, window 2 ms"
PACED = "headway, paced"
MOST, GOAL = 0.7, 0.6


@dataclass(slots=True)
class Contender:
    """A server to be measured, and its rounds so far: microseconds of CPU by role, and requests per second."""

    start: Callable[[], AbstractContextManager[Server]]
    headers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    batch_metric: str = "headway_batch_size"
    rounds: list[dict[str, float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    fixed: list[dict[str, float]] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)
    details: list[object] = field(default_factory=list)

    @property
    def cost(self) -> float:
        """Mean microseconds for each request under wrk."""
        return statistics.fmean(sum(one.values()) for one in self.rounds)

    @property
    def fixed_cost(self) -> float:
        """The same at the fixed rate."""
        return statistics.fmean(sum(one.values()) for one in self.fixed)


def main() -> int:
    options = _options()
    stand.end_in_order()
    if not generators.has_wrk():
        print("wrk is not installed. On Debian and Ubuntu: apt-get install wrk", file=sys.stderr)
        return 2
    findings = Findings(
        "peer", rounds=options.rounds, seconds=options.seconds, rate=options.rate, max_batch=MAX_BATCH,
        wait_ms=WAIT_MS, body=BODY.decode(), warm_up_s=WARM_UP, pinning=stand.PINNING,
    )  # fmt: skip
    findings.say(f"{options.rounds} rounds of {options.seconds:g} s for each server and load; {stand.PINNING}.")
    with tempfile.TemporaryDirectory() as folder:
        contenders = _contenders(Path(folder))
        for _ in range(options.rounds):
            for contender in contenders.values():
                _measure(contender, options.seconds, options.rate)
    _report(findings, contenders, options.rate)
    return findings.close()


def _contenders(folder: Path) -> dict[str, Contender]:
    keys = folder / "keys.toml"
    key = stand.write_key(keys)
    ours = partial(
        stand.headway, f"{stand.TARGETS}:upper",
        *("--keys", str(keys), "--max-batch-size", str(MAX_BATCH), "--log-level", "warning"),
    )  # fmt: skip
    ask = partial(Contender, headers=(f"Authorization: Bearer {key}",), flags=("--key", key))
    window = partial(ours, "--policy", "window", "--max-wait-ms", str(WAIT_MS), name="peer-window")
    return {
        WINDOW: ask(window),
        MOSEC: Contender(partial(mosec, False), batch_metric=MOSEC_BATCH),
        MOSEC_FAST: Contender(partial(mosec, True), batch_metric=MOSEC_BATCH),
        PACED: ask(partial(ours, name="peer-paced")),
    }


def _measure(contender: Contender, seconds: float, rate: float) -> None:
    with contender.start() as server:
        load = partial(generators.closed_loop, f"{server.url}{ROUTE}", BODY, headers=contender.headers)
        load(seconds=WARM_UP)
        before = server.usage()
        done = load(seconds=seconds)
        spent = generators.spent(before, server.usage())
        if done.errors:
            raise Broken(f"{server.name}: {done.errors} of {done.requests} requests failed under wrk")
        contender.rounds.append({role: used / done.requests * 1e6 for role, used in spent.items()})
        contender.rates.append(done.rate)
        if rate > 0:
            entries, batches = _batches(server, contender.batch_metric)
            measured = generators.open_loop(server, rate, seconds, "--expect", "upper", *contender.flags)
            total = measured.report.total
            if total.answered < total.requests or measured.report.mismatches:
                raise Broken(f"{server.name}: not every request at {rate:g}/s was answered: {total.outcomes}")
            contender.fixed.append(measured.cpu_us)
            more_entries, more_batches = _batches(server, contender.batch_metric)
            contender.batches.append((more_entries - entries) / (more_batches - batches))
            contender.details.append(measured)
        contender.details.append(done)


def _batches(server: Server, metric: str) -> tuple[float, float]:
    """Entries in all batches so far, and batches."""
    return server.total(f"{metric}_sum"), server.total(f"{metric}_count")


def _report(findings: Findings, contenders: dict[str, Contender], rate: float) -> None:
    peer = contenders[MOSEC]
    rows = [
        {
            "server": name,
            "µs CPU/request": contender.cost,
            "front": _mean(contender.rounds, "front"),
            "worker": _mean(contender.rounds, "worker"),
            "other": contender.cost - _mean(contender.rounds, "front") - _mean(contender.rounds, "worker"),
            "least": min(sum(one.values()) for one in contender.rounds),
            "most": max(sum(one.values()) for one in contender.rounds),
            "requests/s": statistics.fmean(contender.rates),
            "ratio": contender.cost / peer.cost,
        }
        for name, contender in contenders.items()
    ]
    findings.table("wrk, 1 thread, 128 connections, one core for each server", rows)
    if rate > 0:
        rows = [
            {
                "server": name,
                "µs CPU/request": contender.fixed_cost,
                "front": _mean(contender.fixed, "front"),
                "worker": _mean(contender.fixed, "worker"),
                "batch": statistics.fmean(contender.batches),
                "ratio": contender.fixed_cost / peer.fixed_cost,
            }
            for name, contender in contenders.items()
        ]
        findings.table(f"headway bench, {rate:,.0f} requests/s Poisson", rows)
    for name, contender in contenders.items():
        findings.keep(name, contender.details)
    for name in (WINDOW, PACED):
        ratio = contenders[name].cost / peer.cost
        findings.at_most(f"{name}: CPU time against mosec (goal {GOAL:g})", ratio, MOST)
        fast = contenders[name].cost / contenders[MOSEC_FAST].cost
        findings.figure(f"{name}: CPU time against mosec with msgspec", fast)


def _mean(rounds: list[dict[str, float]], role: str) -> float:
    return statistics.fmean(one.get(role, 0.0) for one in rounds)


@contextmanager
def mosec(
    fast_json: bool = False,
    max_batch: int = MAX_BATCH,
    wait_ms: int = WAIT_MS,
    batch_ms: float = 0.0,
    workers: int = 1,
) -> Iterator[Server]:
    """Mosec, up and answering.

    Arguments:
        fast_json: whether msgspec decodes and encodes its JSON.
        max_batch: most inputs in one batch.
        wait_ms: milliseconds that a batch waits for more inputs.
        batch_ms: run time of a batch in milliseconds.
        workers: number of its worker processes.
    """
    port = stand.free_port()
    program = str(stand.HERE / "mosec_server.py")
    command = [sys.executable, program, "--address", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    environment = {
        "BENCH_MAX_BATCH": str(max_batch),
        "BENCH_MAX_WAIT_MS": str(wait_ms),
        "BENCH_BATCH_MS": str(batch_ms),
        "BENCH_WORKERS": str(workers),
        "BENCH_MSGSPEC": "1" if fast_json else "",
    }
    with Server("peer-mosec", command, _mosec_role, environment) as server:
        server.url = server.admin = f"http://127.0.0.1:{port}"
        server.wait_for(lambda: _answers(server.url))
        yield server


def _answers(url: str) -> bool:
    try:
        with urlopen(f"{url}{ROUTE}", data=BODY, timeout=2) as answer:
            return bool(answer.status == 200)
    except (HTTPError, URLError, OSError):
        return False


def _mosec_role(process: Process) -> str:
    """The Rust program is the front; of the Python processes those that multiprocessing spawned are workers."""
    if process.name == "mosec":
        return "front"
    if "spawn_main" in process.command:
        return "worker"
    return "coordinator"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU time per request beside mosec.")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server (default %(default)d)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load (default %(default)g)")
    parser.add_argument(
        "--rate", type=float, default=4000.0, help="of the cross-check; 0 for none (default %(default)g)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
