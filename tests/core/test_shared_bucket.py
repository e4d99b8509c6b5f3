"""Tokens go to who asks, in even parts; none is made, none is lost, and nobody waits for another's greed."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.shared_bucket import FULL, MOST, ROUNDING, STALE, SharedBucket

RATES = st.floats(0.1, 1e4)
STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),
        st.sampled_from("abcdef"),
        st.integers(1, 12),
        st.sampled_from(["take", "give", "rate", "weight"]),
    ),
    max_size=60,
)


def bucket_of(rate: float) -> SharedBucket:
    bucket = SharedBucket()
    bucket.set_rate(rate, max(rate, 10.0), 0.0)
    return bucket


def levels(bucket: SharedBucket) -> dict[str, float]:
    """Levels of the tenants, in bursts."""
    return {
        tenant: (done - bucket._virtual) * bucket._weights.get(tenant, 1.0) for tenant, done in bucket._done.items()
    }


class Model:
    """What the bucket says of itself, step by step: tenants that have a level work off parts of the rate by weight."""

    def __init__(self, rate: float) -> None:
        self.rate, self.burst = rate, max(rate, 10.0)
        self.levels: dict[str, float] = {}
        self.weights: dict[str, float] = {}

    def wait(self, seconds: float) -> None:
        left = seconds * self.rate / self.burst
        while self.levels and left > 0.0:
            weights = {tenant: self.weights.get(tenant, 1.0) for tenant in self.levels}
            whole = math.fsum(weights.values())
            least = min(level / weights[tenant] for tenant, level in self.levels.items())
            step = min(least, left / whole)
            left -= step * whole
            levels = {tenant: level - step * weights[tenant] for tenant, level in self.levels.items()}
            self.levels = {tenant: level for tenant, level in levels.items() if level > 1e-7}
            if step < least:
                break

    def takes(self, tenant: str, count: int) -> bool:
        part, own, whole = count / self.burst, self.levels.get(tenant, 0.0), math.fsum(self.levels.values())
        fits = own + part <= FULL - (whole + part) + 1e-6
        afresh = own < 1e-7 and part <= 1.0 and whole + 2 * part <= MOST + 1e-6
        return fits or afresh


@given(RATES, STEPS)
def test_it_does_what_its_rule_says(rate: float, steps: list[tuple[float, str, int, str]]) -> None:
    bucket, model, now = bucket_of(rate), Model(rate), 0.0
    for seconds, tenant, count, what in steps:
        now += seconds
        model.wait(seconds)
        if what == "take":
            may = model.takes(tenant, count)
            took = bucket.take(tenant, count, now) == 0.0
            if took:
                assert may
                model.levels[tenant] = model.levels.get(tenant, 0.0) + count / model.burst
        elif what == "give":
            bucket.set_rate(model.rate, model.burst, now, model.weights)
            bucket.give_back(tenant, count)
            left = model.levels.pop(tenant, 0.0) - count / model.burst
            if left > 1e-7:
                model.levels[tenant] = left
        elif what == "weight":
            model.weights = model.weights | {tenant: count / 12}
        else:
            model.rate = rate * count
            model.burst = max(model.rate, 10.0)
        bucket.set_rate(model.rate, model.burst, now, model.weights)
        assert levels(bucket) == pytest.approx(model.levels, abs=1e-5)
        assert bucket.level == pytest.approx(math.fsum(model.levels.values()), abs=1e-5)
        assert bucket.level <= MOST
        assert len(bucket._order) <= 2 * bucket.tenants + STALE


@given(RATES, STEPS)
def test_no_more_is_taken_than_the_rate_and_the_bursts(rate: float, steps: list[tuple[float, str, int, str]]) -> None:
    bucket, taken, now = bucket_of(rate), 0, 0.0
    for seconds, tenant, count, _ in steps:
        now += seconds
        taken += count * (bucket.take(tenant, count, now) == 0.0)
        assert taken <= rate * now + MOST * bucket.burst + 1e-6


@given(RATES, STEPS, st.sampled_from("abcdef"), st.integers(1, 10))
def test_who_comes_back_after_the_wait_is_let_in(
    rate: float, steps: list[tuple[float, str, int, str]], tenant: str, count: int
) -> None:
    bucket, now, weights = bucket_of(rate), 0.0, dict[str, float]()
    for seconds, one, many, what in steps:
        now += seconds
        if what == "weight":
            weights = weights | {one: many / 12}
            bucket.set_rate(bucket.rate, bucket.burst, now, weights)
        bucket.take(one, many, now)
    wait = bucket.take(tenant, count, now)
    assert wait == 0.0 or bucket.take(tenant, count, now + wait + 1e-6 * (1.0 + wait)) == 0.0


@given(st.integers(1, 8), st.floats(1.0, 500.0), st.floats(0.05, 0.9))
def test_who_asks_for_less_than_its_part_is_always_let_in_whoever_floods(floods: int, rate: float, part: float) -> None:
    """Each flood offers ten times the rate. Tokens that nobody else wants go to them, and none is lost."""
    bucket, quiet = bucket_of(rate), part * rate / (floods + 1)
    step, seconds = 0.1 / rate, 30.0 + 20.0 / rate
    let_in, due = Counter[str](), 0.0
    number = 0
    while (now := number * step) < seconds and number < 1500:
        for flood in range(floods):
            let_in[f"flood {flood}"] += bucket.take(f"flood {flood}", 1, now) == 0.0
        if now >= due:
            due += 1.0 / quiet
            assert bucket.take("quiet", 1, now) == 0.0
            let_in["quiet"] += 1
        number += 1
    assert sum(let_in.values()) >= rate * (number - 1) * step - 1
    parts = [let_in[f"flood {flood}"] for flood in range(floods)]
    assert max(parts) - min(parts) <= 0.5 * bucket.burst + 2


def test_a_list_of_one_that_has_taken_nothing_finds_room_in_a_flood() -> None:
    bucket = bucket_of(20.0)
    while bucket.take("flood", 1, 0.0) == 0.0:
        pass
    assert bucket.take("quiet", 20, 0.0) == 0.0
    assert bucket.take("quiet", 1, 0.0) > 0.0
    assert bucket.take("quiet", 21, 1e6) > 0.0, "more than a burst never fits"


def test_many_tenants_at_once_are_held_to_some_bursts_in_all() -> None:
    bucket = bucket_of(20.0)
    let_in = sum(bucket.take(f"tenant {number}", 1, 0.0) == 0.0 for number in range(1000))
    assert let_in == MOST * 20 - 1
    later = sum(bucket.take(f"tenant {number}", 1, 10.0 + number / 1000) == 0.0 for number in range(1000))
    assert later == pytest.approx(MOST * 20 - 1 + 20, abs=1), "a second's worth more in a second"


def test_a_place_that_is_given_back_and_taken_again_leaves_nothing_behind() -> None:
    bucket = bucket_of(0.1)
    bucket.take("slow", 5, 0.0)
    for _ in range(10_000):
        assert bucket.take("kept", 1, 0.0) == 0.0
        bucket.give_back("kept", 1)
    assert bucket.tenants == 1
    assert len(bucket._order) <= STALE + 2
    assert bucket.level == pytest.approx(0.5)


def test_a_bucket_without_a_rate_lets_in_all_and_one_with_none_nobody() -> None:
    bucket = SharedBucket()
    assert bucket.take("a", 10**9, 0.0) == 0.0
    bucket.set_rate(0.0, 0.0, 0.0)
    assert bucket.take("a", 1, 0.0) == pytest.approx(10.0)
    bucket.give_back("a", 1)
    bucket.set_rate(1.0, 10.0, 1.0)
    assert bucket.take("a", 10, 1.0) == 0.0
    assert ROUNDING < bucket.take("a", 1, 1.0) < 1.0 + 1e-6
