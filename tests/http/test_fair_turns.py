"""Turns on an event loop: tenants alternate, and other work gets time too."""

from collections.abc import Callable

import pytest

from headway.runtime.fair_turns import MILLISECOND, FairTurns


class Loop:
    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.due.append((self.now, callback))

    def call_later(self, pause: float, callback: Callable[[], None]) -> None:
        self.due.append((self.now + pause, callback))

    def next(self) -> float:
        """Run the only scheduled callback, and return when it was due."""
        [(self.now, callback)] = self.due
        self.due.clear()
        begun = self.now
        callback()
        return begun


class Work:
    """Simulated work that takes time on the loop. `done` lists the names of the pieces that ran."""

    def __init__(self, budget: float = 0.0, rests: bool = True) -> None:
        self.loop, self.done = Loop(), list[str]()
        self.turns = FairTurns(lambda: self.loop.now, self.loop, budget=budget, rests=rests)  # type: ignore[arg-type]

    def wait(self, tenant: str, name: str, seconds: float, again: int = 0) -> None:
        def begin() -> None:
            self.done.append(name)
            self.loop.now += seconds
            if again:
                self.wait(tenant, name, seconds, again - 1)

        self.turns.wait(tenant, begin)


def test_tenants_take_turns_and_the_loop_is_free_for_as_long_as_each_took() -> None:
    work = Work()
    for number in range(3):
        work.wait("flood", f"flood {number}", 0.25)
    work.wait("other", "other", 0.5)
    assert [work.loop.next() for _ in range(4)] == [0.0, 0.5, 1.5, 2.0]
    assert (work.done, work.loop.due) == (["flood 0", "other", "flood 1", "flood 2"], [])
    work.wait("other", "last", 0.0)
    assert work.loop.next() == 2.5, "one that comes later leaves the pause to others, too"
    work.wait("other", "steps", 0.25, again=2)
    assert [work.loop.next() for _ in range(3)] == [2.5, 3.0, 3.5], "so does each step of a longer piece"
    assert work.loop.due == []


@pytest.mark.parametrize(("milliseconds", "each"), [(5.0, 1), (0.4, 3), (0.1, 10)])
def test_a_turn_with_a_budget_is_given_to_several_pieces(milliseconds: float, each: int) -> None:
    work = Work(budget=MILLISECOND, rests=False)
    for number in range(20):
        work.wait("flood", f"flood {number}", milliseconds / 1000)
    work.wait("other", "other", milliseconds / 1000)
    sizes = []
    while work.loop.due:
        before = len(work.done)
        work.loop.next()
        sizes.append(len(work.done) - before)
    assert work.done[:3] == ["flood 0", "other", "flood 1"]
    assert max(sizes) <= each + 1
    assert sizes[0] in (each, each + 1), "the last one begins before the budget is spent"


def test_who_comes_in_a_turn_waits_for_the_next() -> None:
    work = Work(budget=MILLISECOND, rests=False)
    work.wait("a", "again", 0.0, again=4)
    for count in range(1, 6):
        work.loop.next()
        assert len(work.done) == count
    assert work.loop.due == []
