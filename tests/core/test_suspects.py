"""The search for culprits: groups that wait apart, numbers of runs, outcomes, and who is charged GPU time."""

import math
from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.departure import Departure, Hold
from headway.core.fair_queue import QueuedEntry, queued_at
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.core.retry import DEATHS_ALONE, MAX_ATTEMPTS, SEARCHED
from headway.core.suspects import (
    APART_PRICE,
    CLEAN,
    FIRST,
    HALF,
    LEAST_REST,
    MOST_CREDIT,
    QUARANTINE,
    QUARANTINED_ATTEMPTS,
    RESTS,
    SEARCH_PRICE,
    Group,
    LineSuspects,
    Suspects,
    _cut,
    last_moment,
    line_pause,
)
from headway.model import MOST_OUTPUT, Cause
from tests.core.entries import entry
from tests.core.test_queue import AT_ONCE

BATCH = 0.1


class Bench:
    """A queue with GPUs that run one batch after another. Inputs that start with `bad` fail."""

    def __init__(self, max_batch: int = 32, slots: int = 1) -> None:
        self.queue = ModelQueue(QueueLimits(1, max_batch))
        self.queue.set_slots(slots)
        self.now = 0.0
        self.answered: list[QueuedEntry] = []
        self.dead: list[QueuedEntry] = []
        self.runs: list[Departure] = []

    def offer(self, *asked: tuple[str, str], tenant: str = "t") -> None:
        for caller, text in asked:
            offered = entry(text, tenant=tenant, timeout=1e6, queue_timeout=1e6, caller=caller)
            assert isinstance(self.queue.offer(offered, self.now), QueuedEntry)

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

    def leave(self, limit: int = 32) -> Departure:
        departure = self.queue.depart("gpu-0", limit, AT_ONCE, self.now)
        assert isinstance(departure, Departure)
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
def test_culprits_end_alone_and_others_get_answers(size: int, data: st.DataObject, callers: int, cause: Cause) -> None:
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


@pytest.mark.parametrize("evil", [1, 3])
@pytest.mark.parametrize("max_batch", [4, 32])
def test_what_waits_of_a_hostile_caller_costs_no_input_of_others_more_than_one_run(max_batch: int, evil: int) -> None:
    """Inputs queued before the caller was found are included: they still ride with others, once with each."""
    bench = Bench(max_batch)
    for number in range(100):
        bench.offer((f"evil {number % evil}", f"bad {number}"), ("good", f"good {number}"))
    bench.drain()
    assert (len(bench.answered), len(bench.dead)) == (100, 100)
    runs = Counter(text for run in bench.runs for text in inputs(run.members) if text.startswith("good"))
    assert max(runs.values()) == 2


def test_who_rides_apart_gets_no_more_than_its_part_of_the_gpus() -> None:
    """All its inputs fail and more keep coming, beside a tenant that keeps the GPU busy."""
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
    for member in list(bench.queue._suspects.of)[2:]:  # The half. The rest was set apart before it.
        bench.queue.remove(member)
    bench.drain()
    assert len(bench.answered) == 2


def test_a_probe_that_is_handed_back_goes_first_and_keeps_its_rest() -> None:
    bench = Bench()
    bench.offer(("c", "good 1"), ("c", "bad"), ("c", "good 2"), ("c", "good 3"))
    bench.step()
    half = bench.leave()
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
    half = bench.leave(limit)
    assert len(half.members) == limit
    bench.answered += bench.queue.finish(half, bench.now)
    bench.drain()
    assert (len(bench.answered), inputs(bench.dead)) == (7, ["bad"])


ANN, BOB = ("t", "ann"), ("t", "bob")


def some(*callers: str) -> list[QueuedEntry]:
    return [queued_at(entry(str(place), caller=caller), 0.0) for place, caller in enumerate(callers)]


@pytest.mark.parametrize(
    ("callers", "order", "cut"),
    [
        ("aaaa", "aaaa", 2),
        ("aaaaa", "aaaaa", 2),
        ("abab", "aabb", 2),
        ("abbb", "bbba", 3),
        ("aaabbc", "aaabbc", 3),
        ("aabbccd", "aabbccd", 4),
        ("aabbcc", "aabbcc", 2),
        ("abcaaaaa", "aaaaaabc", 6),
        ("ab", "ab", 1),
    ],
)
def test_a_cut_is_between_two_callers_as_near_to_the_middle_as_can_be(callers: str, order: str, cut: int) -> None:
    members, at = _cut(some(*callers))
    assert ("".join(member.entry.caller for member in members), at) == (order, cut)


