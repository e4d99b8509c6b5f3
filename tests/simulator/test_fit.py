"""Models that pad: the simulated fleet finds it out, carries more so, and nobody waits longer than first come, first served."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.simulated import fit
from headway.simulator import planner
from headway.simulator.batch_times import RecordedBatch
from headway.simulator.engine import simulate
from headway.simulator.planner import Goal, make_plan
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario
from headway.simulator.traffic import read_weights
from tests.cli.command import code_of

MIXED = tuple([2_000] + [100] * 9)
"""Lengths of which nearly each full batch has a long one."""
ALPHA, BETA = 0.008, 1e-6
MODEL = ["--rate", "900", "--batch-ms", "8", "--beta-ms", "0.001", "--padded", "--lengths", "100-2000"]


def scenario(rate: float) -> Scenario:
    return Scenario(
        rate=rate, workers=2, alpha=ALPHA, beta=BETA, max_batch=32, weights=MIXED, padded=True, warmup=4.0, duration=8.0,
        queue_timeout=30.0, timeout=30.0, max_queue=100_000,
    )  # fmt: skip


def p95(asked: Scenario) -> float:
    return percentile(sorted(simulate(asked).latency), 0.95)


def test_a_fleet_that_starts_with_more_than_first_come_carries_finds_out_that_the_model_pads() -> None:
    asked = scenario(1_500.0)
    assert asked.capacity > 1_500.0 > replace(asked, first_come=True).capacity
    assert p95(asked) < 0.2 * p95(replace(asked, first_come=True))


@pytest.mark.parametrize("number", [0, 3, 5, 9])
def test_nobody_waits_longer_than_first_come(number: int) -> None:
    name, kind, load, share, drawn = fit.draw(11, number, {})
    row = fit.compared((name, kind, load, share, replace(drawn, duration=drawn.warmup + 2_000 / drawn.rate)))
    assert row.worst <= 1.0, row


def test_a_plan_says_how_many_gpus_first_come_would_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SEEDS", 1), ("MEASURED_REQUESTS", 2_000), ("RATE_STEPS", 1), ("RATE_SEEDS", 1)):
        monkeypatch.setattr(planner, name, value)
    plan = make_plan(Goal(scenario=scenario(1_800.0), p95=0.2))
    assert plan.first_come is not None
    assert 1.5 * plan.gpus <= plan.first_come


def test_lengths_are_read_from_what_check_has_recorded(tmp_path: Path) -> None:
    rng = random.Random(1)
    batches = [RecordedBatch([rng.randint(1, 9) for _ in range(4)], 0.1) for _ in range(20)]
    path = tmp_path / "batches.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(batch) + b"\n" for batch in batches))
    assert read_weights(str(path)) == tuple(weight for batch in batches for weight in batch.weights)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--padded"], ("--padded", "needs to know how long inputs are", "--lengths")),
        (["--lengths", "1-9"], ("--lengths = '1-9'", "for models that pad", "--padded")),
        (["--padded", "--lengths", "1-9", "--weights", "1-9"], ("--lengths = '1-9'", "Leave --weights out")),
        (["--padded", "--lengths", "/no/such"], ("--lengths = '/no/such'", "No such file")),
    ],
    ids=" ".join,
)
def test_lengths_that_cannot_be_used_are_refused(
    options: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(["simulate", "--rate", "10", "--workers", "1", "--batch-ms", "8", *options]) == 3
    err = " ".join(capsys.readouterr().err.split())
    assert all(part in err for part in parts), err


def test_simulate_takes_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["simulate", *MODEL, "--workers", "2", "--duration", "2"]) == 0
    assert "on 2 GPUs" in capsys.readouterr().out
