"""A real Prometheus scrapes a fleet of six processes: its totals are right, and all panels and rules have data."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT
from tests.e2e.client import wait_until
from tests.e2e.fleet import fleet
from tests.servers.prometheus import Prometheus
from tests.servers.redis import RedisServer

DEPLOY = ROOT / "deploy"
RULES = [DEPLOY / "prometheus" / name for name in ("rules.yml", "alerts.yml")]
TRUTH = {
    'sum(headway_requests_total{outcome="ok"})': 12,
    "sum(headway_requests_total)": 12,
    "sum(headway_request_seconds_count)": 12,
    "sum(headway_batch_size_sum)": 12,
    'sum(headway_workers{status="healthy"})': 2,
    "sum(headway_workers)": 2,
    "sum(headway_queue_depth)": 0,
    "sum(headway_processes)": 6,
    'sum(headway_processes{process_role="worker"})': 2,
    "sum(headway_leader)": 1,
    "sum(headway_pending_requests)": 0,
    "sum(headway_dlq_depth)": 0,
    "count(headway_dead_letters_total)": 1,
    "count(headway_expected_workers)": 1,
    "count(headway_broker_memory_bytes)": 1,
    "count(headway_capacity_usable_items_per_second)": 1,
    "sum(headway_broker_up)": 6,
    'sum(headway:workers{status="healthy"})': 2,
}


def panels() -> Iterator[tuple[str, str]]:
    """Yield the title and expression of every target of every panel, with all models and tiers selected."""
    board = json.loads((DEPLOY / "grafana" / "headway.json").read_text(encoding="utf-8"))
    chosen = {"$__rate_interval": "30s", "$model": ".*", "$tier": ".*", "$fleet": ".*"}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in chosen.items():
                expression = expression.replace(name, value)
            yield panel["title"], expression


def test_the_sums_of_a_fleet_are_the_truth_and_every_panel_and_rule_answers(tmp_path: Path) -> None:
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(tmp_path, redis, gateways=2, workers=2, controllers=2) as it,
        Prometheus(tmp_path / "prometheus", it.everybody(), RULES) as prometheus,
    ):
        for number in range(12):
            it.gateways[number % 2].ask(f"text {number}").output()
        for expression, truth in TRUTH.items():
            becomes(prometheus, expression, truth)
        [leader] = [one for one in it.controllers if one.metrics().value("leader")]
        for title, expression in panels():
            assert "$" not in expression, title
            answers(prometheus, title, expression)
        wait_until(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()))
        assert len(prometheus.rules()) > 40
        pids = {str(one.process.pid) for one in it.everybody()}
        bounds = re.compile(r"'le': '[^']*'")  # Histogram bounds may equal a process id.
        assert not [text for text in series(prometheus) if pids & set(re.findall(r"\d+", bounds.sub("", text)))]

        it.kill(leader)
        becomes(prometheus, "sum(headway_leader)", 1)
        becomes(prometheus, "sum(headway_processes)", 5)
        becomes(prometheus, 'sum(headway_workers{status="healthy"})', 2)


def becomes(prometheus: Prometheus, expression: str, truth: float) -> None:
    with contextlib.suppress(AssertionError):
        wait_until(lambda: prometheus.value(expression) == truth)
    assert (expression, prometheus.value(expression)) == (expression, truth)


def answers(prometheus: Prometheus, title: str, expression: str) -> None:
    """Wait until a panel's expression has a sample."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: prometheus.query(expression))
    assert prometheus.query(expression), (title, expression)


def series(prometheus: Prometheus) -> list[str]:
    """Return the labels of all Headway series except the addresses of the processes."""
    found = prometheus.query('{__name__=~"headway_.*"}')
    return [str({name: value for name, value in labels.items() if name != "instance"}) for labels, _ in found]


def test_the_dashboard_is_one_for_any_grafana_whose_panels_do_not_lie_over_each_other() -> None:
    board = json.loads((DEPLOY / "grafana" / "headway.json").read_text(encoding="utf-8"))
    assert board["uid"] == "headway"
    variables = {one["name"]: one["type"] for one in board["templating"]["list"]}
    assert variables == {"datasource": "datasource", "fleet": "query", "model": "query", "tier": "query"}
    sources = set(re.findall(r'"uid": "([^"]+)"', json.dumps(board["panels"])))
    assert sources == {"${datasource}"}
    rates = [expression for _, expression in panels() if "rate(" in expression]
    assert all("[30s]" in expression for expression in rates)
    assert all("[30s]" in expression or "increase(" in expression for _, expression in panels() if "[" in expression)
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
