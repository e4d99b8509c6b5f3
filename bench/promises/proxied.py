"""Does any request fail behind Envoy, HAProxy or nginx, each with its file of `deploy/`, over TLS, while all servers are restarted?

    python bench/promises/proxied.py                               three minutes behind each
    python bench/promises/proxied.py --proxy nginx --seconds 60

300 requests/s, half of them over HTTP/1.1, a third over gRPC, the rest over HTTP/2, to two gateways and two worker hosts with one emulated GPU
each, over Redis. Gateways and worker hosts are restarted one after the other, again and again.

tests/e2e/test_proxies.py covers idle connections that end; tests/e2e/failover_drill.py planned failovers; chaos.py all failures of a fleet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.promises.callers import Callers, GrpcCallers, History, loop_factory
from bench.stand import fleet, proxies, stand
from bench.stand.findings import Findings
from bench.stand.fleet import Fleet
from bench.stand.proxies import KINDS, Behind
from bench.stand.stand import Broken, Server
from tests.clients.environments import client_command
from tests.servers.balancers import Balancer
from tests.servers.ports import Port
from tests.servers.redis import RedisServer

BATCH_MS, MAX_BATCH = 50.0, 32
LAME_DUCK_MS = 5000
RATES = {"http/1.1": 150.0, "grpc": 100.0, "http/2": 50.0}
"""Requests per second."""
EACH = 2
"""Gateways, and worker hosts."""

Row = dict[str, object]


def main() -> int:
    parser = argparse.ArgumentParser(description="Rolling restarts behind each proxy, with its file of deploy/.")
    parser.add_argument("--proxy", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=180.0, help="behind each (default %(default)g)")
    options = parser.parse_args()
    stand.end_in_order()
    stand.pin_to_load_core()
    findings = Findings(
        "proxied", rates=RATES, seconds=options.seconds, batch_ms=BATCH_MS, max_batch=MAX_BATCH, lame_duck_ms=LAME_DUCK_MS,
        pinning=stand.PINNING,
    )  # fmt: skip
    rows: list[Row] = []
    for kind in options.proxy:
        findings.say(f"behind {kind} …")
        try:
            rows += _rolling(findings, kind, options.seconds)
        except (Broken, OSError) as exc:
            rows.append({"behind": kind, "seen": f"could not run: {exc}"[:120]})
    findings.table("Rolling restarts", rows)
    return findings.close()


def _rolling(findings: Findings, kind: str, seconds: float) -> list[Row]:
    """Restart all servers under load, one after the other."""
    restarts: Counter[str] = Counter()

    async def work(scene: Scene, front: Balancer) -> dict[str, History]:
        loop = asyncio.get_running_loop()
        authority = front.certificates.trusted.read_bytes()
        loads: dict[str, Callers | GrpcCallers] = {
            "http/1.1": Callers(front.url, RATES["http/1.1"], 0, front.certificates.context("http/1.1")),
            "grpc": GrpcCallers(f"127.0.0.1:{front.port}", authority, RATES["grpc"], 1),
        }
        running = [loop.create_task(load.run()) for load in loads.values()]
        until = loop.time() + seconds
        while loop.time() < until:
            for role in ("gateway", "worker"):
                for place in range(EACH):
                    if loop.time() < until:
                        await asyncio.to_thread(scene.restart, role, place)
                        restarts[role] += 1
        for load in loads.values():
            load.end_load()
        return dict(zip(loads, await asyncio.gather(*running), strict=True))

    if not proxies.program(kind):
        raise Broken(f"{kind} is not installed: {'make clients' if kind == 'envoy' else f'apt-get install {kind}'}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix=f"headway-{kind}-")))
        store = stack.enter_context(RedisServer("redis", folder / "redis", durable=True))
        scene = Scene(stack, store.url)
        front = stack.enter_context(Balancer(kind, folder, scene.ports, proxies.Certificates(folder)))
        over_http_2 = _http_2(front)
        stack.callback(over_http_2.kill)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            histories = runner.run(work(scene, front))
        outcomes = json.loads(over_http_2.communicate(timeout=60)[0].splitlines()[-1])
    rows = [_row(kind, name, history) for name, history in histories.items()]
    requests, failed = sum(outcomes.values()), sum(outcomes.values()) - outcomes.get("ok", 0)
    rows.append({"behind": kind, "over": "http/2", "requests": requests, "failed": failed, "seen": _seen(outcomes)})
    for row in rows:
        row["restarts"] = ", ".join(f"{count} {role}s" for role, count in restarts.items())
        findings.none(f"rolling restart behind {kind}, {row['over']}: failed", int(str(row["failed"])))
    return rows


def _http_2(front: Balancer) -> subprocess.Popen[str]:
    """Start clients over HTTP/2, which end with their input."""
    arguments = (front.url, str(front.certificates.trusted), f"{RATES['http/2']:g}")
    command, environ = client_command("deploy", "http2_program.py", *arguments)
    pipe = subprocess.PIPE
    process = subprocess.Popen(stand.on_load_core(command), env=environ, stdin=pipe, stdout=pipe, text=True)
    if process.stdout is None or process.stdout.readline() != "up\n":
        raise Broken("the clients over HTTP/2 did not get a first answer")
    return process


class Scene:
    """A fleet whose gateways keep their ports, closed with the stack."""

    def __init__(self, stack: ExitStack, broker: str) -> None:
        held = [(Port(), Port()) for _ in range(EACH)]
        for port in (port for pair in held for port in pair):
            stack.callback(port.close)
        self.ports = [Behind(*(port.number for port in pair)) for pair in held]
        environment = {"EMULATED_MS": str(BATCH_MS), "EMULATED_MAX": str(MAX_BATCH)}
        lame_duck, batch = ("--lame-duck-ms", str(LAME_DUCK_MS)), ("--max-batch-size", str(MAX_BATCH))
        self._fleet = Fleet(None, stand.EMULATED_GPU, "proxied", ("--broker", broker), lame_duck, batch, environment)
        stack.callback(self._fleet.stop)
        for role, count in {"controller": 1, "worker": EACH, "gateway": EACH}.items():
            for place in range(count):
                self._fleet.rosters[role].append(self._started(role, place))

    def restart(self, role: str, place: int) -> None:
        """End a process, start it again, and return when it serves. Raises Broken if its exit code isn't 0."""
        servers = self._fleet.rosters[role]
        if code := servers[place].stop():
            raise Broken(f"{servers[place].name} ended with exit code {code}:\n{servers[place].output[-2000:]}")
        servers[place] = self._started(role, place)

    def _started(self, role: str, place: int) -> Server:
        if role != "gateway":
            return fleet.wait_until_up(role, self._fleet.start(role))
        at = self.ports[place]
        server = self._fleet.start(role, flags=("--port", str(at.http), "--grpc-port", str(at.grpc)))
        server.wait_for(lambda: _ready(at.http))
        return server


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _row(kind: str, over: str, history: History) -> Row:
    latencies, outcomes = history.latencies, history.outcomes
    return {
        "behind": kind, "over": over, "requests": len(history.requests), "failed": len(history.requests) - outcomes["ok"],
        "p50, ms": round(1000 * latencies[len(latencies) // 2], 1), "p99, ms": round(1000 * latencies[int(len(latencies) * 0.99)], 1),
        "slowest, s": round(latencies[-1], 2), "seen": _seen(outcomes),
    }  # fmt: skip


def _seen(outcomes: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(outcomes).most_common() if name != "ok")


if __name__ == "__main__":
    sys.exit(main())
