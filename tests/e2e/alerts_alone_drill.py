"""A drill like `alerts_drill`, for alerts that need no fleet: a single process and a real Prometheus stage each one.

python -m tests.e2e.alerts_alone_drill        # about six minutes

Exits with 1 if an alert did not fire or did not clear.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.authority import Authority
from tests.docs.pages import ROOT
from tests.e2e.alerts_drill import Watches, ask, held, main
from tests.e2e.fleet import pause, resume
from tests.e2e.server import Server
from tests.e2e.test_bulk import submit
from tests.e2e.test_gpus import gpu
from tests.nvml import Gpus
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import ChaosProxy
from tests.servers.redis import RedisServer

LONG = "--request-timeout-ms", "90000", "--gpu-timeout-ms", "80000"
"""Flags of a process whose batches wait at a gate for a long time."""
BUG = """
import sys
if sys.argv[1:2] == ["serve"] or "serve" in sys.orig_argv:
    from headway.gateway import gateway
    submit = gateway.Gateway.submit
    def broken(self, sink, request, *more, **named):
        if request.input == "bug":
            raise RuntimeError("a bug that the drill has built in")
        return submit(self, sink, request, *more, **named)
    gateway.Gateway.submit = broken
"""
"""A bug to start the process with, because no other way to get an `internal` error is known."""


def faults(folder: Path, watch: Watches) -> None:
    """Refused requests, wasted work, a bug, too few descriptors, and a failing scrape."""
    (folder / "sitecustomize.py").write_text(BUG, encoding="utf-8")
    flags = ("--max-queue", "4", "--max-batch-size", "1", "--queue-timeout-ms", "3000", "--gpu-timeout-ms", "3000")
    server = Server(folder, flags=flags, environ={"PYTHONPATH": f"{folder}:{ROOT}"})
    with watch(folder, server) as drill:
        busy = lambda: ask([server], *["well"] * 8)  # noqa: E731 - load in the background
        drill.fires("HeadwayInternalErrors", meanwhile=lambda: ask([server], "bug", "well"))
        drill.clears("HeadwayInternalErrors", meanwhile=busy)

        def crowd() -> None:
            with held(server, folder) as first:
                waiting = [server.ask("waits") for _ in range(12)]
            for asked in (first, *waiting):
                asked.answer()

        drill.fires("HeadwayRefusingPayers", meanwhile=crowd)
        drill.clears("HeadwayRefusingPayers", meanwhile=busy)

        def departed() -> None:
            with held(server, folder) as asked:
                asked.connection.sock.close()
                time.sleep(0.3)

        drill.fires("HeadwayGpuTimeWasted", meanwhile=departed)
        drill.clears("HeadwayGpuTimeWasted", meanwhile=busy)

        before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        few = int(server.descriptors() / 0.9)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (few, before[1]))
        drill.fires("HeadwayDescriptorsRunOut")
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, before)
        drill.clears("HeadwayDescriptorsRunOut")

        drill.scrape(nothing=True)
        drill.fires("HeadwayNothingScraped")
        drill.scrape()
        drill.clears("HeadwayNothingScraped")


def crashes(folder: Path, watch: Watches) -> None:
    """A worker whose process keeps dying, and one whose breaker opens, which pauses a bulk job."""
    server = Server(folder, flags=("--workers", "1", "--bulk-dir", "bulk"))
    with watch(folder, server) as drill:
        drill.fires("HeadwayWorkersRestart", meanwhile=lambda: ask([server], "exit"))
        drill.clears("HeadwayWorkersRestart")
        (folder / "broken").touch()

        numbers = itertools.count()

        def in_vain() -> None:  # New inputs each time: inputs that failed permanently are not run again.
            server.ask(f"in vain {next(numbers)}", "X-Request-Timeout-Ms: 300").answer()

        drill.fires("HeadwayBreakerOpen", meanwhile=in_vain)
        submit(server, ["well"] * 8)
        drill.fires("HeadwayBulkPaused")
        (folder / "broken").unlink()
        drill.clears("HeadwayBreakerOpen", "HeadwayBulkPaused")


def rejections(folder: Path, watch: Watches) -> None:
    """A model that starts to reject inputs. There are no counts from ten minutes earlier to compare with."""
    obstacle, numbers = folder / "obstacle", itertools.count()
    obstacle.touch()
    server = Server(folder, flags=("--workers", "1"))
    with watch(folder, server, window="3s", interval="500ms") as drill:
        busy = lambda: ask([server], *["well"] * 8)  # noqa: E731 - load in the background
        drill.fires(
            "HeadwayModelRejects", meanwhile=lambda: ask([server], "well", f"unless {obstacle} {next(numbers)}")
        )
        obstacle.unlink()
        drill.clears("HeadwayModelRejects", meanwhile=busy)


def rollout(folder: Path, watch: Watches) -> None:
    """A new version that fails on every input, until an operator acknowledges it."""
    (folder / "both.py").write_text(
        "def old(inputs): return [text.upper() for text in inputs]\n\ndef new(inputs): return [ValueError('no good') for _ in inputs]\n"
    )
    (folder / "headway.toml").write_text(
        '[models."m@3"]\ntarget = "both.py:old"\n[models."m@4"]\ntarget = "both.py:new"\n'
    )
    server = Server(folder, "m")
    with watch(folder, server) as drill:
        server.admin("/internal/rollouts/start?model=m&version=4&steps=50&every=3600", "POST")
        drill.fires("HeadwayRolledBack", meanwhile=lambda: ask([server], *["text"] * 8))
        server.admin("/internal/rollouts/abort?model=m", "POST")
        drill.clears("HeadwayRolledBack")


def gpus(folder: Path, watch: Watches) -> None:
    """A GPU that reports errors, and one that falls off the bus until its process restarts (a fake NVIDIA library)."""
    machine = Gpus(folder, gpu(0))
    flags, environ = ("--workers", "1"), machine.environ("0")
    server = Server(folder, flags=flags, environ=environ)
    xids: list[int] = []
    with contextlib.ExitStack() as stack, watch(folder, server, window="3s", interval="500ms") as drill:

        def failing() -> None:
            xids.append(94)
            machine.write(gpu(0, xids=xids))
            time.sleep(1.0)

        drill.fires("HeadwayGpuErrors", meanwhile=failing)
        drill.clears("HeadwayGpuErrors")
        machine.write(gpu(0, xids=[*xids, 79]))
        drill.fires("HeadwayGpuLost")
        server.kill()
        machine.write(gpu(0))
        fresh = Server(folder, flags=(*flags, "--admin-port", str(server.admin_port)), environ=environ)
        stack.callback(fresh.kill)
        fresh.ready()
        drill.clears("HeadwayGpuLost", "HeadwayGpuErrors")


RULES = '[{"queue_above": 1, "for_s": 1, "add": 2}, {"utilisation_below": 0.9, "for_s": 2, "remove": 1}]'


def scaling(folder: Path, watch: Watches) -> None:
    """More load than the most workers allowed can carry, and workers that never start because nothing scales them."""
    flags = ("--max-batch-size", "1", "--max-workers", "3", "--scale-rules", RULES)
    server = Server(folder, flags=(*flags, "--start-timeout-ms", "1000", "--queue-timeout-ms", "60000", *LONG))
    with watch(folder, server) as drill:
        with held(server, folder) as first:
            waiting = [server.ask("waits") for _ in range(6)]
            drill.fires("HeadwayScalingAtMost", "HeadwayScalingLate")
        for asked in (first, *waiting):
            asked.answer()
        drill.clears("HeadwayScalingAtMost", "HeadwayScalingLate")


def ledgers(folder: Path, watch: Watches) -> None:
    """The database hangs, which affects the ledger and the keys."""
    with PostgresServer() as postgres:
        url = postgres.fresh()
        key = subprocess.run(
            [sys.executable, "-m", "headway", "keys", "create", "--user", "u", "--tenant", "t", "--tier", "paid",
             "--ledger", url],
            cwd=folder, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        token = next(word for word in key if word.startswith("hw_"))
        flags = ("--keys", "ledger", "--max-queue", "20")
        server = Server(folder, flags=flags, environ={"HEADWAY_LEDGER": url})
        with watch(folder, server) as drill:

            def busy() -> None:
                _burst(server, 25, token)

            busy()
            postgres.pause()
            drill.fires("HeadwayKeysOld", "HeadwayLedgerBehind", "HeadwayLedgerDrops", meanwhile=busy)
            postgres.resume()
            drill.clears("HeadwayKeysOld", "HeadwayLedgerBehind", "HeadwayLedgerDrops")


def _burst(server: Server, count: int, token: str) -> None:
    for _ in range(count):
        asked = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/inference", b'{"input": "well"}', {"authorization": f"Bearer {token}"}
        )
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(asked, timeout=10).close()


def certificates(folder: Path, watch: Watches) -> None:
    """A certificate that expires in three days, and clients without a certificate."""
    authority = Authority(folder)
    certificate, key = authority.issue(days=3)
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key), "--tls-client-ca", str(authority.file))
    server = Server(folder, flags=flags)
    with watch(folder, server, certificate=(certificate, key)) as drill:

        def strangers() -> None:
            context = ssl.create_default_context(cafile=str(authority.file))
            for _ in range(5):
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", server.port), 5) as plain,
                    context.wrap_socket(plain, server_hostname="localhost") as wrapped,
                ):
                    wrapped.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    wrapped.recv(100)

        drill.fires("HeadwayClientsWithoutCertificate", "HeadwayCertificateEnds", meanwhile=strangers)
        authority.issue(days=30)  # The files are reloaded when they change.
        drill.clears("HeadwayClientsWithoutCertificate", "HeadwayCertificateEnds")


def broker(folder: Path, watch: Watches) -> None:
    """A gateway that hangs, and a Redis server that fills up, slows down, or goes down while there is a fallback."""
    remote = Server(folder, "tests.targets.gates:Gated")
    remote.ready()
    with contextlib.ExitStack() as stack:
        stack.callback(remote.kill)
        redis = stack.enter_context(RedisServer("valkey", folder / "redis"))
        port = int(redis.url.rpartition(":")[2].partition("/")[0])
        proxy = stack.enter_context(ChaosProxy(port))
        behind = redis.url.replace(str(port), str(proxy.port))
        fallback = f"http://127.0.0.1:{remote.port}/v2/models/default/infer"
        gateway = Server(
            folder, flags=("--broker", behind, "--fallback", fallback, "--broker-timeout-ms", "1000"), role="gateway"
        )
        worker = Server(folder, "tests.targets.gates:Gated", ("--broker", redis.url), role="worker")
        controller = Server(folder, flags=("--broker", redis.url), role="controller")
        with watch(folder, gateway, worker, controller) as drill:

            def busy() -> None:
                ask([gateway], *["well"] * 8)

            def stands_still() -> None:
                with held(gateway, folder) as asked:
                    pause(gateway)
                time.sleep(0.3)  # The batch finishes in this time.
                resume(gateway)
                asked.answer()

            busy()
            drill.clears("HeadwayBatchingSlow", meanwhile=busy)  # On a busy machine this fires without a fault.
            drill.fires("HeadwayBatchingSlow", meanwhile=stands_still)
            drill.clears("HeadwayBatchingSlow", meanwhile=busy)

            used = int(redis.command("INFO", "MEMORY")["used_memory"])
            redis.command("CONFIG", "SET", "maxmemory", int(used / 0.75))
            drill.fires("HeadwayBrokerFillsUp")
            redis.command("CONFIG", "SET", "maxmemory", 0)
            drill.clears("HeadwayBrokerFillsUp")
            proxy.delay(0.06)
            drill.fires("HeadwayBrokerSlow", meanwhile=busy)
            proxy.normal()
            drill.clears("HeadwayBrokerSlow", meanwhile=busy)
            proxy.black_hole()
            drill.fires("HeadwayDirectMode", meanwhile=busy)
            proxy.normal()
            drill.clears("HeadwayDirectMode", meanwhile=busy)


PARTS = (faults, crashes, rejections, rollout, gpus, scaling, ledgers, certificates, broker)

if __name__ == "__main__":
    sys.exit(main(*PARTS))
