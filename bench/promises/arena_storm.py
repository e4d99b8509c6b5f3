"""A storm of kill -9 on GPU processes and hosts while large values travel: does anything stay behind?

    python bench/promises/arena_storm.py                       two minutes: one process, then a fleet over Redis
    python bench/promises/arena_storm.py --seconds 600         ten minutes of each

Clients send 2 MB in a closed loop. Meanwhile the GPU processes of `headway serve` are killed, one after the other; in a fleet the
GPU processes, and now and then a whole worker host, which is started again. After it, with nobody asking any more:

descriptors, mappings   of the host, beside those before the storm
memory                  of the host, beside that after a calm beginning of the same length as a tenth of the storm
keys                    of Redis for large values and what waits
answers                 none is wrong; those to requests that met a dying process may be errors
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.stand import fleet, processes, stand
from bench.stand.findings import Findings
from bench.stand.stand import Server

SIZE = 2_000_000
CLIENTS = 4
KILL_EVERY = 0.5
"""Mean seconds between two kills."""
HOST_SHARE = 0.1
"""Share of the kills in a fleet that meet a whole host."""
MORE_MB = 48.0
"""MiB by which a host's memory may be larger after the storm: an arena of its own, and the allocator's."""
FLAGS = ("--max-body-bytes", str(4 << 20), "--max-batch-size", "4", "--log-level", "error")
DEADLINES = ("--request-timeout-ms", "20000", "--queue-timeout-ms", "15000")
TARGET = "bench/stand/large_targets.py:Measure"


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 while large values travel: does anything stay behind?")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each storm (default %(default)g)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("arena_storm", seconds=options.seconds, size=SIZE, clients=CLIENTS)
    rows = [_embedded(findings, options.seconds), _fleet(findings, options.seconds)]
    findings.table("After the storm", rows)
    return findings.close()


def _embedded(findings: Findings, seconds: float) -> dict[str, object]:
    with stand.headway(
        TARGET, "--workers", "2", *FLAGS, *DEADLINES, name="arena-storm", environment={"EMULATED_MS": "20"}
    ) as server:
        with _load(server.url):
            time.sleep(seconds / 10)
        before = _held(server)
        with _load(server.url) as told:
            kills = _storm(seconds, lambda: fleet.gpu_pids(server))
        server.wait_for(lambda: len(fleet.gpu_pids(server)) == 2 and _answers(server.url))
        time.sleep(2.0)
        return _judged(findings, "embedded", kills, told, before, _held(server))


def _fleet(findings: Findings, seconds: float) -> dict[str, object]:
    with fleet.fleet(
        TARGET,
        name="arena-storm",
        workers=2,
        gateway_flags=("--max-body-bytes", str(4 << 20), *DEADLINES),
        worker_flags=("--workers", "1", "--max-batch-size", "4"),
        environment={"EMULATED_MS": "20"},
    ) as made:
        made.gateways[0].wait_for(lambda: _answers(made.url))
        with _load(made.url):
            time.sleep(seconds / 10)
        before = _held(made.gateways[0])
        with _load(made.url) as told:
            kills = _storm(seconds, lambda: [pid for one in made.workers for pid in fleet.gpu_pids(one)], made)
        made.gateways[0].wait_for(lambda: _answers(made.url))
        time.sleep(12.0)  # The reaper sweeps every 10 s.
        found = _judged(findings, "fleet", kills, told, before, _held(made.gateways[0]))
        with made.redis.client() as client:
            left = [key for key in client.scan_iter(match="headway:*") for kind in (b":P:", b":R:") if kind in key]
        remains = sum(made.redis.remains().values())
        findings.at_most("entries left in Redis", remains, 0)
        findings.at_most("large values left in Redis", len(left), 0)
        return found | {"keys": len(left)}


def _storm(seconds: float, pids: Callable[[], list[int]], made: fleet.Fleet | None = None) -> Counter[str]:
    """Kill GPU processes, and now and then a host, for so many seconds."""
    rng, kills, over = random.Random(7), Counter[str](), time.monotonic() + seconds
    while time.monotonic() < over:
        time.sleep(rng.expovariate(1 / KILL_EVERY))
        if made is not None and rng.random() < HOST_SHARE:
            place = rng.randrange(len(made.workers))
            made.workers[place].kill()
            made.workers[place] = made.start("worker")
            kills["hosts"] += 1
        elif victims := pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGKILL)
                kills["processes"] += 1
    return kills


@contextlib.contextmanager
def _load(url: str) -> Iterator[Counter[str]]:
    """Clients in a closed loop while the context lasts; what they were told."""
    told, over = Counter[str](), threading.Event()

    def ask(place: int) -> None:
        body = os.urandom(SIZE + place)
        while not over.is_set():
            told[_ask(url, body)] += 1

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield told
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _ask(url: str, body: bytes) -> str:
    """What became of a request: right, wrong, a status, or no answer."""
    fields = {"content-type": "application/octet-stream"}
    asked = urllib.request.Request(f"{url}/v1/predict?model_id=default", body, fields)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return "right" if str(len(body)) in answer.read().decode() else "wrong"
    except urllib.error.HTTPError as exc:
        return str(exc.code)
    except OSError:
        return "no answer"


def _answers(url: str) -> bool:
    return _ask(url, b"x" * 100) == "right"


def _held(server: Server) -> dict[str, float]:
    """What a host holds."""
    maps = Path(f"/proc/{server.pid}/maps").read_text().splitlines()
    found = processes.look(server.pid)
    return {
        "descriptors": float(processes.descriptors(server.pid)),
        "arenas": float(sum("headway-arena" in line for line in maps)),
        "MiB": (found.rss if found is not None else 0) / 2**20,
    }


def _judged(
    findings: Findings,
    name: str,
    kills: Counter[str],
    told: Counter[str],
    before: dict[str, float],
    after: dict[str, float],
) -> dict[str, object]:
    findings.at_most(f"{name}: wrong answers", told["wrong"], 0)
    findings.at_most(f"{name}: more descriptors", after["descriptors"] - before["descriptors"], 2)
    findings.at_most(f"{name}: more mappings of arenas", after["arenas"] - before["arenas"], 0)
    findings.at_most(f"{name}: more memory", after["MiB"] - before["MiB"], MORE_MB, "MiB")
    shown = ", ".join(f"{what} {count}" for what, count in sorted(told.items()))
    killed = ", ".join(f"{count} {what}" for what, count in kills.items())
    held = {what: f"{before[what]:.0f} → {count:.0f}" for what, count in after.items()}
    return {"where": name, "killed": killed, "answers": shown, **held}


if __name__ == "__main__":
    sys.exit(main())
