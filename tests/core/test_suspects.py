"""The search for culprits: what runs how often, who hears what, and whose GPU time it is."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.batch import Departure
from headway.core.departure import APART, Hold, Rule
from headway.core.fair_queue import QueuedEntry
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.core.suspects import APART_PRICE
from headway.model import Cause
from tests.contracts.brokers import Fixed
from tests.core.entries import entry

AT_ONCE = Fixed(Rule(size=1))
BATCH = 0.1
"""Seconds that each batch takes."""


class Bench:
    """A queue with GPUs that run one batch after the other; inputs that begin with `bad` fail."""

    def __init__(self, max_batch: int = 32, slots: int = 1) -> None:
        self.queue = ModelQueue(QueueLimits(1, max_batch))
        self.queue.set_slots(slots)
        self.now = 0.0
        self.answered: list[QueuedEntry] = []
        self.dead: list[QueuedEntry] = []
        self.runs: list[Departure] = []

    def offer(self, *asked: tuple[str, str], tenant: str = "t") -> None:
        for caller, text in asked:
            found = msgspec.structs.replace(entry(text, tenant=tenant, timeout=1e6, queue_timeout=1e6), caller=caller)
            assert isinstance(self.queue.offer(found, self.now), QueuedEntry)

    def step(self, cause: Cause = Cause.RAISED) -> Departure | None:
        departure = self.queue.depart("gpu-0", 32, AT_ONCE, self.now)
        if isinstance(departure, Hold):
            assert not math.isinf(departure.until)
            self.now = departure.until
            return None
        self.now += BATCH
        self.runs.append(departure)
        if any(str(member.entry.input).startswith("bad") for member in departure.members):
            self.dead += self.queue.fail(departure, cause, self.now, lambda: 0.5).dead
        else:
            self.answered += self.queue.finish(departure, self.now)
        return departure

    def drain(self) -> None:
        while self.queue.depth:
            self.step()


def inputs(members: list[QueuedEntry]) -> list[str]:
    return [str(member.entry.input) for member in members]


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 32),
    data=st.data(),
    callers=st.integers(1, 4),
    cause=st.sampled_from([Cause.RAISED, Cause.CRASHED]),
)
def test_every_culprit_ends_alone_and_every_innocent_is_answered(
    size: int, data: st.DataObject, callers: int, cause: Cause
) -> None:
    culprits = data.draw(st.sets(st.integers(0, size - 1), max_size=4))
    bench = Bench()
    asked = [(f"c{number % callers}", f"{'bad' if number in culprits else 'good'} {number}") for number in range(size)]
    bench.offer(*asked)
    while bench.queue.depth:
        bench.step(cause)
    assert sorted(inputs(bench.dead)) == sorted(text for _, text in asked if text.startswith("bad"))
    assert len(bench.answered) == size - len(culprits)
    depth = math.ceil(math.log2(size)) + 1
    assert len(bench.runs) <= 2 + (2 * depth + 3) * len(culprits)


def test_one_culprit_costs_about_one_run_a_halving() -> None:
    runs = []
    for place in range(32):
        bench = Bench()
        bench.offer(*(("c", "bad" if number == place else "good") for number in range(32)))
        bench.drain()
        runs.append(len(bench.runs))
    assert max(runs) <= 12
    assert sum(runs) / 32 <= 9.0


def test_a_failed_batch_is_split_by_caller_first_and_the_innocent_run_next() -> None:
    bench = Bench()
    bench.offer(*(("good", f"good {number}") for number in range(20)), ("evil", "bad"), ("evil", "fine"))
    bench.step()
    second = bench.step()
    assert second is not None
    assert {member.entry.caller for member in second.members} == {"good"}
    assert len(second.members) == 20
    bench.drain()
    assert (len(bench.answered), inputs(bench.dead)) == (21, ["bad"])


def test_nothing_is_paid_for_a_search_and_others_budgets_are_left_alone() -> None:
    bench = Bench()
    for _ in range(60):
        bench.offer(*(("c", f"good {number}") for number in range(15)), ("c", "bad"))
        bench.drain()
    assert len(bench.dead) == 60
    assert len(bench.answered) == 60 * 15


def test_who_has_sent_a_culprit_rides_apart() -> None:
    bench = Bench()
    bench.offer(("evil", "bad"))
    bench.drain()
    bench.offer(("evil", "fine"), tenant="t")
    bench.offer(("good", "good"), tenant="u")
    bench.drain()
    apart, others = bench.runs[-2:]
    assert (inputs(apart.members), apart.reason) == (["fine"], APART)
    assert (inputs(others.members), others.reason) == (["good"], "full")


def test_who_rides_apart_gets_no_more_than_its_part_of_the_gpus() -> None:
    """All its inputs fail, and there are always more of them, beside a tenant that keeps the GPU busy."""
    bench = Bench(max_batch=4)
    seconds = Counter[str]()
    for _ in range(600):
        while bench.queue._fresh < 8:
            bench.offer(("good", "good"), tenant="good")
        quarantine = bench.queue._suspects.quarantine(("evil", "evil"))
        if quarantine is None or len(quarantine.members) < 8:
            bench.offer(("evil", "bad"), tenant="evil")
        if (departure := bench.step()) is not None:
            seconds[departure.members[0].entry.tenant] += 1
    share = seconds["evil"] / seconds.total()
    assert 0.5 / (1.0 + APART_PRICE) <= share <= 1.2 / (1.0 + APART_PRICE)


def test_whoever_waits_for_a_probe_that_is_gone_runs_all_the_same() -> None:
    bench = Bench()
    bench.offer(("c", "bad"), ("c", "good 1"), ("c", "good 2"), ("c", "good 3"))
    bench.step()
    for member in list(bench.queue._suspects.of)[2:]:  # the half; the rest was set apart before it.
        bench.queue.remove(member)
    bench.drain()
    assert len(bench.answered) == 2


def test_a_probe_that_is_handed_back_goes_first_and_keeps_its_rest() -> None:
    bench = Bench()
    bench.offer(("c", "good 1"), ("c", "bad"), ("c", "good 2"), ("c", "good 3"))
    bench.step()
    half = bench.queue.depart("gpu-0", 32, AT_ONCE, bench.now)
    assert isinstance(half, Departure)
    bench.queue.hand_back(half, bench.now)
    bench.offer(("d", "fresh"))
    again = bench.step()
    assert again is not None
    assert (again.members, again.attempts) == (half.members, 2)
    bench.drain()
    assert (len(bench.answered), inputs(bench.dead)) == (4, ["bad"])


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_smaller_slot_takes_part_of_a_probe_and_the_rest_waits(limit: int) -> None:
    bench = Bench()
    bench.offer(*(("c", f"good {number}") for number in range(7)), ("c", "bad"))
    bench.step()
    half = bench.queue.depart("gpu-0", limit, AT_ONCE, bench.now)
    assert isinstance(half, Departure)
    assert len(half.members) == limit
    bench.answered += bench.queue.finish(half, bench.now)
    bench.drain()
    assert (len(bench.answered), inputs(bench.dead)) == (7, ["bad"])
