"""Prometheus scraping Headway processes on loopback, as a child process.

    with Prometheus(tmp_path / "prometheus", fleet_of_six, rules=[RULES]) as prometheus:
        prometheus.scraped()
        assert prometheus.value("sum(headway_workers)") == 4

It comes from the distribution. Without it a test is skipped, or fails with HEADWAY_TEST_REQUIRE_SERVERS=1.
"""

import json
import os
import shutil
import signal
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.client import PATIENCE, wait_until
from tests.e2e.server import Server
from tests.servers.child import ChildServer
from tests.servers.ports import LOOPBACK
from tests.servers.redis import lacking

_CONFIG = """
global: {{scrape_interval: {interval}, scrape_timeout: {interval}, evaluation_interval: {interval}}}
rule_files: {rules}
scrape_configs:
  - job_name: headway
    scheme: {scheme}
    tls_config: {tls}
    static_configs: {targets}
"""


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`. Without it the test is skipped, or fails."""
    path = shutil.which(name)
    if path is None:
        lacking(f"{name} is not on the path; on Debian and Ubuntu: apt-get install prometheus")
    return path


class Prometheus(ChildServer):
    """A Prometheus that scrapes admin ports, each under its role; `with` starts and stops it."""

    def __init__(
        self,
        folder: Path,
        scraped: Sequence[Server],
        rules: Sequence[Path] = (),
        interval: str = "1s",
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        found = program("prometheus")
        super().__init__(folder)
        self.argv = [
            found,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={LOOPBACK}:{self.port}",
        ]
        targets = [
            {"targets": [f"{LOOPBACK}:{server.admin_port}"], "labels": {"role": server.role}} for server in scraped
        ]
        self._count = len(targets)
        tls: dict[str, Any] = {"insecure_skip_verify": True}
        if certificate is not None:
            tls |= {"cert_file": str(certificate[0]), "key_file": str(certificate[1])}
        self._settings = {
            "interval": interval,
            "scheme": "https" if certificate is not None else "http",
            "tls": json.dumps(tls),
            "rules": json.dumps(list(map(str, rules))),
        }
        self._targets = targets
        self._configure(targets)

    def scrape(self, nothing: bool = False) -> None:
        """Stop scraping, or scrape the targets again."""
        self._configure([] if nothing else self._targets)
        os.kill(self.pid, signal.SIGHUP)

    def _configure(self, targets: list[dict[str, Any]]) -> None:
        config = _CONFIG.format(targets=json.dumps(targets), **self._settings)
        (self.folder / "prometheus.yml").write_text(config, encoding="utf-8")

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        answer = self._ask("query", query=expression)
        if answer["resultType"] == "scalar":
            return [({}, float(answer["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in answer["result"]]

    def value(self, expression: str) -> float | None:
        """The value of an expression with one sample; None if it has none."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return found[0][1] if found else None

    def rules(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._ask("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def firing(self) -> set[str]:
        alerts: list[dict[str, Any]] = self._ask("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def scraped(self) -> None:
        wait_until(lambda: self.value("sum(up)") == self._count)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=PATIENCE) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _ask(self, what: str, **parameters: str) -> Any:
        body = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{what}?{body}", timeout=PATIENCE) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]
