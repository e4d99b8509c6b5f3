"""The four policies: the rule that each derives from a load, its effects, full batches in step, and bursts."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.core import policies
from headway.core.departure import Departure, Dispatch, Hold, Load, Past, QueueSnapshot, Rule, decide
from headway.core.policies.paced import KD, KI, KP, LONGER, SMALLER, Paced, Pid, Table, Window, headway
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from tests.core.entries import entry
from tests.core.fleet import Seen, drive

BUSY = Load(rate=1000.0, alpha=0.1, beta=0.0, slots=2, max_batch=100, departures=100)

each_policy = pytest.mark.parametrize("name", policies.NAMES)


def test_a_cold_start_into_full_load_keeps_its_gpus_for_full_batches() -> None:
    """The rate is known within milliseconds. A GPU that left with the first few requests would be busy for a batch."""
    queue = ModelQueue(QueueLimits(tiers=3, max_batch=16))
    queue.service.warm_up([(1, 0.02), (16, 0.02)])
    came = (number / 5000 for number in range(25))
    seen = drive(queue, policies.build("paced", None), ((at, entry(f"{at}")) for at in came), 7, lambda _: 0.02, 0.005)
    assert [left for left, _, _ in seen.batches] == [0.0, 0.004]


@each_policy
@pytest.mark.parametrize("wait", [None, 0.2])
def test_a_lone_request_before_and_after_the_rush_hour_leaves_at_once(name: str, wait: float | None) -> None:
    """A rule wakes idle workers. The rule from the last busy claim mustn't hold the first request after it."""
    queue, policy = ModelQueue(QueueLimits(tiers=3, max_batch=32)), policies.build(name, wait)
    queue.set_slots(1)
    now = 5.0
    queue.offer(entry("first"), now)
    departure = queue.depart("gpu-0", 32, policy, now)
    assert isinstance(departure, Departure)
    queue.finish(departure, now)
    for number in range(400):
        now += 0.001
        queue.offer(entry(f"rush-{number}"), now)
        departure = queue.depart("gpu-0", 32, policy, now)
        if isinstance(departure, Departure):
            queue.finish(departure, now)
    now += 1.0
    while isinstance(departure := queue.depart("gpu-0", 32, policy, now), Departure):
        queue.finish(departure, now)
    now += 60.0
    queue.offer(entry("lone"), now)
    assert queue.wake(("gpu-0",), now) == "gpu-0"
    assert isinstance(queue.depart("gpu-0", 32, policy, now), Departure)


@each_policy
@given(
    rate=st.floats(0.0, 1e6),
    alpha=st.floats(0.0, 10.0),
    beta=st.floats(0.0, 1.0),
    slots=st.integers(0, 200),
    max_batch=st.integers(1, 100),
    depth=st.integers(0, 10_000),
    utilisation=st.floats(0.0, 1.0),
    wait=st.floats(0.0, 30.0),
    departures=st.integers(0, 3),
)
def test_every_load_gives_a_rule_that_makes_sense(name: str, **load: float) -> None:
    policy = policies.build(name, None)
    for _ in range(2):
        rule = policy.rule(Load(**load))  # type: ignore[arg-type]
        assert 1 <= rule.size <= load["max_batch"]
        assert rule.headway is None or 0.0 <= rule.headway < math.inf
        assert rule.window >= 0.0
        assert rule.service >= 0.0


