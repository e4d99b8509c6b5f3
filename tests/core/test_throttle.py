"""The lowest tier is limited to what the others leave, however gateways share it, but never by unknown figures."""

import math
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.throttle import (
    FULL,
    MOST,
    ROUNDING,
    STALE,
    ArrivalRates,
    SharedBucket,
    Throttle,
    room,
    share,
    weights,
)
from headway.model import Capacity

T = "acme"
RATES = st.floats(0.0, 1e5)


@st.composite
def gateways(draw: st.DrawFn) -> list[ArrivalRates]:
    """Draw the arrivals at some gateways. Each knows its busiest tenants, or none."""
    told = []
    for _ in range(draw(st.integers(1, 8))):
        tenants = draw(st.dictionaries(st.sampled_from("abcdefgh"), RATES, max_size=6))
        others = draw(st.floats(0.0, 100.0)) * min(tenants.values()) if tenants else draw(RATES)
        told.append(ArrivalRates(draw(RATES), math.fsum(tenants.values()) + others, tenants))
    return told


def capacity(usable: float, healthy: int = 2, degraded: int = 0) -> Capacity:
    return Capacity(
        model="m", healthy=healthy, degraded=degraded, items_per_second=usable / 0.7, usable_per_second=usable
    )


def admitted(throttle: Throttle, instants: Iterator[float]) -> int:
    return sum(throttle.admit(T, now) == 0.0 for now in instants)


def test_the_room_is_what_higher_tiers_leave_and_never_less_than_the_reserved_share() -> None:
    assert room(capacity(1400), 0.1, [ArrivalRates(300, 700)]) == pytest.approx(1100)
    assert room(capacity(1400), 0.1, [ArrivalRates(100, 700), ArrivalRates(200, 9000)]) == pytest.approx(1100)
    assert room(capacity(1400), 0.1, [ArrivalRates(3000, 7000)]) == pytest.approx(140)


def test_what_is_not_known_throttles_nobody_but_workers_of_which_none_counts_have_no_room() -> None:
    assert room(capacity(0, healthy=2), 0.1, [ArrivalRates(10, 10)]) == math.inf  # No batch has been measured yet.
    assert room(capacity(0, healthy=0), 0.1, [ArrivalRates(10, 10)]) == math.inf  # No worker is there yet.
    assert Throttle().admit(T, 0.0) == 0.0
    assert room(capacity(0, healthy=0, degraded=2), 0.1, [ArrivalRates(0, 10)]) == 0.0
    throttle = Throttle()
    throttle.set_rate(0.0, 0.0)
    assert 0.0 < throttle.admit(T, 0.0) < math.inf


def test_a_broker_that_takes_nothing_in_has_no_room_either_whatever_is_known_of_its_workers() -> None:
    for known in (capacity(1400), capacity(0, healthy=2)):
        assert room(msgspec.structs.replace(known, scarce=True), 0.1, [ArrivalRates(10, 10)]) == 0.0


@given(st.floats(0.0, 1e6), gateways())
def test_the_shares_of_all_gateways_are_the_room(room: float, told: list[ArrivalRates]) -> None:
    shares = [share(room, own, [*told[:at], *told[at + 1 :]]) for at, own in enumerate(told)]
    assert math.fsum(shares) == pytest.approx(room)
    assert all(part >= 0.1 * room / len(told) * (1 - 1e-9) for part in shares)


@given(st.floats(0.0, 1e6), gateways(), st.floats(0.0, 1e5))
def test_gateways_that_ask_for_less_than_their_part_get_it(room: float, told: list[ArrivalRates], asked: float) -> None:
    own = ArrivalRates(0.0, asked, {"own": asked})
    nameless = sum(not math.fsum(one.tenants.values()) for one in told)
    tenants = 1 + len({tenant for one in told for tenant in one.tenants}) + nameless
    others = [msgspec.structs.replace(one, lowest=math.fsum(one.tenants.values()) or one.lowest) for one in told]
    assert share(room, own, others) >= min(asked, 0.9 * room / tenants) * (1 - 1e-9)


def test_a_flood_at_one_gateway_takes_nothing_of_another_gateways_tenants() -> None:
    flood, quiet = ArrivalRates(0, 100, {"flood": 100}), ArrivalRates(0, 6, {"a": 3, "b": 3})
    assert share(20, quiet, [flood]) == pytest.approx(6 + 1)
    assert share(20, flood, [quiet]) == pytest.approx(12 + 1)
    assert share(20, ArrivalRates(0, 103, {"another": 100, "c": 3}), [quiet]) == pytest.approx(9 + 3 + 1)


def test_a_tenant_at_every_gateway_counts_once() -> None:
    first, second = ArrivalRates(0, 158, {"flood": 150, "quiet": 8}), ArrivalRates(0, 50, {"flood": 50})
    assert share(20, first, [second]) == pytest.approx(1 + 8 + 10 * 0.75)
    assert share(20, second, [first]) == pytest.approx(1 + 10 * 0.25)
    assert weights(first, [second]) == {"flood": 0.75}
    assert weights(second, [first]) == {"flood": 0.25}
    assert weights(first, []) == {}


@pytest.fixture
def throttle() -> Throttle:
    return Throttle()


