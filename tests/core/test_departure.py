import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.departure import (
    DEADLINE,
    EARLY,
    FULL,
    HEADWAY,
    HELPED_FROM,
    LEEWAY,
    LONE_FACTOR,
    MEASURE_AFTER,
    WINDOW,
    Dispatch,
    Hold,
    QueueSnapshot,
    Rule,
    decide,
)

SECONDS = st.floats(0.0, 100.0)


def view(depth: int = 1, oldest: float = 0.0, due: float = 100.0, last_departure: float = -math.inf) -> QueueSnapshot:
    return QueueSnapshot(depth, oldest, due, last_departure)


def until(verdict: Dispatch | Hold) -> float:
    assert isinstance(verdict, Hold)
    return verdict.until


def test_full_batches_leave_ahead_of_the_schedule_by_no_more_than_the_lead() -> None:
    rule = Rule(8, headway=5.0, tolerance=0.5)
    full = QueueSnapshot(8, oldest=0.0, due=100.0, last_departure=0.0, schedule=1.0)
    assert decide(rule, full, 0.25) == Hold(0.5)
    assert decide(rule, full, 0.5) == Dispatch(FULL)


def test_a_batch_leaves_when_its_oldest_member_has_waited_for_the_window() -> None:
    rule = Rule(8, window=0.04, rate=1000.0)
    for now, verdict in ((1.0, Hold(1.04)), (1.039, Hold(1.04)), (1.04, Dispatch(WINDOW))):
        assert decide(rule, view(oldest=1.0), now) == verdict


def test_a_batch_leaves_one_headway_after_the_one_before() -> None:
    rule = Rule(8, headway=0.05)
    assert decide(rule, view(last_departure=1.0), 1.02) == Hold(1.05)
    assert decide(rule, view(last_departure=1.0), 1.05) == Dispatch(HEADWAY)
    assert decide(rule, view(), 0.0) == Dispatch(HEADWAY)  # The very first batch has none before it to keep a gap to.
    assert decide(Rule(8, headway=0.0), view(last_departure=1.0), 1.0) == Dispatch(EARLY)


def test_the_gap_grows_with_the_largest_batch_on_a_gpu_if_there_is_one() -> None:
    assert Rule(8, headway=0.0, gap_each=1.0).gap(8) == Rule(8, gap_each=1.0).gap(8) == 0.0
    rule = Rule(8, headway=0.02, gap_each=0.01)
    assert [rule.gap(running) for running in (0, 1, 3, 6)] == pytest.approx([0.02, 0.03, 0.05, 0.08])
    held = QueueSnapshot(1, oldest=0.0, due=100.0, last_departure=1.0, running=6)
    assert until(decide(rule, held, 1.05)) == pytest.approx(1.08)
    assert decide(rule, held, 1.081) == Dispatch(HEADWAY)


def test_what_waits_is_cut_where_that_pays() -> None:
    rule = Rule(64, headway=0.05, split=0.3)
    assert [rule.share(depth, slots=4) for depth in (1, 6, 7, 16, 22, 64)] == [1, 6, 4, 8, 8, 16]
    assert rule.share(64, slots=2) == 32
    assert rule.share(64) == rule.share(64, slots=1, busy=1, running=3) == 64
    assert Rule(64).share(64, slots=4) == 64
    waiting = QueueSnapshot(22, oldest=0.0, due=100.0, last_departure=0.0, slots=4)
    assert decide(rule, waiting, 0.05) == Dispatch(HEADWAY, 8)
    assert decide(rule, view(22, last_departure=0.0), 0.05) == Dispatch(HEADWAY)


def test_a_batch_is_cut_to_the_even_share_of_all_that_waits_and_runs() -> None:
    rule = Rule(64, headway=0.05, split=0.6)
    assert rule.share(61, busy=1, slots=2, running=3) == 32
    assert rule.share(43, busy=2, slots=4, running=12) == 17
    assert rule.share(17, busy=3, slots=4, running=16) == 17  # Barely more than its share.
    assert rule.share(16, busy=4, slots=8, running=16) == 10
    assert rule.share(16, busy=7, slots=8, running=16) == 16
    unlike = Rule(64, headway=0.05, split=0.6, team=2.0)
    assert unlike.share(61, busy=1, slots=2, running=3) == 61  # At most two shares.
    assert unlike.share(43, busy=1, slots=4, running=12) == 14


def test_a_full_batch_that_is_better_shared_leaves_in_parts_at_even_gaps() -> None:
    rule = Rule(64, headway=0.05, split=0.3)
    waiting = QueueSnapshot(64, oldest=1.0, due=100.0, last_departure=1.0, slots=2)
    assert decide(rule, waiting, 1.0) == Hold(1.05)
    assert decide(rule, waiting, 1.05) == Dispatch(HEADWAY, 32)
    assert decide(rule, QueueSnapshot(200, 1.0, 100.0, 1.0, slots=2), 1.0) == Dispatch(FULL)


