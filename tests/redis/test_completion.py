"""The bound on the outputs of one completion, and who is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from headway import errors
from headway.backends.process.frames import MAX_OUTPUT
from headway.brokers.redis.completion import MOST_BYTES, fitting
from headway.model import Entry, EntryState, ItemResult, Lease, Reply
from tests.contracts.brokers import ask, drained, story
from tests.contracts.shares import admit, task
from tests.contracts.shares import sharing as asked_with
from tests.redis.stand import Stand
from tests.servers.redis import RedisServer


@pytest.fixture
def harness(own: Callable[[str], RedisServer]) -> Iterator[Stand]:
    made = Stand(own("redis"))
    yield made
    made.close()


def left(entries: list[Entry], sizes: list[int], most: int, letter: str = "x") -> list[bool]:
    """Whether each output is still there."""
    return [item.output is not None for item in fitting(entries, [ItemResult(letter * size) for size in sizes], most)]


def test_what_fits_stays_as_it_is() -> None:
    items = [ItemResult("x" * 50), ItemResult(None, "no"), ItemResult("é" * 25)]
    assert fitting([ask() for _ in items], items, 100) is items


def test_the_largest_outputs_of_a_tenant_are_left_out() -> None:
    assert left([ask() for _ in range(4)], [60, 10, 50, 20], 100) == [False, True, True, True]


def test_a_tenant_with_many_large_outputs_costs_no_other_its_own() -> None:
    entries = [ask(tenant="greedy") for _ in range(8)] + [ask(tenant="modest")]
    assert left(entries, [12] * 8 + [12], 30) == [True, *[False] * 7, True]


def test_bytes_count_and_not_characters() -> None:
    assert left([ask(), ask()], [30, 30], 100, "é") == [True, False]


def test_an_output_that_is_sent_twice_counts_twice() -> None:
    assert left([asked_with("first", task("first")), ask()], [40, 30], 100) == [False, True]


def test_the_largest_output_fits_alone_in_any_case() -> None:
    assert 2 * MAX_OUTPUT <= MOST_BYTES


@story
async def test_an_output_too_many_fails_and_the_rest_is_answered(
    harness: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.brokers.redis.broker.fitting", lambda entries, items: fitting(entries, items, 100))
    await admit(harness, asked_with("large", task("large")), ask(id="small"))
    lease = await harness.claim()
    assert isinstance(lease, Lease)
    outputs = [ItemResult("x" * (60 if entry.id == "large" else 20)) for entry in lease.entries]
    assert (await harness.broker.complete(lease, outputs)).answered == 2
    replies = await drained(harness)
    assert replies["small"].output == "x" * 20
    failure = replies["large"].failure
    assert failure is not None
    assert (failure.code, failure.reason) == (errors.BACKEND_ERROR, "item")
    kept: Reply | EntryState | None = await harness.broker.outcome("t", "large")
    assert isinstance(kept, Reply)
    assert kept.failure == failure
