"""Behaviour of every broker towards the traces that entries carry: it hands them on as they are."""

from __future__ import annotations

from msgspec.structs import replace

from headway.model import Lease
from tests.contracts.brokers import AT_ONCE, Harness, ask, failed, slot, story

TRACE = bytes(range(33)) + b"vendor=1"


@story
async def test_a_trace_comes_with_its_entry_to_each_run_and_to_the_dead_letter(harness: Harness) -> None:
    traced, plain = replace(ask(id="a"), trace=TRACE), ask(id="b")
    await harness.broker.enqueue([traced, plain])
    first = await harness.claim()
    assert ({one.id: one.trace for one in first.entries}, first.attempt) == ({"a": TRACE, "b": b""}, 1)
    attempts = []
    await harness.broker.release(first, failed())
    for _ in range(20):
        claimed = await harness.broker.claim(slot("gpu-1"), AT_ONCE)
        if not isinstance(claimed, Lease):
            await harness.advance(0.5)
            continue
        if any(one.id == "a" for one in claimed.entries):
            attempts.append(claimed.attempt)
        assert all(one.trace == (TRACE if one.id == "a" else b"") for one in claimed.entries)
        await harness.broker.release(claimed, failed(worker="gpu-1"))
    assert attempts[0] == 2
    [letter] = await harness.dead.find("a")
    assert letter.entry.trace == TRACE


@story
async def test_a_lease_that_lapsed_counts_as_an_attempt(harness: Harness) -> None:
    await harness.broker.enqueue([replace(ask(id="a"), trace=TRACE)])
    await harness.claim("gpu-0")
    await harness.reaping(harness.lease_seconds + 1.0)
    again = await harness.claim("gpu-1")
    assert (again.attempt, [one.trace for one in again.entries]) == (2, [TRACE])
    await harness.answer(again)
