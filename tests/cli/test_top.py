"""`headway top`: figures between two scrapes, what fits a terminal, keys, and a real terminal."""

from __future__ import annotations

import math
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from headway.cli.admin import Admin
from headway.cli.figures import Scrape, between, percentile, read
from headway.cli.screen import HELP, fit, narrowed
from headway.cli.status import Sort
from headway.cli.top import View, described
from tests.cli.command import ROOT
from tests.cli.test_status import Port, port

__all__ = ["port"]

BEFORE = """
headway_requests_total{model="m",tier="paid",outcome="ok"} 100
headway_requests_total{model="m",tier="paid",outcome="expired"} 7
headway_batches_total{model="m",reason="full"} 50
"""
AFTER = """
headway_requests_total{model="m",tier="paid",outcome="ok"} 300
headway_requests_total{model="m",tier="paid",outcome="shed"} 40
headway_requests_total{model="m",tier="paid",outcome="cancelled"} 9
headway_requests_total{model="m",tier="paid",outcome="deadline_exceeded"} 20
headway_requests_total{model="m",tier="free",outcome="ok"} 10
headway_refusals_total{reason="shed",tier="paid"} 40
headway_refusals_total{reason="unauthenticated",tier="none"} 10
headway_request_seconds_bucket{model="m",tier="paid",le="0.1"} 100
headway_request_seconds_bucket{model="m",tier="paid",le="0.2"} 200
headway_request_seconds_bucket{model="m",tier="paid",le="+Inf"} 200
headway_batches_total{model="m",reason="full"} 80
headway_batches_total{model="m",reason="headway"} 10
headway_batch_size_sum{model="m"} 400
headway_batch_size_count{model="m"} 40
"""


def scrapes() -> tuple[Scrape, Scrape]:
    return read(BEFORE, 5.0), read(AFTER, 15.0)


def test_rates_refusals_errors_and_percentiles_are_told_apart() -> None:
    found = between(*scrapes())
    free, paid, all_tiers = found.tiers
    assert (free.tier, free.answered, math.isnan(free.p95)) == ("free", 1.0, True)
    assert (paid.tier, paid.answered, paid.refused, paid.errors) == ("paid", 20.0, 4.0, 2.0)
    assert [paid.p50, paid.p95] == pytest.approx([0.1, 0.19])
    assert (all_tiers.tier, all_tiers.answered, all_tiers.refused, all_tiers.errors) == ("all", 21.0, 5.0, 2.0)
    assert found.refusals == {"shed": 4.0, "unauthenticated": 1.0}
    assert found.errors == {"DEADLINE_EXCEEDED": 2.0}
    assert (found.departures, found.size, found.reasons) == (4.0, 10.0, {"full": 0.75, "headway": 0.25})


def test_of_several_models_each_has_its_figures() -> None:
    before, after = (
        BEFORE,
        AFTER
        + """
headway_requests_total{model="n",tier="paid",outcome="ok"} 50
headway_requests_total{model="n",tier="paid",outcome="backend_error"} 5
headway_requests_total{model="",tier="paid",outcome="not_found"} 30
""",
    )
    found = between(read(before, 5.0), read(after, 15.0))
    m, n = found.models
    assert (m.tier, m.answered, m.refused, m.errors) == ("m", 21.0, 4.0, 2.0)
    assert (n.tier, n.answered, n.refused, n.errors) == ("n", 5.0, 0.0, 0.5)
    assert m.p95 == pytest.approx(0.19)
    assert [line.split()[0] for line in described(found).splitlines() if line.startswith(("MODEL", "m ", "n "))] == [
        "MODEL", "m", "n",
    ]  # fmt: skip
    assert not between(*scrapes()).models


def test_a_process_that_began_anew_counts_from_its_beginning() -> None:
    before, after = scrapes()
    found = between(Scrape(0.0, after.values), Scrape(10.0, before.values))
    assert found.tiers[0].answered == 10.0


@pytest.mark.parametrize(
    ("buckets", "share", "value"),
    [
        ({}, 0.5, math.nan),
        ({0.1: 0, math.inf: 0}, 0.5, math.nan),
        ({0.1: 10, math.inf: 10}, 0.5, 0.05),
        ({0.1: 0, 0.2: 10, math.inf: 10}, 0.99, 0.199),
        ({0.1: 5, math.inf: 10}, 0.95, 0.1),
    ],
)
def test_a_percentile_lies_within_its_bucket(buckets: dict[float, float], share: float, value: float) -> None:
    assert percentile(buckets, share) == pytest.approx(value, nan_ok=True)


