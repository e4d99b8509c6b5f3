"""A drill: stages faults in a fleet under a real Prometheus. Each alert must fire, and clear after the fault.

python -m tests.e2e.alerts_drill        # about four minutes

The rules are copies of those in deploy/prometheus, with short windows and durations. Exits with 1 if an alert did not
fire or did not clear.
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
"""Maximum seconds until an alert fires or clears."""
LISTED = 180.0
"""Maximum seconds for which a vanished worker is still listed."""
GATEWAY = ("--broker-timeout-ms", "1000", "--request-timeout-ms", "3000", "--queue-timeout-ms", "3000")
WORKER = ("--max-batch-size", "1", "--gpu-timeout-ms", "3000")
SOON = {"headway.core.health.OFFLINE_AFTER": 5.0}
"""Shortens the time after which a silent process counts as lost."""


LOWER = {
    "headway_ledger_backlog) > 10000": "headway_ledger_backlog) > 20",
    "headway_keys_age_seconds > 60": "headway_keys_age_seconds > 5",
    "headway_worker_restarts_total[10s]": "headway_worker_restarts_total[30s]",
}
"""Lower thresholds for the copies, and one longer window, because a process doesn't die four times in 10 s."""


def shortened(folder: Path, window: str = "10s") -> list[Path]:
    """Copy the rules with these windows, and with durations of 1 s. See also LOWER."""
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
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _nothing() -> None: ...


class Watch(Protocol):
    """Waits for the alerts that the staged faults should raise."""

    def fires(self, *alerts: str, meanwhile: Callable[[], None] = _nothing) -> None:
        """Wait until these alerts fire."""

    def clears(self, *alerts: str, meanwhile: Callable[[], None] = _nothing, within: float = WITHIN) -> None:
        """Wait until these alerts stop firing."""

    def scrape(self, nothing: bool = False) -> None:
        """Stop scraping, or scrape the processes again."""


Watches = Callable[..., contextlib.AbstractContextManager[Watch]]
"""A function such as `watched`, without its first parameter."""


@dataclass
class Drill:
    """Processes that a Prometheus watches, and the alerts that were missed."""

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
    """Run a drill with running processes. They are killed at the end, because the faults leave them in a bad state.
    `window` is used for all rates in the rules, `interval` is the scrape interval, and `certificate` is what the admin
    ports require."""
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
    """Send requests to the processes in turn, and accept any answer."""
    for number, text in enumerate(texts):
        servers[number % len(servers)].ask(text).answer()


@contextlib.contextmanager
def held(server: Server, folder: Path) -> Iterator[Asked]:
    """Send a request whose batch waits at a gate until the block ends."""
    gate = Gate(folder)
    asked = server.ask(gate.text())
    gate.reached()
    yield asked
    gate.open()


@contextlib.contextmanager
def six(folder: Path, watch: Watches) -> Iterator[tuple[Watch, Fleet, RedisServer]]:
    """A fleet of six processes that Prometheus watches."""
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
    """Faults in a fleet of six: its load, its model and its controllers."""
    with six(folder, watch) as (drill, it, _):
        busy = lambda: ask(it.gateways, *["well"] * 8)  # noqa: E731 - load in the background
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
    """The fleet's broker hangs."""
    with six(folder, watch) as (drill, it, redis):
        busy = lambda: ask(it.gateways, *["well"] * 8)  # noqa: E731 - load in the background
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
    """All workers of a fleet are killed, and a new one fails to start."""
    with six(folder, watch) as (drill, it, _):
        obstacle = folder / "obstacle"
        obstacle.touch()
        ask(it.gateways, f"unless {obstacle}")  # It fails twice, because retries count from the first one on.
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
    """Ends a drill. The fleet is then killed, because the faults leave it in a bad state."""


def main(*parts: Callable[[Path, Watches], None]) -> int:
    """Run these parts, or those that the arguments name. Returns the exit code."""
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
