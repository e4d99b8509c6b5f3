"""Large values in the server: stored apart from entries, also when several share one, and deleted when these end."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from headway import errors
from headway.brokers.redis import entry_wire, large_values, wire
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.connection import OutOfMemory, RedisConnection
from headway.brokers.redis.large_values import PIECE, LargeValues, StoredValues
from headway.brokers.redis.link import PIECE as ARGUMENT
from headway.brokers.redis.shard_queue import MOST_BYTES, fitting, pack, parts
from headway.errors import BrokerUnavailable
from headway.model import MOST_OUTPUT, DedupKey, Entry, ItemResult, NoWork, Octets, QueueName, Reply, Value
from tests.contracts.brokers import AT_ONCE, ask, drained, fail_all, failure_of, ids, outcome_of, slot
from tests.contracts.dedup_keys import admit, key, poll, refused, same, sharing, task
from tests.redis.stand import Stand

APART_FROM = 1000
LARGE = "x" * 5000
GATHERED = Octets(bytearray(b"z" * 5000))  # type: ignore[arg-type]
"""Like a body that was gathered as it arrived."""
VALUES: list[Value] = [
    LARGE, "ü" * 3000, "\ud800" * 2000, b"[" + b"1," * 2000 + b"1]", Octets(bytes(range(256)) * 20), GATHERED,
]  # fmt: skip


@pytest.fixture
def apart_from() -> float:
    return APART_FROM


def stored(harness: Stand, *kinds: str) -> list[str]:
    """Kinds of stored values: inputs (P), outputs (R), who reads (Q) or keeps (K) these, dead letters' inputs (zp)."""
    there = harness.keys()
    return sorted(name for key in there for name in kinds or ("P", "R", "zp") if key.startswith(f"{name}:"))


def apart(harness: Stand) -> list[str]:
    return stored(harness, "K", "Q", "R")


def names_of(harness: Stand, kind: str) -> list[str]:
    there = harness.keys()
    return sorted(harness.key(name) for name in there if name.startswith(f"{kind}:"))


async def acknowledged(harness: Stand, gateway: str = "g") -> dict[str, Reply]:
    await drained(harness, gateway)
    replies, cursor = await harness.broker.replies(gateway, 0)
    await drained(harness, gateway, after=cursor)
    await harness.advance(0.1)
    return {reply.id: reply for reply in replies}


async def test_values_come_as_they_were_and_go_when_they_were_read(harness: Stand) -> None:
    entries = [ask(value, id=str(at)) for at, value in enumerate(VALUES)]
    await admit(harness, *entries)
    assert stored(harness) == ["P"] * len(VALUES)
    assert max(map(len, harness.server.command("HVALS", harness.key("p")))) < 300
    lease = await harness.claim()
    assert list(lease.entries) == entries
    await harness.broker.complete(lease, [ItemResult(entry.input) for entry in lease.entries])
    assert stored(harness) == ["R"] * len(VALUES)
    replies = await drained(harness)
    assert [replies[str(at)].output for at in range(len(VALUES))] == VALUES
    await acknowledged(harness)
    assert stored(harness) == []


PARAMETERS = b'{"grammar":"' + b"g" * 5000 + b'"}'


def with_parameters(entry: Entry, parameters: bytes = PARAMETERS) -> Entry:
    return msgspec.structs.replace(entry, parameters=parameters)


@pytest.mark.parametrize("value", ["small", LARGE])
async def test_large_parameters_lie_apart_with_their_input_and_go_with_it(harness: Stand, value: Value) -> None:
    entry = with_parameters(ask(value, id="a"))
    await admit(harness, entry)
    assert stored(harness) == ["P"]
    assert max(map(len, harness.server.command("HVALS", harness.key("p")))) < 300
    lease = await harness.claim()
    assert list(lease.entries) == [entry]
    await harness.answer(lease)
    await acknowledged(harness)
    assert stored(harness) == []


async def die(harness: Stand, entry: Entry) -> None:
    await admit(harness, entry)
    await fail_all(harness)