class TestPools:
    def test_what_is_not_known_of_one_caller_goes_to_its_pool_and_of_several_waits_together(self) -> None:
        suspects, like = Suspects(), Group([], 5.0, FIRST, 3, 2)
        suspects.unknown([], like, lambda _: 8)
        assert suspects.groups == {}
        suspects.unknown(some("ann", "ann"), like, {ANN: 8}.__getitem__)
        suspects.unknown(some("ann", "bob"), like, dict[tuple[str, str], int]().__getitem__)
        assert suspects.quarantine(ANN) is next(iter(suspects.groups))
        assert (suspects.quarantine(BOB), suspects.callers) == (None, 1)
        assert [
            (len(group.members), group.ready_at, group.kind, group.failures, group.caller) for group in suspects.groups
        ] == [(2, 5.0, QUARANTINE, 3, ANN), (2, 5.0, QUARANTINE, 3, None)]
        assert list(suspects.groups)[1].attempts == 2

    def test_those_of_a_pool_count_as_run_once_as_soon_as_one_of_them_has(self) -> None:
        suspects, fresh, again = Suspects(), some("ann"), some("ann")
        suspects.join(ANN, fresh, Group([], 5.0, QUARANTINE), 9)
        assert fresh[0].attempts == 0
        suspects.join(ANN, again, Group([], 5.0, QUARANTINE, 2, 3), 9)
        assert [member.attempts for member in fresh + again] == [QUARANTINED_ATTEMPTS] * 2
        quarantine = suspects.quarantine(ANN)
        assert quarantine is not None and (quarantine.failures, quarantine.attempts) == (2, QUARANTINED_ATTEMPTS)
        late = some("ann")
        suspects.join(ANN, late, Group([], 5.0, QUARANTINE, 1, 0), 9)
        assert (quarantine.failures, late[0].attempts) == (2, QUARANTINED_ATTEMPTS)


class TestChoosing:
    def test_probes_and_pools_take_turns_by_what_they_cost(self) -> None:
        suspects = Suspects()
        half, quarantine = Group(some("a"), 1.0, HALF), Group(some("b"), 2.0, QUARANTINE)
        suspects.add(half)
        suspects.add(quarantine)
        turns = []
        for _ in range(8):
            turn = suspects.choose("gpu-0", False, 2.0).turn
            assert turn is not None
            suspects.pay(turn, 0.25, 1.0, 0.0)
            turns.append("half" if turn is half else "quarantine")
        assert turns[0] == "half"
        assert turns.count("quarantine") == round(SEARCH_PRICE * turns.count("half"))
        assert quarantine.members

    def test_where_there_are_others_a_worker_is_avoided_for_a_while(self) -> None:
        group = Group(some("a"), 1.0, HALF)
        group.avoid, group.avoid_until = "gpu-0", 3.0
        workers = ("gpu-0", "gpu-1")
        assert [group.open_at(worker, True) for worker in workers] == [3.0, 1.0]
        assert [group.open_at(worker, False) for worker in workers] == [1.0, 1.0]
        suspects = Suspects()
        suspects.add(group)
        assert suspects.wake(["gpu-0", "gpu-1"], True, 1.0) == "gpu-1"
        assert suspects.wake(["gpu-0"], True, 1.0) == 3.0
        assert suspects.wake(["gpu-0"], False, 1.0) == "gpu-0"
        assert suspects.wake(["gpu-0", "gpu-1"], True, 0.5) == 1.0


def test_credit_is_earned_by_part_spent_at_its_price_and_saved_up_for_two_full_batches_at_most() -> None:
    suspects = Suspects()
    suspects.join(ANN, some("ann"), Group([], 5.0, QUARANTINE), 9)
    suspects.join(BOB, some("bob"), Group([], 5.0, QUARANTINE), 9)
    suspects.earn(0.3, 3, 1.0)
    assert suspects.credit == pytest.approx(0.3 * 2 / 3)
    suspects.earn(0.3, 1, 1.0)
    assert suspects.credit == pytest.approx(0.2 + 0.6)
    suspects.pay(next(iter(suspects.groups)), 0.1, 1.0, 4.0)
    assert suspects.credit == pytest.approx(0.4)
    for _ in range(100):
        suspects.earn(0.5, 1, 0.5)
    assert suspects.credit == pytest.approx(MOST_CREDIT * 0.5)


def test_one_that_never_ran_keeps_its_queue_deadline_and_is_told_at_its_last_moment() -> None:
    [queued] = some("a")
    assert last_moment(queued) == 2.0
    queued.attempts = 1
    assert last_moment(queued) == 4.0
    suspects, members = Suspects(), some("a", "b")
    suspects.add(Group(members[:1], 0.0, FIRST))
    suspects.add(Group(members[1:], 0.0, FIRST, 1, 1))
    assert (suspects.due, suspects.overdue(1.9)) == (2.0, [])
    assert suspects.overdue(2.0) == members[:1]
    assert suspects.due == 4.0