def test_figures_are_shown_in_the_width_that_there_is() -> None:
    text = described(between(*scrapes()))
    assert "LAST 10 S  ANSWERED/S  REFUSED/S  ERRORS/S  P50 MS  P95 MS  P99 MS" in text
    assert "refused       shed 4.0/s, unauthenticated 1.0/s" in text
    assert "errors        DEADLINE_EXCEEDED 2.0/s" in text
    assert "departures    4.0/s of 10.0 inputs: full 75%, headway 25%" in text
    assert "LAST 10 S  ANSWERED/S  REFUSED/S  P95 MS" in described(between(*scrapes()), 45)


def test_a_text_is_cut_to_the_terminal_and_says_so() -> None:
    assert fit("a\nbcdef\nc\nd", 4, 3) == "a\nbcd…\n… 2 "
    assert fit("a\nb", 80, 2) == "a\nb"
    assert fit("a\nb\nc", 80, 2) == "a\n… 2 more lines: the terminal is too low"


def test_columns_that_are_needed_least_go_first() -> None:
    head, rows = ("A", "BB", "CCC"), [("1", "2", "3")]
    assert narrowed(head, rows, 0, ("CCC",)) == (head, rows)
    assert narrowed(head, rows, 10, ("CCC", "BB")) == (head, rows)
    assert narrowed(head, rows, 9, ("CCC", "BB")) == (("A", "BB"), [("1", "2")])
    assert narrowed(head, rows, 2, ("CCC", "BB")) == (("A",), [("1",)])


@pytest.fixture
def view(port: Port) -> Iterator[View]:
    port.answers["/metrics"] = (200, BEFORE)
    yield View(Admin(port.url, ""))


def test_what_the_metrics_say_stands_between_summary_and_tables(port: Port, view: View) -> None:
    assert "departures" not in view.now(5.0)
    port.answers["/metrics"] = (200, AFTER)
    shown = view.now(15.0)
    assert shown.index("version") < shown.index("departures    4.0/s") < shown.index("WORKER")
    assert max(map(len, view.now(16.0, 60).splitlines()[12:])) <= 60


def test_rates_are_of_the_last_seconds(port: Port, view: View) -> None:
    for at in range(30):
        view.now(float(at))
    assert len(view._scrapes) == 11
    port.answers["/internal/health"] = (503, {"message": "away"})
    assert view.now(30.0) == f"{port.url}: away (503)"
    assert not view._scrapes


def test_keys_quit_help_and_sort(port: Port, view: View) -> None:
    assert not view.press("q")
    assert view.press("?")
    assert vars(view)["helps"]
    assert view.press("?")
    assert not vars(view)["helps"]
    rows = [line.split()[0] for line in view.now(1.0).splitlines() if "/gpu-0" in line]
    assert rows == ["host-a/gpu-0", "host-b/gpu-0"]
    assert view.press("s") and view.sort == Sort("STATUS")
    assert view.press("r") and view.sort == Sort("STATUS", reverse=True)
    rows = [line.split()[0] for line in view.now(2.0).splitlines() if "/gpu-0" in line]
    assert rows == ["host-b/gpu-0", "host-a/gpu-0"]
    for _ in range(4):
        view.press("s")
    assert view.sort.column == "WORKER"


@pytest.mark.processes
def test_on_a_terminal_q_ends_it(port: Port) -> None:
    port.answers["/metrics"] = (200, BEFORE)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "headway", "top", "--admin", port.url, "--interval", "0.1"]
    environment: dict[str, Any] = {**os.environ, "COLUMNS": "70", "LINES": "40", "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment)
    os.close(theirs)
    try:
        assert "q quits" in _until(ours, "version")
        os.write(ours, b"?")
        _until(ours, HELP.splitlines()[1].strip())
        os.write(ours, b"q")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _until(terminal: int, word: str) -> str:
    """What a terminal shows until a word has come."""
    shown = ""
    while word not in shown:
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, shown
        shown += os.read(terminal, 65_536).decode(errors="replace")
    return shown
