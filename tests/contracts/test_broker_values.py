"""Promises of every broker on values that are no texts: they come out as they went in, wherever they are kept."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.brokers.redis import entry_wire
from headway.model import DedupKind, Entry, ItemResult, Octets, Reply, TokenCount, Value
from tests.contracts.brokers import EXAMPLES, Harness, ask, drained, failed, output, tensors
from tests.contracts.dedup_keys import TTL, admit, came_by, key, poll, task
from tests.core.test_values import TREES

OCTETS = Octets(bytes(range(256)))
TENSORS = tensors(3)
ASKED = '{"a":[1,"é",null]}'.encode()


@pytest.mark.parametrize("harness", (*EXAMPLES, "apart"), indirect=True)
async def test_a_json_value_goes_to_the_worker_and_its_answer_back(harness: Harness) -> None:
    inputs: list[Value] = [ASKED, b"[]", "text", '"quoted"', b'"quoted"', b"x" * 100_000, OCTETS, TENSORS]
    entries = [ask(value, id=f"id-{place}") for place, value in enumerate(inputs)]
    assert list(await harness.broker.enqueue(entries)) == [None] * len(entries)
    lease = await harness.claim()
    assert [entry.input for entry in lease.entries] == inputs
    await harness.answer(lease)
    replies = await drained(harness)
    assert [replies[entry.id].output for entry in entries] == [output(value) for value in inputs]


async def test_a_json_answer_is_kept_shared_and_asked_for_by_any_gateway(harness: Harness) -> None:
    first = ask(ASKED, id="first", dedup_keys=(task("first"), key()))
    await admit(harness, first, ask(ASKED, id="follower", dedup_keys=(key(),)), poll("poll", "first"))
    await harness.answer(await harness.claim())
    replies = await drained(harness)
    assert {replies[id].output for id in ("first", "follower", "poll")} == {output(ASKED)}
    await admit(harness, ask(ASKED, id="later", gateway="other", dedup_keys=(key(),)))
    [later] = (await drained(harness, "other")).values()
    assert (came_by(later), later.output) == ((DedupKind.KEY, True), output(ASKED))
    for broker in (harness.broker, harness.peer()):
        kept = await broker.outcome("t", "first")
        assert isinstance(kept, Reply)
        assert kept.output == output(ASKED)
    await harness.advance(TTL + 1.0)
    assert await harness.broker.outcome("t", "first") is None


async def test_a_json_input_that_fails_alone_is_a_dead_letter_and_known(harness: Harness) -> None:
    await harness.broker.enqueue([ask(ASKED, id="bad", caller="ada")])
    for _ in range(2):
        await harness.broker.release(await harness.claim(), failed())
        await harness.advance(1.0)
    [letter] = await harness.dead.find("bad")
    assert letter.entry.input == ASKED
    again = [ask(ASKED, caller="ada"), ask(ASKED.decode(), caller="ada"), ask(b"[]", caller="ada")]
    known = await harness.broker.enqueue(again)
    assert [failure is not None for failure in known] == [True, False, False]


@pytest.mark.parametrize("harness", (*EXAMPLES, "apart"), indirect=True)
@pytest.mark.parametrize("value", [OCTETS, TENSORS, tensors(5, bytes(2_000))], ids=["octets", "tensors", "large"])
async def test_octets_are_kept_shared_and_a_dead_letter_as_they_are(harness: Harness, value: Octets) -> None:
    first = ask(value, id="first", dedup_keys=(task("first"), key()))
    await admit(harness, first, ask(value, id="follower", dedup_keys=(key(),)), poll("poll", "first"))
    await harness.answer(await harness.claim())
    replies = await drained(harness)
    assert {id: replies[id].output for id in ("first", "follower", "poll")} == dict.fromkeys(replies, output(value))
    kept = await harness.broker.outcome("t", "first")
    assert isinstance(kept, Reply)
    assert kept.output == output(value)
    await harness.broker.enqueue([ask(value, id="bad", caller="ada")])
    for _ in range(2):
        await harness.broker.release(await harness.claim(), failed())
        await harness.advance(1.0)
    [letter] = await harness.dead.find("bad")
    assert (letter.entry.input, type(letter.entry.input)) == (value, type(value))
    assert [failure is not None for failure in await harness.broker.enqueue([ask(value, caller="ada")])] == [True]


async def test_the_tokens_of_a_run_go_with_its_answer_to_all_who_share_it(harness: Harness) -> None:
    first = ask("a", id="first", dedup_keys=(task("first"), key()))
    await admit(
        harness, first, ask("a", id="follower", dedup_keys=(key(),)), poll("poll", "first"), ask("b", id="untold")
    )
    lease = await harness.claim()
    used = {"first": TokenCount(7, 3)}
    await harness.broker.complete(lease, [ItemResult("x", tokens=used.get(entry.id)) for entry in lease.entries])
    replies = await drained(harness)
    told = {id: reply.tokens for id, reply in replies.items()}
    assert told == {"first": TokenCount(7, 3), "follower": TokenCount(7, 3), "poll": TokenCount(7, 3), "untold": None}
    await admit(harness, ask("a", id="later", gateway="other", dedup_keys=(key(),)))
    [later] = (await drained(harness, "other")).values()
    assert (later.kept, later.tokens) == (True, TokenCount(7, 3))
    for broker in (harness.broker, harness.peer()):
        kept = await broker.outcome("t", "first")
        assert isinstance(kept, Reply)
        assert kept.tokens == TokenCount(7, 3)


@given(st.binary())
def test_octets_are_packed_for_redis_and_read_as_they_were(octets: bytes) -> None:
    entry = Entry("id", "m", Octets(octets), 0, "t", "g", 1.0, 1.0)
    assert entry_wire.entry_of(entry_wire.read_payload(entry_wire.pack_entry(entry))) == entry


@given(TREES, st.booleans())
def test_any_value_is_packed_for_redis_and_read_as_it_was(tree: object, text: bool) -> None:
    value = json.dumps(tree) if text or isinstance(tree, str) else json.dumps(tree).encode()
    entry = Entry("id", "m", value, 0, "t", "g", 1.0, 1.0)
    assert entry_wire.entry_of(entry_wire.read_payload(entry_wire.pack_entry(entry))) == entry
