"""`paced` beside what people know: it answers no later than windows or no rule."""

from dataclasses import replace
from typing import Any

import pytest

from headway.simulator.engine import simulate
from headway.simulator.report import percentile
from headway.simulator.scenario import Scenario

MOST = 1.03
PATIENT: dict[str, Any] = {"queue_timeout": 30.0, "timeout": 30.0}
POLICIES = ("paced", "window", "eager")


def at(load: float, workers: int, alpha: float, beta: float, max_batch: int, **more: Any) -> Scenario:
    """Scenario of Poisson arrivals at a share of what the workers carry."""
    rate = load * workers * max_batch / (alpha + beta * max_batch)
    how: dict[str, Any] = {"duration": 10.0, **more}
    return Scenario(rate=rate, workers=workers, alpha=alpha, beta=beta, max_batch=max_batch, **how)


def unlike(workers: int, slow: float, rate: float, jitter: float) -> Scenario:
    """Scenario of GPUs of which one is slower."""
    return Scenario(
        rate=rate, workers=workers, alpha=0.2, max_batch=64, slow=slow, jitter=jitter, duration=6000.0 / rate + 5.0
    )


@pytest.mark.parametrize(
    "scenario",
    [
        # Batches that take longer the more they hold.
        at(0.5, 6, 0.1, 0.002, 64),
        at(0.5, 2, 0.1, 0.0, 100),
        # Times that vary.
        at(0.7, 5, 0.2, 0.025, 16, jitter=0.3, duration=70.0),
        at(0.6, 1, 0.05, 0.002, 32, jitter=0.3, duration=55.0),
        # One GPU that is slower.
        unlike(2, 3.0, 265.0, 0.1),
        unlike(8, 2.0, 2040.0, 0.1),
        # Two unlike GPUs that do better without gaps.
        Scenario(rate=330.0, workers=2, alpha=0.05, max_batch=32, slow=1.5, duration=40.0, warmup=20.0, **PATIENT),
    ],
)
def test_requests_wait_no_longer(scenario: Scenario) -> None:
    paced, *others = (percentile(sorted(simulate(replace(scenario, policy=name)).latency), 0.95) for name in POLICIES)
    assert paced <= MOST * min(others)


def clients(
    count: int, workers: int, alpha: float, beta: float, max_batch: int, seconds: float, **more: Any
) -> Scenario:
    """Scenario of clients that ask again as soon as they are answered, for so long after a warm-up of a fifth."""
    return Scenario(
        clients=count, workers=workers, alpha=alpha, beta=beta, max_batch=max_batch, duration=1.2 * seconds,
        warmup=0.2 * seconds, **more,
    )  # fmt: skip


def together(count: int, workers: int, alpha: float, beta: float, max_batch: int, slow: float) -> Scenario:
    """Scenario of clients that do best in groups, each on its GPU, with no gaps."""
    cycle = alpha + beta * max_batch
    return clients(count, workers, alpha, beta, max_batch, 100 * cycle, slow=slow, **PATIENT)


@pytest.mark.parametrize(
    ("scenario", "least", "seeds"),
    [
        # Clients that come back together are not left to ride together for ever, while the other GPU rests.
        (clients(4, 2, 0.02, 0.002, 64, 10.0), 0.97, 1),
        (clients(16, 2, 0.02, 0.002, 64, 10.0, jitter=0.05), 0.97, 1),
        # As many clients as GPUs have one each.
        (clients(4, 4, 0.1, 0.003, 32, 24.0, slow=1.5, jitter=0.3), 0.97, 1),
        # All fit into one batch. Under a window they keep together from their first requests on, a rhythm that another rule finds
        # by chance.
        (clients(16, 7, 0.02, 0.00125, 32, 8.3, slow=3.0, jitter=0.3), 1.08, 2),
        (together(16, 5, 0.02, 0.00125, 32, 1.5), 1.08, 1),
    ],
)
def test_clients_get_as_many_answers(scenario: Scenario, least: float, seeds: int) -> None:
    paced, *others = (
        sum(len(simulate(replace(scenario, policy=name, seed=seed)).latency) for seed in range(seeds))
        for name in POLICIES
    )
    assert paced >= least * max(others)
