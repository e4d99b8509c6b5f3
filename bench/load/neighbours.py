"""What one tenant can do to another: for each resource one does its worst, while the other's requests are measured.

    python bench/load/neighbours.py                      all ten, 8 s calm and 8 s hostile each: three minutes
    python bench/load/neighbours.py --only queue bodies  some of them

Two tenants of one tier share one process with two GPUs made of sleep (20 ms a batch of at most 8) and a ledger. One asks
100/s, open-loop, and holds tasks, an idempotency key's answers and a dead letter of its own. Its P95 and its errors are
measured with nobody else there, then with the other one at its worst, and then all that was kept for it is asked for.
What the other does is done by a process of its own, of low priority, so that it is the service that is under attack, not the
load generator. Unless the attack is one on the queue or on memory it has a key of 1,000 requests a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.stand import stand
from bench.stand.findings import OUT, Findings
from bench.stand.generators import Measured, open_loop
from bench.stand.stand import Server

GPUS, BATCH_MS, MAX_BATCH = 2, 20.0, 8
RATE = 100.0
WARM_UP, HEAD_START = 2.0, 1.5
"""Seconds of load before the calm figures; seconds for which the other is at it before the hostile ones."""
KEPT = 20
"""Tasks, and answers under keys, that the measured tenant has kept."""
MOST_CONNECTIONS = 2000
MEGABYTE = 1 << 20

Request = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Worst:
    """What one tenant does.

    Attributes:
        what: it does, in words.
        request: the bytes of its request of this number.
        connections: it uses at once.
        every: seconds between two requests of a connection; 0: as fast as they are answered.
        limited: its key has a limit.
        waits: it waits for answers; else it only holds its connections.
    """

    what: str
    request: Request
    connections: int
    every: float = 0.0
    limited: bool = True
    waits: bool = True


def _ask(text: str, *fields: str, **members: Any) -> bytes:
    return _post(json.dumps({"input": text, **members}).encode(), *fields)


def _post(body: bytes, *fields: str, path: str = "/v1/inference", method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: bench", f"Content-Length: {len(body)}", "Authorization: Bearer KEY"]
    return "\r\n".join([*lines, *fields, "", ""]).encode() + body


def _label(number: int) -> bytes:
    """Something else that a metric could be labelled with, each time."""
    one = f"x{number}"
    return [
        _ask("label", model=one),
        _ask("label", f"X-Request-Tier: {one}"),
        _post(b"{}", path=f"/{one}"),
        _post(b"", path="/v1/inference", method=one.upper()),
    ][number % 4]


_UNENDED = _ask("b" * 1_000_000)[:-1]
_CHUNKED = _post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
_TINY = _CHUNKED + b"1\r\na\r\n" * 50_000
_EMPTY = _CHUNKED + (b"1000\r\n" + b"\r\n" * 2048 + b"\r\n") * 100

WORST = {
    "queue": Worst("asks more than there is capacity", lambda n: _ask(f"flood {n}"), 300, limited=False),
    "retry budget": Worst("every input raises", lambda n: _ask(f"POISON {n}"), 16, every=1.0),
    "kept outcomes": Worst(
        "answers of 1 MB under keys of their own",
        lambda n: _ask(f"BIG {n}", f"Idempotency-Key: k{n}", "Prefer: respond-async"), 16, every=1.0,
    ),
    "memory": Worst("inputs of 0.9 MB", lambda n: _ask("m" * 900_000 + str(n)), 64, limited=False),
    "connections": Worst("as many connections as it gets, idle", lambda n: _ask(f"c {n}"), 3000, every=600.0),
    "bodies": Worst("1 MB of a body, never ended", lambda n: _UNENDED, 300, waits=False),
    "chunks": Worst("bodies in chunks of one byte, and of empty lines", lambda n: (_TINY, _EMPTY)[n % 2], 16, limited=False),
    "ledger": Worst("an unknown model, as fast as it goes", lambda n: _ask("x", model="none"), 50),
    "metric labels": Worst("other models, tiers, routes and methods", _label, 50),
    "dead letters": Worst("inputs that the model refuses", lambda n: _ask(f"REJECT {n}"), 16, every=0.5),
    "log": Worst("requests that are none", lambda n: _post(b"{" * 200, f"X-Request-Timeout-Ms: {n}x"), 50),
}  # fmt: skip


def main() -> int:
    options = _options()
    if options.worst:
        return asyncio.run(_do_worst(options.worst, options.url, options.key))
    stand.end_in_order()
    findings = Findings("neighbours", seconds=options.seconds, rate=RATE, pinning=stand.PINNING)
    rows = [_measure(findings, name, options.seconds) for name in options.only]
    findings.table("One tenant at its worst, and what another one sees; ms, MB", rows)
    for row in rows:
        findings.at_most(f"{row['resource']}: p95, % of calm", float(str(row["% of calm"])), 110, "%")
        findings.none(f"{row['resource']}: errors", int(str(row["errors"])))
        findings.none(f"{row['resource']}: of what was kept, lost", int(str(row["kept, lost"])))
    return findings.close()


def _measure(findings: Findings, name: str, seconds: float) -> dict[str, object]:
    """One resource: calm, then hostile."""
    worst = WORST[name]
    with tempfile.TemporaryDirectory(prefix="headway-bench-neighbours-") as folder, _service(Path(folder)) as service:
        server, keys = service
        calm_key, worst_key = keys["calm"], keys["limited" if worst.limited else "unlimited"]
        expect = ("--key", calm_key, "--expect", "upper")
        open_loop(server, RATE, WARM_UP, *expect)
        kept = _Kept(server, calm_key)
        calm = open_loop(server, RATE, seconds, *expect)
        before = _sizes(server, Path(folder))
        with _attack(name, server, worst_key) as attack:
            time.sleep(HEAD_START)
            hostile = open_loop(server, RATE, seconds, *expect)
            after = _sizes(server, Path(folder))
        done = attack.done()
        lost = kept.lost()
    findings.keep(name, {"calm": calm, "hostile": hostile, "attack": done})
    share = 100 * hostile.report.total.latency_ms.p95 / calm.report.total.latency_ms.p95
    asked = sum(done.values())
    most = ", ".join(f"{times} × {what}" for what, times in Counter(done).most_common(3))
    return {
        "resource": name, "the other": worst.what, "its requests/s": asked / (seconds + HEAD_START), "of them": most,
        "p95 calm": calm.report.total.latency_ms.p95, "p95": hostile.report.total.latency_ms.p95, "% of calm": share,
        "errors": _errors(hostile), "kept, lost": lost,
        **{f"{what} +MB": (after[what] - before[what]) / MEGABYTE for what in before},
    }  # fmt: skip


def _errors(measured: Measured) -> int:
    total = measured.report.total
    return total.requests - total.answered


class _Kept:
    """What the measured tenant has at the service: outcomes of tasks, answers under keys, a dead letter."""

    def __init__(self, server: Server, key: str) -> None:
        self._server = server
        self._key = key
        self._tasks = [self._call("POST", "/v1/inference", f"task {n}", Prefer="respond-async") for n in range(KEPT)]
        self._ask_again()
        self._letter = self._call("POST", "/v1/inference", "REJECT mine").get("request_id")

    def lost(self) -> int:
        """How much of it is not there any more."""
        answers = [self._call("GET", f"/v1/result/{task.get('task_id')}") for task in self._tasks]
        tasks: int = sum(one.get("output") != f"TASK {number}" for number, one in enumerate(answers))
        return tasks + self._ask_again() + (not self._has_letter())

    def _has_letter(self) -> bool:
        try:
            return bool(self._server.ask(f"/internal/dlq/{self._letter}"))
        except urllib.error.HTTPError:
            return False

    def _ask_again(self) -> int:
        """How many of the requests under keys ran."""
        answers = [
            self._call("POST", "/v1/inference", f"keyed {number}", **{"Idempotency-Key": f"mine-{number}"})
            for number in range(KEPT)
        ]
        return sum(not one.get("replayed") for one in answers)

    def _call(self, method: str, path: str, text: str = "", **fields: str) -> dict[str, Any]:
        body = json.dumps({"input": text}).encode() if text else None
        headers = {"Authorization": f"Bearer {self._key}", **fields}
        request = urllib.request.Request(f"{self._server.url}{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                told: dict[str, Any] = json.loads(answer.read())
                return told | {"replayed": answer.headers["idempotency-replayed"]}
        except urllib.error.HTTPError as error:
            return {**json.loads(error.read()), "error": error.code}


@contextmanager
def _service(folder: Path) -> Iterator[tuple[Server, dict[str, str]]]:
    """The service, and the keys of both tenants."""
    keys, rows = {}, []
    for name, rate in (("calm", 0), ("limited", 1000), ("unlimited", 0)):
        id, hashed, keys[name] = stand.fresh_key()
        tenant = "calm" if name == "calm" else "worst"
        rows.append(
            f'[[keys]]\nid = "{id}"\nsha256 = "{hashed}"\nuser = "{name}"\ntenant = "{tenant}"\ntier = "paid"\n'
            f"rate = {rate}\n"
        )
    (folder / "keys.toml").write_text("".join(rows), encoding="utf-8")
    with stand.headway(
        f"{stand.TARGETS}:Neighbours", "--workers", str(GPUS), "--max-batch-size", str(MAX_BATCH),
        "--keys", str(folder / "keys.toml"), "--ledger", f"sqlite:///{folder / 'ledger.db'}",
        "--max-connections", str(MOST_CONNECTIONS), name="neighbours", environment={"NEIGHBOURS_MS": f"{BATCH_MS:g}"},
    ) as server:  # fmt: skip
        yield server, keys


def _sizes(server: Server, folder: Path) -> dict[str, float]:
    """Bytes of what may grow."""
    return {
        "memory": server.rss().get("front", 0),
        "ledger": sum(path.stat().st_size for path in folder.glob("ledger.db*")),
        "log": len(server.output),
        "metrics": len(server.metrics()) * 100,
    }


# The other tenant.


class _Attack:
    """A process that does its worst until it is ended."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self.process = process
        self._path = path

    def done(self) -> dict[str, int]:
        """What it was answered, and how often."""
        told: dict[str, int] = json.loads(self._path.read_text() or "{}")
        return told


