"""What one tenant can do to another: one does its worst to each resource, while the other's requests are measured.

    python bench/load/neighbours.py                                  what lists, large bodies and answers, and floods do: ten minutes
    python bench/load/neighbours.py --only queue bodies --where one  some loads, in one process only
    python bench/load/neighbours.py --only cheap                     what costs one request's price and much of the loop: two minutes
    python bench/load/neighbours.py --only fitting                   lengths and parameters of a call: two minutes
    python bench/load/neighbours.py --only all                       these and all others: half an hour

Two tenants share two emulated GPUs (20 ms a batch of at most 8): one process with a ledger, or two gateways and a worker host over Redis. The
measured tenant sends 100/s to the first gateway, open-loop, and keeps tasks, answers under an idempotency key and a dead letter. Its P95 and errors
are measured alone, then with the other tenant at its worst; then everything kept for it is fetched. The other tenant uses all gateways, from a
low-priority process, so that it attacks the service and not the load generator. Its key allows 1,000 requests a minute, unless the attack is on
the queue or on memory.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import grpc

from bench.load import http2
from bench.load.worst import CALM_LENGTH, CHEAP, FILE_ID, FITTING, KEY, NEIGHBOURS, STREAM, WORST, Worst
from bench.stand import stand
from bench.stand.findings import OUT, Findings
from bench.stand.fleet import Fleet, fleet, lone_service
from bench.stand.generators import open_loop
from bench.stand.stand import Server
from tests.identity.writing import entry, key_of

GPUS, BATCH_MS, MAX_BATCH = 2, 20.0, 8
RATE = 100.0
LEAST_REQUESTS = 100
"""Minimum number of requests for a meaningful P95; a tenant that sends few is measured for longer."""
WARM_UP, HEAD_START = 1.5, 1.0
"""Seconds of load before the calm measurement, and of the attack before the hostile one."""
KEPT = 5
"""How many tasks, and how many answers under keys, the measured tenant keeps."""
MOST_CONNECTIONS = 2000
WHERE = ("one", "two")
SHOWN = (
    "load", "where", "errors", "p95 calm", "p95", "% of calm", "at most", "cpu calm %", "cpu %", "cpu of all %", "its requests/s", "of them", "kept, lost",
    "new client, max ms", "memory +MB",
)  # fmt: skip
"""Columns of the table; the file has all of them."""
NEW_CLIENT_MS = 500.0
"""Maximum milliseconds for a request over a new connection."""
MEGABYTE = 1 << 20
LEAVE_SECONDS = 5.0
"""Seconds within which everything that the other tenant held must be released."""
NICE = int(os.environ.get("NEIGHBOURS_NICE", "15"))
BEGUN = json.dumps({})
"""Printed by the other tenant when it begins."""
SPARE = 4
"""Descriptors that may remain."""


def main() -> int:
    options = _options()
    if options.worst:
        return asyncio.run(_do_worst(options.worst, options.url, options.key))
    stand.end_in_order()
    findings = Findings("neighbours", seconds=options.seconds, rate=RATE, pinning=stand.PINNING)
    rows = []
    for name in options.only:
        for where in options.where:
            rows.append(_measure(findings, name, where, options.seconds))
            findings.say(" · ".join(f"{what} {_shown(value)}" for what, value in rows[-1].items()))
    if options.limits:
        rows_of_limits = [_count_charged(findings, where) for where in options.where]
        findings.table("60 lists of 10 at all gateways, by a key of 60/min with a burst of 10", rows_of_limits)
    for row in rows:
        what = f"{row['load']}, {row['where']}"
        findings.none(f"{what}: errors", int(str(row["errors"])))
        findings.at_most(f"{what}: P95, % of calm", float(str(row["% of calm"])), float(str(row["at most"])), "%")
        findings.none(f"{what}: of what was kept, lost", int(str(row["kept, lost"])))
        findings.at_most(f"{what}: descriptors left", int(str(row["and left"])), SPARE)
        if row["new client, max ms"] is not None:
            findings.at_most(f"{what}: a new client waits", float(str(row["new client, max ms"])), NEW_CLIENT_MS, "ms")
    findings.keep("loads", rows)
    shown = [{column: row[column] for column in SHOWN} for row in rows]
    findings.table("One tenant at its worst, and what another one sees; ms, MB", shown)
    return findings.close()


def _shown(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _measure(findings: Findings, name: str, where: str, seconds: float) -> dict[str, object]:
    """Measure a load calm, then hostile."""
    worst = WORST[name]
    seconds = max(seconds, LEAST_REQUESTS / worst.rate)
    with (
        tempfile.TemporaryDirectory(prefix="headway-bench-neighbours-") as folder,
        _service(Path(folder), worst, where) as service,
    ):
        made, keys = service
        server = made.doors[0]
        calm_key, worst_key = keys["calm"], keys["limited" if worst.limited else "unlimited"]
        expect = ("--key", calm_key, "--expect", "upper", *worst.calm)
        open_loop(server, worst.rate, WARM_UP, *expect)
        kept = _Kept(server, calm_key)
        used, used_by_all = [_busy(server)], []
        calm = open_loop(server, worst.rate, seconds, *expect)
        used.append(_busy(server))
        before, held = _sizes(server, Path(folder)), server.descriptors()
        with contextlib.ExitStack() as attacks:
            acts = [
                attacks.enter_context(_attack(act, _urls(made, WORST[act]), worst_key))
                for act in (name, worst.beside)
                if act
            ]
            newcomers = attacks.enter_context(_Newcomers(server, calm_key)) if worst.newcomers else None
            time.sleep(HEAD_START)
            used.append(_busy(server))
            used_by_all.append(_busy(made))
            hostile = open_loop(server, worst.rate, seconds, *expect)
            used_by_all.append(_busy(made))
            used.append(_busy(server))
            after, most = _sizes(server, Path(folder)), server.descriptors()
        done = Counter[str]()
        for act in acts:
            done.update(act.done())
        lost, left = kept.lost(), _left(server, held)
        kept_memory = _memory(server) - before["memory"]
    findings.keep(f"{name}, {where}", {"calm": calm, "hostile": hostile, "attack": done})
    calm_p95, p95 = (load.report.total.latency_ms.p95 for load in (calm, hostile))
    return {
        "load": name, "where": where, "errors": hostile.failures, "p95 calm": calm_p95, "p95": p95, "% of calm": 100 * p95 / calm_p95,
        "at most": worst.bound, "cpu calm %": 100 * (used[1] - used[0]) / seconds, "cpu %": 100 * (used[3] - used[2]) / seconds, "cpu of all %": 100 * (used_by_all[1] - used_by_all[0]) / seconds, "the other": worst.what, "its requests/s": sum(done.values()) / (seconds + HEAD_START),
        "of them": ", ".join(f"{times} × {what}" for what, times in done.most_common(3)), "kept, lost": lost,
        "new client, max ms": None if newcomers is None else 1000 * newcomers.longest, "descriptors": most - held, "and left": left,
        **{f"{what} +MB": (after[what] - before[what]) / MEGABYTE for what in before}, "and kept MB": kept_memory / MEGABYTE,
    }  # fmt: skip


def _urls(made: Fleet, worst: Worst) -> str:
    """Return the URLs to attack: those of all gateways, separated by commas."""
    return ",".join(f"http://127.0.0.1:{door.grpc_port}" if worst.grpc else door.url for door in made.doors)


def _count_charged(findings: Findings, where: str) -> dict[str, object]:
    """Count the inputs that ran from lists that count towards a limit, and those that were charged and answered."""
    lists, size = 60, 10
    with (
        tempfile.TemporaryDirectory(prefix="headway-bench-neighbours-") as folder,
        _service(Path(folder), WORST["lists"], where) as service,
    ):
        made, keys = service
        answers: list[bool] = []

        def ask(number: int) -> None:
            body = json.dumps({"inputs": [f"{number} {at}" for at in range(size)]}).encode()
            door = made.doors[number % len(made.doors)]
            answers.append(bool(_call(door, keys["listed"], "POST", "/v1/inference", body).get("outputs")))

        begun, ran = time.monotonic(), _ran(made)
        with ThreadPoolExecutor(lists) as threads:
            list(threads.map(ask, range(lists)))
        elapsed = time.monotonic() - begun
        time.sleep(1.0)  # Late refusals may still be on their way.
        ran = _ran(made) - ran
    allowed = size + int(elapsed)
    findings.at_most(f"limits, {where}: inputs answered", size * sum(answers), allowed)
    findings.none(f"limits, {where}: inputs that ran and were not answered", ran - size * sum(answers))
    return {"where": where, "answered": size * sum(answers), "ran": ran, "allowed": allowed}


def _ran(made: Fleet) -> int:
    return round(sum(host.total("headway_batch_size_sum") for host in made.hosts))


def _left(server: Server, before: int) -> int:
    """Return the descriptors left after the other tenant has gone. Waits until there are none, or it takes too long."""
    patience = time.monotonic() + LEAVE_SECONDS
    while (left := server.descriptors() - before) > 0 and time.monotonic() < patience:
        time.sleep(0.1)
    return max(left, 0)


class _Kept:
    """What the service keeps for the measured tenant: outcomes of tasks, answers under keys, a dead letter."""

    def __init__(self, server: Server, key: str) -> None:
        self._server = server
        self._key = key
        self._tasks = [self._call("POST", "/v1/inference", f"task {n}", Prefer="respond-async") for n in range(KEPT)]
        self._ask_again()
        self._letter = self._call("POST", "/v1/inference", "REJECT mine").get("request_id")

    def lost(self) -> int:
        """Return how many of them are gone."""
        answers = [self._call("GET", f"/v1/result/{task.get('task_id')}") for task in self._tasks]
        tasks: int = sum(one.get("output") != f"TASK {number}" for number, one in enumerate(answers))
        return tasks + self._ask_again() + (not self._has_letter())

    def _has_letter(self) -> bool:
        try:
            return bool(self._server.ask(f"/internal/dlq/{self._letter}"))
        except urllib.error.HTTPError:
            return False

    def _ask_again(self) -> int:
        """Repeat the requests with keys. Returns how many ran again."""
        answers = [
            self._call("POST", "/v1/inference", f"keyed {number}", **{"Idempotency-Key": f"mine-{number}"})
            for number in range(KEPT)
        ]
        return sum(not answer.get("replayed") for answer in answers)

    def _call(self, method: str, path: str, text: str = "", **fields: str) -> dict[str, Any]:
        body = json.dumps({"input": text}).encode() if text else None
        return _call(self._server, self._key, method, path, body, **fields)


def _call(server: Server, key: str, method: str, path: str, body: bytes | None = None, **fields: str) -> dict[str, Any]:
    """Send a request over a new connection. Returns the answer, with the values from its header."""
    headers = {"Authorization": f"Bearer {key}", **fields}
    request = urllib.request.Request(f"{server.url}{path}", body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            content: dict[str, Any] = json.loads(answer.read())
            return content | {"replayed": answer.headers["idempotency-replayed"]}
    except urllib.error.HTTPError as error:
        return {**json.loads(error.read()), "error": error.code}


class _Newcomers:
    """Requests of the measured tenant over new connections, one after the other. `longest` is in seconds."""

    def __init__(self, server: Server, key: str) -> None:
        self.longest = 0.0
        self._server, self._key = server, key
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._over.wait(0.1):
            begun = time.monotonic()
            try:
                _call(self._server, self._key, "POST", "/v1/inference", b'{"input":"new"}')
            except OSError:
                self.longest = math.inf
            self.longest = max(self.longest, time.monotonic() - begun)


@contextlib.contextmanager
def _service(folder: Path, worst: Worst, where: str) -> Iterator[tuple[Fleet, dict[str, str]]]:
    """Run the service, in one process or over Redis. Yields it with the keys of both tenants."""
    keys, rows = {}, []
    for name, rate, burst in (("calm", 0, 0), ("limited", 1000, 0), ("unlimited", 0, 0), ("listed", 60, 10)):
        keys[name] = key_of(name)
        tenant, tier = ("calm", worst.calm_tier) if name == "calm" else ("worst", worst.tier)
        rows.append(entry(name, name, tenant, tier, f"rate = {rate}\n" + (f"burst = {burst}\n" if burst else "")))
    (folder / "keys.toml").write_text("".join(rows), encoding="utf-8")
    target = f"default={stand.TARGETS}:{worst.target}"
    environment = {"NEIGHBOURS_MS": f"{BATCH_MS:g}", "NEIGHBOURS_LENGTH": str(CALM_LENGTH)}
    batch = ("--max-batch-size", str(MAX_BATCH))
    gpus = ("--workers", str(GPUS))
    doors: tuple[str, ...] = ("--keys", str(folder / "keys.toml"), "--max-connections", str(MOST_CONNECTIONS))
    if worst.file:
        doors += ("--bulk-dir", str(folder / "bulk"))
    if where == "one":
        ledger = ("--ledger", f"sqlite:///{folder / 'ledger.db'}")
        flags = (*batch, *gpus, *doors, *ledger, *worst.gateway_flags, *worst.worker_flags, *worst.controller_flags)
        with lone_service(target, *flags, name="neighbours", environment=environment, grpc=True) as made:
            yield made, keys
        return
    if worst.file:
        doors += ("--ledger", f"sqlite:///{folder / 'jobs.db'}")
    with fleet(
        target, name="neighbours", gateways=2, grpc=True, gateway_flags=(*doors, *worst.gateway_flags),
        worker_flags=(*batch, *gpus, *worst.worker_flags), controller_flags=worst.controller_flags, environment=environment,
    ) as made:  # fmt: skip
        for door in made.doors:
            door.wait_for(partial(_answers, door, keys["calm"]))
        yield made, keys


def _answers(server: Server, key: str) -> bool:
    return "output" in _call(server, key, "POST", "/v1/inference", b'{"input":"first"}')


def _busy(used: Server | Fleet) -> float:
    """Return CPU seconds, without processes that run functions."""
    return sum(seconds for role, seconds in used.usage().items() if role != "gpu")


def _memory(server: Server) -> int:
    """Return bytes of memory, without processes that run functions."""
    return sum(size for role, size in server.rss().items() if role != "gpu")


def _sizes(server: Server, folder: Path) -> dict[str, float]:
    """Return the sizes in bytes of what may grow."""
    return {
        "memory": _memory(server),
        "ledger": sum(path.stat().st_size for path in folder.glob("ledger.db*")),
        "log": len(server.output),
        "metrics": len(server.metrics()) * 100,
    }


# The other tenant.


Address = tuple[str, int]
CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))


class _Attack:
    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self.process = process
        self._path = path

    def done(self) -> dict[str, int]:
        counts: dict[str, int] = json.loads(self._path.read_text().splitlines()[-1])
        return counts


@contextlib.contextmanager
def _attack(name: str, url: str, key: str) -> Iterator[_Attack]:
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"neighbours-attack-{name.replace(' ', '-')}.json"
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
    """Act as the other tenant until SIGTERM. Prints the outcomes."""
    os.nice(NICE)
    worst, numbers, answers = WORST[name], count(), Counter[str]()
    addresses = [(parts.hostname or "", parts.port or 0) for parts in map(urlsplit, url.split(","))]
    if worst.file:
        worst = replace(worst, request=_fetching(worst, _send_file(url.split(",")[0], key, worst.file)))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(15, stop.set)
    act = _streams if worst.streams else _calls if worst.unary else _frames if worst.grpc else _client
    clients = [
        asyncio.create_task(_in_turn(act, number, worst, addresses[number % len(addresses)], key, numbers, answers))
        for number in range(worst.connections)
    ]
    print(BEGUN, flush=True)
    await stop.wait()
    print(json.dumps(answers), flush=True)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return 0


def _send_file(url: str, key: str, size: int) -> bytes:
    """Send a file of about `size` bytes for bulk jobs. Returns its id."""
    body = {"model": "default", "prompt": "f" * 900}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body})
    lines = f"{line}\n".encode() * (size // 1000)
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--b\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
    fields = {"Authorization": f"Bearer {key}", "Content-Type": "multipart/form-data; boundary=b"}
    request = urllib.request.Request(f"{url}/v1/files", head + lines + b"\r\n--b--\r\n", fields)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.loads(answer.read())["id"]).encode()


def _fetching(worst: Worst, file: bytes) -> Callable[[int], bytes]:
    return lambda number: worst.request(number).replace(FILE_ID, file)


async def _in_turn(act: Any, number: int, worst: Worst, *how: Any) -> None:
    """Open a connection when it is its turn."""
    if worst.every < 60.0:
        await asyncio.sleep(worst.every * number / worst.connections)
    await act(worst, *how)


async def _client(worst: Worst, address: Address, key: str, numbers: Iterator[int], answers: Counter[str]) -> None:
    """Run an HTTP connection, reopening it whenever it is closed."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(*address)
        except OSError:
            answers["no connection"] += 1
            await asyncio.sleep(0.1)
            continue
        try:
            while True:
                number = next(numbers)
                writer.write(worst.request(number).replace(KEY, key.encode(), 1))
                if worst.leaves and number % worst.leaves == 0:
                    await writer.drain()
                    answers["left"] += 1
                    raise EOFError
                if not worst.waits:
                    answers["sent"] += 1
                    if worst.file:
                        await asyncio.Event().wait()
                    await reader.read()
                    raise EOFError
                answers[await _status(reader)] += 1
                await asyncio.sleep(worst.every)
                if worst.fresh:
                    break
        except (OSError, EOFError, ValueError):
            answers["cut"] += 1
            await asyncio.sleep(0.05)
        finally:
            writer.close()


