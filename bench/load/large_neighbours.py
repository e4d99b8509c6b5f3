"""Large inputs of one tenant, and what the requests of others get beside them: small ones, and a few large ones.

    python bench/load/large_neighbours.py                             two minutes
    python bench/load/large_neighbours.py --in-hand 32 --ways redis   more of them at a time, over Redis alone

Two GPUs made of 100 ms of sleep take at most 8 inputs a batch. One tenant asks 20 times a second with 100 bytes, one once a
second with 5 MB, open loop: alone, beside another tenant that has small requests in hand, and beside the same number of 5 MB. Any load
has requests wait for the next departure; what the bytes of another tenant cost is the difference of the last two. Latencies count from
the scheduled instant. The other tenant is a process of its own, of low priority.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.cost import payload
from bench.stand import fleet, stand
from bench.stand.findings import Findings

SMALL_RATE, LARGE_RATE = 20.0, 1.0
SENDERS = 20
"""Connections that take turns at a schedule; each is used again when its answer is there."""
LOW = 10
"""Niceness of the other tenant."""
PAUSE = 0.05
"""Seconds after which the other tenant asks again where it was refused."""
HEAD_START = 2.0
"""Seconds for which the other tenant is at it before anything is measured."""
MOST = 1.1
"""Most that P95 beside large requests may be, as a multiple of that beside as many small ones."""
SHOWN = 0.05, 0.5, 0.95


def main() -> int:
    ways = {"arena": _service, "redis": _fleet}
    parser = argparse.ArgumentParser(description="Large inputs of one tenant, and what another one's requests get.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (default %(default)g)")
    parser.add_argument("--in-hand", type=int, default=16, help="requests of the other tenant (default %(default)g)")
    parser.add_argument("--ways", nargs="+", choices=ways, default=list(ways), metavar="WAY", help=", ".join(ways))
    parser.add_argument("--directions", nargs="+", choices=("in", "out"), default=["in", "out"], metavar="DIRECTION")
    options = parser.parse_args()
    stand.end_in_order()
    stand.pin_to_load_core()
    findings = Findings("large_neighbours", seconds=options.seconds, in_hand=options.in_hand, pinning=stand.PINNING)
    rows: list[dict[str, object]] = []
    for name in options.ways:
        for direction in options.directions:
            target, large, small = payload.asked(direction)
            with (
                tempfile.TemporaryDirectory(prefix="headway-bench-") as folder,
                ways[name](target, small, folder) as made,
            ):
                url, keys = made
                found = {}
                for beside, request in (("alone", b""), ("small", small), ("large", large)):
                    with _attack(url, _signed(request, keys["worst"]), options.in_hand) as told:
                        found[beside] = _measured(
                            url, _signed(small, keys["small"]), _signed(large, keys["large"]), options.seconds
                        )
                    for size, seconds in found[beside].items():
                        shown = {f"P{share * 100:g}, ms": 1000 * _quantile(seconds, share) for share in SHOWN}
                        answers = ", ".join(f"{count} × {what}" for what, count in sorted(told.items()))
                        rows.append({"way": name, "5 MB": direction, "asked": size, "beside": beside, **shown,
                                     "max": 1000 * max(seconds), "count": len(seconds), "the other": answers})  # fmt: skip
                for size in ("small", "large"):
                    ratio = _quantile(found["large"][size], 0.95) / _quantile(found["small"][size], 0.95)
                    findings.at_most(f"{name}, {direction}: P95 of {size}, beside large over beside small", ratio, MOST)
    findings.table(f"Another tenant has {options.in_hand} requests in hand", rows)
    return findings.close()


def _measured(url: str, small: bytes, large: bytes, seconds: float) -> dict[str, list[float]]:
    """Seconds of each request, by its size."""
    found: dict[str, list[float]] = {"small": [], "large": []}
    begun = time.monotonic() + 0.1
    threads = []
    for name, request, rate in (("small", small, SMALL_RATE), ("large", large, LARGE_RATE)):
        schedule = [begun + number / rate for number in range(int(seconds * rate))]
        for place in range(SENDERS):
            act = partial(_send, url, request, schedule[place::SENDERS], found[name])
            threads.append(threading.Thread(target=act))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _send(url: str, request: bytes, schedule: Sequence[float], found: list[float]) -> None:
    with contextlib.closing(payload.Client(url)) as client:
        for instant in schedule:
            time.sleep(max(0.0, instant - time.monotonic()))
            client.ask(request)
            found.append(time.monotonic() - instant)


@contextlib.contextmanager
def _attack(url: str, request: bytes, in_hand: int) -> Iterator[dict[str, int]]:
    """The other tenant at work; what it was answered is in the dict when the context ends."""
    told: dict[str, int] = {}
    if not request:
        yield told
        return
    made = multiprocessing.get_context("spawn")
    over, answers = made.Event(), made.Queue()
    process = made.Process(target=_do_worst, args=(url, request, in_hand, over, answers))
    process.start()
    time.sleep(HEAD_START)
    try:
        yield told
    finally:
        over.set()
        told |= answers.get(timeout=60)
        process.join()


def _do_worst(url: str, request: bytes, in_hand: int, over: Any, answers: Any) -> None:
    os.nice(LOW)
    told = Counter[str]()

    def run() -> None:
        while not over.is_set():
            with contextlib.closing(payload.Client(url)) as client:
                try:
                    while not over.is_set():
                        client.ask(request)
                        told["200"] += 1
                except stand.Broken as exc:
                    told[str(exc).split()[1]] += 1
                except OSError:
                    told["cut"] += 1
            time.sleep(PAUSE)

    threads = [threading.Thread(target=run) for _ in range(in_hand)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put(dict(told))


def _signed(request: bytes, key: str) -> bytes:
    return request.replace(b"\r\n", f"\r\nAuthorization: Bearer {key}\r\n".encode(), 1)


def _quantile(seconds: Sequence[float], share: float) -> float:
    return sorted(seconds)[min(int(share * len(seconds)), len(seconds) - 1)]


def _keys(folder: str) -> tuple[Path, dict[str, str]]:
    """File of keys, and a key of each tenant."""
    path, keys, rows = Path(folder) / "keys.toml", {}, []
    for name in ("small", "large", "worst"):
        id, hashed, keys[name] = stand.fresh_key()
        rows.append(
            f'[[keys]]\nid = "{id}"\nsha256 = "{hashed}"\nuser = "{name}"\ntenant = "{name}"\ntier = "paid"\nrate = 0\n'
        )
    path.write_text("".join(rows), encoding="utf-8")
    return path, keys


@contextlib.contextmanager
def _service(target: str, small: bytes, folder: str) -> Iterator[tuple[str, dict[str, str]]]:
    path, keys = _keys(folder)
    flags = (*payload.FLAGS, *payload.DEADLINES, "--workers", "2", "--keys", str(path))
    with stand.headway(target, *flags, name="large-neighbours") as server:
        yield server.url, keys


@contextlib.contextmanager
def _fleet(target: str, small: bytes, folder: str) -> Iterator[tuple[str, dict[str, str]]]:
    path, keys = _keys(folder)
    flags = ("--max-body-bytes", str(payload.BODY_LIMIT), *payload.DEADLINES, "--keys", str(path))
    with fleet.fleet(
        target, "--max-batch-size", "8", name="large-neighbours", gateway_flags=flags, worker_flags=("--workers", "2")
    ) as made:
        made.gateways[0].wait_for(lambda: payload.takes(made.url, _signed(small, keys["small"])))
        yield made.url, keys


if __name__ == "__main__":
    sys.exit(main())
