"""CPU time of a request over Redis, by role, compared with Triton's server.

    python bench/cost/fleet_peer.py                            about ten minutes
    python bench/cost/fleet_peer.py --rounds 1 --seconds 4     a first impression

Both upper-case a string in no time, at most 64 in a batch, and get a JSON POST of 115 bytes. Headway is a gateway, a worker host with one GPU
process, a controller and redis-server, with everything enabled: an API key and its rate limit, metrics, admin ports. Triton is one process and
its Python backend's, with a queue delay of 2 ms. Headway is measured with the window policy at 2 ms, with its default policy, and with an
append-only file that is synced every second. Triton persists nothing.

The servers take turns. Each round starts fresh ones, with all processes of a server on one core. The loads are wrk at full load, 1,000
requests/s, and 10,000 (or less if that is too close to the slowest one's limit). A function that takes no time is the hardest case: at 1,000/s,
hardly two requests share a batch. So that rate is also measured with batches of 20 ms.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from bench.cost.contenders import BODY_BYTES, MAX_BATCH, WAIT_MS, WARM_UP, Contender
from bench.stand import fleet, stand, triton_server
from bench.stand.findings import Findings

TRITON = "Triton"
WINDOW = "Headway, window 2 ms"
PACED = "Headway, paced"
KEPT = "Headway, window, AOF everysec"
LOW, HIGH = 1_000.0, 10_000.0
GPU_MS = 20.0
SLACK = 0.9
BRIM = "brim"
KEYS = "keys.toml"
CALIBRATION = 2.0
MOST, GOAL = 1.0, 0.75
ROLES = ("front", "gateway", "worker", "gpu", "controller", "redis")
_PREFIX = len("01234567-000000000 ")
"""Characters that the load generator adds before each input."""


def main() -> int:
    options = _options()
    stand.end_in_order()
    if not triton_server.is_installed():
        print("Triton's server is not installed: make triton", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        key = stand.write_key(Path(folder) / KEYS)
        at_once, gpu = (_contenders(Path(folder), key, batch_ms) for batch_ms in (0.0, GPU_MS))
        high = options.high or _calibrated(at_once)
        findings = Findings(
            "fleet_peer", rounds=options.rounds, seconds=options.seconds, low=LOW, high=high, gpu_ms=GPU_MS,
            max_batch=MAX_BATCH, wait_ms=WAIT_MS, body_bytes=BODY_BYTES, warm_up_s=WARM_UP,
            pinning=stand.PINNING,
        )  # fmt: skip
        findings.say(f"{options.rounds} rounds of {options.seconds:g} s for each server and load; {stand.PINNING}.")
        for _ in range(options.rounds):
            for contender in at_once.values():
                _measure(contender, options.seconds, (LOW, high), brim=True)
            for contender in gpu.values():
                _measure(contender, options.seconds, (LOW,), brim=False)
    _report(findings, "wrk, 1 thread, 128 connections", BRIM, at_once)
    _report(findings, f"{LOW:,.0f} requests/s", f"{LOW:g}", at_once)
    _report(findings, f"{high:,.0f} requests/s", f"{high:g}", at_once)
    _report(findings, f"{LOW:,.0f} requests/s, {GPU_MS:g} ms a batch", f"{LOW:g}", gpu)
    return findings.close()


def _contenders(folder: Path, key: str, batch_ms: float) -> dict[str, Contender]:
    """Return all servers, with a function that takes `batch_ms`."""
    ours_file, triton_file = folder / "ours.json", folder / "triton.json"
    ours_file.write_bytes(b'{"input": "%s"}' % (b"the quick brown fox " * 6)[: BODY_BYTES - 13 - _PREFIX])
    triton_file.write_bytes(triton_server.body(BODY_BYTES))
    common = ("--max-batch-size", str(MAX_BATCH))
    window = ("--policy", "window", "--max-wait-ms", str(WAIT_MS))
    ours = partial(
        fleet.fleet, stand.EMULATED_GPU if batch_ms else f"{stand.TARGETS}:upper", *common,
        gateway_flags=("--keys", str(folder / KEYS)), environment={"EMULATED_MS": str(batch_ms)},
    )  # fmt: skip
    ask = partial(
        Contender, flags=("--body", str(ours_file), "--expect", "upper", "--key", key), headers=(f"Authorization: Bearer {key}",)
    )  # fmt: skip
    return {
        TRITON: Contender(
            partial(triton_server.upper, batch_ms), ("--body", str(triton_file)),
            batches=(triton_server.ENTRIES, triton_server.BATCHES), route=triton_server.ROUTE, body=triton_server.body(BODY_BYTES),
        ),
        WINDOW: ask(partial(ours, worker_flags=window, name="fleet-peer-window")),
        PACED: ask(partial(ours, name="fleet-peer-paced")),
        KEPT: ask(partial(ours, worker_flags=window, name="fleet-peer-kept", keep="everysec")),
    }  # fmt: skip


def _calibrated(contenders: Mapping[str, Contender]) -> float:
    """Return the higher of the two rates."""
    brims = []
    for contender in contenders.values():
        with contender.start() as server:
            contender.wrk(server, WARM_UP)
            brims.append(contender.wrk(server, CALIBRATION).rate)
    return min(HIGH, SLACK * min(brims) // 100 * 100)


def _measure(contender: Contender, seconds: float, rates: Sequence[float], brim: bool) -> None:
    with contender.start() as server:
        if brim:
            contender.fill(BRIM, server, seconds)
        for rate in rates:
            contender.ask(f"{rate:g}", server, rate, seconds)


def _report(findings: Findings, title: str, load: str, contenders: Mapping[str, Contender]) -> None:
    triton = contenders[TRITON].cost(load)
    rows = [contender.row(name, load, ROLES, triton) for name, contender in contenders.items()]
    findings.table(f"{title}; CPU in µs for each request, everything of a server on one core", rows)
    findings.table(f"{title}; what Redis was asked to do for each request", _asked(contenders, load))
    for name, contender in contenders.items():
        findings.keep(f"{title}: {name}", contender.turns[load])
    for name in (WINDOW, PACED):
        ratio = contenders[name].cost(load) / triton
        findings.at_most(f"{title}: {name}: CPU time against Triton (goal {GOAL:g})", ratio, MOST)
        findings.figure(f"{title}: {name}: CPU time of a request, in µs", ratio * triton)
    findings.figure(f"{title}: {TRITON}: CPU time of a request, in µs", triton)


def _asked(contenders: Mapping[str, Contender], load: str) -> Sequence[Mapping[str, object]]:
    rows = []
    for name, contender in contenders.items():
        turns = contender.turns[load]
        requests = sum(turn.requests for turn in turns)
        each = {what: sum(turn.operations[what] for turn in turns) / requests for what in turns[0].operations}
        if each:
            rows.append({"server": name, **each})
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU time per request over Redis, beside Triton's server.")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server (default %(default)d)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load (default %(default)g)")
    parser.add_argument("--high", type=float, default=0.0, help="the higher rate (default: 10,000, or what fits)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