async def test_a_dead_letter_has_its_input_until_it_is_purged(harness: Stand) -> None:
    for id, value in (("a", LARGE), ("b", Octets(b"y" * 5000))):
        await die(harness, with_parameters(ask(value, id=id)))
        [letter] = await harness.dead.find(id)
        assert (letter.entry.input, letter.entry.parameters) == (value, PARAMETERS)
    assert stored(harness) == ["zp", "zp"]
    assert sorted(letter.entry.id for letter in await harness.dead.list()) == ["a", "b"]
    assert float(harness.server.command("ZSCORE", harness.key("ou"), b"\xff")) > 10_000
    assert await harness.dead.remove("a") == 1
    assert stored(harness) == ["zp"]
    assert 0 < harness.server.command("TTL", harness.key("zp:t\0b")) <= 7 * 86_400
    await die(harness, ask("small", id="b", nonce=1))  # It replaces the other.
    assert stored(harness) == []
    assert await harness.dead.remove("b") == 1
    assert harness.server.command("EXISTS", harness.key("ou")) == 0


async def test_a_known_culprit_is_known_by_its_whole_input_and_parameters(harness: Stand) -> None:
    await die(harness, with_parameters(ask(LARGE, id="a", caller="c")))
    assert (await refused(harness, with_parameters(ask(LARGE, caller="c")))).code == errors.REJECTED_BY_MODEL
    assert stored(harness) == ["zp"]
    for other in (LARGE + "x", "y" + LARGE[1:], Octets(LARGE.encode())):
        await admit(harness, with_parameters(ask(other, caller="c")))
    for parameters in (PARAMETERS.replace(b"gg", b"hg"), b""):
        await admit(harness, with_parameters(ask(LARGE, caller="c"), parameters))
    assert len((await harness.claim()).entries) > 0


async def test_what_is_refused_is_not_kept(harness: Stand) -> None:
    await admit(harness, ask(LARGE, id="a", nonce=1))
    assert (await refused(harness, ask(LARGE, id="a", nonce=2))).code == errors.IDEMPOTENCY_CONFLICT
    assert stored(harness) == ["P"]
    await admit(harness, ask(LARGE, id="a", nonce=1))  # It is already there.
    assert stored(harness) == ["P"]
    await harness.answer(await harness.claim())
    await admit(harness, ask(LARGE, id="a", nonce=1))  # Its outcome is there, but not read yet.
    assert stored(harness) == ["R"]