class TestPaced:
    @pytest.mark.parametrize(
        ("rate", "alpha", "beta", "slots", "gap"),
        [
            (1000.0, 0.100, 0.0, 2, 0.050),
            (10_000.0, 0.100, 0.0, 11, 0.100 / 11),
            (400.0, 0.080, 0.002, 2, 0.080 / 1.2),
            (1000.0, 0.050, 0.001, 2, 0.050),
            (1000.0, 0.100, 0.0, 1, 0.100),
            (20.0, 0.100, 0.0, 2, 0.050),
            (3900.0, 0.050, 0.001, 4, 0.150 / 4),
            (4000.0, 0.050, 0.001, 4, 0.150 / 4),
            (4 * 100 / 0.150, 0.050, 0.001, 4, 0.150 / 4),
            (50_000.0, 0.050, 0.001, 4, 0.150 / 4),
        ],
    )
    def test_the_gap_follows_its_formula(self, rate: float, alpha: float, beta: float, slots: int, gap: float) -> None:
        assert headway(Load(rate, alpha, beta, slots, max_batch=100)) == pytest.approx(gap)

    def test_the_rule_tells_what_is_expected(self) -> None:
        rule = policies.build("paced", None).rule(replace(BUSY, beta=0.001))
        assert (rule.size, rule.window) == (100, math.inf)
        assert rule.rate == BUSY.rate
        assert rule.service == pytest.approx(0.2)
        few = replace(BUSY, rate=15.0)
        assert policies.build("paced", None).rule(few) == Rule(100, headway=0.0, rate=15.0, service=0.1)

    def test_times_that_vary_leave_room_for_late_gpus_and_count_the_largest_batch_less(self) -> None:
        calm = replace(BUSY, beta=0.0004)
        even = policies.build("paced", None).rule(calm)
        usual = calm.alpha + calm.beta * calm.rate * headway(calm)
        uneven = policies.build("paced", None).rule(replace(calm, deviation=0.2 * usual))
        assert uneven.gap(0.0) == pytest.approx(even.gap(0.0) * (1.0 + LONGER * 0.2))
        assert uneven.gap_each == pytest.approx(even.gap_each / (1.0 + SMALLER * 0.2))

    def test_the_first_batch_of_each_gpu_keeps_the_gap_that_lasts_and_is_not_cut(self) -> None:
        """If cut to an even part of the little that runs, the first arrivals would wait for one gap after another."""
        load = Load(rate=1050.0, alpha=0.2, beta=0.004, slots=8, max_batch=100)
        first, later = (Paced().spaced(replace(load, departures=left)) for left in (7, 8))
        assert first.gap(0.0) == first.gap(50.0) == pytest.approx(headway(load))
        assert later.gap(0.0) < first.gap(0.0) < later.gap(100.0)
        assert first.split == 0.0 < later.split

    def test_at_a_start_times_are_presumed_to_vary(self) -> None:
        at_last = Paced().spaced(BUSY)
        gaps = [Paced().spaced(replace(BUSY, departures=left)).gap(0.0) for left in (2, 3, 4)]
        assert gaps[0] > gaps[1] > gaps[2] == at_last.gap(0.0)

    def test_one_gpu_keeps_no_gap_and_waits_for_company_alone(self) -> None:
        alone = replace(BUSY, slots=1, beta=0.001)
        rule = policies.build("paced", None).rule(alone)
        assert rule.gap(100.0) == rule.quiet == pytest.approx(3.0 / alone.rate)
        assert rule.gather == pytest.approx(alone.alpha - rule.quiet)

    def test_a_configured_wait_bounds_the_gap(self) -> None:
        rule = policies.build("paced", 0.02).rule(BUSY)
        assert decide(rule, QueueSnapshot(10, 1.0, 9.0, 1.0), 1.0) == Hold(1.02)


class TestClients:
    """The `paced` rule for clients that wait for their answers."""

    @pytest.mark.parametrize(("clients", "company"), [(4, 1.0), (16, 4.0), (5, 1.0), (1, 0.0), (400, 32.0)])
    def test_half_an_even_part_of_them_is_enough(self, clients: int, company: float) -> None:
        past = Past()
        past.clients = clients
        rule = Paced().together(Load(rate=200.0, alpha=0.1, beta=0.001, slots=2, max_batch=64, past=past))
        assert rule.company == company
        some = QueueSnapshot(company + 1, 1.0, 9.0, last_departure=0.9, newest=1.0, busy=1, running=clients, slots=2)
        assert decide(rule, some, 1.0) == Hold(1.0 + rule.quiet)
        assert isinstance(decide(rule, some, 1.0 + rule.quiet), Dispatch)

    def test_fewer_wait_for_the_next_group_but_not_for_ever(self) -> None:
        past = Past()
        past.clients = 16
        rule = Paced().together(Load(rate=200.0, alpha=0.1, beta=0.0, slots=2, max_batch=64, past=past))
        few = QueueSnapshot(3, 1.0, 9.0, last_departure=0.9, newest=1.0, busy=1, running=13, slots=2)
        assert decide(rule, few, 1.05) == Hold(1.15)
        assert decide(rule, few, 1.15) == Dispatch("headway")