@contextmanager
def _attack(name: str, server: Server, key: str) -> Iterator[_Attack]:
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "neighbours-attack.json"
    command = [sys.executable, __file__, "--worst", name, "--url", server.url, "--key", key]
    with path.open("w") as out:
        process = subprocess.Popen(stand.on_load_core(command), stdout=out, text=True)
    try:
        yield _Attack(process, path)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _do_worst(name: str, url: str, key: str) -> int:
    """Be the other tenant until SIGTERM; prints what was answered."""
    os.nice(15)
    worst, numbers, answers = WORST[name], count(), Counter[str]()
    parts = urlsplit(url)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(15, stop.set)
    clients = [
        asyncio.create_task(_client(worst, (parts.hostname or "", parts.port or 0), key, numbers, answers))
        for _ in range(worst.connections)
    ]
    await stop.wait()
    print(json.dumps(answers), flush=True)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return 0


async def _client(
    worst: Worst, address: tuple[str, int], key: str, numbers: Iterator[int], answers: Counter[str]
) -> None:
    """One connection of it, made again whenever it is closed."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(*address)
        except OSError:
            answers["no connection"] += 1
            await asyncio.sleep(0.1)
            continue
        try:
            while True:
                writer.write(worst.request(next(numbers)).replace(b"Bearer KEY", b"Bearer " + key.encode(), 1))
                if not worst.waits:
                    answers["sent"] += 1
                    await reader.read()
                    raise EOFError
                answers[await _status(reader)] += 1
                await asyncio.sleep(worst.every)
        except (OSError, EOFError, ValueError):
            answers["cut"] += 1
            await asyncio.sleep(0.05)
        finally:
            writer.close()


async def _status(reader: asyncio.StreamReader) -> str:
    head = await reader.readuntil(b"\r\n\r\n")
    at = head.lower().find(b"content-length:")
    if at >= 0:
        await reader.readexactly(int(head[at + 15 :].split(b"\r\n", 1)[0]))
    return head[9:12].decode()


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One tenant at its worst, and what another one sees of it.")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load (default %(default)g)")
    parser.add_argument("--only", nargs="+", choices=WORST, default=list(WORST), metavar="RESOURCE")
    for hidden in ("--worst", "--url", "--key"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
