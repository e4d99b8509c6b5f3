"""A drill: faults are staged in a fleet that a real Prometheus watches, and each alert fires, and clears after its fault.

python -m tests.e2e.alerts_drill        # about four minutes

The rules are a copy of those in deploy/prometheus with short windows and durations. Exits with 1 when an alert did not
fire, or did not clear.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.docs.pages import ROOT
from tests.e2e.client import Asked, Gate
from tests.e2e.fleet import Fleet, fleet, pause, resume
from tests.e2e.server import TARGET, Server
from tests.servers.prometheus import Prometheus
from tests.servers.redis import RedisServer

FOLDER = ROOT / "deploy" / "prometheus"
WITHIN = 60.0
"""Seconds within which an alert fires, or clears."""
LISTED = 180.0
"""Seconds within which a worker that vanished is no longer listed."""
GATEWAY = ("--broker-timeout-ms", "1000", "--request-timeout-ms", "3000", "--queue-timeout-ms", "3000")
WORKER = ("--max-batch-size", "1", "--gpu-timeout-ms", "3000")
SOON = {"headway.core.health.OFFLINE_AFTER": 5.0}
"""Time of a fleet after which a process that says nothing is taken for lost; in the source it is longer."""


LOWER = {
    "headway_ledger_backlog) > 10000": "headway_ledger_backlog) > 20",
    "headway_keys_age_seconds > 60": "headway_keys_age_seconds > 5",
    "headway_worker_restarts_total[10s]": "headway_worker_restarts_total[30s]",
}
"""Thresholds that are lower in the copies, and a window that is longer: a process does not die four times in 10 s."""


def shortened(folder: Path, window: str = "10s") -> list[Path]:
    """Copies of the rules with such windows, and durations of 1 s; see LOWER, too."""
    folder.mkdir(exist_ok=True)
    copies = []
    for name in ("rules.yml", "alerts.yml"):
        text = (FOLDER / name).read_text(encoding="utf-8")
        text = re.sub(r"\[\d+[smh]\]", "[10s]", text)
        text = re.sub(r"^( +(?:for|keep_firing_for): )\d+[smh]$", r"\g<1>1s", text, flags=re.MULTILINE)
        for written, lower in LOWER.items():
            assert written in text or name == "rules.yml", written
            text = text.replace(written, lower)
        text = text.replace("[10s]", f"[{window}]")
        copies.append(folder / name)
        copies[-1].write_text(text, encoding="utf-8")
    return copies


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _nothing() -> None: ...


class Watch(Protocol):
    """What waits for the alerts whose states are staged."""

    def fires(self, *alerts: str, meanwhile: Callable[[], None] = _nothing) -> None:
        """Wait until these alerts fire."""

    def clears(self, *alerts: str, meanwhile: Callable[[], None] = _nothing, within: float = WITHIN) -> None:
        """Wait until these alerts fire no longer."""

    def scrape(self, nothing: bool = False) -> None:
        """Scrape nothing from now on, or the processes again."""


Watches = Callable[..., contextlib.AbstractContextManager[Watch]]
"""Begins to watch running processes: as `watched` does, whose arguments those of a call are but for the first."""


@dataclass
class Drill:
    """Processes under the watch of a Prometheus, and what did not happen."""

    prometheus: Prometheus
    missed: list[str]

    def scrape(self, nothing: bool = False) -> None:
        self.prometheus.scrape(nothing)

    def fires(self, *alerts: str, meanwhile: Callable[[], None] = _nothing) -> None:
        self._wait("fires", alerts, lambda firing: firing >= set(alerts), meanwhile)

    def clears(self, *alerts: str, meanwhile: Callable[[], None] = _nothing, within: float = WITHIN) -> None:
        self._wait("clears", alerts, lambda firing: not firing & set(alerts), meanwhile, within)

    def _wait(
        self,
        what: str,
        alerts: Sequence[str],
        seen: Callable[[set[str]], bool],
        meanwhile: Callable[[], None],
        within: float = WITHIN,
    ) -> None:
        began, firing = time.monotonic(), self.prometheus.firing()
        while not seen(firing) and time.monotonic() - began < within:
            meanwhile()
            time.sleep(0.2)
            firing = self.prometheus.firing()
        told = f"{what} {', '.join(alerts)}"
        if seen(firing):
            say(f"{time.monotonic() - began:6.1f} s  {told}")
        else:
            self.missed.append(told)
            say(f"  MISSED  {told}; firing: {sorted(firing)}")


@contextlib.contextmanager
def watched(
    missed: list[str],
    folder: Path,
    *servers: Server,
    certificate: tuple[Path, Path] | None = None,
    window: str = "10s",
    interval: str = "1s",
) -> Iterator[Drill]:
    """Drill of running processes; they are killed at its end, as none of what they were through is in good order.

    `window` is that of all rates in the rules, `interval` the time between two scrapes, and `certificate` what the
    admin ports ask for.
    """
    try:
        for server in servers:
            server.ready()
        rules = shortened(folder / "rules", window)
        with Prometheus(folder / "prometheus", servers, rules, interval, certificate) as prometheus:
            prometheus.scraped()
            yield Drill(prometheus, missed)
    finally:
        for server in servers:
            server.kill()


def ask(servers: Sequence[Server], *texts: str) -> None:
    """Ask processes in turn; whatever comes back will do."""
    for number, text in enumerate(texts):
        servers[number % len(servers)].ask(text).answer()


@contextlib.contextmanager
def held(server: Server, folder: Path) -> Iterator[Asked]:
    """Request whose batch waits at a gate until the block ends."""
    gate = Gate(folder)
    asked = server.ask(gate.text())
    gate.reached()
    yield asked
    gate.open()


@contextlib.contextmanager
def six(folder: Path, watch: Watches) -> Iterator[tuple[Watch, Fleet, RedisServer]]:
    """A fleet of six under watch."""
    with (
        contextlib.suppress(_Over),
        RedisServer("valkey", folder / "redis") as redis,
        fleet(
            folder, redis, gateways=2, gateway_flags=GATEWAY, worker_flags=WORKER, target=TARGET, patience=1.0, lawful=False,
            constants=SOON,
        ) as it,
    ):  # fmt: skip
        for _ in range(2):
            it.start("controller", "--expected-workers", "2")
        with watch(folder, *it.everybody()) as drill:
            drill.clears("HeadwayNobodyLeads", "HeadwayNoHealthyWorker", "HeadwayWorkerMissing")
            yield drill, it, redis
        raise _Over


def members(folder: Path, watch: Watches) -> None:
    """A fleet of six: its load, its model, and its controllers."""
    with six(folder, watch) as (drill, it, _):
        busy = lambda: ask(it.gateways, *["well"] * 8)  # noqa: E731 - it is what goes on meanwhile
        drill.fires("HeadwayLittleRoomLeft", meanwhile=busy)  # Every batch of one is full.
        drill.clears("HeadwayLittleRoomLeft")

        obstacle = folder / "obstacle"
        obstacle.touch()
        drill.fires(
            "HeadwayDeadLetters",
            "HeadwayManyRetries",
            meanwhile=lambda: ask(it.gateways, f"unless {obstacle} {time.monotonic()}"),
        )
        obstacle.unlink()
        drill.clears("HeadwayDeadLetters", "HeadwayManyRetries")

        def slow() -> None:
            with held(it.gateways[0], folder) as asked:
                time.sleep(0.4)
            asked.answer()

        drill.fires("HeadwayLatencyNearPromise", meanwhile=slow)
        drill.clears("HeadwayLatencyNearPromise", meanwhile=busy)

        with contextlib.ExitStack() as gates:
            waiting = [gates.enter_context(held(it.gateways[0], folder)) for _ in it.workers]
            waiting += [it.gateways[0].ask("waits") for _ in range(4)]
            drill.fires("HeadwayQueueOld")
        for asked in waiting:
            asked.answer()
        drill.clears("HeadwayQueueOld")

        pause(*it.controllers)
        drill.fires("HeadwayNobodyLeads", "HeadwayProcessDown")
        resume(*it.controllers)
        drill.clears("HeadwayNobodyLeads", "HeadwayProcessDown")


def outage(folder: Path, watch: Watches) -> None:
    """The broker of such a fleet stands still."""
    with six(folder, watch) as (drill, it, redis):
        busy = lambda: ask(it.gateways, *["well"] * 8)  # noqa: E731 - it is what goes on meanwhile
        redis.pause()
        errors = (
            "HeadwayBrokerOutOfReach",
            "HeadwayRefusingForBroker",
            "HeadwayErrorBudgetBurnsFast",
            "HeadwayErrorBudgetBurns",
        )
        drill.fires(*errors, meanwhile=busy)
        redis.resume()
        drill.clears(*errors, meanwhile=busy)


def losses(folder: Path, watch: Watches) -> None:
    """All workers of such a fleet are killed, and another one starts in vain."""
    with six(folder, watch) as (drill, it, _):
        obstacle = folder / "obstacle"
        obstacle.touch()
        ask(it.gateways, f"unless {obstacle}")  # It runs again in vain: retries are counted from the first one on.
        for worker in list(it.workers):
            it.kill(worker)
        (folder / "broken").touch()
        flags = ("--name", "in-vain", "--broker", it.url, *WORKER)
        in_vain = Server(folder, TARGET, flags, role="worker", constants=SOON)
        lost = "HeadwayWorkerMissing", "HeadwayWorkerLost", "HeadwayNoHealthyWorker", "HeadwayModelWithoutWorker"
        drill.fires(*lost)
        in_vain.kill()
        (folder / "broken").unlink()
        it.start("worker")
        it.start("worker")
        drill.clears(*(name for name in lost if name != "HeadwayWorkerLost"))
        drill.clears("HeadwayWorkerLost", within=LISTED)


PARTS = (members, outage, losses)


class _Over(Exception):
    """End of the drill: the fleet is killed, as none of what it was through is in good order."""


def main(*parts: Callable[[Path, Watches], None]) -> int:
    """Run these parts, or those that the arguments name; returns the exit code."""
    missed: list[str] = []
    chosen = sys.argv[1:]
    for part in parts:
        if chosen and part.__name__ not in chosen:
            continue
        with tempfile.TemporaryDirectory(prefix="headway-drill-") as name:
            say(f"{part.__name__}:")
            part(Path(name), functools.partial(watched, missed))
    say("missed: " + ("; ".join(missed) or "nothing"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*PARTS))