@pytest.mark.parametrize(
    ("depth", "busy", "running", "slots", "factor", "leaves"),
    [
        (1, 3, 1.0, 4, 1.0, True),
        (2, 2, 1.0, 4, 1.0, True),
        (1, 2, 1.0, 4, 1.0, True),
        (1, 3, 1.0, 4, LONE_FACTOR, True),
        (1, 3, 1.0, 4, LONE_FACTOR + 0.1, False),
        (2, 3, 1.0, 4, 1.0, False),
        (1, 1, 1.0, 4, 1.0, False),
        (1, 3, 2.0, 4, 1.0, False),
        (4, 0, 0.0, 4, 1.0, False),
        (1, 2, 1.0, 3, 1.0, False),
    ],
)
def test_an_entry_is_not_held_back_where_each_has_a_gpu_of_its_own(
    depth: int, busy: int, running: float, slots: int, factor: float, leaves: bool
) -> None:
    """Clients that share a batch do wait for each other."""
    waiting = QueueSnapshot(
        depth, oldest=0.9, due=100.0, last_departure=0.9, running=running, busy=busy, slots=slots, factor=factor
    )
    assert decide(Rule(64, headway=0.5, rate=2.0), waiting, 1.0) == (Dispatch(EARLY) if leaves else Hold(1.4))
    assert decide(Rule(64, headway=0.5, rate=20.0), waiting, 1.0) == Hold(1.4)
    assert decide(Rule(64, headway=0.5, rate=2.0, company=0.5), waiting, 1.0) == Hold(1.4)


def test_a_batch_leaves_early_enough_for_its_most_urgent_member() -> None:
    rule = Rule(8, headway=9.0, service=0.1)
    last_moment = 2.0 - 0.1 - LEEWAY
    assert decide(rule, view(due=2.0, last_departure=0.0), 1.0) == Hold(last_moment)
    assert decide(rule, view(due=2.0, last_departure=0.0), last_moment) == Dispatch(DEADLINE)


@pytest.mark.parametrize(("rate", "leaves"), [(0.0, True), (24.0, True), (25.0, False), (26.0, False)])
def test_a_batch_leaves_early_when_less_than_one_more_is_expected_in_the_window(rate: float, leaves: bool) -> None:
    verdict = decide(Rule(8, window=0.04, rate=rate), view(oldest=0.0), 0.0)
    assert verdict == (Dispatch(EARLY) if leaves else Hold(0.04))


@given(
    rule=st.builds(
        Rule,
        size=st.integers(1, 100),
        headway=st.none() | SECONDS,
        window=SECONDS | st.just(math.inf),
        rate=st.floats(0.0, 1e5),
        service=SECONDS,
        pace=SECONDS,
        tolerance=SECONDS | st.just(math.inf),
    ),
    depth=st.integers(0, 200),
    oldest=SECONDS,
    patience=SECONDS,
    since=SECONDS | st.just(math.inf),
    schedule=SECONDS | st.just(-math.inf),
    now=SECONDS,
)
def test_a_hold_ends_later_and_then_something_leaves(
    rule: Rule, depth: int, oldest: float, patience: float, since: float, schedule: float, now: float
) -> None:
    """No rule holds a batch forever or makes a worker ask again immediately."""
    seen = QueueSnapshot(depth, min(oldest, now), now + patience, now - since, schedule)
    verdict = decide(rule, seen, now)
    if depth == 0:
        assert verdict == Hold(math.inf)
    elif isinstance(verdict, Hold):
        assert now < verdict.until < now + patience
        assert isinstance(decide(rule, seen, verdict.until), Dispatch)


UNEVEN = Rule(8, headway=0.06, batch=0.1, team=2, speed=1.5, slowest=2.2)
"""One slot of factor 1, one of 2, and the mean gap between them."""


def test_the_slower_a_slot_the_sooner_it_leaves_after_the_last_departure() -> None:
    for factor, gap in ((1.0, 0.09), (1.5, 0.045), (2.0, 0.0)):
        held = decide(UNEVEN, QueueSnapshot(1, 1.0, 100.0, last_departure=1.0, factor=factor), 1.0)
        assert (held.until if isinstance(held, Hold) else 1.0) == pytest.approx(1.0 + gap)


@pytest.mark.parametrize(
    ("depth", "unseen", "now", "verdict"),
    [
        pytest.param(8, 0, 1.0, Hold(1.3), id="a full batch is left to the others"),
        pytest.param(HELPED_FROM * 8, 0, 1.0, Dispatch(FULL), id="two are not"),
        pytest.param(1, 0, 1.3, Dispatch(HEADWAY), id="the others are late"),
        pytest.param(1, MEASURE_AFTER, 1.0, Dispatch(HEADWAY), id="to be seen again"),
        pytest.param(0, MEASURE_AFTER, 1.0, Hold(math.inf), id="nothing waits"),
    ],
)
def test_a_slot_that_only_helps_out_leaves(depth: int, unseen: int, now: float, verdict: Dispatch | Hold) -> None:
    view = QueueSnapshot(depth, 1.0, 100.0, last_departure=1.0, factor=3.0, unseen=unseen)
    assert decide(UNEVEN, view, now) == verdict


def test_a_slot_that_only_helps_out_leaves_alone_what_one_of_the_others_will_take() -> None:
    thin = Rule(8, headway=0.0, batch=0.1, team=1, speed=1.0, slowest=1.1)
    assert decide(thin, view(last_departure=1.0), 1.0) == Dispatch(EARLY)
    helping = QueueSnapshot(1, 1.0, 100.0, last_departure=1.0, factor=2.0)
    assert until(decide(thin, helping, 1.0)) == pytest.approx(1.2)
