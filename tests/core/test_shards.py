from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from headway.core.shards import active, choose, home, slots_at


class TestActive:
    @pytest.mark.parametrize(
        ("shards", "slots", "expected"),
        [(1, 64, 1), (16, 64, 16), (16, 16, 16), (16, 5, 5), (16, 1, 1), (4, 4, 4)],
    )
    def test_each_shard_in_use_has_a_slot(self, shards: int, slots: int, expected: int) -> None:
        assert active(shards, slots) == expected

    def test_while_no_worker_lives_one_shard_takes_what_comes(self) -> None:
        assert active(16, 0) == 1


class TestHome:
    @pytest.mark.parametrize(("slots", "shards"), list(itertools.product((1, 2, 5, 11, 16, 64), (1, 2, 3, 4, 16))))
    def test_is_balanced(self, slots: int, shards: int) -> None:
        workers = [f"host-{number}/gpu-0" for number in range(slots)]
        homes = Counter(home(worker, workers, shards) for worker in workers)
        assert set(homes) <= set(range(shards))
        assert [homes[shard] for shard in range(shards)] == [slots_at(shard, slots, shards) for shard in range(shards)]
        assert max(homes.values()) - min(homes[shard] for shard in range(shards)) <= 1

    def test_does_not_depend_on_the_order_in_which_workers_are_seen(self) -> None:
        workers = [f"host-{number}/gpu-0" for number in range(7)]
        mixed = random.Random(0).sample(workers, 7)
        assert [home(worker, workers, 3) for worker in workers] == [home(worker, mixed, 3) for worker in workers]

    def test_a_newcomer_knows_its_home_before_others_know_it(self) -> None:
        others = ["a", "b", "d"]
        assert home("c", others, 3) == home("c", ["a", "b", "c", "d"], 3)

    def test_of_nobody(self) -> None:
        assert home("a", [], 1) == 0


class TestSlotsAt:
    def test_adds_up_to_all(self) -> None:
        assert [slots_at(shard, 11, 4) for shard in range(4)] == [3, 3, 3, 2]

    def test_of_a_shard_that_is_not_in_use(self) -> None:
        assert [slots_at(shard, 2, 2) for shard in range(4)] == [1, 1, 0, 0]
        assert slots_at(0, 0, 1) == 0


class TestChoose:
    def test_the_only_one_needs_no_dice(self) -> None:
        def dice() -> float:
            raise AssertionError("rolled")

        assert choose([7.0], dice) == 0

    def test_the_emptier_of_two(self) -> None:
        rolls = random.Random(0)
        assert {choose([3.0, 2.0], rolls.random) for _ in range(50)} == {1}

    @pytest.mark.parametrize("rolls", [(0.0, 0.0), (0.999999, 0.999999), (0.5, 0.0), (0.0, 0.999999)])
    def test_two_different_ones_are_drawn(self, rolls: tuple[float, float]) -> None:
        """With the fuller of any two never taken, the fullest of all never is."""
        assert choose([1.0, 1.0, 9.0, 1.0], iter(rolls).__next__) != 2

    def test_equals_share_evenly(self) -> None:
        rolls = random.Random(1)
        counts = Counter(choose([0.0] * 4, rolls.random) for _ in range(8000))
        assert min(counts.values()) > 1850
        assert sum(counts.values()) == 8000

    def test_the_emptier_the_more_often_and_the_fullest_never(self) -> None:
        rolls = random.Random(2)
        counts = Counter(choose([0.0, 1.0, 2.0, 3.0], rolls.random) for _ in range(6000))
        assert counts[0] == pytest.approx(3000, abs=150)
        assert counts[1] == pytest.approx(2000, abs=150)
        assert counts[2] == pytest.approx(1000, abs=150)
        assert counts[3] == 0

    def test_keeps_loads_much_closer_together_than_one_choice(self) -> None:
        rolls = random.Random(3)
        depths = [0.0] * 16
        for _ in range(16_000):
            depths[choose(depths, rolls.random)] += 1.0
        assert max(depths) - min(depths) <= 10  # One choice leaves about 120 between them.
