"""Entries that weigh, in simulations and plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import SettingError
from headway.simulator import planner
from headway.simulator.engine import simulate
from headway.simulator.planner import Goal, make_plan
from headway.simulator.report import describe, make_report
from headway.simulator.scenario import Scenario
from headway.simulator.traffic import read_weights


def scenario(max_weight: int = 0, max_batch: int = 64, rate: float = 250.0) -> Scenario:
    """Two GPUs, 20 ms a batch and a tenth of a millisecond for each unit of weight."""
    return Scenario(
        rate=rate,
        workers=2,
        alpha=0.02,
        beta=0.0001,
        max_batch=max_batch,
        weights=tuple(range(10, 91)),
        max_weight=max_weight,
        duration=10.0,
        warmup=2.0,
    )


@pytest.mark.parametrize(
    ("text", "weights"), [("5-8", (5, 6, 7, 8)), ("3-3", (3,)), ("a file", (7, 12))], ids=["range", "one", "file"]
)
def test_weights_are_a_range_or_a_file(text: str, weights: tuple[int, ...], tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("7\n12\n")
    assert read_weights(str(file) if text == "a file" else text) == weights


@pytest.mark.parametrize("text", ["0-5", "9-5", "nowhere", "5-99999999999"])
def test_other_weights_are_refused(text: str) -> None:
    with pytest.raises(SettingError) as refused:
        read_weights(text)
    assert str(refused.value).startswith("--weights")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for content in ("", "a\n", "0\n"):
        (tmp_path / "weights").write_text(content)
        with pytest.raises(SettingError):
            read_weights(str(tmp_path / "weights"))


def test_a_bound_on_weight_needs_weights() -> None:
    with pytest.raises(SettingError, match="--max-batch-weight"):
        Scenario(rate=1.0, workers=1, alpha=0.1, max_batch=8, max_weight=100)


def test_a_full_batch_holds_what_its_weight_allows() -> None:
    assert scenario().full == 64
    weighed = scenario(max_weight=1000)
    assert weighed.full == 20
    assert weighed.cycle(64) == pytest.approx(0.02 + 0.1 + weighed.overhead)
    assert weighed.capacity == pytest.approx(2 * 20 / weighed.cycle(64))


def test_batches_are_bounded_by_weight_and_their_time_is_learnt() -> None:
    record = simulate(scenario(max_weight=1000))
    report = make_report(record)
    assert max(record.size) < 40
    assert 0.3 < report.batches.fill <= 1.0
    assert report.total.answered == report.total.requests
    assert record.estimates[1] == pytest.approx(0.02 + 0.0015, rel=0.1)
    assert describe(record.scenario)["weights"] == 81


@pytest.mark.parametrize("rows", [(1,), (8,), (1,) * 8 + (8,), (1, 2, 4, 8)], ids=["1", "8", "mostly 1", "mixed"])
def test_rows_fill_batches_and_are_refused_by_rows(rows: tuple[int, ...]) -> None:
    """Two GPUs do 1,707 rows a second, whatever requests these come in: under that all are answered, over it what is too much
    is refused at once.
    """
    mean = sum(rows) / len(rows)
    below, above = (
        make_report(simulate(_of_rows(rows, rate=share * 1707 / mean))) for share in (0.8, 1.4)
    )  # fmt: skip
    assert below.total.answered == below.total.requests
    assert below.batches.fill > 0.6
    answered = above.total.answered / above.total.requests
    assert 0.9 < answered * 1.4 <= 1.05
    assert above.batches.fill > 0.9


@pytest.mark.parametrize(("rows", "clients"), [(1, 4), (4, 4), (8, 2)])
def test_clients_that_wait_ride_together_whatever_rows_they_have(rows: int, clients: int) -> None:
    """All of them in each batch, and not in two groups of which one waits for the other."""
    asked = Scenario(
        clients=clients, workers=1, alpha=0.003, beta=0.0001, max_batch=32, max_weight=32, weights=(rows,), duration=8.0,
        warmup=4.0,
    )  # fmt: skip
    record = simulate(asked)
    assert sum(record.size) / len(record.size) == pytest.approx(clients, rel=0.1)


def _of_rows(rows: tuple[int, ...], rate: float) -> Scenario:
    return Scenario(
        rate=rate, workers=2, alpha=0.02, beta=0.0005, max_batch=32, max_weight=32, weights=rows, duration=9.0, warmup=3.0,
        queue_timeout=0.5,
    )  # fmt: skip


def test_plan_reckons_with_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SEEDS", 2), ("SETTLING", 10.0), ("MEASURED", 10.0), ("MEASURED_REQUESTS", 1000)):
        monkeypatch.setattr(planner, name, value)
    plan = make_plan(Goal(scenario=scenario(max_weight=1000, rate=600.0), p95=0.3))
    assert plan.gpus == 4
    assert plan.capacity == pytest.approx(4 * 20 / scenario(max_weight=1000).cycle(64))
