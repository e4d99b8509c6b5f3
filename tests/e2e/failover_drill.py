"""A drill: `headway failover` while clients of every kind send 200 requests a second to a fleet at the default settings.

    python -m tests.e2e.failover_drill sentinel --runs 10        (one, sentinel or cluster)

Nobody may be refused. Each line tells how long writes were paused, and whatever was not answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from bench.stand.proxies import listens
from tests.e2e.client import PATIENCE, wait_until
from tests.e2e.fleet import CUT_OFF, HARDY, PATIENT, Fleet, fleet
from tests.e2e.server import ROOT
from tests.servers.cluster import ClusterSetup
from tests.servers.ports import LOOPBACK, Port
from tests.servers.reaper import the_reaper
from tests.servers.redis import RedisServer, RunningServer, lacking
from tests.servers.sentinel import SentinelSetup

RATE = 200.0
"""Requests per second, over all gateways."""
BEFORE, AFTER = 1.0, 2.0
"""Seconds of load before the command starts and after it ends."""
DEFAULTS = ("--queue-timeout-ms", "2000", "--request-timeout-ms", "4000")
"""The default timeouts, which `Server` would otherwise replace."""
HAPROXY = """
defaults
  mode tcp
  timeout connect 1s
  timeout client 1h
  timeout server 1h
  timeout check 5s
  option tcp-check
  default-server inter 100ms fall 1 rise 1 on-marked-down shutdown-sessions
listen primary
  bind 127.0.0.1:{port}
  tcp-check send info\\ replication\\r\\nquit\\r\\n
  tcp-check expect string role:master
  {servers}
