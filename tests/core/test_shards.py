import itertools
import random
from collections import Counter

import pytest

from headway.core.shards import SLOTS_EACH, active, behind, home, in_turn, of_tenant, part, parts, slots_at

FLEETS = list(itertools.product((1, 2, 5, 11, 16, 64), (1, 2, 3, 4, 16)))


class TestActive:
    @pytest.mark.parametrize(
        ("shards", "slots", "expected"),
        [(1, 64, 1), (16, 64, 16), (16, 1000, 16), (16, 63, 15), (16, 11, 2), (16, 8, 2), (16, 7, 1), (16, 1, 1)],
    )
    def test_each_shard_in_use_has_slots_enough(self, shards: int, slots: int, expected: int) -> None:
        assert active(shards, slots) == expected

    def test_while_no_worker_lives_one_shard_takes_what_comes_and_else_none_has_fewer_slots(self) -> None:
        assert active(16, 0) == 1
        for slots in range(SLOTS_EACH, 100):
            used = active(16, slots)
            assert min(slots_at(shard, slots, used) for shard in range(used)) >= SLOTS_EACH


class TestHome:
    def test_is_balanced(self) -> None:
        for slots, shards in FLEETS:
            workers = [f"host-{number}/gpu-0" for number in range(slots)]
            homes = Counter(home(worker, workers, shards) for worker in workers)
            assert set(homes) <= set(range(shards))
            here = [homes[shard] for shard in range(shards)]
            assert here == [slots_at(shard, slots, shards) for shard in range(shards)]
            assert slots_at(shards, slots, shards) == 0
            assert max(here) - min(here) <= 1

    def test_depends_on_no_order_and_a_newcomer_knows_it_before_others_know_the_newcomer(self) -> None:
        workers = [f"host-{number}/gpu-0" for number in range(7)]
        mixed = random.Random(0).sample(workers, 7)
        assert [home(worker, workers, 3) for worker in workers] == [home(worker, mixed, 3) for worker in workers]
        assert home("c", ["a", "b", "d"], 3) == home("c", ["a", "b", "c", "d"], 3)
        assert home("a", [], 1) == 0


class TestInTurn:
    def test_each_shard_gets_its_slots_share(self) -> None:
        for slots, shards in FLEETS:
            counts = Counter(in_turn(turn, slots, shards) for turn in range(1000, 1000 + 3 * slots))
            due = [3 * slots_at(shard, slots, shards) for shard in range(shards)]
            assert [counts[shard] for shard in range(shards)] == due


class TestOfTenant:
    def test_one_more_shard_moves_only_who_goes_there(self) -> None:
        tenants = [f"tenant {number}" for number in range(2000)]
        for count in range(1, 17):
            before, after = ([of_tenant(tenant, shards) for tenant in tenants] for shards in (count, count + 1))
            assert max(before) < count
            assert {there for here, there in zip(before, after, strict=True) if here != there} == {count}
            assert 0.5 < after.count(count) / (len(tenants) / (count + 1)) < 1.5

    def test_is_the_same_in_every_process_and_release(self) -> None:
        shards = [of_tenant(tenant, 1000) for tenant in ("acme", "globex", "", "ü\ud800")]
        assert shards == [126, 779, 22, 575]
        assert of_tenant("", 1) == of_tenant("\ud800", 1) == 0


class TestPart:
    def test_of_a_batch_is_never_nothing(self) -> None:
        assert [part(size) for size in (100, 32, 3, 2, 1)] == [25, 8, 1, 1, 1]

    @pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (25, 1), (26, 2), (100, 4)])
    def test_a_group_is_cut_into_as_few_as_will_do(self, count: int, expected: int) -> None:
        assert parts(count, 100) == expected


class TestBehind:
    @pytest.mark.parametrize(("depth", "expected"), [(0, False), (100, False), (149, False), (150, True), (400, True)])
    def test_a_full_batch_and_half_another(self, depth: int, expected: bool) -> None:
        assert behind(depth, 4, 100) is expected

    def test_a_shard_without_slots_lives_on_help(self) -> None:
        assert behind(1, 0, 100)
        assert not behind(0, 0, 100)
