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
OCTETS_LARGE = Octets(bytes(range(256)) * 40)
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


@pytest.mark.parametrize("harness", (*EXAMPLES, "apart"), indirect=True)
@pytest.mark.parametrize("value", [ASKED, TENSORS, OCTETS_LARGE], ids=["json", "tensors", "large"])
async def test_an_answer_and_its_tokens_are_kept_and_shared_as_they_are(harness: Harness, value: Value) -> None:
    first = ask(value, id="first", dedup_keys=(task("first"), key()))
    await admit(harness, first, ask(value, id="follower", dedup_keys=(key(),)), poll("poll", "first"), ask(id="untold"))
    lease = await harness.claim()
    items = {"first": ItemResult(output(value), tokens=TokenCount(7, 3)), "untold": ItemResult("x")}
    await harness.broker.complete(lease, [items[entry.id] for entry in lease.entries])
    replies = await drained(harness)
    assert {id: (reply.output, reply.tokens) for id, reply in replies.items() if id != "untold"} == dict.fromkeys(
        ["first", "follower", "poll"], (output(value), TokenCount(7, 3))
    )
    assert replies["untold"].tokens is None
    await admit(harness, ask(value, id="later", gateway="other", dedup_keys=(key(),)))
    [later] = (await drained(harness, "other")).values()
    assert (came_by(later), later.output) == ((DedupKind.KEY, True), output(value))
    for broker in (harness.broker, harness.peer()):
        kept = await broker.outcome("t", "first")
        assert isinstance(kept, Reply)
        assert (kept.output, kept.tokens) == (output(value), TokenCount(7, 3))
    await harness.advance(TTL + 1.0)
    assert await harness.broker.outcome("t", "first") is None


@pytest.mark.parametrize("harness", (*EXAMPLES, "apart"), indirect=True)
@pytest.mark.parametrize("value", [ASKED, TENSORS, OCTETS_LARGE], ids=["json", "tensors", "large"])
async def test_an_input_that_fails_alone_is_a_dead_letter_as_it_is_and_known(harness: Harness, value: Value) -> None:
    await harness.broker.enqueue([ask(value, id="bad", caller="ada")])
    for _ in range(2):
        await harness.broker.release(await harness.claim(), failed())
        await harness.advance(1.0)
    [letter] = await harness.dead.find("bad")
    assert (letter.entry.input, type(letter.entry.input)) == (value, type(value))
    again = [ask(value, caller="ada"), ask(ASKED.decode(), caller="ada"), ask(b"[]", caller="ada")]
    assert [failure is not None for failure in await harness.broker.enqueue(again)] == [True, False, False]


@given(st.binary())
def test_octets_are_packed_for_redis_and_read_as_they_were(octets: bytes) -> None:
    entry = Entry("id", "m", Octets(octets), 0, "t", "g", 1.0, 1.0)
    assert entry_wire.entry_of(entry_wire.read_payload(entry_wire.pack_entry(entry))) == entry


@given(TREES, st.booleans())
def test_any_value_is_packed_for_redis_and_read_as_it_was(tree: object, text: bool) -> None:
    value = json.dumps(tree) if text or isinstance(tree, str) else json.dumps(tree).encode()
    entry = Entry("id", "m", value, 0, "t", "g", 1.0, 1.0)
    assert entry_wire.entry_of(entry_wire.read_payload(entry_wire.pack_entry(entry))) == entry