async def _frames(worst: Worst, address: Address, key: str, numbers: Iterator[int], answers: Counter[str]) -> None:
    """Run a connection to the gRPC port, discarding the answers."""
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
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


async def _status(reader: asyncio.StreamReader) -> str:
    """Return the status of an answer, after reading all of it."""
    head = await reader.readuntil(b"\r\n\r\n")
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        while size := int((await reader.readline()).split(b";")[0], 16):
            await _skip(reader, size + 2)
        await reader.readline()
    elif (at := lowered.find(b"\r\ncontent-length:")) >= 0:
        await _skip(reader, int(head[at + 17 :].split(b"\r\n", 1)[0]))
    return head[9:12].decode()


async def _skip(reader: asyncio.StreamReader, size: int) -> None:
    while size > 0:
        content = await reader.read(min(size, 1 << 20))
        if not content:
            raise EOFError
        size -= len(content)


async def _streams(worst: Worst, address: Address, key: str, numbers: Iterator[int], answers: Counter[str]) -> None:
    """Run a connection with all its streams, respecting flow control. Streams are replaced when they end."""
    async with grpc.aio.insecure_channel(f"{address[0]}:{address[1]}", options=CHANNEL) as channel:
        await asyncio.gather(*(_write_stream(worst, channel, key, numbers, answers) for _ in range(worst.streams)))


