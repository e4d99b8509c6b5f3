"""Refusals of one caller are counted together."""

from __future__ import annotations

import msgspec
import pytest

from headway.core import ledger_records
from headway.core.ledger_records import MINUTE, RefusalCounts
from headway.errors import CANCELLED, NOT_FOUND, RATE_LIMITED
from headway.model import LedgerRecord

PLAIN = LedgerRecord(
    id="first", user="alice", tenant="acme", tier="paid", model="m", status="failed", created_at=10.0, completed_at=10.5,
    latency_ms=500.0, error=RATE_LIMITED, input="in",
)  # fmt: skip


def record(**changes: object) -> LedgerRecord:
    return msgspec.structs.replace(PLAIN, **changes)


def test_the_first_has_a_record_of_its_own_and_the_next_ones_one_together() -> None:
    it = RefusalCounts()
    assert not it.count(record(), 0.0)
    assert it.count(record(id="second", created_at=20.0, completed_at=20.1), 1.0)
    assert it.count(record(id="third", completed_at=30.0, latency_ms=900.0), MINUTE + 1.0)
    assert list(it.ended(MINUTE - 0.001)) == []
    [together] = it.ended(MINUTE)
    assert (together.id, together.requests, together.input, together.model) == ("second", 2, None, "m")
    assert (together.created_at, together.completed_at, together.latency_ms) == (20.0, 30.0, 900.0)
    assert not it.count(record(), MINUTE)
    assert list(it.ended()) == []


@pytest.mark.parametrize("other", [{"user": "bob"}, {"tenant": "globex"}, {"tier": "free"}, {"error": NOT_FOUND}])
def test_callers_tiers_and_codes_are_counted_apart(other: dict[str, str]) -> None:
    it = RefusalCounts()
    assert not it.count(record(), 0.0)
    assert not it.count(record(**other), 0.0)
    assert it.count(record(model="another"), 0.0)


@pytest.mark.parametrize("ended", [{"error": ""}, {"error": CANCELLED}, {"batch_size": 3}])
def test_what_was_taken_in_is_not_counted(ended: dict[str, object]) -> None:
    it = RefusalCounts()
    assert not any(it.count(record(**ended), 0.0) for _ in range(3))
    assert list(it.ended()) == []


def test_the_model_is_told_only_when_all_asked_the_same() -> None:
    it = RefusalCounts()
    for model in ("m", "m", "m", "other"):
        it.count(record(model=model), 0.0)
    [together] = it.ended()
    assert (together.model, together.requests) == ("", 3)


def test_no_content_is_kept_of_those_that_are_counted() -> None:
    it = RefusalCounts()
    for _ in range(2):
        it.count(record(input="in", output="out"), 0.0)
    [together] = it.ended()
    assert (together.input, together.output) == (None, None)


def test_no_more_are_counted_at_a_time_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_records, "MOST_COUNTED", 2)
    it = RefusalCounts()
    for user in ("a", "b", "c"):
        assert [it.count(record(user=user), 0.0) for _ in range(2)] == [False, True]
    assert [early.user for early in it.ended(0.0)] == ["a"]
    assert [rest.user for rest in it.ended()] == ["b", "c"]
