"""What clients see behind Envoy, HAProxy and nginx, one at a time, each with its file of `deploy/`, over TLS.

    python bench/promises/proxied.py                          all of it behind each: about a quarter of an hour a proxy
    python bench/promises/proxied.py --proxy nginx --only rolling --seconds 60

rolling    300 requests/s, half of them over HTTP/1.1, a third over gRPC, the rest over HTTP/2, while gateways and worker hosts are restarted
           one after the other, again and again
slow       clients that send a byte at a time, and requests and polls that take 30 s, beside 100 requests/s
race       all idle connections to the gateways are used at once, 10,000 times in all, at ages around those at which proxy and gateway
           give them up: the proxy after 4 s, the gateway after 5. Then again with a gateway that gives up first, after 1, to see what that costs
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from bench.promises.callers import Callers, History
from bench.promises.crew import Crew
from bench.promises.crowd import loop_factory
from bench.promises.grpc_callers import GrpcCallers
from bench.stand import stand
from bench.stand.findings import Findings
from bench.stand.proxies import KINDS, Behind, Proxy
from bench.stand.stand import Broken
from bench.stand.stores import Store
from tests.clients.environments import client_command

BATCH_MS, MAX_BATCH = 50.0, 32
COUNTS = {"gateway": 2, "worker": 2, "controller": 1}
LAME_DUCK_MS = 5000
RATES = {"http/1.1": 150.0, "grpc": 100.0, "http/2": 50.0}
"""Requests per second while all is restarted."""
WAIT = 30.0
"""Seconds of a long request, and of a long poll."""
PROXY_IDLE = 4.0
"""Seconds after which the proxies give an idle connection up, as their files say."""
LINES, WAVES = 250, 40
"""Connections that are used at once, and how often."""
TARGET = f"{stand.TARGETS}:Waiting"
LONG = ("--queue-timeout-ms", "60000", "--request-timeout-ms", "60000", "--task-timeout-ms", "60000")
PATIENT = ("--gpu-timeout-ms", "40000", "--lease-ms", "60000")

Row = dict[str, object]


def main() -> int:
    options = _options()
    stand.end_in_order()
    stand.pin_to_load_core()
    findings = Findings(
        "proxied", rates=RATES, seconds=options.seconds, batch_ms=BATCH_MS, max_batch=MAX_BATCH, processes=COUNTS,
        lame_duck_ms=LAME_DUCK_MS, pinning=stand.PINNING,
    )  # fmt: skip
    rows: dict[str, list[Row]] = {name: [] for name in options.only}
    for kind in options.proxy:
        for name in options.only:
            findings.say(f"{name} behind {kind} …")
            try:
                found = PARTS[name](kind, options, findings)
            except (Broken, OSError) as exc:
                found = [{"behind": kind, "seen": f"could not run: {exc}"[:120]}]
            for row in found:
                findings.say(f"  {row}")
            rows[name] += found
    for name, found in rows.items():
        findings.table(name, found)
    return findings.close()


# Gateways and workers come and go.


def rolling(kind: str, options: argparse.Namespace, findings: Findings) -> list[Row]:
    """Restart everything that serves, under load, for `options.seconds`."""
    restarts: Counter[str] = Counter()

    async def work(crew: Crew, front: Proxy) -> dict[str, History]:
        loop = asyncio.get_running_loop()
        authority = front.certificates.trusted.read_bytes()
        loads: dict[str, Callers | GrpcCallers] = {
            "http/1.1": Callers(front.url, RATES["http/1.1"], 0, front.certificates.context("http/1.1")),
            "grpc": GrpcCallers(f"127.0.0.1:{front.port}", authority, RATES["grpc"], 1),
        }
        running = [loop.create_task(load.run()) for load in loads.values()]
        until = loop.time() + options.seconds
        while loop.time() < until:
            for post in (*crew.of("gateway"), *crew.of("worker")):
                if loop.time() < until:
                    await post.end()
                    await post.start()
                    restarts[post.role] += 1
        for load in loads.values():
            load.end_load()
        return dict(zip(loads, await asyncio.gather(*running), strict=True))

    with ExitStack() as stack:
        crew, front = _scene(stack, kind, ("--lame-duck-ms", str(LAME_DUCK_MS)))
        over_http_2 = _http_2(front)
        stack.callback(over_http_2.kill)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            histories = runner.run(work(crew, front))
        told = json.loads(over_http_2.communicate(timeout=60)[0].splitlines()[-1])
    found = [_row(kind, name, history) for name, history in histories.items()]
    found.append(
        {
            "behind": kind,
            "over": "http/2",
            "requests": sum(told.values()),
            "failed": sum(told.values()) - told.get("ok", 0),
            "seen": _seen(told),
        }
    )
    for row in found:
        row["restarts"] = ", ".join(f"{count} {role}s" for role, count in restarts.items())
        findings.none(f"rolling restart behind {kind}, {row['over']}: failed", int(str(row["failed"])))
    return found


def _http_2(front: Proxy) -> subprocess.Popen[str]:
    """Clients over HTTP/2 that end when their input does."""
    arguments = (front.url, str(front.certificates.trusted), f"{RATES['http/2']:g}")
    command, environ = client_command("deploy", "http2_program.py", *arguments)
    pipe = subprocess.PIPE
    process = subprocess.Popen(stand.on_load_core(command), env=environ, stdin=pipe, stdout=pipe, text=True)
    if process.stdout is None or process.stdout.readline() != "up\n":
        raise Broken("the clients over HTTP/2 did not get a first answer")
    return process


# Clients that take their time, and requests that do.


def slow(kind: str, options: argparse.Namespace, findings: Findings) -> list[Row]:
    """Slow clients, long requests and long polls beside a load."""

    async def work(crew: Crew, front: Proxy) -> dict[str, Counter[str]]:
        callers = Callers(front.url, 100.0, 0, front.certificates.context("http/1.1"))
        load = asyncio.create_task(callers.run())
        await asyncio.sleep(2.0)
        trust = front.certificates.context("http/1.1")
        kinds: dict[str, tuple[int, Callable[[ssl.SSLContext, int], Awaitable[str]]]] = {
            "a byte at a time, 8 s": (100, _trickled),
            f"answers after {WAIT:g} s": (8, _long),
            f"polls of {WAIT:g} s": (8, _polled),
        }
        told = {}
        for name, (count, ask) in kinds.items():
            told[name] = asyncio.gather(*(ask(trust, front.port) for _ in range(count)))
        outcomes = {name: Counter(await found) for name, found in told.items()}
        callers.end_load()
        outcomes["100 requests/s beside them"] = (await load).outcomes
        return outcomes

    with ExitStack() as stack:
        crew, front = _scene(stack, kind, LONG, PATIENT, workers=4)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            outcomes = runner.run(work(crew, front))
    found: list[Row] = []
    for name, seen in outcomes.items():
        failed = seen.total() - seen["ok"]
        findings.none(f"slow clients behind {kind}, {name}: failed", failed)
        found.append({"behind": kind, "what": name, "requests": seen.total(), "failed": failed, "seen": _seen(seen)})
    return found


async def _trickled(trust: ssl.SSLContext, port: int) -> str:
    """Send a request within 8 s, and read its answer as slowly."""
    body = json.dumps({"input": "slowly " * 10}).encode()
    head = b"POST /v1/inference HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    try:
        writer.write(head)
        for at in range(len(body)):
            writer.write(body[at : at + 1])
            await writer.drain()
            await asyncio.sleep(8.0 / len(body))
        return await _outcome(reader, b"SLOWLY")
    finally:
        writer.close()


async def _long(trust: ssl.SSLContext, port: int) -> str:
    """Ask for what takes WAIT seconds."""
    return await _asked(trust, port, {"input": f"wait {WAIT:g} long"}, b"LONG")


async def _polled(trust: ssl.SSLContext, port: int) -> str:
    """Have a task that takes WAIT seconds, and wait for its end with one poll."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    try:
        body = json.dumps({"input": f"wait {WAIT:g} polled"}).encode()
        writer.write(
            b"POST /v1/inference HTTP/1.1\r\nHost: bench\r\nPrefer: respond-async\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        _status, content = await _answer(reader)
        task = json.loads(content)["task_id"]
        writer.write(f"GET /v1/result/{task}?wait=60 HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
        return await _outcome(reader, b"POLLED")
    finally:
        writer.close()


async def _asked(trust: ssl.SSLContext, port: int, sent: object, expected: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    try:
        body = json.dumps(sent).encode()
        writer.write(b"POST /v1/inference HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        return await _outcome(reader, expected)
    finally:
        writer.close()


async def _outcome(reader: asyncio.StreamReader, expected: bytes) -> str:
    try:
        status, content = await _answer(reader)
    except (OSError, asyncio.IncompleteReadError) as exc:
        return repr(exc)[:80]
    return "ok" if status == 200 and expected in content else f"{status} {content[:60]!r}"


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
    return int(head[9:12]), await reader.readexactly(length)


# Idle connections that are used again as they are given up.


def race(kind: str, options: argparse.Namespace, findings: Findings) -> list[Row]:
    """Use all idle connections at once at the ages at which they end; then with a gateway that is the first to end them."""
    found = []
    for keep_alive, around in ((5.0, (3.9, 5.7)), (1.0, (0.9, 1.7))):
        with ExitStack() as stack:
            _, front = _scene(stack, kind, ("--keep-alive-ms", f"{keep_alive * 1000:g}", "--user-rate", "0"))
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                seen = runner.run(_raced(front, WAVES, around))
        failed = seen.total() - seen["ok"]
        first = "the proxy" if keep_alive > PROXY_IDLE else "the gateway"
        if keep_alive > PROXY_IDLE:
            findings.none(f"keep-alive race behind {kind}: failed", failed)
        found.append(
            {"behind": kind, "gives up first": first, "tries": seen.total(), "failed": failed, "seen": _seen(seen)}
        )
    return found


async def _raced(front: Proxy, waves: int, around: tuple[float, float]) -> Counter[str]:
    """Outcomes of all requests of LINES clients that send together after silences spread over `around`, in seconds."""
    rng = random.Random(0)
    trust = front.certificates.context("http/1.1")
    body = b'{"input": "race"}'
    sent = b"POST /v1/inference HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    outcomes: Counter[str] = Counter()
    lines: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(number: int) -> None:
        reader, writer = lines[number]
        try:
            writer.write(sent)
            outcome = await _outcome(reader, b"RACE")
        except OSError as exc:
            outcome = repr(exc)[:80]
        outcomes[outcome] += 1
        if outcome != "ok":
            writer.close()
            lines[number] = await asyncio.open_connection("127.0.0.1", front.port, ssl=trust)

    for _ in range(LINES):
        lines.append(await asyncio.open_connection("127.0.0.1", front.port, ssl=trust))
    await asyncio.gather(*map(ask, range(LINES)))
    outcomes.clear()
    for wave in range(waves):
        least, most = around
        await asyncio.sleep(least + (most - least) * (wave + rng.random()) / waves)
        await asyncio.gather(*map(ask, range(LINES)))
    for _, writer in lines:
        writer.close()
    return outcomes


# What all have in common.


def _scene(
    stack: ExitStack, kind: str, gateways: tuple[str, ...] = (), workers_flags: tuple[str, ...] = (), workers: int = 2
) -> tuple[Crew, Proxy]:
    """A fleet that is ready, and the proxy in front of it."""
    store = stack.enter_context(Store("proxied"))
    flags = {"gateway": gateways, "worker": workers_flags}
    crew = stack.enter_context(Crew(store.url, {**COUNTS, "worker": workers}, flags, BATCH_MS, MAX_BATCH, TARGET))
    ports = [Behind(post.port, post.grpc_port) for post in crew.of("gateway")]
    for post in crew.of("gateway"):
        post.server.wait_for(post.ready)
    return crew, stack.enter_context(Proxy(kind, ports))


def _row(kind: str, over: str, history: History) -> Row:
    latencies = sorted(history.latencies)
    outcomes = history.outcomes
    return {
        "behind": kind,
        "over": over,
        "requests": len(history.requests),
        "failed": len(history.requests) - outcomes["ok"],
        "p50, ms": round(1000 * latencies[len(latencies) // 2], 1),
        "p99, ms": round(1000 * latencies[int(len(latencies) * 0.99)], 1),
        "slowest, s": round(latencies[-1], 2),
        "seen": _seen(outcomes),
    }


def _seen(outcomes: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(outcomes).most_common() if name != "ok")


PARTS: dict[str, Callable[[str, argparse.Namespace, Findings], list[Row]]] = {
    "rolling": rolling,
    "slow": slow,
    "race": race,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What clients see behind each proxy, with its file of deploy/.")
    parser.add_argument("--proxy", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=180.0, help="of a rolling restart")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
