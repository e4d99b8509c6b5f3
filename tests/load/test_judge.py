"""The search for the highest rate that MLPerf LoadGen finds valid, with runs that are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from bench.stand import judge
from bench.stand.judge import Late, Load, Verdict

LOAD = Load(questions=(), bound_ms=100.0)


def carries(most: float, late_ms: float = 0.1, failures: dict[str, int] | None = None) -> Callable[..., Verdict]:
    """Stands for a run: VALID up to a rate."""

    def run(urls: Sequence[str], load: Load, rate: float, seconds: float, queries: int = 1) -> Verdict:
        result = "VALID" if rate <= most else "INVALID"
        late = Late(late_ms, 0.0, 0.0)
        return Verdict(result, "", True, rate, rate, 1000, 50.0, 90.0, 99.0, 120.0, failures or {}, 0, late)

    return run


def found(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Verdict], steps: int = 12) -> judge.Found:
    monkeypatch.setattr(judge, "_run", run)
    return judge.most(["http://127.0.0.1:1"], LOAD, 400.0, steps, lambda line: None)


@pytest.mark.parametrize("most", [50.0, 390.0, 400.0, 1234.0])
def test_the_highest_rate_that_holds_is_found(monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    best = found(monkeypatch, carries(most)).best
    assert best is not None
    assert most / judge.WITHIN <= best.target_rate <= most


def test_nothing_is_reported_where_no_rate_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = found(monkeypatch, carries(0.0), steps=3)
    assert outcome.best is None
    assert [run.target_rate for run in outcome.runs] == pytest.approx([400.0, 400.0 / 1.4, 400.0 / 1.96])


def test_a_valid_run_with_a_wrong_answer_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, carries(1000.0, failures={"503": 1}), steps=2).best is None


def test_a_run_whose_client_was_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = found(monkeypatch, carries(1000.0, late_ms=2.1))
    assert outcome.runs == []
    assert "late by 2.1, 2.1, 2.1 ms (P99) at 400/s, and 2.0 is the most" in outcome.refused