class Line:
    def __init__(self, bad: bool = False) -> None:
        self.bad, self.failures, self.alone = bad, 0, 0
        self.runs = self.runs_alone = 0


@pytest.fixture
def found() -> LineSuspects:
    return LineSuspects(lambda: 0.0)


def search(lines: Sequence[Line], cause: Cause, found: LineSuspects) -> list[Line]:
    """Run lines, together at first, until each has its outcome. Returns those that were given up on."""
    waiting, ended = deque([lines]), []
    while waiting:
        group = waiting.popleft()
        for line in group:
            line.runs += 1
            line.runs_alone += len(group) == 1
        if any(line.bad for line in group):
            groups = found.failed("t", group, cause, len(group))
            waiting.extend(groups)
            over = list(group) if not groups else []
        else:
            over = list(group)
        for line in over:
            found.ended("t", line)
            if line.bad:
                ended.append(line)
    return ended


@given(
    st.lists(st.sampled_from([True, False, False, False, False, False]), min_size=1, max_size=40).filter(
        lambda bad: sum(bad) < 6
    ),
    st.sampled_from([Cause.RAISED, Cause.TIMEOUT, Cause.CRASHED]),
)
def test_bad_lines_alone_are_given_up_and_no_tenant_stays_suspected(bad: list[bool], cause: Cause) -> None:
    lines, found = [Line(one) for one in bad], LineSuspects(lambda: 0.0)
    given_up = search(lines, cause, found)
    assert Counter(map(id, given_up)) == Counter(id(line) for line in lines if line.bad)
    assert all(line.runs_alone >= (1 if cause in SEARCHED else DEATHS_ALONE) for line in given_up)
    assert all(line.runs <= 2 * MAX_ATTEMPTS + 8 for line in lines)
    for _ in range(CLEAN * 2 ** max(sum(bad) - 1, 0)):  # As many as the tenant owes after the last bad line.
        assert bool(found.shape("t")) == any(bad)
        found.succeeded("t", 1, 8)
    assert found.shape("t") == 0


def test_what_a_tenant_owes_doubles_with_each_bad_line(found: LineSuspects) -> None:
    for times in range(3):
        search([Line(bad=True)], Cause.RAISED, found)
        for _ in range(CLEAN * 2**times):
            assert found.shape("t")
            found.succeeded("t", 1, 8)
        assert found.shape("t") == 0
    assert found.shape("another") == 0


def test_lines_with_large_outputs_ride_apart_as_many_as_have_room(found: LineSuspects) -> None:
    size = MOST_OUTPUT // 3
    assert found.succeeded("t", size, 8)
    assert not found.succeeded("t", size, 8), "it is told once"
    shapes = [found.shape("t") for _ in range(9)]
    assert len(set(shapes)) == 3
    assert all(shapes.count(shape) == 3 for shape in shapes)
    for _ in range(CLEAN):
        found.succeeded("t", 1, 8)
    assert found.shape("t") == 0


@pytest.mark.parametrize("ran", [0.1, 10.0])
def test_groups_of_a_tenant_that_killed_a_worker_rest_one_after_another(found: LineSuspects, ran: float) -> None:
    each = max(LEAST_REST, RESTS * ran)
    assert found.rest("t", 3, ran, 100.0) == [each, 2 * each, 3 * each]
    assert found.rest_left("t", 100.0) == 4 * each
    assert found.rest("t", 1, ran, 100.0) == [5 * each]
    assert (found.rest_left("t", 1e9), found.rest_left("another", 0.0)) == (0.0, 0.0)


@pytest.mark.parametrize(("cause", "longer"), [(Cause.RAISED, 1), (Cause.TIMEOUT, 8), (Cause.CRASHED, 8)])
def test_a_rest_doubles_with_each_line_that_has_killed_a_worker_and_not_with_others(
    found: LineSuspects, cause: Cause, longer: int
) -> None:
    for _ in range(3):
        search([Line(bad=True)], cause, found)
    assert found.rest("t", 1, 0.1, 100.0) == [longer * LEAST_REST]


@pytest.mark.parametrize(("cause", "longer"), [(Cause.RAISED, False), (Cause.REMOTE, True)])
def test_lines_pause_longer_and_longer_while_a_remote_api_fails(cause: Cause, longer: bool) -> None:
    line, pauses = Line(), []
    for line.failures in (1, 3):
        pauses.append(line_pause([[line]], cause, 1.0))
    assert (pauses[1] > 4 * pauses[0]) == longer