async def test_an_input_whose_entry_never_came_has_an_end(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(RedisConnection, "call", AsyncMock(side_effect=BrokerUnavailable("lost")))
        with pytest.raises(BrokerUnavailable):
            await harness.broker.enqueue([ask(LARGE, id="a", timeout=7.0)])
    assert stored(harness) == ["P"]
    [name] = names_of(harness, "P")
    assert 7 < harness.server.command("TTL", name) <= 100


def lose(harness: Stand, kind: str, count: int = 1) -> None:
    for name in names_of(harness, kind)[:count]:
        harness.server.command("DEL", name)


async def test_a_lost_input_fails_its_entry_alone(harness: Stand) -> None:
    await admit(harness, *(ask(LARGE, id=f"{n}") for n in range(3)), ask(id="small"))
    lose(harness, "P")
    lease = await harness.claim()
    assert len(lease.entries) == 3
    assert "small" in ids(lease.entries)
    [(id, told)] = (await drained(harness)).items()
    failure = failure_of(told)
    assert (failure.code, failure.reason) == (errors.SERVICE_OVERLOADED, "broker")
    assert "lost this input" in failure.message
    await harness.broker.complete(lease, [ItemResult(entry.id) for entry in lease.entries])
    replies = await drained(harness)
    assert {one: reply.output for one, reply in replies.items() if one != id} == {
        one: one for one in ids(lease.entries)
    }
    assert await harness.dead.count() == 0
    await admit(harness, ask(LARGE, id="a"), ask(LARGE, id="b"))
    lose(harness, "P", 2)
    assert isinstance(await harness.broker.claim(slot(), AT_ONCE), NoWork), "a batch without inputs is none"
    await admit(harness, ask(LARGE, id="c"))
    assert ids((await harness.claim()).entries) == ["c"]


async def test_a_lost_output_is_told(harness: Stand) -> None:
    await admit(harness, ask(id="a"))
    await harness.broker.complete(await harness.claim(), [ItemResult(LARGE)])
    lose(harness, "R")
    assert "lost its output" in failure_of((await drained(harness))["a"]).message


async def test_a_claim_goes_on_while_its_inputs_take_long(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    await admit(harness, ask(LARGE, id="a"))
    fetch = StoredValues.fetch

    async def slow(self: StoredValues, name: str, length: int) -> bytes | None:
        await asyncio.sleep(3 * harness.lease_seconds)
        return await fetch(self, name, length)

    monkeypatch.setattr(StoredValues, "fetch", slow)
    claiming = asyncio.ensure_future(harness.claim())
    await harness.settle()
    for _ in range(5):
        await harness.advance(harness.lease_seconds / 2)
        await harness.broker.reap()
    assert isinstance(await harness.broker.claim(slot("gpu-1"), AT_ONCE), NoWork)
    lease = await claiming
    await harness.answer(lease)


MODEST = ask(LARGE, id="modest", tenant="modest")
STORED = entry_wire.read_payload(entry_wire.pack_entry(MODEST, "tmodest", len(LARGE)))
MOVES: dict[str, Callable[[LargeValues], Awaitable[object]]] = {
    "an input to the server": lambda values: values.bring("q:", [MODEST]),
    "an input to a worker": lambda values: values.input_of("q:", STORED),
    "an output to the server": lambda values: values.bring_output("q:", LARGE, "modest"),
    "an output to a gateway": lambda values: values.output_of("q:", "tmodest", len(LARGE), "modest"),
    "the input of a dead letter": lambda values: values.read_input("q:zp:modest", "modest", ("tmodest", len(LARGE))),
}


@pytest.mark.parametrize("way", MOVES)
async def test_values_of_one_tenant_keep_those_of_another_waiting_for_a_few_only(way: str) -> None:
    begun, go = list[str](), asyncio.Semaphore(0)

    class Slow:
        async def fetch(self, key: str, length: int) -> bytes:
            begun.append("greedy" if "greedy" in key else "modest")
            await go.acquire()
            return b"x" * length

        async def fetch_text(self, key: str, length: int) -> str:
            return (await self.fetch(key, length)).decode()

        async def store(self, key: str, value: bytes, seconds: int) -> None:
            await self.fetch(key, len(value))

    values = LargeValues(Slow(), APART_FROM)  # type: ignore[arg-type]
    greedy = [values.output_of("q:", f"tgreedy{number}", 5000, "greedy") for number in range(20)]
    moving = asyncio.gather(*greedy, MOVES[way](values))
    for _ in range(5):
        await asyncio.sleep(0)
    for _ in range(21):
        go.release()
    await moving
    assert begun.index("modest") == large_values.AT_ONCE + 1


def held_up(monkeypatch: pytest.MonkeyPatch, way: str, kind: str) -> asyncio.Event:
    """An event: no large value of a kind is stored or read until it is set."""
    moves, move = asyncio.Event(), getattr(StoredValues, way)

    async def wait(self: StoredValues, name: str, *more: object) -> object:
        if f"}}:{kind}:" in name:
            await moves.wait()
        return await move(self, name, *more)

    monkeypatch.setattr(StoredValues, way, wait)
    return moves


@pytest.mark.parametrize("way", ["store", "fetch_text"])
async def test_no_reply_waits_for_anothers_output(harness: Stand, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    moves = held_up(monkeypatch, way, "R")
    await admit(harness, ask(id="large 1"), ask(id="small 1"), ask(id="large 2"))
    lease = await harness.claim()
    outputs = [ItemResult(LARGE + entry.id if "large" in entry.id else entry.id) for entry in lease.entries]
    completing = asyncio.ensure_future(harness.broker.complete(lease, outputs))
    replies, cursor = await harness.broker.replies("g", 0)
    assert [reply.output for reply in replies] == ["small 1"]
    await admit(harness, ask(id="small 2"))
    await harness.answer(await harness.claim())
    replies, cursor = await harness.broker.replies("g", cursor)
    assert [reply.id for reply in replies] == ["small 2"]
    moves.set()
    assert (await completing).answered == 3
    replies = [*(await drained(harness, after=cursor)).values()]
    assert {reply.id: reply.output for reply in replies} == {id: LARGE + id for id in ("large 1", "large 2")}
    await harness.acknowledged()
    assert stored(harness) == []
    assert harness.server.command("HLEN", harness.key("e")) == 0
    assert harness.server.command("XLEN", harness.key("r:g")) == 0


async def test_outputs_nobody_waits_for_are_not_read_and_go(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a list's answer grew too large while most of its outputs were on their way."""
    moves, read = asyncio.Event(), list[str]()
    fetch = StoredValues.fetch_text

    async def noted(self: StoredValues, name: str, length: int) -> str | None:
        read.append(name)
        await moves.wait()
        return await fetch(self, name, length)

    monkeypatch.setattr(StoredValues, "fetch_text", noted)
    asked = [ask(id=f"{number}") for number in range(8)]
    await admit(harness, *asked)
    await harness.broker.complete(await harness.claim(), [ItemResult(LARGE)] * 8)
    reading = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    assert len(read) == large_values.AT_ONCE
    await harness.broker.withdraw([entry.submission for entry in asked if entry.id != "7"], "g")
    moves.set()
    await reading
    found = await drained(harness)
    assert len(read) == large_values.AT_ONCE + 1
    assert found["7"].output == LARGE
    assert len(found) == 8
    await acknowledged(harness)
    assert stored(harness) == []


async def test_replies_carry_what_fits_where_storing_fails(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.brokers.redis.shard_queue.fitting", partial(fitting, most=7000))
    for fails in (False, True):
        if fails:
            monkeypatch.setattr(harness._links[0].values, "store", AsyncMock(side_effect=OutOfMemory("no room")))
        _, read = await harness.broker.replies("g", 0) if fails else ((), 0)
        await admit(
            harness, *(ask(id=f"{fails} {number}", dedup_keys=(task(f"{fails} {number}"),)) for number in range(3))
        )
        assert (await harness.broker.complete(await harness.claim(), [ItemResult(LARGE)] * 3)).answered == 3
        replies = list((await drained(harness, after=read)).values())
        assert [reply.output for reply in replies].count(LARGE) == (1 if fails else 3)
    [failed, *_] = [reply for reply in replies if reply.failure is not None]
    assert (failure_of(failed).code, failure_of(failed).reason) == (errors.BACKEND_ERROR, "item")
    assert (await outcome_of(harness.broker, failed.id)).failure == failed.failure


async def test_a_large_value_comes_in_pieces_or_is_missing(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the server would do nothing else while it builds one large answer."""
    link, name, value = harness._links[0], harness.key("R:1:g:a"), bytes(range(256)) * 5000
    await link.values.store(name, value, 60)
    real, answers = link.values._client.call, list[int]()

    async def call(key: str, *command: object, large: bool = False) -> bytes:
        answer: bytes = await real(key, *command, large=large)
        answers.append(len(answer))
        return answer

    monkeypatch.setattr(link.values._client, "call", call)
    assert await link.values.fetch(name, len(value)) == value
    assert max(answers) == PIECE < len(value)
    assert sum(answers) == len(value)

    async def dropping(key: str, *command: object, large: bool = False) -> bytes:
        answer: bytes = await real(key, *command, large=large)
        await link.drop([name])
        return answer

    monkeypatch.setattr(link.values._client, "call", dropping)
    assert await link.values.fetch(name, len(value)) is None


@pytest.mark.parametrize("text", ["x" * PIECE, "x\ud800\U0001f600" * (PIECE // 4)])
async def test_a_large_text_is_decoded_in_pieces(harness: Stand, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Otherwise a gateway would do nothing else while it decodes all of it: 5 ms for 8 MB."""
    make, decoded = large_values._text_decoder, list[int]()

    class Noted:
        def __init__(self, errors: str) -> None:
            self._decoder = make(errors)

        def decode(self, content: bytes, final: bool = False) -> str:
            decoded.append(len(content))
            return self._decoder.decode(content, final)

    monkeypatch.setattr(large_values, "_text_decoder", Noted)
    await admit(harness, ask(id="a"))
    await harness.broker.complete(await harness.claim(), [ItemResult(text)])
    assert (await drained(harness))["a"].output == text
    assert max(decoded) == PIECE
    assert sum(decoded) == len(text.encode("utf-8", "surrogatepass"))


async def test_inputs_of_two_letters_of_one_id_are_never_mixed(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input is stored under the id, so a later letter's input may replace it between two pieces."""
    link, first = harness._links[0], "x" * (3 * PIECE)
    await die(harness, ask(first, id="dead"))
    [name] = names_of(harness, "zp")
    real = link.values._client.call

    async def replaced(key: str, *command: object, large: bool = False) -> bytes:
        answer: bytes = await real(key, *command, large=large)
        if large and command[0] != "SET":
            await link.values.store(name, b"y" * len(first), 60)
        return answer

    monkeypatch.setattr(link.values._client, "call", replaced)
    assert (await harness.dead.find("dead"))[0].entry.input == first
    await harness.dead.remove("dead")


async def test_a_large_value_is_written_in_pieces_by_turns(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the process would do nothing else while it encodes and writes all of it."""
    link, written, turn = harness._links[0], dict[int, int](), 0
    write = asyncio.StreamWriter.write

    def noted(writer: asyncio.StreamWriter, data: bytes) -> None:
        written[turn] = written.get(turn, 0) + len(data)
        write(writer, data)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(asyncio.StreamWriter, "write", noted)
    values: list[str | bytes] = ["x" * 3_000_001, b"y" * 3_000_000, b"z" * ARGUMENT, "a" * (ARGUMENT + 1)]
    for value in values:
        counting = asyncio.ensure_future(count())
        await link.values.store(harness.key("R:1:g:a"), value, 60)
        counting.cancel()
        assert max(written.values()) <= ARGUMENT + 200
        found = await link.values.fetch(harness.key("R:1:g:a"), len(value))
        assert found == (value.encode() if isinstance(value, str) else value)
        written.clear()


async def ran(harness: Stand, output: Value = LARGE) -> None:
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult(output) for _ in lease.entries])


def sizes(harness: Stand) -> list[int]:
    """Bytes of the longest value in each stream and each kept outcome."""
    found = []
    for name in sorted(harness.keys()):
        if name.startswith("k:"):
            found.append(harness.server.command("STRLEN", harness.key(name)))
        if name.startswith("r:"):
            entries = harness.server.command("XRANGE", harness.key(name), "-", "+")
            found += [len(value) for _, fields in entries for value in fields]
    return found


@pytest.mark.parametrize("share", [task("first"), key()])
async def test_an_outcome_that_is_kept_has_its_output_apart_for_as_long(harness: Stand, share: DedupKey) -> None:
    await admit(harness, sharing("first", share))
    await ran(harness)
    assert max(sizes(harness)) < 300
    assert (await acknowledged(harness))["first"].output == LARGE
    assert apart(harness) == ["K", "R"]
    await admit(harness, poll("later", "first") if share.kind.value == "task" else sharing("later", share))
    assert (await drained(harness, after=1))["later"].output == LARGE
    if share.kind.value == "task":
        assert (await outcome_of(harness.peer(), "first")).output == LARGE
    assert apart(harness) == ["K", "Q", "R"], "who came last has not said yet that it was read"


async def test_followers_read_an_output_once_until_the_last(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = LargeValues.output_of

    async def noted(values: LargeValues, queue: str, name: str, *more: Any) -> Value | None:
        reads.append(name)
        return await read(values, queue, name, *more)

    monkeypatch.setattr(LargeValues, "output_of", noted)
    await admit(harness, sharing("first", same(keep=0.0)))
    for number in range(30):
        await admit(harness, sharing(f"one {number}", same(keep=0.0)))
        await admit(harness, sharing(f"two {number}", same(keep=0.0), gateway="h"))
    await ran(harness)
    reads.clear()
    found = await acknowledged(harness)
    assert len(found) == 31
    assert len({id(reply.output) for name, reply in found.items() if name != "first"}) == 1
    assert {reply.output for reply in found.values()} == {LARGE}
    assert len(reads) == 2, "that of the first, and that of its followers"
    assert apart(harness) == ["Q", "R"]
    assert {reply.output for reply in (await acknowledged(harness, "h")).values()} == {LARGE}
    assert apart(harness) == []


async def test_a_receipt_that_comes_twice_takes_the_output_from_nobody(harness: Stand) -> None:
    await admit(harness, sharing("first", same(keep=0.0)), sharing("second", same(keep=0.0), gateway="h"))
    await ran(harness)
    with harness.losing("acknowledge"):
        await acknowledged(harness)
    await harness.advance(1.0)
    assert apart(harness) == ["Q", "R"]
    assert (await acknowledged(harness, "h"))["second"].output == LARGE
    assert apart(harness) == []


async def test_outputs_go_with_what_has_to_go_for_the_budgets(harness: Stand) -> None:
    for number in range(40):
        await admit(harness, sharing(f"{number}", key(f"{number}")))
        await ran(harness, "x" * 10_000)
        await acknowledged(harness)
    assert apart(harness) == ["K"] * 8 + ["R"] * 8
    assert sum(harness.server.command("STRLEN", name) for name in names_of(harness, "R")) == 8 * 10_000


async def test_an_output_that_was_lost_is_forgotten_with_its_outcome(harness: Stand) -> None:
    await admit(harness, sharing("first", task("first"), key()))
    await ran(harness)
    await acknowledged(harness)
    lose(harness, "R")
    assert await harness.peer().outcome("t", "first") is None
    await admit(harness, sharing("again", key()))
    await ran(harness, "y" * 5000)
    assert (await acknowledged(harness))["again"].output == "y" * 5000


async def test_an_output_too_large_to_be_kept_goes_when_it_was_read(harness: Stand) -> None:
    await admit(harness, sharing("first", task("first"), key()), sharing("second", key()))
    await ran(harness, "x" * 30_000)
    found = await acknowledged(harness)
    assert {name: len(reply.output or "") for name, reply in found.items()} == {"first": 30_000, "second": 30_000}
    assert apart(harness) == []


@pytest.mark.parametrize(
    ("tenants", "letter", "sizes", "most", "stays"),
    [
        ("tttt", "x", (60, 10, 50, 20), 100, [False, True, True, True]),  # A tenant's largest goes.
        ("ggggggggm", "x", (12,) * 9, 30, [True, *[False] * 7, True]),  # A tenant with many only loses its own.
        ("tt", "é", (30, 30), 100, [True, False]),  # Bytes count, not characters.
        ("t", "x", (MOST_OUTPUT,), MOST_BYTES, [True]),
    ],
)
def test_of_outputs_that_do_not_fit_the_largest_are_left_out(
    tenants: str, letter: str, sizes: Sequence[int], most: int, stays: list[bool]
) -> None:
    items = [ItemResult(letter * size) for size in sizes]
    fit = fitting([ask(tenant=tenant) for tenant in tenants], items, most=most)
    assert [item.output is not None for item in fit] == stays
    assert all(stays) == (fit is items)


@pytest.mark.parametrize(
    ("sizes", "large", "most", "cut"),
    [
        ([10, 10, 10], (), 200, [[0, 1, 2]]),
        ([30, 30, 30, 10], (), 60, [[0, 1], [2, 3]]),
        ([100, 100], (), 60, [[0], [1]]),  # A value that is too large gets its own part.
        ([10, 100, 10], (), 60, [[0], [1], [2]]),
        ([], (), 0, [[]]),
        ([90, 10, 90, 10], (0, 2), 100, [[1, 3], [0], [2]]),  # Large outputs come last.
        ([90, 10, 90, 10], (0, 2), 1000, [[1, 3], [0, 2]]),
        ([90, 10, 90, 10], (0, 1, 2, 3), 100, [[0, 1], [2, 3]]),
    ],
)
def test_outputs_are_cut_into_parts_in_order(
    sizes: list[int], large: Sequence[int], most: int, cut: list[list[int]]
) -> None:
    assert [list(part) for part in parts([ItemResult("x" * size) for size in sizes], {*large}, most)] == cut


async def test_an_output_that_is_answered_and_kept_is_sent_once(harness: Stand) -> None:
    await admit(harness, sharing("task", task("task")), ask(id="id"))
    lease = await harness.claim()
    items = [ItemResult(f"of {entry.id}") for entry in lease.entries]
    assert isinstance(harness.broker, RedisBroker)
    sent = wire.encode(
        harness.broker._queues[QueueName("m")][0].completions._arguments(pack(lease, items, [0.0, 0.0], range(2)))
    )
    assert [sent.count(b"of task"), sent.count(b"of id")] == [1, 1]
    assert (await harness.broker.complete(lease, items)).answered == 2
    kept = await outcome_of(harness.broker, "task")
    assert kept == (await drained(harness))["task"]


@pytest.fixture
def singly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every output count as so large that it is stored in a step of its own."""
    monkeypatch.setattr("headway.brokers.redis.shard_queue.parts", lambda items, large: parts(items, large, 1))


@pytest.mark.usefixtures("singly")
async def test_large_outputs_go_in_steps_and_each_is_answered_once(harness: Stand) -> None:
    await admit(harness, sharing("task", task("task")), *(ask(id=f"id {number}") for number in range(4)))
    lease = await harness.claim()
    await harness.broker.withdraw([("t", "id 1", 0)], "g")
    items = [ItemResult(None, "no") if entry.id == "id 2" else ItemResult(f"of {entry.id}") for entry in lease.entries]
    settled = await harness.broker.complete(lease, items)
    assert (settled.answered, settled.departed, settled.fenced) == (4, 1, False)
    replies = await drained(harness)
    assert {id: reply.output for id, reply in replies.items()} == {
        "task": "of task",
        "id 0": "of id 0",
        "id 2": None,
        "id 3": "of id 3",
    }
    assert (await outcome_of(harness.broker, "task")).output == "of task"
    assert [letter.entry.id for letter in await harness.dead.list()] == ["id 2"]
    assert harness.server.command("HLEN", harness.key("x")) == 0


@pytest.mark.usefixtures("singly")
@pytest.mark.parametrize("lost", ["deliver", "complete"])
async def test_steps_whose_answers_are_lost_are_told_again_to_no_effect(harness: Stand, lost: str) -> None:
    await admit(harness, *(ask(id=f"id {number}") for number in range(3)))
    lease = await harness.claim()
    with harness.losing(lost), pytest.raises(BrokerUnavailable):
        await harness.answer(lease)
    settled = await harness.broker.complete(lease, [ItemResult("told again") for _ in lease.entries])
    assert settled.fenced is (lost == "complete")
    outputs = [reply.output for reply in (await drained(harness)).values()]
    assert outputs.count("told again") == (2 if lost == "deliver" else 0)
    assert len(outputs) == 3


@pytest.mark.usefixtures("singly")
async def test_a_lease_that_ends_between_two_steps_runs_the_rest_again(harness: Stand) -> None:
    await admit(harness, *(ask(id=f"id {number}") for number in range(3)))
    lease = await harness.claim()
    with harness.losing("deliver"), pytest.raises(BrokerUnavailable):
        await harness.answer(lease)
    await harness.reaping(harness.lease_seconds + 1.0)
    assert (await harness.broker.complete(lease, [ItemResult("too late") for _ in lease.entries])).fenced
    again = await harness.claim()
    assert [entry.id for entry in again.entries] == ["id 1", "id 2"]
    await harness.answer(again)
    replies = await drained(harness)
    assert {id: reply.attempts for id, reply in replies.items()} == {"id 0": 1, "id 1": 2, "id 2": 2}
    assert "too late" not in {reply.output for reply in replies.values()}
