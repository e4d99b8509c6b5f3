from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from headway.core.trace_context import Sampler
from headway.model import TraceContext

BITS = random.Random(7).getrandbits
PARENT = TraceContext(bytes(15) + b"\x07", bytes(7) + b"\x09", 1, "vendor=1")
UNSAMPLED = TraceContext(PARENT.trace_id, PARENT.span_id, 2)


@pytest.mark.parametrize("follows", [False, True])
def test_a_request_without_a_parent_is_sampled_by_the_ratio(follows: bool) -> None:
    assert all(Sampler(1.0, follows, BITS).begin(None) for _ in range(100))
    assert not any(Sampler(0.0, follows, BITS).begin(None) for _ in range(100))
    found = [one for _ in range(4000) if (one := Sampler(0.25, follows, BITS).begin(None)) is not None]
    assert 900 < len(found) < 1100
    assert all(int.from_bytes(one.trace_id[8:], "big") < 1 << 62 and any(one.trace_id[:8]) for one in found)
    assert len({one.trace_id for one in found}) == len({one.span_id for one in found}) == len(found)


@pytest.mark.parametrize("numbered", [True, False])
def test_each_request_has_the_same_chance_whatever_became_of_those_before_it(numbered: bool) -> None:
    sampler = Sampler(0.25, True, random.Random(3).getrandbits)
    taken = [sampler.draws(at) if numbered else sampler.begin(None) is not None for at in range(1, 20_001)]
    after = [now for before, now in pairwise(taken) if before]
    others = [now for before, now in pairwise(taken) if not before]
    assert sum(after) / len(after) == pytest.approx(0.25, abs=0.02)
    assert sum(others) / len(others) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(("ratio", "least"), [(1.0, 0), (0.0, 1 << 60), (1e-18, 1 << 40), (5e-324, 1 << 60)])
def test_a_share_at_its_ends_leaves_out_none_or_nearly_all(ratio: float, least: int) -> None:
    sampler = Sampler(ratio, True, BITS)
    assert sampler.due >= 1 + least
    assert ratio < 1 or all(sampler.due == number and sampler.draws(number) for number in range(1, 100))


@pytest.mark.parametrize("asked", [lambda number: number % 3 == 0, lambda number: number > 15_000])
def test_numbers_that_are_passed_over_change_no_chance(asked: Callable[[int], bool]) -> None:
    sampler = Sampler(0.25, True, random.Random(4).getrandbits)
    taken = [sampler.draws(number) for number in range(1, 20_001) if asked(number)]
    assert sum(taken) / len(taken) == pytest.approx(0.25, abs=0.02)


def test_requests_before_the_one_that_is_due_need_not_ask() -> None:
    all_ask, few_ask = (Sampler(0.1, True, random.Random(5).getrandbits) for _ in range(2))
    taken = [number for number in range(1, 2000) if all_ask.draws(number)]
    assert taken == [number for number in range(1, 2000) if number >= few_ask.due and few_ask.draws(number)]


def test_one_that_follows_does_as_its_parent_did() -> None:
    never, always = Sampler(0.0, True, BITS), Sampler(1.0, True, BITS)
    found = never.begin(PARENT)
    assert found is not None and found.span_id != PARENT.span_id
    assert (found.trace_id, found.flags, found.state) == (PARENT.trace_id, 1, "vendor=1")
    assert always.begin(UNSAMPLED) is None


def test_one_that_follows_nobody_goes_by_the_trace_id() -> None:
    found = Sampler(1.0, False, BITS).begin(UNSAMPLED)
    assert found is not None and (found.trace_id, found.flags) == (PARENT.trace_id, 3)
    low = Sampler(1e-9, False, BITS)
    assert low.begin(UNSAMPLED) is not None  # Its id is 7.
    high = TraceContext(b"\xff" * 16, PARENT.span_id, 1)
    assert low.begin(high) is None
    assert Sampler(0.0, False, BITS).begin(PARENT) is None


def test_a_span_below_is_of_the_same_trace_and_one_apart_is_not() -> None:
    sampler = Sampler(0.0, True, BITS)
    below, apart = sampler.below(PARENT), sampler.apart()
    assert (below.trace_id, below.flags, below.state) == (PARENT.trace_id, 1, "vendor=1")
    assert below.span_id != PARENT.span_id
    assert apart.sampled and apart.trace_id != PARENT.trace_id
