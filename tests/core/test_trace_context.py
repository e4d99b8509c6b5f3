import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.trace_context import (
    LONG_MEMBER,
    MOST_MEMBERS,
    MOST_STATE,
    Sampler,
    pack_carried,
    read_carried,
    read_trace_context,
    read_trace_state,
    trace_field,
    traceparent,
)
from headway.model import CarriedTrace, TraceContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01".encode()

ids = st.binary(min_size=16, max_size=16).filter(any), st.binary(min_size=8, max_size=8).filter(any)
keys = st.text("az09_-*/@", min_size=1, max_size=8).filter(lambda key: key[0].isalnum())
values = st.text("aZ9 !+-<>~", min_size=1, max_size=60).filter(lambda value: not value.endswith(" "))
states = st.dictionaries(keys, values, max_size=12).map(
    lambda members: ",".join(f"{key}={value}" for key, value in members.items())
)


def test_a_traceparent_names_trace_and_span() -> None:
    found = read_trace_context(GOOD)
    assert found == TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), 1)
    assert found.sampled and traceparent(found).encode() == GOOD


@pytest.mark.parametrize(("flags", "sampled", "passed"), [("00", False, 0), ("02", False, 2), ("03", True, 3), ("ff", True, 3), ("fc", False, 0)])  # fmt: skip
def test_flags_that_nobody_knows_are_not_passed_on(flags: str, sampled: bool, passed: int) -> None:
    found = read_trace_context(f"00-{TRACE}-{SPAN}-{flags}".encode())
    assert found is not None and (found.sampled, found.flags) == (sampled, passed)


@pytest.mark.parametrize("later", [b"01" + GOOD[2:], b"cc" + GOOD[2:] + b"-what-comes-later", b"fe" + GOOD[2:] + b"-"])
def test_a_later_version_is_read_as_far_as_this_one_knows_it(later: bytes) -> None:
    assert read_trace_context(later) == read_trace_context(GOOD)


@pytest.mark.parametrize(
    "value",
    [
        b"", b"00", GOOD + b"-", GOOD + b"-00", GOOD[:-1], GOOD.upper(), b"ff" + GOOD[2:], b"cc" + GOOD[2:] + b".x", b" " + GOOD,
        b"0" + GOOD, GOOD.replace(b"-", b"_"), f"00-{'0' * 32}-{SPAN}-01".encode(), f"00-{TRACE}-{'0' * 16}-01".encode(),
        GOOD + b", " + GOOD, GOOD.replace(b"a", b"g"), f"00-{TRACE[1:]}-{SPAN}-01".encode(),
    ],
)  # fmt: skip
def test_a_traceparent_that_is_malformed_counts_as_none(value: bytes) -> None:
    assert read_trace_context(value, b"a=1") is None


@given(st.binary(max_size=80))
def test_no_value_of_a_traceparent_raises(value: bytes) -> None:
    found = read_trace_context(value, value)
    assert found is None or len(found.trace_id) == 16


@given(states)
def test_a_good_tracestate_is_passed_on_in_order(state: str) -> None:
    found = read_trace_state(state.encode())
    assert len(found) <= MOST_STATE
    members = state.split(",") if state else []
    kept = found.split(",") if found else []
    assert [one for one in members if one in kept] == kept
    if len(state) <= MOST_STATE:
        assert found == state


def test_blanks_and_empty_members_of_a_tracestate_are_left_out() -> None:
    assert read_trace_state(b" a=1 ,,\t b@c=x y , ") == "a=1,b@c=x y"


@pytest.mark.parametrize(
    "value",
    [
        b"a", b"a=", b"=1", b"A=1", b"a=1,a=2", b"a=1=2", b"a=\x7f", b"a=\xe9", b"a" * 257 + b"=1", b"a=" + b"1" * 257,
        b",".join(b"k%d=1" % n for n in range(MOST_MEMBERS + 1)),
    ],
)  # fmt: skip
def test_a_tracestate_that_is_malformed_is_dropped_and_the_trace_goes_on(value: bytes) -> None:
    found = read_trace_context(GOOD, value)
    assert found is not None and found.state == ""


def test_of_a_long_tracestate_long_members_are_left_out_first_and_then_the_last() -> None:
    short = [f"k{n}={'v' * 20}" for n in range(20)]
    long = f"big={'x' * LONG_MEMBER}"
    assert read_trace_state(",".join([long, *short[:17]]).encode()) == ",".join(short[:17])
    assert read_trace_state(",".join([*short, long]).encode()) == ",".join(short)
    many = [f"k{n}={'v' * 30}" for n in range(20)]
    kept = read_trace_state(",".join(many).encode()).split(",")
    assert kept == many[: len(kept)] and len(",".join(many[: len(kept) + 1])) > MOST_STATE


@given(st.builds(CarriedTrace, st.builds(TraceContext, *ids, st.integers(0, 3), states), st.integers(0, 2**63)))
def test_what_an_entry_carries_comes_out_as_it_went_in(carried: CarriedTrace) -> None:
    packed = pack_carried(carried)
    assert read_carried(packed) == carried
    assert trace_field(packed) == {"trace_id": carried.context.trace_id.hex()}
    assert trace_field(b"") == {}


@given(st.binary(max_size=100))
def test_what_cannot_be_read_of_an_entry_is_no_trace(packed: bytes) -> None:
    assert (read_carried(packed) is None) == (len(packed) < 33)


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


def test_requests_before_the_one_that_is_due_need_not_ask() -> None:
    all_ask, few_ask = (Sampler(0.1, True, random.Random(5).getrandbits) for _ in range(2))
    taken = [number for number in range(1, 2000) if all_ask.draws(number)]
    assert taken == [number for number in range(1, 2000) if number >= few_ask.due and few_ask.draws(number)]


def test_one_that_follows_does_as_its_parent_did_or_goes_by_the_trace_id() -> None:
    never, always = Sampler(0.0, True, BITS), Sampler(1.0, True, BITS)
    found = never.begin(PARENT)
    assert found is not None and found.span_id != PARENT.span_id
    assert (found.trace_id, found.flags, found.state) == (PARENT.trace_id, 1, "vendor=1")
    assert always.begin(UNSAMPLED) is None
    found = Sampler(1.0, False, BITS).begin(UNSAMPLED)
    assert found is not None and (found.trace_id, found.flags) == (PARENT.trace_id, 3)
    low = Sampler(1e-9, False, BITS)
    assert low.begin(UNSAMPLED) is not None  # Its id is 7.
    assert low.begin(TraceContext(b"\xff" * 16, PARENT.span_id, 1)) is None
    assert Sampler(0.0, False, BITS).begin(PARENT) is None


def test_a_span_below_is_of_the_same_trace_and_one_apart_is_not() -> None:
    sampler = Sampler(0.0, True, BITS)
    below, apart = sampler.below(PARENT), sampler.apart()
    assert (below.trace_id, below.flags, below.state) == (PARENT.trace_id, 1, "vendor=1")
    assert below.span_id != PARENT.span_id
    assert apart.sampled and apart.trace_id != PARENT.trace_id
