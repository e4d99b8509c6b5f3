"""The search for bad lines of bulk jobs: who runs again with whom, who is to blame, and who rides apart or rests for how long."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.retry import DEATHS_ALONE, MAX_ATTEMPTS, SEARCHED
from headway.core.suspects import CLEAN, LEAST_REST, RESTS, LineSuspects, line_pause
from headway.model import MOST_OUTPUT, Cause


class Line:
    def __init__(self, bad: bool = False) -> None:
        self.bad, self.failures, self.alone = bad, 0, 0
        self.runs = self.runs_alone = 0


def suspects() -> LineSuspects:
    return LineSuspects(lambda: 0.0)


def search(lines: Sequence[Line], cause: Cause, found: LineSuspects) -> list[Line]:
    """Run lines, together at first, until each has its outcome. Returns those that were given up."""
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
    lines, found = [Line(one) for one in bad], suspects()
    given_up = search(lines, cause, found)
    assert Counter(map(id, given_up)) == Counter(id(line) for line in lines if line.bad)
    assert all(line.runs_alone >= (1 if cause in SEARCHED else DEATHS_ALONE) for line in given_up)
    assert all(line.runs <= 2 * MAX_ATTEMPTS + 8 for line in lines)
    for _ in range(CLEAN * 2 ** max(sum(bad) - 1, 0)):  # As many as the last of them has it owe.
        assert bool(found.shape("t")) == any(bad)
        found.succeeded("t", 1, 8)
    assert found.shape("t") == 0


def test_what_a_tenant_owes_doubles_with_each_bad_line() -> None:
    found = suspects()
    for times in range(3):
        search([Line(bad=True)], Cause.RAISED, found)
        for _ in range(CLEAN * 2**times):
            assert found.shape("t")
            found.succeeded("t", 1, 8)
        assert found.shape("t") == 0
    assert found.shape("another") == 0


def test_lines_with_large_outputs_ride_apart_as_many_as_have_room() -> None:
    found, size = suspects(), MOST_OUTPUT // 3
    assert found.succeeded("t", size, 8)
    assert not found.succeeded("t", size, 8), "it is told once"
    shapes = [found.shape("t") for _ in range(9)]
    assert len(set(shapes)) == 3
    assert all(shapes.count(shape) == 3 for shape in shapes)
    for _ in range(CLEAN):
        found.succeeded("t", 1, 8)
    assert found.shape("t") == 0


@pytest.mark.parametrize("ran", [0.1, 10.0])
def test_groups_of_a_tenant_that_killed_a_worker_rest_one_after_another(ran: float) -> None:
    found, each = suspects(), max(LEAST_REST, RESTS * ran)
    assert found.rest("t", 3, ran, 100.0) == [each, 2 * each, 3 * each]
    assert found.rest_left("t", 100.0) == 4 * each
    assert found.rest("t", 1, ran, 100.0) == [5 * each]
    assert (found.rest_left("t", 1e9), found.rest_left("another", 0.0)) == (0.0, 0.0)


@pytest.mark.parametrize(("cause", "longer"), [(Cause.RAISED, 1), (Cause.TIMEOUT, 8), (Cause.CRASHED, 8)])
def test_a_rest_doubles_with_each_line_that_has_killed_a_worker_and_not_with_others(cause: Cause, longer: int) -> None:
    found = suspects()
    for _ in range(3):
        search([Line(bad=True)], cause, found)
    assert found.rest("t", 1, 0.1, 100.0) == [longer * LEAST_REST]


@pytest.mark.parametrize(("cause", "longer"), [(Cause.RAISED, False), (Cause.REMOTE, True)])
def test_lines_pause_longer_and_longer_while_a_remote_api_fails(cause: Cause, longer: bool) -> None:
    line = Line()
    pause: Callable[[], float] = lambda: line_pause([[line]], cause, 1.0)  # noqa: E731
    line.failures = 1
    first = pause()
    line.failures = 3
    assert (pause() > 4 * first) == longer
