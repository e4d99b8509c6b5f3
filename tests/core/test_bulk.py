"""Bulk entries take what is left: seats that members can afford, and GPUs that others are unlikely to need."""

import math

import pytest

from headway.core.bulk import LOOK, QUIET, SETTLED, STRETCH, WITHIN, BulkClass, Forecast, seats
from headway.core.fair_queue import queued_at
from headway.core.packing import Nearness
from headway.core.service_model import ServiceModel
from headway.model import Entry


def line(shape: int = 0, tenant: str = "t") -> Entry:
    return Entry("id", "m", "x", 3, tenant, "g", 60.0, 60.0, shape=shape)


def line_of(alpha: float, beta: float) -> tuple[float, float]:
    found = ServiceModel()
    for size in (1, 100) * 30:
        found.observe(size, alpha + beta * size)
    return found.alpha, found.beta


def forecast(
    rate: float = 0.0,
    slots: int = 4,
    newest: float = 0.0,
    seconds: float = 0.1,
    gap: float = 0.0,
    whole: float | None = None,
    others: int = 0,
) -> Forecast:
    return Forecast(seconds, rate, gap, slots, slots if whole is None else whole, newest, others)


def waiting(count: int = 100, shape: int = 0) -> BulkClass:
    bulk = BulkClass(0.01, 100)
    for _ in range(count):
        bulk.push(queued_at(line(shape), 0.0))
    return bulk


def test_as_many_seats_as_the_promise_allows_and_all_where_a_full_batch_takes_no_longer() -> None:
    assert seats(*line_of(0.1, 0.0), 1, 100, 0.0, 0.0) == 100
    assert seats(*line_of(0.1, 0.1 * (STRETCH - 1) / 100), 1, 100, 0.0, 0.0) == 100
    assert seats(*line_of(0.02, 0.0008), 7, 100, 0.0, 0.0) == 7
    assert seats(*line_of(0.02, 0.001), 7, 100, 0.0, 0.1) == pytest.approx((WITHIN * 0.1 - 0.02) / 0.001)
    assert seats(*line_of(0.02, 0.001), 7, 100, 0.05, 0.1) == pytest.approx(10.0)
    assert seats(*line_of(0.02, 0.001), 7, 100, 0.07, 0.1) == 7


def test_an_idle_fleet_has_all_its_gpus_for_bulk() -> None:
    bulk = waiting(1000)
    for _ in range(4):
        assert bulk.opens_at(forecast(), QUIET) <= QUIET
        bulk.busy += 1


@pytest.mark.parametrize(("rate", "kept"), [(0.0, 1), (0.05, 1), (1.0, 2), (10.0, 5)])
def test_gpus_are_kept_for_those_who_will_ask(rate: float, kept: int) -> None:
    """Hardly one arrival in a hundred finds no GPU: Poisson arrivals during the 100 ms of a batch."""
    bulk = waiting()
    bulk.busy = 8 - kept - 1
    assert bulk.opens_at(forecast(rate, slots=8, newest=1.0), 1.0) <= 1.0
    bulk.busy += 1
    assert bulk.opens_at(forecast(rate, slots=8, newest=1.0), 1.0) == 1.0 + LOOK


def test_none_is_left_where_departures_are_spaced_over_all_of_them() -> None:
    assert waiting().opens_at(forecast(1000.0, slots=8, newest=1.0, gap=0.1 / 8), 1.0) > 1.0


def test_whole_batches_end_one_after_the_other() -> None:
    bulk, now = waiting(1000), QUIET
    bulk.whole(100, math.inf, forecast(), now)
    assert bulk.opens_at(forecast(), now) == pytest.approx(now + 0.8 * 0.1 / 4)


def test_a_gpu_that_models_share_runs_none() -> None:
    assert waiting().opens_at(forecast(slots=2, whole=1.0), QUIET) == math.inf


def test_who_was_delayed_is_paid_back_before_there_is_another() -> None:
    bulk = waiting()
    bulk.charge(1, 1.0)
    assert bulk.opens_at(forecast(newest=1.0), 1.0) > 1.0
    bulk.earn(100)
    assert bulk.opens_at(forecast(newest=1.0), 1.0) <= 1.0


@pytest.mark.parametrize("slots", [1, 2])
def test_a_job_begins_at_once_where_hardly_anybody_comes(slots: int) -> None:
    bulk = waiting()
    assert bulk.opens_at(forecast(5.0, slots, newest=1.0), 1.0) <= 1.0
    bulk.busy = 1
    assert bulk.opens_at(forecast(5.0, slots, newest=1.0), 1.0) == 1.0 + LOOK, "no second GPU on credit alone"


def test_a_job_begins_soon_after_many_have_come() -> None:
    bulk, after = waiting(), forecast(500.0, slots=1, newest=1.0)
    assert bulk.opens_at(after, 1.0) == 1.0 + LOOK
    assert bulk.opens_at(after, 1.0 + SETTLED) <= 1.0 + SETTLED


def test_no_job_begins_while_others_wait_or_once_the_credit_is_spent() -> None:
    bulk = waiting()
    assert bulk.opens_at(forecast(5.0, slots=1, newest=1.0, others=1), 1.0) > 1.0
    bulk.charge(1, 1.0)
    assert bulk.opens_at(forecast(slots=1, newest=1.0), 20.0) > 20.0


def test_the_first_after_a_silence_are_not_counted() -> None:
    bulk = waiting()
    bulk.whole(100, math.inf, forecast(), QUIET)
    bulk.charge(1, QUIET + 0.1)
    assert bulk.credit == 1.0
    bulk.charge(1, QUIET + 0.3)
    assert bulk.credit == 0.0


def test_after_no_silence_the_first_are_counted() -> None:
    bulk = waiting()
    bulk.whole(100, math.inf, forecast(newest=0.1), QUIET)
    bulk.charge(1, QUIET + 0.1)
    assert bulk.credit == 0.0


def test_what_rides_apart_gets_a_gpu_now_and_then() -> None:
    """It gets no seats, and no GPU is idle under high load."""
    bulk, busy = waiting(shape=1), forecast(1000.0, newest=1.0)
    assert bulk.opens_at(busy, 1.0) > 1.0
    bulk.earn(10_000)
    assert bulk.opens_at(busy, 1.0) <= 1.0


def test_tenants_take_turns() -> None:
    bulk = waiting(50)
    for _ in range(2):
        bulk.push(queued_at(line(tenant="other"), 0.0))
    assert [queued.entry.tenant for queued in bulk.fill(4, math.inf)] == ["t", "other"] * 2


def test_those_handed_back_that_left_out_of_turn_ride_once() -> None:
    bulk, near = waiting(6), Nearness(4, 0.0, 32, lambda weight: 1.0)
    bulk.hand_back(bulk.fill_near(4, 10.0, 1, 1, near))
    taken = bulk.fill_near(10, 10.0, 1, 1, near)
    assert len(set(map(id, taken))) == len(taken) == 6


def test_large_ones_ride_apart_and_few_together() -> None:
    bulk = BulkClass(0.01, 100)
    for _ in range(5):
        bulk.push(queued_at(Entry("id", "m", "x" * (20 << 16), 3, "t", "g", 60.0, 60.0), 0.0))
    assert bulk.fill(100, math.inf) == []
    assert len(bulk.whole(100, math.inf, forecast(), QUIET)) == 3