async def _calls(worst: Worst, address: Address, key: str, numbers: Iterator[int], answers: Counter[str]) -> None:
    """Run a connection that makes one call after the other, respecting flow control."""
    async with grpc.aio.insecure_channel(f"{address[0]}:{address[1]}", options=CHANNEL) as channel:
        while True:
            method, _, message = worst.request(next(numbers)).partition(b" ")
            try:
                await channel.unary_unary(method.decode())(message, metadata=(("authorization", f"Bearer {key}"),))
                answers["answered"] += 1
            except grpc.aio.AioRpcError as error:
                answers[error.code().name] += 1
            await asyncio.sleep(worst.every)


async def _write_stream(
    worst: Worst, channel: grpc.aio.Channel, key: str, numbers: Iterator[int], answers: Counter[str]
) -> None:
    while True:
        call: Any = channel.stream_stream(STREAM)(metadata=(("authorization", f"Bearer {key}"),))
        reading = asyncio.create_task(_count_answers(call, answers))
        try:
            while True:
                await call.write(worst.request(next(numbers)))
                answers["sent"] += 1
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            answers["ended"] += 1
            await asyncio.sleep(0.05)
        finally:
            reading.cancel()


async def _count_answers(call: Any, answers: Counter[str]) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for answer in call:
            answers["answered" if len(answer) > 10_000 else "refused"] += 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One tenant at its worst, and what another one sees of it.")
    add = parser.add_argument
    add("--seconds", type=float, default=4.0, help="of each load (default %(default)g)")
    loads = f"of: all, cheap ({', '.join(CHEAP)}), fitting ({', '.join(FITTING)}), {', '.join(WORST)} (default: {', '.join(NEIGHBOURS)})"
    choices = ("all", "cheap", "fitting", *WORST)
    add("--only", nargs="+", choices=choices, default=[*NEIGHBOURS], metavar="LOAD", help=loads)
    add("--where", nargs="+", choices=WHERE, default=list(WHERE), help="one process, or two gateways over Redis")
    add("--limits", action=argparse.BooleanOptionalAction, default=True, help="count what limits charge for lists")
    for hidden in ("--worst", "--url", "--key"):
        add(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "all" in options.only:
        options.only = list(WORST)
    elif "fitting" in options.only:
        options.only = list(FITTING)
    elif "cheap" in options.only:
        options.only = [name for name in WORST if name in CHEAP or name in options.only]
    return options


if __name__ == "__main__":
    sys.exit(main())
