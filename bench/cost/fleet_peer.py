"""CPU time for each request over Redis, role by role, side by side with Triton's server.

    python bench/cost/fleet_peer.py                            about ten minutes
    python bench/cost/fleet_peer.py --rounds 1 --seconds 4     a first impression

Both serve the same function (a text in capitals, no sleep), at most 64 in a batch, and get a JSON POST of 115 bytes.
Headway is a gateway, a worker host with one GPU process, a controller and redis-server, with everything on: an API key
looked up and its rate limit counted for every request, metrics, admin ports. Triton is one process and that of its
Python backend, with a queue delay of 2 ms; Headway is measured with the window policy at the same 2 ms, with its default
policy, and with an append-only file that is brought to disk every second. Triton keeps nothing that would outlive it.

The servers take turns, each round starting a fresh one; all that belongs to one is on one core, the load on another. The
loads are wrk to the brim, `headway bench` at 1,000 requests/s, and at 10,000 or, where the brim of one of them is too
near, as near to it as a tenth of slack for the slowest allows. A function that takes no time is the hardest case: at
1,000 requests/s hardly two requests meet in a batch. So that rate is measured once more with batches that take 20 ms.
What Redis was asked to do is counted meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.cost import peer
from bench.stand import fleet, generators, stand, triton_server
from bench.stand.findings import Findings
from bench.stand.fleet import Fleet, Operations
from bench.stand.stand import Broken, Server

TRITON = "Triton"
WINDOW = "Headway, window 2 ms"
PACED = "Headway, paced"
KEPT = "Headway, window, AOF everysec"
LOW, HIGH = 1_000.0, 10_000.0
GPU_MS = 20.0
"""Run time of a batch where it takes any."""
SLACK = 0.9
BRIM = "brim"
KEYS = "keys.toml"
WARM_UP = 2.0
CALIBRATION = 2.0
MOST, GOAL = 1.0, 0.75
ROLES = ("front", "gateway", "worker", "gpu", "controller", "redis")
_PREFIX = len("01234567-000000000 ")
"""Characters that the load generator puts before each input."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One load on one server.

    Attributes:
        cpu_us: microseconds for each answered request, by role.
        rate: answered requests per second.
        batch: mean entries in a batch.
        p99_ms: latency; of wrk's closed loop when it was the load.
        operations: what Redis was asked to do; None for Triton.
        requests: answered.
        report: what the generator said.
    """

    cpu_us: Mapping[str, float]
    rate: float
    batch: float
    p99_ms: float
    operations: Operations | None
    requests: int
    report: object

    @property
    def cost(self) -> float:
        """Microseconds for each request, of all processes."""
        return sum(self.cpu_us.values())


@dataclass(slots=True)
class Contender:
    """A server to be measured, and its turns so far by load.

    Attributes:
        start: brings it up.
        route: where requests go.
        body: what wrk sends.
        batches: entries and batches so far.
        headers: of wrk's requests.
        flags: of `headway bench`.
        turns: so far.
    """

    start: Callable[[], AbstractContextManager[Server | Fleet]]
    route: str
    body: bytes
    batches: tuple[str, str]
    headers: tuple[str, ...]
    flags: tuple[str, ...]
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def mean(self, load: str, value: Callable[[Turn], float]) -> float:
        """Over all turns under a load."""
        return statistics.fmean(value(turn) for turn in self.turns[load])


def main() -> int:
    options = _options()
    stand.end_in_order()
    if not generators.has_wrk():
        print("wrk is not installed. On Debian and Ubuntu: apt-get install wrk", file=sys.stderr)
        return 2
    if not triton_server.is_installed():
        print("Triton's server is not installed: make triton", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        key = stand.write_key(Path(folder) / KEYS)
        at_once, gpu = (_contenders(Path(folder), key, batch_ms) for batch_ms in (0.0, GPU_MS))
        high = options.high or _calibrated(at_once)
        findings = Findings(
            "fleet_peer", rounds=options.rounds, seconds=options.seconds, low=LOW, high=high, gpu_ms=GPU_MS,
            max_batch=peer.MAX_BATCH, wait_ms=peer.WAIT_MS, body_bytes=peer.BODY_BYTES, warm_up_s=WARM_UP,
            pinning=stand.PINNING,
        )  # fmt: skip
        findings.say(f"{options.rounds} rounds of {options.seconds:g} s for each server and load; {stand.PINNING}.")
        for _ in range(options.rounds):
            for name, contender in at_once.items():
                _measure(name, contender, options.seconds, (LOW, high), brim=True)
            for name, contender in gpu.items():
                _measure(name, contender, options.seconds, (LOW,), brim=False)
    _report(findings, "wrk, 1 thread, 128 connections", BRIM, at_once)
    _report(findings, f"{LOW:,.0f} requests/s", f"{LOW:g}", at_once)
    _report(findings, f"{high:,.0f} requests/s", f"{high:g}", at_once)
    _report(findings, f"{LOW:,.0f} requests/s, {GPU_MS:g} ms a batch", f"{LOW:g}", gpu)
    return findings.close()


def _contenders(folder: Path, key: str, batch_ms: float) -> dict[str, Contender]:
    """All servers, with a function that takes so many milliseconds."""
    ours_file, triton_file = folder / "ours.json", folder / "triton.json"
    ours_file.write_bytes(b'{"input": "%s"}' % (b"the quick brown fox " * 6)[: peer.BODY_BYTES - 13 - _PREFIX])
    triton_file.write_bytes(triton_server.body(peer.BODY_BYTES))
    common = ("--max-batch-size", str(peer.MAX_BATCH))
    window = ("--policy", "window", "--max-wait-ms", str(peer.WAIT_MS))
    ours = partial(
        fleet.fleet, stand.EMULATED_GPU if batch_ms else f"{stand.TARGETS}:upper", *common,
        gateway_flags=("--keys", str(folder / KEYS)), environment={"EMULATED_MS": str(batch_ms)},
    )  # fmt: skip
    ask = partial(
        Contender, route=peer.ROUTE, body=peer.BODY, batches=("headway_batch_size_sum", "headway_batch_size_count"),
        headers=(f"Authorization: Bearer {key}",),
        flags=("--body", str(ours_file), "--expect", "upper", "--key", key),
    )  # fmt: skip
    return {
        TRITON: Contender(
            partial(triton_server.upper, batch_ms), triton_server.ROUTE, triton_server.body(peer.BODY_BYTES),
            (triton_server.ENTRIES, triton_server.BATCHES), (), ("--body", str(triton_file)),
        ),
        WINDOW: ask(partial(ours, worker_flags=window, name="fleet-peer-window")),
        PACED: ask(partial(ours, name="fleet-peer-paced")),
        KEPT: ask(partial(ours, worker_flags=window, name="fleet-peer-kept", keep="everysec")),
    }  # fmt: skip


def _calibrated(contenders: Mapping[str, Contender]) -> float:
    """The higher of the two rates: 10,000 requests/s, or less where the slowest needs it."""
    brims = []
    for contender in contenders.values():
        with contender.start() as server:
            load = partial(_wrk, server, contender)
            load(seconds=WARM_UP)
            brims.append(load(seconds=CALIBRATION).rate)
    return min(HIGH, SLACK * min(brims) // 100 * 100)


def _measure(name: str, contender: Contender, seconds: float, rates: Sequence[float], brim: bool) -> None:
    with contender.start() as server:
        if brim:
            _wrk(server, contender, WARM_UP)
            contender.turns.setdefault(BRIM, []).append(_brim(name, server, contender, seconds))
        for rate in rates:
            # Batch times and arrivals are learnt in service.
            generators.open_loop(server, rate, WARM_UP, *contender.flags, path=contender.route)
            turn = _at(server, contender, rate, seconds)
            _check(f"{name} at {rate:g}/s", turn)
            contender.turns.setdefault(f"{rate:g}", []).append(turn)


def _brim(name: str, server: Server | Fleet, contender: Contender, seconds: float) -> Turn:
    before, used, asked = _batches(server, contender), server.usage(), _operations(server)
    done = _wrk(server, contender, seconds)
    spent = generators.spent(used, server.usage())
    cpu_us = {role: seconds_used / done.requests * 1e6 for role, seconds_used in spent.items()}
    batch = _mean_batch(before, _batches(server, contender))
    if done.errors:
        raise Broken(f"{name}: {done.errors} of {done.requests} requests at the brim failed")
    return Turn(cpu_us, done.rate, batch, done.p99_ms, _since(asked, server), done.requests, done)


def _at(server: Server | Fleet, contender: Contender, rate: float, seconds: float) -> Turn:
    before, asked = _batches(server, contender), _operations(server)
    measured = generators.open_loop(server, rate, seconds, *contender.flags, path=contender.route)
    total = measured.report.total
    batch = _mean_batch(before, _batches(server, contender))
    return Turn(
        measured.cpu_us,
        total.answered_rate,
        batch,
        total.latency_ms.p99,
        _since(asked, server),
        total.answered,
        measured,
    )


def _check(what: str, turn: Turn) -> None:
    if not isinstance(turn.report, generators.Measured):
        return
    report = turn.report.report
    if report.total.answered < report.total.requests or report.mismatches:
        raise Broken(f"{what}: not every request was answered: {report.total.outcomes}")


def _wrk(server: Server | Fleet, contender: Contender, seconds: float) -> generators.Wrk:
    url = f"{server.url}{contender.route}"
    return generators.closed_loop(url, contender.body, seconds, headers=contender.headers)


def _batches(server: Server | Fleet, contender: Contender) -> tuple[float, float]:
    entries, batches = contender.batches
    return server.total(entries), server.total(batches)


def _mean_batch(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / max(1.0, after[1] - before[1])


def _operations(server: Server | Fleet) -> Operations | None:
    return server.redis.operations() if isinstance(server, Fleet) else None


def _since(before: Operations | None, server: Server | Fleet) -> Operations | None:
    after = _operations(server)
    return after - before if after is not None and before is not None else None


def _report(findings: Findings, title: str, load: str, contenders: Mapping[str, Contender]) -> None:
    triton = contenders[TRITON].mean(load, lambda turn: turn.cost)
    rows = [_row(name, contender, load, triton) for name, contender in contenders.items()]
    findings.table(f"{title}; CPU in µs for each request, everything of a server on one core", rows)
    findings.table(f"{title}; what Redis was asked to do for each request", _asked(contenders, load))
    for name, contender in contenders.items():
        findings.keep(f"{title}: {name}", contender.turns[load])
    for name in (WINDOW, PACED):
        ratio = contenders[name].mean(load, lambda turn: turn.cost) / triton
        findings.at_most(f"{title}: {name}: CPU time against Triton (goal {GOAL:g})", ratio, MOST)
        findings.figure(f"{title}: {name}: CPU time of a request, in µs", ratio * triton)
    findings.figure(f"{title}: {TRITON}: CPU time of a request, in µs", triton)


def _row(name: str, contender: Contender, load: str, triton: float) -> dict[str, object]:
    cost = contender.mean(load, lambda turn: turn.cost)
    roles = {role: _role(contender, load, role) for role in ROLES}
    return {
        "server": name,
        "all": cost,
        "ratio": cost / triton,
        **roles,
        "other": cost - sum(roles.values()),
        "least": min(turn.cost for turn in contender.turns[load]),
        "most": max(turn.cost for turn in contender.turns[load]),
        "batch": contender.mean(load, lambda turn: turn.batch),
        "requests/s": contender.mean(load, lambda turn: turn.rate),
        "p99 ms": contender.mean(load, lambda turn: turn.p99_ms),
    }


def _role(contender: Contender, load: str, role: str) -> float:
    return contender.mean(load, lambda turn: turn.cpu_us.get(role, 0.0))


def _asked(contenders: Mapping[str, Contender], load: str) -> Sequence[Mapping[str, object]]:
    rows = []
    for name, contender in contenders.items():
        turns = [(turn.operations, turn.requests) for turn in contender.turns[load] if turn.operations is not None]
        if turns:
            requests = sum(count for _, count in turns)
            asked = [operations for operations, _ in turns]
            rows.append(
                {
                    "server": name,
                    "script calls": sum(one.scripts for one in asked) / requests,
                    "blocking reads": sum(one.reads for one in asked) / requests,
                    "other commands": sum(one.inside for one in asked) / requests,
                    "socket reads": sum(one.arrivals for one in asked) / requests,
                    "µs in scripts": sum(one.script_us for one in asked) / requests,
                }
            )
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU time per request over Redis, beside Triton's server.")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server (default %(default)d)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load (default %(default)g)")
    parser.add_argument("--high", type=float, default=0.0, help="the higher rate (default: 10,000, or what fits)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
