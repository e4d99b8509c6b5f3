"""Estimate of the server's clock: the best of recent answers, until that clock was put back."""

from __future__ import annotations

import pytest

from headway.brokers.redis.steps import PUT_BACK, WINDOW, ServerClock


class Two:
    """Clock of this process, and an estimate of the server's, which is ahead by some seconds. The loop's turn began a while ago."""

    def __init__(self) -> None:
        self.here, self.ahead, self.turn_began = 10.0, 1000.0, 0.0
        self.estimate = ServerClock(lambda: self.here - self.turn_began, lambda: self.here)

    def answer(self, seconds: float = 0.0) -> None:
        """An answer comes that took so long to arrive."""
        self.estimate.learn(self.here + self.ahead - seconds)

    @property
    def behind(self) -> float:
        """Seconds by which the estimate is behind the server's clock."""
        until = self.estimate.after(0.0)
        assert until is not None
        return self.here + self.ahead - until


def test_nothing_is_known_before_the_first_answer() -> None:
    two = Two()
    assert two.estimate.after(1.0) is None
    assert two.estimate.now() == two.here


def test_an_answer_that_took_long_to_arrive_does_not_spoil_the_estimate() -> None:
    two = Two()
    for seconds in (0.2, 0.01, 0.9, 0.3):
        two.answer(seconds)
        two.here += 1.0
    assert two.behind == pytest.approx(0.01)
    assert two.estimate.after(1.0) == pytest.approx(two.here + two.ahead + 0.99)


def test_the_first_answer_of_a_window_does_not_either() -> None:
    two = Two()
    two.answer(0.01)
    two.here += WINDOW + 1.0
    two.answer(0.9)
    assert two.behind == pytest.approx(0.01)


def test_an_answer_that_is_read_when_a_turn_of_the_loop_has_lasted_long_does_not_put_the_server_ahead() -> None:
    two = Two()
    two.turn_began = 0.5
    two.answer(0.6)
    two.turn_began = 0.0
    assert two.behind == pytest.approx(0.6)


def test_what_was_good_two_windows_ago_is_forgotten_as_clocks_drift() -> None:
    two = Two()
    two.answer()
    two.ahead -= 0.1
    for _ in range(2):
        two.here += WINDOW + 1.0
        two.answer()
    assert two.behind == pytest.approx(0.0)


@pytest.mark.parametrize("seconds", [-3600.0, -PUT_BACK - 0.1, 0.5, 3600.0])
def test_a_clock_that_is_put_to_another_instant_is_believed_at_the_next_answer(seconds: float) -> None:
    two = Two()
    two.answer(0.01)
    two.ahead += seconds
    two.answer(0.02)
    assert two.behind == pytest.approx(0.02)
