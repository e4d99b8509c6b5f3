"""Alerts in deploy/prometheus: each has its unit test and its entry in the runbook, and uses metrics that exist."""

from __future__ import annotations

import re
import subprocess

import pytest

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
    done = subprocess.run([program("promtool"), *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=300)
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


@pytest.mark.processes
def test_the_files_are_what_prometheus_takes() -> None:
    promtool("check", "rules", "rules.yml", "alerts.yml")
    promtool("check", "config", "--syntax-only", "prometheus.yml")


@pytest.mark.processes
def test_every_alert_fires_and_clears() -> None:
    promtool("test", "rules", "alerts_test.yml")
