"""Plans: the fewest GPUs for a load, what a plan is based on, and goals that can't be met."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from headway.errors import SettingError
from headway.simulator import planner
from headway.simulator.engine import simulate
from headway.simulator.planner import Goal, make_plan
from headway.simulator.record import Record
from headway.simulator.report import make_report
from headway.simulator.scenario import QueueRules, Scenario

MODEL = Scenario(rate=1_000.0, workers=1, alpha=0.05, max_batch=32)
SHORT = {
    "SEEDS": 2, "SETTLING": 10.0, "MEASURED": 10.0, "MEASURED_REQUESTS": 1_000, "RATE_REQUESTS": 1_000, "RATE_STEPS": 2,
    "RATE_SEEDS": 1,
}  # fmt: skip
USUAL = {name: getattr(planner, name) for name in SHORT}


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten runs: these are enough to test the search, but not for real plans."""
    for name, value in SHORT.items():
        monkeypatch.setattr(planner, name, value)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Scenario]:
    scenarios: list[Scenario] = []

    def simulate_shortly(scenario: Scenario) -> Record:
        scenarios.append(scenario)
        return simulate(replace(scenario, warmup=1.0, duration=2.0))

    monkeypatch.setattr(planner, "simulate", simulate_shortly)
    for name, value in USUAL.items():
        monkeypatch.setattr(planner, name, value)
    return scenarios


def test_the_least_number_that_carries_the_load_and_meets_the_target_and_what_one_less_gives() -> None:
    found = make_plan(Goal(scenario=MODEL, p95=0.2))
    assert (found.gpus, found.one_less) == (2, None)
    assert found.p50_ms < found.p95_ms < found.p99_ms <= 200
    assert found.load == pytest.approx(1_000 / found.capacity)
    assert 1_000 <= found.meets_up_to < found.capacity
    assert found.arrivals_cv == pytest.approx(1.0, abs=0.1)
    tight = make_plan(Goal(scenario=MODEL, p95=0.058))
    assert tight.gpus > found.gpus
    assert tight.p95_ms + tight.doubt_ms.p95 <= 58
    assert tight.one_less is not None
    assert tight.one_less.p95_ms + tight.one_less.doubt_ms.p95 > 58


def test_a_plan_that_is_near_to_its_target_says_so_and_what_one_more_gives() -> None:
    edge = make_plan(Goal(scenario=MODEL, p95=0.2))
    near = make_plan(Goal(scenario=MODEL, p95=(edge.p95_ms + edge.doubt_ms.p95 + 1.0) / 1000))
    assert (edge.gpus, edge.on_the_edge, edge.one_more) == (2, False, None)
    assert (near.gpus, near.on_the_edge) == (2, True)
    assert near.one_more is not None
    assert near.one_more.p95_ms < near.p95_ms


@pytest.mark.parametrize(("share", "gpus"), [(1.0, 2), (0.7, 3), (0.1, 17)])
def test_a_plan_tells_how_many_gpus_would_leave_room(share: float, gpus: int) -> None:
    found = make_plan(Goal(scenario=MODEL, p95=0.2, target_utilisation=share))
    assert found.gpus == 2
    assert found.with_room == gpus
    assert MODEL.rate <= share * found.capacity / found.gpus * gpus


def test_no_plan_takes_more_gpus_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one run, these GPUs seem enough; several runs show that they aren't."""
    met_by = planner._Planner._meets
    monkeypatch.setattr(
        planner._Planner, "_meets", lambda self, gpus, rate, seeds: seeds == 1 and met_by(self, gpus, rate, seeds)
    )
    with pytest.raises(SettingError, match=r"^--p95 = '200 ms': 3 GPUs give p95 .* and no more are allowed"):
        make_plan(Goal(scenario=MODEL, p95=0.2, max_gpus=3))


def test_a_plan_simulates_nothing_twice_and_no_more_than_a_user_waits_for(asked: list[Scenario]) -> None:
    """The README's plan. A slow machine simulates 50,000 requests a second."""
    make_plan(Goal(scenario=replace(MODEL, alpha=0.1, max_batch=100), p95=0.155))
    runs = [(scenario.workers, scenario.rate, scenario.seed) for scenario in asked]
    assert len(runs) == len(set(runs))
    assert sum(scenario.rate * scenario.duration for scenario in asked) < 350_000


def test_both_targets_must_be_met_and_the_same_question_gets_the_same_answer() -> None:
    found = make_plan(Goal(scenario=MODEL, p95=0.2, p99=0.062))
    assert found.gpus > 2
    assert found.p99_ms <= 62
    goal = Goal(scenario=MODEL, p95=0.1)
    assert make_plan(goal) == make_plan(goal)


def test_a_plan_tells_its_cost_per_hour_and_per_million_requests() -> None:
    found = make_plan(Goal(scenario=MODEL, p95=0.2, gpu_hour_cost=3.6))
    assert found.cost is not None
    assert found.cost.per_hour == pytest.approx(7.2)
    assert found.cost.per_million_requests == pytest.approx(2.0)


def test_a_turned_trace_keeps_its_gaps() -> None:
    trace = (0.0, 1.0, 3.0, 6.0, 10.0)
    turned = planner._turned(trace, 0.4)
    gaps = sorted(later - before for before, later in pairwise(turned))
    assert turned[0] == 3.0
    assert gaps == [1.0, 2.5, 3.0, 4.0]  # The mean gap joins the end to the start.
    assert planner._turned(trace, 0.0) == trace


@pytest.mark.parametrize(
    ("goal", "parts"),
    [
        ({}, ("--p95", "no target")),
        ({"p95": 0.04}, ("--p95 = '40 ms'", "one batch takes, 51.5 ms", "more GPUs do not help")),
        ({"p99": 0.04}, ("--p99 = '40 ms'",)),
        ({"p95": math.inf}, ("--p95", "must be a time above 0")),
        ({"p95": 600.001}, ("--p95 = '600001 ms'", "is above the maximum deadline of 600 s")),
        ({"p95": 0.2, "target_utilisation": 0.0}, ("--target-utilisation = 0.0",)),
        ({"p95": 0.0516, "max_gpus": 8}, ("--p95 = '51.6 ms'", "8 GPUs give p95", "--max-gpus")),
        ({"p95": 0.2, "max_gpus": 1}, ("--max-gpus = 1", "1.6 GPUs busy", "Allow 2")),
        ({"p95": 0.2, "max_gpus": 0}, ("--max-gpus = 0",)),
        ({"p95": 0.2, "gpu_hour_cost": -1.0}, ("--gpu-hour-cost = -1.0",)),
    ],
)
def test_what_cannot_be_met_is_refused_with_the_reason(goal: dict[str, float], parts: tuple[str, ...]) -> None:
    with pytest.raises(SettingError) as caught:
        make_plan(Goal(scenario=MODEL, **goal))  # type: ignore[arg-type]
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_plan_tells_how_many_lines_of_bulk_jobs_go_beside_the_load() -> None:
    model = replace(MODEL, alpha=0.1, max_batch=100, queue=QueueRules(promise=0.2))
    found = make_plan(Goal(scenario=model, p95=0.2, bulk=True))
    beside = replace(model, workers=found.gpus, duration=24.0, warmup=4.0, bulk=True, seed=7)
    assert found.bulk == pytest.approx(make_report(simulate(beside)).bulk, rel=0.1)
