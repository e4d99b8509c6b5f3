"""The lowest tier is held to what the others leave, at any split between gateways, and to nothing that is not known."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.throttle import BURST_SECONDS, LEAST_BURST, ArrivalRates, Throttle, room, share, weights
from headway.model import Capacity

T = "acme"
RATES = st.floats(0.0, 1e5)


@st.composite
def gateways(draw: st.DrawFn) -> list[ArrivalRates]:
    """Arrivals at some gateways, of which each knows the busiest of its tenants, or none of them."""
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


def every(gap: float, seconds: float, start: float = 0.0) -> Iterator[float]:
    return (start + number * gap for number in range(int(seconds / gap)))


def test_the_room_is_what_higher_tiers_leave_and_never_less_than_the_reserved_share() -> None:
    assert room(capacity(1400), 0.1, [ArrivalRates(300, 700)]) == pytest.approx(1100)
    assert room(capacity(1400), 0.1, [ArrivalRates(100, 700), ArrivalRates(200, 9000)]) == pytest.approx(1100)
    assert room(capacity(1400), 0.1, [ArrivalRates(3000, 7000)]) == pytest.approx(140)


def test_what_is_not_known_throttles_nobody() -> None:
    assert room(capacity(0, healthy=2), 0.1, [ArrivalRates(10, 10)]) == math.inf  # No batch was measured yet.
    assert room(capacity(0, healthy=0), 0.1, [ArrivalRates(10, 10)]) == math.inf  # Nobody is there yet.
    assert Throttle().admit(T, 0.0) == 0.0


def test_workers_of_which_none_counts_have_no_room() -> None:
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
def test_a_gateway_whose_tenants_ask_for_less_than_their_parts_gets_what_they_ask_for(
    room: float, told: list[ArrivalRates], asked: float
) -> None:
    own = ArrivalRates(0.0, asked, {"own": asked})
    nameless = sum(not math.fsum(one.tenants.values()) for one in told)
    tenants = 1 + len({tenant for one in told for tenant in one.tenants}) + nameless
    others = [msgspec.structs.replace(one, lowest=math.fsum(one.tenants.values()) or one.lowest) for one in told]
    assert share(room, own, others) >= min(asked, 0.9 * room / tenants) * (1 - 1e-9)


def test_a_flood_at_one_gateway_takes_nothing_of_another_gateways_tenants() -> None:
    flood, quiet = ArrivalRates(0, 100, {"flood": 100}), ArrivalRates(0, 6, {"a": 3, "b": 3})
    assert share(20, quiet, [flood]) == pytest.approx(6 + 1)
    assert share(20, flood, [quiet]) == pytest.approx(12 + 1)
    both = ArrivalRates(0, 103, {"another": 100, "c": 3})
    assert share(20, both, [quiet]) == pytest.approx(9 + 3 + 1)


def test_a_tenant_at_every_gateway_counts_once() -> None:
    first, second = ArrivalRates(0, 158, {"flood": 150, "quiet": 8}), ArrivalRates(0, 50, {"flood": 50})
    assert share(20, first, [second]) == pytest.approx(1 + 8 + 10 * 0.75)
    assert share(20, second, [first]) == pytest.approx(1 + 10 * 0.25)
    assert weights(first, [second]) == {"flood": 0.75}
    assert weights(second, [first]) == {"flood": 0.25}
    assert weights(first, []) == {}


def test_who_asks_one_gateway_has_its_whole_part_beside_a_tenant_that_asks_both() -> None:
    throttle = Throttle()
    own, other = ArrivalRates(0, 158, {"flood": 150, "quiet": 8}), ArrivalRates(0, 150, {"flood": 150})
    throttle.set_rate(share(20, own, [other]), 0.0, weights(own, [other]))
    let_in = dict.fromkeys(("flood", "quiet"), 0)
    for number in range(60 * 150):
        now = number / 150
        let_in["flood"] += throttle.admit("flood", now) == 0.0
        if number % 18 == 0:
            let_in["quiet"] += throttle.admit("quiet", now) == 0.0
    assert let_in["quiet"] == 60 * 150 // 18


def test_tenants_that_are_not_told_one_by_one_count_as_many_as_they_must_be() -> None:
    many, one = ArrivalRates(0, 100, {"a": 2, "b": 2}), ArrivalRates(0, 100, {"c": 100})
    assert share(51, many, [one]) == pytest.approx(0.9 * 50 + 2.55)
    assert share(51, one, [many]) == pytest.approx(0.9 * 1 + 2.55)


def test_a_gateway_to_which_traffic_moves_may_let_some_in_at_once() -> None:
    assert share(900, ArrivalRates(0, 0), [ArrivalRates(0, 900)] * 3) == pytest.approx(900 * 0.1 / 4)
    assert share(100, ArrivalRates(0, 0), [ArrivalRates(0, 0)]) == pytest.approx(50)


def test_what_nobody_asks_for_is_dealt_as_arrivals_are() -> None:
    assert share(100, ArrivalRates(0, 0.2), [ArrivalRates(0, 0.6)]) == pytest.approx(90 / 4 + 10 / 2)
    assert share(math.inf, ArrivalRates(0, 0.2), [ArrivalRates(0, 0.6)]) == math.inf


def test_a_flood_is_held_to_the_rate_after_one_burst() -> None:
    throttle = Throttle()
    throttle.set_rate(100.0, 0.0)
    assert admitted(throttle, every(0.001, 10.0)) == pytest.approx(100 * (10 + BURST_SECONDS), abs=2)


def test_a_rate_that_changes_neither_forgives_nor_takes_what_is_owed() -> None:
    """Half the workers go and come back: the sum of what was let in is that of the rates, and one burst."""
    throttle, total = Throttle(), 0
    for start, rate in ((0.0, 200.0), (10.0, 100.0), (20.0, 200.0)):
        throttle.set_rate(rate, start)
        total += admitted(throttle, every(0.001, 10.0, start))
    assert total == pytest.approx(2000 + 1000 + 2000 + 200, abs=5)


def test_an_open_throttle_begins_with_a_whole_burst_when_it_is_set_again() -> None:
    throttle = Throttle()
    throttle.set_rate(100.0, 0.0)
    admitted(throttle, iter([0.0] * 1000))
    throttle.set_rate(math.inf, 1.0)
    assert admitted(throttle, iter([1.0] * 1000)) == 1000
    throttle.set_rate(100.0, 2.0)
    assert admitted(throttle, iter([2.0] * 1000)) == 100


def test_a_throttle_that_was_open_for_no_time_begins_with_a_whole_burst() -> None:
    throttle = Throttle()
    throttle.set_rate(100.0, 0.0)
    admitted(throttle, iter([0.0] * 1000))
    throttle.set_rate(math.inf, 0.0)
    throttle.set_rate(100.0, 0.0)
    assert admitted(throttle, iter([0.0] * 1000)) == 100


def test_what_needed_no_run_is_given_back() -> None:
    throttle = Throttle()
    throttle.set_rate(10.0, 0.0)
    for _ in range(500):
        assert throttle.admit(T, 0.0) == 0.0
        throttle.give_back(T)
    throttle.count(0.0)
    assert throttle.count(1.0) == ArrivalRates()


def test_flows_are_averages_of_about_a_second() -> None:
    throttle = Throttle()
    throttle.count(0.0)
    for look in range(1, 21):
        throttle.higher += 50
        throttle.lowest += 100
        flow = throttle.count(look * 0.5)
    assert flow.higher == pytest.approx(100, rel=0.01)
    assert flow.lowest == pytest.approx(200, rel=0.01)
    assert throttle.count(10.5).higher == pytest.approx(100 * math.exp(-0.5), rel=0.01)
    assert throttle.count(10.5).higher == pytest.approx(100 * math.exp(-0.5), rel=0.01)  # No time has passed.


def test_next_to_no_capacity_is_known_all_the_same() -> None:
    assert room(capacity(0.5), 0.1, [ArrivalRates(0.2, 0.0)]) == pytest.approx(0.3)
    assert room(capacity(0, healthy=0, degraded=1), 0.1, [ArrivalRates(0, 10)]) == 0.0


def test_what_is_given_back_is_one() -> None:
    throttle = Throttle()
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


def test_a_look_at_an_earlier_instant_changes_nothing() -> None:
    throttle = Throttle()
    throttle.count(5.0)
    throttle.lowest = 100
    assert throttle.count(4.0) == ArrivalRates()
    assert throttle.count(6.0).lowest == pytest.approx(100 * (1.0 - math.exp(-1.0)))


def test_arrivals_are_counted_whether_they_are_let_in_or_not() -> None:
    throttle = Throttle()
    throttle.count(0.0)
    throttle.set_rate(0.5, 0.0)
    assert admitted(throttle, iter([0.0] * 30)) == LEAST_BURST
    assert throttle.lowest == 30


def test_the_wait_is_for_what_is_missing_of_one() -> None:
    throttle = Throttle()
    throttle.set_rate(2.0, 0.0)
    admitted(throttle, iter([0.0] * 10))
    assert throttle.admit(T, 0.25) == pytest.approx(0.25)


def test_a_place_that_the_broker_refuses_is_free_for_another_and_still_counts_as_an_arrival() -> None:
    throttle = Throttle()
    throttle.set_rate(20.0, 0.0)
    while throttle.admit(T, 0.0) == 0.0:
        pass
    came = throttle.lowest
    assert throttle.admit(T, 0.0) > 0.0
    throttle.refund(T)
    assert throttle.admit(T, 0.0) == 0.0
    assert throttle.admit(T, 0.0) > 0.0
    assert throttle.lowest == came + 3


def test_several_are_let_in_together_or_not_at_all() -> None:
    throttle = Throttle()
    throttle.set_rate(100.0, 0.0)
    throttle.refund(T, 60)
    assert throttle.admit(T, 0.0, 60) == 0.0
    wait = throttle.admit(T, 0.0, 60)
    assert wait == pytest.approx(0.2)
    assert throttle.admit(T, 0.0, 40) == 0.0
    throttle.refund(T, 40)
    assert throttle.admit(T, wait + 1e-9, 60) == 0.0
    assert throttle.admit(T, 1e9, 101) > 0.0


def test_arrivals_are_told_by_tenant() -> None:
    throttle = Throttle()
    throttle.count(0.0)
    for look in range(1, 30):
        for tenant, count in (("a", 10), ("b", 30), ("c", 5)):
            for _ in range(count):
                throttle.admit(tenant, 0.0)
        throttle.give_back("a", 5)
        flow = throttle.count(look * 0.5)
    assert flow.lowest == pytest.approx(80, rel=0.01)
    assert flow.tenants == pytest.approx({"b": 60, "a": 10, "c": 10}, rel=0.01)
