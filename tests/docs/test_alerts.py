"""Alerts in deploy/prometheus: each has a unit test and a runbook entry, and uses metrics that exist."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.runtime.counters import Counters
from headway.telemetry.figures import ProcessFigures, State
from headway.telemetry.metrics import families
from tests.docs.pages import ROOT
from tests.servers.prometheus import program

FOLDER = ROOT / "deploy" / "prometheus"
DOCS = "{{ with $externalLabels.docs_of_headway }}{{ . }}{{ else }}docs{{ end }}"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
ALERTS = (FOLDER / "alerts.yml").read_text(encoding="utf-8")
EXPRESSIONS = dict(re.findall(r"^      - alert: (\w+)\n        expr: (.+)$", ALERTS, re.MULTILINE))


def promtool(*arguments: str) -> None:
    environ = {**os.environ, "GOGC": "400"}  # It spends a third of its time on garbage collection.
    done = subprocess.run(
        [program("promtool"), *arguments], cwd=FOLDER, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_how_bad_it_is_and_where_to_read_on() -> None:
    for rule in ALERTS.split("      - alert: ")[1:]:
        name = rule.partition("\n")[0]
        assert re.search(r"labels: {severity: (page|ticket)}\n", rule), name
        for annotation in ("summary", "description"):
            assert re.search(rf"^          {annotation}: \"[^\"]+\"$", rule, re.MULTILINE), name
        assert f'runbook_url: "{DOCS}/runbook.md#{name.lower()}"\n' in rule, name


def test_the_runbook_has_an_entry_for_every_alert_and_no_other() -> None:
    entries = dict(re.findall(r"^## (\w+)\n\n\*(?:page|ticket).*?\*: `(.+)`$", RUNBOOK, re.MULTILINE))
    assert entries == EXPRESSIONS
    durations = re.findall(r"^      - alert: (\w+)\n        expr: .+\n(?:        for: (\w+)\n)?", ALERTS, re.MULTILINE)
    told = re.findall(r"^## (\w+)\n\n\*(?:page|ticket)(?:, after (\w+))?.*\*: `", RUNBOOK, re.MULTILINE)
    assert told == durations
    for entry in RUNBOOK.split("\n## ")[1:]:
        assert re.findall(r"^- \*\*(.+):\*\* \S", entry, re.MULTILINE) == ["Means", "Look at", "Do"], entry[:40]


def test_every_alert_has_a_unit_test_that_sees_it_fire_and_clear() -> None:
    tests = (FOLDER / "alerts_test.yml").read_text(encoding="utf-8")
    found = re.findall(
        r'alertname="(\w+)",alertstate="firing"}\)\', eval_time: \w+, exp_samples: (.+)}$', tests, re.MULTILINE
    )
    fires = "[{labels: '{}', value: 1}]"
    assert found == [(name, seen) for name in EXPRESSIONS for seen in ("[]", fires, "[]")]


def test_every_alert_fires_in_a_drill() -> None:
    folder = ROOT / "tests" / "e2e"
    drills = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in ("alerts_drill", "alerts_alone_drill")]
    assert {name for text in drills for name in re.findall(r'"(Headway\w+)"', text)} == EXPRESSIONS.keys()


@pytest.mark.parametrize("file", ["alerts.yml", "rules.yml", "alerts_test.yml", "../grafana/headway.json"])
def test_every_metric_in_a_file_for_operators_exists(file: str) -> None:
    made = families(State(Counters(), ProcessFigures(["free"])))
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in made}
    text = (FOLDER / file).read_text(encoding="utf-8")
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bheadway_[a-z_]+", text)}
    assert used
    assert used <= names
    recorded = set(re.findall(r"record: (\S+)", (FOLDER / "rules.yml").read_text(encoding="utf-8")))
    assert set(re.findall(r"headway:[a-z0-9_:]+", text)) <= recorded


def expressions_for_operators() -> Iterator[str]:
    """Yield the expressions of all rules, alerts and panels."""
    yield from EXPRESSIONS.values()
    yield from re.findall(r"^        expr: (.+)$", (FOLDER / "rules.yml").read_text(encoding="utf-8"), re.MULTILINE)
    board = json.loads((FOLDER.parent / "grafana" / "headway.json").read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            assert "$fleet" in target["expr"] and "{{fleet}}" in target["legendFormat"], panel["title"]
            yield target["expr"]


def test_whatever_is_summed_up_is_summed_up_for_each_fleet() -> None:
    for expression in expressions_for_operators():
        aggregated = re.findall(r"\b(?:sum|min|max|avg|count|group)\b(?: by \(([a-z, ]+)\))? ?\(", expression)
        assert all(labels.split(", ")[0] == "fleet" for labels in aggregated), expression


BESIDE_OTHERS = {"HeadwayNothingScraped"}
"""Alerts that fire later if another fleet is scraped; a separate test says when."""
LATER = "1e9"
"""When a certificate expires that won't expire soon."""


@pytest.mark.processes
def test_every_alert_fires_and_clears_for_the_fleet_that_is_in_trouble_alone(tmp_path: Path) -> None:
    found = yaml.safe_load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"))
    found["rule_files"] = [str(FOLDER / name) for name in found["rule_files"]]
    apart = EXPRESSIONS.keys() - BESIDE_OTHERS
    assert {one["name"] for one in found["tests"]} >= apart
    found["tests"] = [two_fleets(one) if one["name"] in apart else one for one in found["tests"]]
    (tmp_path / "two_fleets.yml").write_text(json.dumps(found), encoding="utf-8")
    promtool("test", "rules", str(tmp_path / "two_fleets.yml"))


def two_fleets(test: dict[str, Any]) -> dict[str, Any]:
    """Return an alert's unit test for fleet `b`, alongside a fleet `a` whose values never change."""
    series = []
    for one in test["input_series"]:
        first = re.match(r"-?[0-9.]+", one["values"])
        steady = LATER if "expiry" in one["series"] else first and first[0]
        series.append({"series": of_fleet("b", one["series"]), "values": one["values"]})
        if steady:
            series.append({"series": of_fleet("a", one["series"]), "values": f"{steady}+0x500"})
    fires = f'group by (fleet) (ALERTS{{alertname="{test["name"]}",alertstate="firing"}})'
    seen = [
        {**one, "expr": fires, "exp_samples": one["exp_samples"] and [{"labels": '{fleet="b"}', "value": 1}]}
        for one in test["promql_expr_test"]
    ]
    return {**test, "input_series": series, "promql_expr_test": seen}


def of_fleet(fleet: str, series: str) -> str:
    begun = f"{series[:-1]}," if series.endswith("}") else f"{series}{{"
    return f'{begun}fleet="{fleet}"}}'


@pytest.mark.processes
def test_the_files_are_what_prometheus_takes() -> None:
    promtool("check", "rules", "rules.yml", "alerts.yml")
    promtool("check", "config", "--syntax-only", "prometheus.yml")