def test_a_gateway_to_which_traffic_moves_may_let_some_in_and_what_nobody_asks_for_is_dealt() -> None:
    assert share(900, ArrivalRates(0, 0), [ArrivalRates(0, 900)] * 3) == pytest.approx(900 * 0.1 / 4)
    assert share(100, ArrivalRates(0, 0), [ArrivalRates(0, 0)]) == pytest.approx(50)
    assert share(100, ArrivalRates(0, 0.2), [ArrivalRates(0, 0.6)]) == pytest.approx(90 / 4 + 10 / 2)
    assert share(math.inf, ArrivalRates(0, 0.2), [ArrivalRates(0, 0.6)]) == math.inf


def test_a_throttle_that_was_open_however_briefly_begins_with_a_whole_burst() -> None:
    for opened, closed in ((1.0, 2.0), (0.0, 0.0)):
        throttle = Throttle()
        throttle.set_rate(100.0, 0.0)
        admitted(throttle, iter([0.0] * 1000))
        throttle.set_rate(math.inf, opened)
        if opened < closed:
            assert admitted(throttle, iter([opened] * 1000)) == 1000
        throttle.set_rate(100.0, closed)
        assert admitted(throttle, iter([closed] * 1000)) == 100


def test_what_is_given_back_is_one(throttle: Throttle) -> None:
    throttle.set_rate(10.0, 0.0)
    throttle.count(0.0)
    for _ in range(4):
        assert throttle.admit(T, 0.0) == 0.0
    throttle.give_back(T)
    assert admitted(throttle, iter([0.0] * 20)) == 7
    throttle = Throttle()
    throttle.count(0.0)
    for _ in range(4):
        throttle.admit(T, 0.0)
    throttle.give_back(T)
    assert throttle.count(1.0).lowest == pytest.approx(3 * (1.0 - math.exp(-1.0)))


def test_a_look_at_an_earlier_instant_changes_nothing(throttle: Throttle) -> None:
    throttle.count(5.0)
    throttle.lowest = 100
    assert throttle.count(4.0) == ArrivalRates()
    assert throttle.count(6.0).lowest == pytest.approx(100 * (1.0 - math.exp(-1.0)))


def test_a_place_that_the_broker_refuses_is_free_for_another_and_still_counts_as_an_arrival(throttle: Throttle) -> None:
    throttle.set_rate(20.0, 0.0)
    while throttle.admit(T, 0.0) == 0.0:
        pass
    came = throttle.lowest
    assert throttle.admit(T, 0.0) > 0.0
    throttle.refund(T)
    assert throttle.admit(T, 0.0) == 0.0
    assert throttle.admit(T, 0.0) > 0.0
    assert throttle.lowest == came + 3


def test_several_are_let_in_together_or_not_at_all(throttle: Throttle) -> None:
    throttle.set_rate(100.0, 0.0)
    throttle.refund(T, 60)
    assert throttle.admit(T, 0.0, 60) == 0.0
    wait = throttle.admit(T, 0.0, 60)
    assert wait == pytest.approx(0.2)
    assert throttle.admit(T, 0.0, 40) == 0.0
    throttle.refund(T, 40)
    assert throttle.admit(T, wait + 1e-9, 60) == 0.0
    assert throttle.admit(T, 1e9, 101) > 0.0


def test_flows_are_averages_of_about_a_second_and_told_by_tenant(throttle: Throttle) -> None:
    throttle.count(0.0)
    for look in range(1, 30):
        throttle.higher += 50
        for tenant, count in (("a", 10), ("b", 30), ("c", 5)):
            for _ in range(count):
                throttle.admit(tenant, 0.0)
        throttle.give_back("a", 5)
        flow = throttle.count(look * 0.5)
    assert (flow.higher, flow.lowest) == pytest.approx((100, 80), rel=0.01)
    assert flow.tenants == pytest.approx({"b": 60, "a": 10, "c": 10}, rel=0.01)
    assert throttle.count(15.0).higher == pytest.approx(100 * math.exp(-0.5), rel=0.01)


PACES = st.floats(0.1, 1e4)
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
    return {name: (done - bucket._virtual) * bucket._weights.get(name, 1.0) for name, done in bucket._done.items()}


class Model:
    """Simulates the bucket step by step. Levels drain at the rate, which their tenants share by weight."""

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


@given(PACES, STEPS)
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
        assert len(bucket._order) <= 2 * len(bucket._done) + STALE


@given(PACES, STEPS, st.sampled_from("abcdef"), st.integers(1, 10))
def test_who_waits_is_let_in(rate: float, steps: list[tuple[float, str, int, str]], tenant: str, count: int) -> None:
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
    """Each flood offers ten times the rate. Floods get the tokens that nobody else wants, and none is lost."""
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


def test_a_bucket_without_a_rate_lets_in_all_and_one_with_none_nobody() -> None:
    bucket = SharedBucket()
    assert bucket.take("a", 10**9, 0.0) == 0.0
    bucket.set_rate(0.0, 0.0, 0.0)
    assert bucket.take("a", 1, 0.0) == pytest.approx(10.0)
    bucket.give_back("a", 1)
    bucket.set_rate(1.0, 10.0, 1.0)
    assert bucket.take("a", 10, 1.0) == 0.0
    assert ROUNDING < bucket.take("a", 1, 1.0) < 1.0 + 1e-6
