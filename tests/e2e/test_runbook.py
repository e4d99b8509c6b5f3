"""The commands in docs/runbook.md work, and show what is wrong in the state that the alert describes.

The states are those of the alert drills, without Prometheus. The commands come from the page itself.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.docs.pages import ROOT
from tests.docs.parsing import unknown_flags
from tests.e2e import alerts_alone_drill, alerts_drill
from tests.e2e.alerts_drill import WITHIN, Watches
from tests.e2e.client import PATIENCE
from tests.e2e.fleet import stands_still
from tests.e2e.fork_server import the_fork_server
from tests.e2e.server import GPUS, TAKE, TARGET, Server
from tests.servers.redis import lacking

ENTRIES = {
    entry.partition("\n")[0]: list(
        dict.fromkeys(" ".join(text.split()) for text in re.findall(r"`([^`]+)`", entry.partition("- **Look at:**")[2]))
    )
    for entry in (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8").split("\n## ")[1:]
}
"""The page's code blocks below "Look at" and "Do", by alert."""
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "headway").rglob("*.py"))
ELSEWHERE = {
    "…/scale", "LimitNOFILE=", "Pending", "X-Request-Timeout-Ms", "dmesg", "headway", "maxmemory", "nvidia-smi",
    "scrape_configs", "systemctl status",
}  # fmt: skip
"""Words and commands that belong to other programs."""
RUNS = re.compile(r"headway |/|INFO|SLOWLOG|openssl ")
FILLED = {"TARGET": TARGET, "MODEL": "m", "R": "2000", "MS": "2", "P95": "1"}
"""Values for the placeholders in capitals, in addition to those from the state."""


class Shows(NamedTuple):
    """What a command should show: a pattern in its output, and its exit code."""

    pattern: str
    code: int = 0


SILENT = Shows(r"\Ano answer\Z")
AWAY = Shows(r"(?m)^broker away +\S", 1)
GONE = Shows(r"worker-\d/cpu-0 is offline: no heartbeat", 1)
SHOWN: dict[str, dict[str, Shows]] = {
    "HeadwayProcessDown": {"headway status": Shows(r"(?m)^controller-\d +lost ")},
    "HeadwayNobodyLeads": {"headway status": Shows(r"(?s)\A(?!.* yes )")},
    "HeadwayNoHealthyWorker": {"headway status": GONE, "headway check TARGET": Shows("nothing works any more", 4)},
    "HeadwayModelWithoutWorker": {"headway status": GONE, "/readyz?verbose": Shows("none is healthy")},
    "HeadwayWorkerMissing": {"headway status": GONE},
    "HeadwayWorkerLost": {"headway status": GONE},
    "HeadwayGpuLost": {"headway status": Shows("its GPU is lost: Xid 79", 1)},
    "HeadwayGpuErrors": {"headway status": Shows(r"\b94 \(\d+\)")},
    "HeadwayBrokerOutOfReach": {"INFO": SILENT, "headway status": AWAY},
    "HeadwayRefusingForBroker": {"INFO memory": SILENT},
    "HeadwayBrokerFillsUp": {"INFO memory": Shows(r"'maxmemory': [1-9]")},
    "HeadwayBrokerSlow": {"SLOWLOG GET": Shows(r"\A\[")},
    "HeadwayRefusingPayers": {"headway top": Shows("refused")},
    "HeadwayDeadLetters": {
        "headway dlq list": Shows("not while it is there"),
        "headway dlq show ID": Shows(r'"input": "unless '),
        "headway dlq replay --all": Shows("not while it is there", 1),
        "headway dlq purge ID": Shows("removed"),
    },
    "HeadwayModelRejects": {
        "headway dlq list": Shows("not while it is there"),
        "headway status": Shows("VERSION"),
        "headway dlq replay --all": Shows("not while it is there", 1),
    },
    "HeadwayBulkPaused": {
        "headway bulk list": Shows("in_progress"),
        "headway bulk status ID": Shows("no worker of the model is up"),
        "headway bulk cancel ID": Shows("cancel"),
    },
    "HeadwayCertificateEnds": {"openssl x509 -noout -enddate -in FILE": Shows("notAfter=")},
    "HeadwayScalingAtMost": {"/internal/scaling": Shows("rule")},
    "HeadwayScalingLate": {"/internal/scaling": Shows('"late"')},
    "HeadwayRolledBack": {
        "headway rollout status": Shows("rolled back"),
        "headway dlq list": Shows("no good"),
        "headway rollout abort MODEL": Shows("aborted"),
        "headway rollout promote MODEL": Shows("promoted"),
    },
}
"""What each command of each entry shows in its state."""
ALONE = {
    "headway plan --rate R --batch-ms MS --p95 P95": Shows("no request is answered sooner than one batch takes", 3)
}
"""What commands that contact no process show. Feasible plans take many seconds; other tests make some."""


def test_it_is_said_of_every_command_of_the_runbook_what_it_shows() -> None:
    runs = {
        alert: {text for text in found if RUNS.match(text) and text not in ALONE} for alert, found in ENTRIES.items()
    }
    assert {alert: found for alert, found in runs.items() if found} == {
        alert: set(shown) for alert, shown in SHOWN.items()
    }


@pytest.mark.parametrize("text", ALONE)
def test_what_the_runbook_has_calculated_is(tmp_path: Path, text: str) -> None:
    right, output = Reader(tmp_path, (), None).shows(text, ALONE[text])
    assert right, output