def test_a_window_is_size_or_time() -> None:
    rule = Window(0.04).rule(BUSY)
    assert (rule.size, rule.window, rule.headway) == (100, 0.04, None)
    assert (rule.rate, rule.service) == (BUSY.rate, BUSY.batch_seconds(100))
    rule = Window(0.04).rule(replace(BUSY, rate=10.0))
    assert decide(rule, QueueSnapshot(1, 0.0, 9.0, -math.inf), 0.0) == Dispatch("early")


class TestTable:
    @pytest.mark.parametrize(
        ("utilisation", "depth", "size", "window"),
        [
            (0.49, 9, 16, 0.03),
            (0.49, 10, 32, 0.05),
            (0.50, 9, 32, 0.05),
            (0.85, 100, 32, 0.05),
            (0.86, 0, 64, 0.1),
            (0.10, 101, 64, 0.1),
        ],
    )
    def test_rows(self, utilisation: float, depth: int, size: int, window: float) -> None:
        rule = Table().rule(replace(BUSY, utilisation=utilisation, depth=depth))
        assert (rule.size, rule.window) == (size, window)
        assert (rule.rate, rule.service) == (BUSY.rate, BUSY.batch_seconds(size))
        assert Table().rule(replace(BUSY, utilisation=utilisation, depth=depth, max_batch=8)).size == 8


class TestPid:
    def test_moves_once_a_departure_however_often_it_is_asked(self) -> None:
        policy = Pid(0.04)
        load = replace(BUSY, wait=0.01, departures=1)
        first = policy.rule(load)
        assert first.window > 0.04
        assert policy.rule(load) == first
        assert policy.rule(replace(load, departures=2)).window > first.window

    def test_steps_by_the_velocity_form(self) -> None:
        policy, waits, window, errors = Pid(0.04), [0.03, 0.035, 0.05, 0.041], 0.04, [0.0, 0.0]
        for departures, wait in enumerate(waits, 1):
            errors.append(0.04 - wait)
            newest, last, before = errors[-1], errors[-2], errors[-3]
            window += KP * (newest - last) + KI * newest + KD * (newest - 2 * last + before)
            assert policy.rule(replace(BUSY, wait=wait, departures=departures)).window == pytest.approx(window)

    @pytest.mark.parametrize(("wait", "window"), [(1.0, 0.0), (0.0, 0.08)])
    def test_the_window_stays_between_nothing_and_twice_the_target(self, wait: float, window: float) -> None:
        policy = Pid(0.04)
        for departures in range(1, 200):
            rule = policy.rule(replace(BUSY, wait=wait, departures=departures))
        assert rule.window == window

    def test_steers_a_real_queue_to_the_target(self) -> None:
        queue = ModelQueue(QueueLimits(tiers=1, max_batch=100))
        evenly = [(number / 500, entry(str(number))) for number in range(4000)]
        seen = drive(queue, Pid(0.04), evenly, slots=8, seconds=lambda size: 0.05, until=8)
        waits = [wait for left_at, _, wait in seen.batches if left_at > 4.0]
        assert sum(waits) / len(waits) == pytest.approx(0.04, rel=0.1)