"""
CACHED, KEYED = {"Cache-Control": "max-age=60"}, "Idempotency-Key"


@dataclass
class Seen:
    """What clients saw in one run. `answers` counts answers by kind of request, status and message. `wrong` lists
    answers to other requests, and `twice` the inputs that ran more than once."""

    answers: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
    said: str = ""
    wrong: int = 0
    twice: list[str] = field(default_factory=list)

    @property
    def refused(self) -> dict[tuple[str, int, str], int]:
        """Return the answers that were not the expected one."""
        return {which: count for which, count in self.answers.items() if which[1] != 200}

    def note_runs(self, it: Fleet) -> None:
        ran = Counter(text for run in it.journal() for text in run.inputs)
        self.twice = [text for text, times in ran.items() if times > 1 and text.split()[0] in ("sync", "task", "key")]


class Clients:
    """Clients that send at fixed times, without waiting for earlier answers. See `Seen`."""

    def __init__(self, session: aiohttp.ClientSession, ports: list[int], seen: Seen) -> None:
        self._session, self._ports, self._seen = session, ports, seen
        self._kinds = {"sync": self._sync, "task": self._task, "key": self._key, "cached": self._cached}
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, over: asyncio.Event) -> None:
        """Send until `over` is set, then wait for all answers."""
        begun, kinds = monotonic(), itertools.cycle(self._kinds.items())
        for number in itertools.count():
            if over.is_set():
                break
            await asyncio.sleep(max(0.0, begun + number / RATE - monotonic()))
            kind, ask = next(kinds)
            self._running.add(asyncio.create_task(self._one(kind, ask, number)))
        await asyncio.gather(*self._running)

    async def _one(self, kind: str, ask: Callable[[str, str], Any], number: int) -> None:
        text, began = f"{kind} {number}", monotonic()
        try:
            status, output, message = await ask(f"http://{LOOPBACK}:{self._ports[number % len(self._ports)]}", text)
        except (aiohttp.ClientError, TimeoutError) as exc:
            status, output, message = 0, "", repr(exc)
        self._seen.answers[kind, status, message] += 1
        self._seen.slowest = max(self._seen.slowest, (monotonic() - began, text))
        self._seen.wrong += status == 200 and output.lower() != (text if kind != "cached" else output.lower())

    async def _post(self, at: str, text: str, **headers: str) -> tuple[int, Any]:
        async with self._session.post(f"{at}/v1/inference", json={"input": text}, headers=headers) as answer:
            return answer.status, await answer.json()

    async def _sync(self, at: str, text: str, **headers: str) -> tuple[int, str, str]:
        status, told = await self._post(at, text, **headers)
        return status, told.get("output", ""), told.get("message", "")

    async def _key(self, at: str, text: str) -> tuple[int, str, str]:
        return await self._sync(at, text, **{KEYED: f"key-{text}"})

    async def _cached(self, at: str, text: str) -> tuple[int, str, str]:
        return await self._sync(at, f"cached {int(text.split()[1]) % 40}", **CACHED)

    async def _task(self, at: str, text: str) -> tuple[int, str, str]:
        """Send a task, ask for its outcome immediately, then wait for it by long polling."""
        status, told = await self._post(at, text, Prefer="respond-async")
        if status != 202:
            return status, "", f"sent: {told.get('message')}"
        for query in ("", "?wait=10"):
            async with self._session.get(f"{at}/v1/result/{told['task_id']}{query}") as answer:
                found = await answer.json()
            if answer.status != 200:
                return answer.status, "", f"asked for{query}: {found.get('message')}"
        return (200 if found["status"] == "SUCCESS" else 500), found.get("output", ""), str(found.get("error", ""))


async def drill(ports: list[int], command: Callable[[], Coroutine[Any, Any, str]], seen: Seen) -> None:
    """Run a command while clients send to the gateways on these ports."""
    over, connector = asyncio.Event(), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
        clients = asyncio.create_task(Clients(session, ports, seen).run(over))
        await asyncio.sleep(BEFORE)
        seen.said = await command()
        await asyncio.sleep(AFTER)
        over.set()
        await clients


def hand_over(broker: str) -> Coroutine[Any, Any, str]:
    """Switch over to the replicas with `headway failover`. Returns what it prints."""

    async def run() -> str:
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headway", "failover", "--broker", broker),
            env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
        assert process.returncode == 0, said.decode()
        return said.decode()

    return run()


def drilled(folder: Path, redis: RunningServer, url: str, broker: str, *flags: str, patient: bool) -> Seen:
    """Fail over at `broker` with two gateways and two worker hosts. `patient` raises all but the broker timeout."""
    seen = Seen()
    own = PATIENT if patient else DEFAULTS
    with fleet(
        folder, redis, gateways=2, url=url, target="tests.targets.journal:Slow", patience=1.0, lawful=False,
        gateway_flags=("--cache", *own, *flags), worker_flags=(*(HARDY if patient else ()), *flags),
    ) as it:  # fmt: skip
        it.expected |= CUT_OFF | {"the broker does not answer yet"}
        asyncio.run(drill([one.port for one in it.gateways], lambda: hand_over(broker), seen))
        seen.note_runs(it)
    return seen


@contextlib.contextmanager
def address_of(folder: Path, *servers: RedisServer) -> Iterator[int]:
    """Return the port of an HAProxy that forwards to whichever of the two servers reports that it is a primary."""
    if shutil.which("haproxy") is None:
        lacking("haproxy is not on the path; on Debian and Ubuntu: apt-get install haproxy")
    address = Port()
    lines = [f"server s{number} {LOOPBACK}:{one.port} check" for number, one in enumerate(servers)]
    (folder / "haproxy.cfg").write_text(HAPROXY.format(port=address.number, servers="\n  ".join(lines)))
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen(["haproxy", "-f", str(folder / "haproxy.cfg")], stdout=log, stderr=log)
    the_reaper().watch(process.pid)
    try:
        wait_until(lambda: listens(address.number) or process.poll() is not None)
        yield address.number
    finally:
        process.kill()
        process.wait(PATIENCE)
        address.close()


def of_one(folder: Path, kind: str, patient: bool = False) -> Seen:
    """Drill with one server and a replica, behind an address that forwards to the primary."""
    lines = ("repl-diskless-sync-delay 0", "min-replicas-to-write 0")
    primary = RedisServer(kind, folder / "primary", *lines)
    replica = RedisServer(kind, folder / "replica", *lines, f"replicaof {LOOPBACK} {primary.port}")
    with primary, replica, address_of(folder, primary, replica) as port:
        wait_until(lambda: "online" in str(primary.command("INFO", "replication").get("slave0")))
        url = f"redis://{LOOPBACK}:{port}"
        seen = drilled(folder, replica, url, primary.url, patient=patient)
        assert replica.command("ROLE")[0] == b"master"
    return seen


def of_sentinels(folder: Path, kind: str, patient: bool = False) -> Seen:
    """Drill with a primary and a replica under three Sentinels."""
    with SentinelSetup(kind, folder / "sentinel", usual=not patient) as setup:
        replica = setup.replica
        seen = drilled(folder, replica, setup.url, setup.url, patient=patient)
        assert setup.primary is replica
    return seen


def of_cluster(folder: Path, kind: str, patient: bool = False) -> Seen:
    """Drill with a cluster of three primaries, each with a replica."""
    with ClusterSetup(kind, folder / "cluster", replicas=True) as setup:
        wait_until(lambda: all("slave0" in one.command("INFO", "replication") for one in setup.servers))
        home = setup.replicas[setup.servers.index(setup.of("headway:{fleet}:k"))]
        seen = drilled(folder, home, setup.url, setup.url, "--shards", "4", patient=patient)
        assert [one.command("ROLE")[0] for one in setup.replicas] == [b"master"] * 3
    return seen


DRILLS = {"one": of_one, "sentinel": of_sentinels, "cluster": of_cluster}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", choices=DRILLS)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kind", default="valkey")
    given = parser.parse_args()
    for run in range(given.runs):
        with tempfile.TemporaryDirectory() as folder:
            seen = DRILLS[given.servers](Path(folder), given.kind)
        sums = f"{seen.answers.total()} asked, {sum(seen.refused.values())} refused, {seen.wrong} wrong"
        times = [line for line in seen.said.splitlines() if "has replaced the primary" in line]
        rest = [
            f"{len(seen.twice)} ran twice, {seen.slowest[1]} took {seen.slowest[0]:.2f} s",
            *times,
            str(seen.refused or ""),
        ]
        sys.stdout.write(f"{run + 1}: {'; '.join([sums, *filter(None, rest)])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