@pytest.mark.parametrize("alert", ENTRIES)
def test_what_the_runbook_names_is_there(alert: str) -> None:
    for text in ENTRIES[alert]:
        if text.startswith("--"):
            assert not unknown_flags(["serve", text]) or not unknown_flags(["controller", text]), text
        elif text not in ELSEWHERE and text not in ENTRIES and not RUNS.match(text) and not metrics(text):
            word = re.sub(r" \w+=…$", "", text)
            assert re.search(rf"\b{re.escape(word)}\b", SOURCE, re.IGNORECASE), (
                f"no event of the log, and no word: {text}"
            )


@pytest.mark.parametrize("part", [*alerts_drill.PARTS, *alerts_alone_drill.PARTS], ids=lambda part: str(part.__name__))
def test_the_runbook_helps(tmp_path: Path, part: Callable[[Path, Watches], None]) -> None:
    part(tmp_path, reading)


@contextlib.contextmanager
def reading(
    folder: Path, *servers: Server, certificate: tuple[Path, Path] | None = None, window: str = "", interval: str = ""
) -> Iterator[Reader]:
    """Run a reader of the runbook for these processes. They are killed at the end."""
    try:
        for server in servers:
            server.ready()
        yield Reader(folder, servers, certificate)
    finally:
        for server in servers:
            server.kill()


class Reader:
    """Follows the runbook's entries for the alerts instead of waiting for the alerts."""

    def __init__(self, folder: Path, servers: tuple[Server, ...], certificate: tuple[Path, Path] | None) -> None:
        self._folder = folder
        self._servers = servers
        self._filled = {**FILLED, "FILE": str(certificate[0]) if certificate else ""}

    def fires(self, *alerts: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Follow the page while the state lasts. Each command must show what is wrong."""
        self._do(meanwhile)
        for alert in alerts:
            for text in ENTRIES[alert]:
                if names := metrics(text):
                    self._until(lambda names=names: (self._tells(names), ""), f"{alert}: {text}", meanwhile)  # type: ignore[misc]
                elif shown := SHOWN.get(alert, {}).get(text):
                    self._until(lambda t=text, s=shown: self.shows(t, s), f"{alert}: {text}", meanwhile)  # type: ignore[misc]

    def clears(self, *alerts: str, meanwhile: Callable[[], None] = lambda: None, within: float = 0.0) -> None:
        """Called once the staged fault is over."""
        self._do(meanwhile)

    def scrape(self, nothing: bool = False) -> None:
        """Does nothing, because nothing is scraped."""

    def _do(self, meanwhile: Callable[[], None]) -> None:
        meanwhile()
        for asked in itertools.chain(*(server.asked for server in self._servers)):
            if asked.outcome:
                asked.connection.close()

    def _until(self, asked: Callable[[], tuple[bool, str]], what: str, meanwhile: Callable[[], None]) -> None:
        end = time.monotonic() + WITHIN
        while not (last := asked())[0]:
            assert time.monotonic() < end, f"{what}\n{last[1]}"
            self._do(meanwhile)

    def _running(self) -> list[Server]:
        return [one for one in self._servers if one.process.poll() is None and not stands_still(one)]

    def _tells(self, names: set[str]) -> bool:
        """Return True if metrics with these names have samples. Most of them come from the first process."""
        left = set(names)
        for server in self._running():
            left -= {re.sub(r"_(bucket|sum|count)$", "", sample.name) for sample in server.metrics().samples}
            if not left:
                break
        return not left

    def shows(self, text: str, shown: Shows) -> tuple[bool, str]:
        """Return whether a command shows that, and its output."""
        code, output = self._run(" ".join(self._filled.get(word, word) for word in text.split()))
        if found := re.search(r"\b(?:req|batch)_[\w-]+", output):
            self._filled["ID"] = found[0]
        return code == shown.code and bool(re.search(shown.pattern, output)), f"code {code}:\n{output}"

    def _run(self, text: str) -> tuple[int, str]:
        if text.startswith("headway "):
            return self._headway(text)
        server = self._running()[0]
        if text.startswith("/internal/"):
            return 0, server.admin(text).body.decode()
        if text.startswith("/"):
            return 0, next(one for one in self._running() if one.role in TAKE).get(text).body.decode()
        if text.startswith("openssl "):
            if shutil.which("openssl") is None:
                lacking("openssl is not on the path, which reads the certificate")
            done = subprocess.run(shlex.split(text), capture_output=True, text=True, timeout=PATIENCE)
            return done.returncode, done.stdout + done.stderr
        with redis.Redis.from_url(server.health()["broker"], socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as asked:
            try:
                return 0, str(asked.execute_command(*text.split()))
            except redis.TimeoutError:
                return 0, "no answer"

    def _headway(self, text: str) -> tuple[int, str]:
        environ = {**GPUS, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        for server in self._running()[:1]:
            environ["HEADWAY_ADMIN"] = f"http://127.0.0.1:{server.admin_port}"
            environ["HEADWAY_URL"] = f"http://127.0.0.1:{server.port}"
        with tempfile.TemporaryFile("w+b", dir=self._folder) as out:
            outputs = out.fileno(), out.fileno()
            process = the_fork_server().start(shlex.split(text)[1:], self._folder, environ, *outputs)
            code = process.wait(PATIENCE)
            out.seek(0)
            return code, out.read().decode()


def metrics(text: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(?:headway|process)_[a-z_]+", text)}
