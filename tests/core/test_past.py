"""Past of a queue: records of arrivals, and clients that wait for their answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.batch import RunningBatches
from headway.core.past import ENOUGH, EVERY, FEWEST, MOST, Past

NOTHING = RunningBatches()


def ends(past: Past, count: int, together: list[int], newest: float) -> None:
    """End batches a tenth of a second apart; the latest arrival lies at this part of the gap before each."""
    for number in range(count):
        now = number / 10
        past.ended(together[number % len(together)], NOTHING, now - 0.1 + newest * 0.1, now)


class TestClients:
    def test_as_many_entries_at_each_end_that_came_with_the_answers_are_clients(self) -> None:
        past = Past()
        ends(past, ENOUGH - 1, [16], newest=0.02)
        assert past.clients == 0
        ends(past, ENOUGH, [16, 16, 16, 15], newest=0.02)
        assert past.clients == 16

    def test_clients_that_ask_again_at_the_very_end_of_a_batch_are_seen_too(self) -> None:
        past = Past()
        for number in range(2 * ENOUGH):
            past.ended(64, NOTHING, (number - 1) / 8, number / 8)
        assert past.clients == 64

    def test_clients_are_counted_where_their_requests_have_rows(self) -> None:
        """16 clients with 4 rows each, of which 4 wait and 48 rows run."""
        past, running = Past(), RunningBatches()
        running.left(48.0, 1, 0.0)
        past.each = 4.0
        for number in range(EVERY * ENOUGH):
            now = 0.1 * (number + 1)
            past.ended(4, running, now - 0.08, now)
        assert past.clients == 16

    def test_even_arrivals_are_none(self) -> None:
        past = Past()
        ends(past, 100, [16], newest=0.9)
        assert past.clients == 0

    @pytest.mark.parametrize("seed", range(5))
    def test_entries_whose_number_varies_are_none(self, seed: int) -> None:
        past, rng = Past(), random.Random(seed)
        ends(past, 200, [rng.randint(8, 24) for _ in range(51)], newest=0.02)
        assert past.clients == 0

    def test_clients_that_were_seen_are_clients_still_while_their_answers_lie_close(self) -> None:
        """Where batches of several slots end at nearly one instant, the time until the next end says little."""
        past = Past()
        for number in range(200):
            now = number / 10
            past.ended(16, NOTHING, now - (0.1 if number < 40 else 0.05), now)
            assert past.clients == (16 if number >= ENOUGH - 1 else 0)
        for number in range(200, 400):
            past.ended(16, NOTHING, number / 10 - 0.01, number / 10)
        assert past.clients == 0

    def test_clients_that_stop_are_forgotten(self) -> None:
        past = Past()
        ends(past, 40, [16], newest=0.02)
        for number in range(40, 80):
            past.ended(number % 9 + 1, NOTHING, number / 10 - 0.01, number / 10)
        assert past.clients == 0


class TestRecord:
    def test_a_record_is_taken_once_it_is_long_enough(self) -> None:
        past = Past()
        for number in range(FEWEST - 1):
            past.left([number * 0.01], number * 0.01)
        assert past.take(1.0) == []
        past.left([5.0], 10.0)
        assert past.take(60.0) == []
        record = past.take(1.0)
        assert len(record) == FEWEST
        assert record == sorted(record)

    def test_nothing_is_noted_while_a_record_is_looked_at(self) -> None:
        past = Past()
        past.left([0.0] * FEWEST, 0.0)
        assert past.take(0.0)
        past.left([1.0] * FEWEST, 1.0)
        assert past.take(0.0) == []
        past.resume(2.0)
        past.left([1.5] * FEWEST, 1.9)
        assert past.take(0.0) == []
        past.left([1.9] * FEWEST, 2.0)
        assert past.take(0.0)

    @given(st.lists(st.integers(1, 400), max_size=60))
    def test_a_record_is_bounded(self, sizes: list[int]) -> None:
        past, now = Past(), 0.0
        for size in sizes:
            now += 1e-3
            past.left([now] * size, now)
        assert len(past.take(1e9)) < MOST + 400