class TestFullBatches:
    @pytest.mark.parametrize(
        ("load", "spaced"),
        [
            pytest.param(Load(10_000.0, 0.1, 0.0, 11, 100), True, id="a busy fleet"),
            pytest.param(Load(5_000.0, 0.1, 0.0, 11, 100), False, id="one with GPUs to spare"),
            pytest.param(Load(900.0, 0.1, 0.0, 1, 100), False, id="one GPU has nobody to bunch with"),
            pytest.param(Load(5.0, 0.1, 0.0, 2, 100), False, id="few arrivals"),
            pytest.param(Load(1_601.0, 0.1, 0.0, 2, 100), True, id="two GPUs above the bound"),
            pytest.param(Load(1_600.0, 0.1, 0.0, 2, 100), False, id="two GPUs on the bound"),
        ],
    )
    def test_spaces_full_batches_where_there_is_something_to_space(self, load: Load, spaced: bool) -> None:
        rule = policies.build("paced", None).rule(load)
        assert (rule.pace > 0.0) == spaced
        assert math.isinf(rule.tolerance) != spaced

    def test_the_schedule_is_faster_than_the_fleet(self) -> None:
        load = Load(20_000.0, 0.1, 0.001, 4, 100)
        assert 0.9 < policies.build("paced", None).rule(load).pace / (load.batch_seconds(100) / 4) < 1.0

    def test_what_varies_by_chance_is_not_held(self) -> None:
        steady = Load(10_000.0, 0.1, 0.0, 11, 100)
        varying = Load(10_000.0, 0.1, 0.0, 11, 100, deviation=0.01)
        policy = policies.build("paced", None)
        assert policy.rule(varying).tolerance == pytest.approx(policy.rule(steady).tolerance + 0.04)


def test_bunched_gpus_are_spread_while_every_batch_is_full() -> None:
    """A backlog of four batches arrives at four idle GPUs. They start in step, with no batch to spare."""
    rate, queue = 950.0, ModelQueue(QueueLimits(tiers=1, max_batch=25))
    arrivals = [0.0] * 100 + [number / rate for number in range(1, int(rate * 4))]
    coming = ((at, entry(str(number))) for number, at in enumerate(arrivals))
    seen = drive(queue, policies.build("paced", None), coming, slots=4, seconds=lambda size: 0.1, until=4)
    assert _widest_gap(seen, 0.0, 0.5) > 0.09
    assert _widest_gap(seen, 3.0, 4.0) < 0.035
    assert sum(size for left_at, size, _ in seen.batches if left_at >= 3.0) >= 0.97 * rate


def _widest_gap(seen: Seen, start: float, end: float) -> float:
    times = [left_at for left_at, _, _ in seen.batches if start <= left_at < end]
    return max(later - before for before, later in pairwise(times))


class TestGather:
    @pytest.mark.parametrize(
        ("company", "depth", "newest", "now", "verdict"),
        [
            (0, 1, 2.0, 2.0, Hold(2.01)),
            (0, 30, 2.035, 2.035, Hold(2.04)),
            (0, 31, 2.04, 2.04, Dispatch("headway")),
            (0, 7, 2.01, 2.02, Dispatch("headway")),
            (0, 100, 2.0, 2.0, Dispatch("full")),
            (8, 7, 2.01, 2.02, Hold(2.04)),
            (8, 7, 2.01, 2.04, Dispatch("headway")),
            (8, 8, 2.01, 2.02, Dispatch("headway")),
        ],
    )
    def test_the_first_of_a_burst_has_a_gap_to_gather_others_until_nobody_follows_or_it_is_full(
        self, company: float, depth: int, newest: float, now: float, verdict: Dispatch | Hold
    ) -> None:
        """With too little company, it keeps waiting even if no more arrive."""
        rule = Rule(100, headway=0.05, service=0.1, gather=0.04, quiet=0.01, company=company)
        assert decide(rule, QueueSnapshot(depth, 2.0, 9.0, last_departure=1.0, newest=newest), now) == verdict

    @pytest.mark.parametrize(("rate", "gathers"), [(1000.0, True), (59.0, False), (19.0, False)])
    def test_only_where_others_were_due(self, rate: float, gathers: bool) -> None:
        """The gap is 50 ms. Three mean gaps between arrivals must fit into it."""
        rule = policies.build("paced", None).rule(Load(rate, 0.1, 0.0, 2, 100))
        assert (rule.gather > 0.0) == gathers
        assert rule.gather + rule.quiet <= max(0.05, 2 * rule.quiet)
