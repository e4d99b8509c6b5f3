"""What one tenant can do to another: for each resource one does its worst, while the other's requests are measured.

    python bench/load/neighbours.py                      all of them, 8 s calm and 8 s hostile each: ten minutes
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
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.load import http2
from bench.load.stream_writer import write_streams
from bench.load.worst import KEY, WORST, Worst
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
LEAVE_SECONDS = 5.0
"""Seconds within which what the other tenant held must be let go."""
NICE = int(os.environ.get("NEIGHBOURS_NICE", "15"))
BEGUN = json.dumps({})
"""Line that the other tenant prints when it begins."""
SPARE = 4
"""Descriptors that the process may hold beyond those before."""


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
        findings.at_most(f"{row['resource']}: descriptors left", int(str(row["and left"])), SPARE)
    return findings.close()


def _measure(findings: Findings, name: str, seconds: float) -> dict[str, object]:
    """One resource: calm, then hostile."""
    worst = WORST[name]
    with (
        tempfile.TemporaryDirectory(prefix="headway-bench-neighbours-") as folder,
        _service(Path(folder), worst.flags) as service,
    ):
        server, grpc, keys = service
        url = f"http://127.0.0.1:{grpc}" if worst.grpc else server.url
        calm_key, worst_key = keys["calm"], keys["limited" if worst.limited else "unlimited"]
        expect = ("--key", calm_key, "--expect", "upper")
        open_loop(server, RATE, WARM_UP, *expect)
        kept = _Kept(server, calm_key)
        calm = open_loop(server, RATE, seconds, *expect)
        before = _sizes(server, Path(folder))
        held = server.descriptors()
        with _attack(name, url, worst_key) as attack:
            time.sleep(HEAD_START)
            hostile = open_loop(server, RATE, seconds, *expect)
            after = _sizes(server, Path(folder))
            most = server.descriptors()
        done = attack.done()
        lost = kept.lost()
        left = _left(server, held)
        kept_memory = server.rss().get("front", 0) - before["memory"]
    findings.keep(name, {"calm": calm, "hostile": hostile, "attack": done})
    share = 100 * hostile.report.total.latency_ms.p95 / calm.report.total.latency_ms.p95
    asked = sum(done.values())
    answers = ", ".join(f"{times} × {what}" for what, times in Counter(done).most_common(3))
    return {
        "resource": name, "the other": worst.what, "its requests/s": asked / (seconds + HEAD_START), "of them": answers,
        "p95 calm": calm.report.total.latency_ms.p95, "p95": hostile.report.total.latency_ms.p95, "% of calm": share,
        "errors": _errors(hostile), "kept, lost": lost, "descriptors": most - held, "and left": left,
        **{f"{what} +MB": (after[what] - before[what]) / MEGABYTE for what in before}, "and kept MB": kept_memory / MEGABYTE,
    }  # fmt: skip


def _left(server: Server, before: int) -> int:
    """Descriptors beyond those before, once the other tenant has gone; waits until there are none, or too long."""
    patience = time.monotonic() + LEAVE_SECONDS
    while (left := server.descriptors() - before) > 0 and time.monotonic() < patience:
        time.sleep(0.1)
    return max(left, 0)


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


@contextlib.contextmanager
def _service(folder: Path, flags: Sequence[str]) -> Iterator[tuple[Server, int, dict[str, str]]]:
    """The service, its gRPC port, and the keys of both tenants."""
    keys, rows = {}, []
    for name, rate in (("calm", 0), ("limited", 1000), ("unlimited", 0)):
        id, hashed, keys[name] = stand.fresh_key()
        tenant = "calm" if name == "calm" else "worst"
        rows.append(
            f'[[keys]]\nid = "{id}"\nsha256 = "{hashed}"\nuser = "{name}"\ntenant = "{tenant}"\ntier = "paid"\n'
            f"rate = {rate}\n"
        )
    (folder / "keys.toml").write_text("".join(rows), encoding="utf-8")
    port = stand.free_port()
    with stand.headway(
        f"{stand.TARGETS}:Neighbours", "--grpc-port", str(port), "--workers", str(GPUS), "--max-batch-size", str(MAX_BATCH),
        "--keys", str(folder / "keys.toml"), "--ledger", f"sqlite:///{folder / 'ledger.db'}",
        "--max-connections", str(MOST_CONNECTIONS), *flags, name="neighbours", environment={"NEIGHBOURS_MS": f"{BATCH_MS:g}"},
    ) as server:  # fmt: skip
        yield server, port, keys


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
        told: dict[str, int] = json.loads(self._path.read_text().splitlines()[-1])
        return told


@contextlib.contextmanager
def _attack(name: str, url: str, key: str) -> Iterator[_Attack]:
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "neighbours-attack.json"
    command = [sys.executable, __file__, "--worst", name, "--url", url, "--key", key]
    with path.open("w") as out:
        process = subprocess.Popen(stand.on_load_core(command), stdout=out, text=True)
    try:
        while not path.read_text():
            if process.poll() is not None:
                raise stand.Broken(f"the attack {name} ended with exit code {process.returncode} before it began")
            time.sleep(0.05)
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
    os.nice(NICE)
    worst, numbers, answers = WORST[name], count(), Counter[str]()
    parts = urlsplit(url)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(15, stop.set)
    act = write_streams if worst.streams else _frames if worst.grpc else _client
    clients = [
        asyncio.create_task(act(worst, (parts.hostname or "", parts.port or 0), key, numbers, answers))
        for _ in range(worst.connections)
    ]
    print(BEGUN, flush=True)
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
                writer.write(worst.request(next(numbers)).replace(KEY, key.encode(), 1))
                if worst.leaves:
                    await writer.drain()
                    answers["left"] += 1
                    raise EOFError
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


async def _frames(
    worst: Worst, address: tuple[str, int], key: str, numbers: Iterator[int], answers: Counter[str]
) -> None:
    """One connection of it to the gRPC port; what comes is read and dropped."""
    credential = key.encode()
    while True:
        try:
            reader, writer = await asyncio.open_connection(*address)
        except OSError:
            answers["no connection"] += 1
            await asyncio.sleep(0.1)
            continue
        reading = asyncio.create_task(_drop(reader))
        try:
            writer.write(http2.hello())
            for number in count():
                if reading.done():
                    raise EOFError
                if not worst.once or number < worst.once:
                    writer.write(worst.request(number).replace(KEY, credential))
                    await writer.drain()
                    answers["sent"] += 1
                await asyncio.sleep(worst.every if number < worst.once or not worst.once else 0.2)
        except (OSError, EOFError):
            answers["cut"] += 1
            await asyncio.sleep(0.05)
        finally:
            reading.cancel()
            writer.close()


async def _drop(reader: asyncio.StreamReader) -> None:
    """Read to the end of a connection."""
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


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
