"""Large values in the server: stored apart from their entries, and gone with them however these end."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from unittest.mock import AsyncMock

import msgspec
import pytest

from headway import errors
from headway.brokers.redis import connection, entry_wire, large_values
from headway.brokers.redis.completion import fitting
from headway.brokers.redis.connection import PIECE, OutOfMemory, RedisConnection
from headway.brokers.redis.large_values import LargeValues
from headway.brokers.redis.link import PIECE as ARGUMENT
from headway.errors import BrokerUnavailable
from headway.model import Entry, ItemResult, Lease, NoWork, Octets, Value
from tests.contracts.brokers import AT_ONCE, ask, drained, failed, ids, leave, slot
from tests.contracts.dedup_keys import admit, key, refused, same, sharing, task
from tests.redis.stand import Stand

APART_FROM = 1000
LARGE = "x" * 5000
VALUES: list[Value] = [LARGE, "ü" * 3000, "\ud800" * 2000, b"[" + b"1," * 2000 + b"1]", Octets(bytes(range(256)) * 20)]
GATHERED = Octets(bytearray(b"z" * 5000))  # type: ignore[arg-type]
"""As a body is that was gathered as it came."""


@pytest.fixture
def apart_from() -> float:
    return APART_FROM


def stored(harness: Stand) -> list[str]:
    """Kinds of what is stored apart: an input, an output, or the input of a dead letter."""
    there = harness.keys()
    return sorted(name for key in there for name in ("P", "R", "zp") if key.startswith(f"{name}:"))


def names_of(harness: Stand, kind: str) -> list[str]:
    there = harness.keys()
    return sorted(harness.key(name) for name in there if name.startswith(f"{kind}:"))


async def acknowledged(harness: Stand) -> None:
    await drained(harness)
    _, cursor = await harness.broker.replies("g", 0)
    await drained(harness, after=cursor)
    await harness.advance(0.1)


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


WAYS = ["late", "withdrawn", "withdrawn on a GPU", "spent", "cancelled"]


@pytest.mark.parametrize("way", WAYS)
async def test_an_input_goes_with_its_entry(harness: Stand, way: str) -> None:
    keys = (task("a"),) if way == "cancelled" else ()
    entry = ask(LARGE, id="a", queue_timeout=5.0, timeout=5.0, dedup_keys=keys)
    await admit(harness, entry)
    lease = await harness.claim() if way in ("withdrawn on a GPU", "spent") else None
    assert stored(harness) == ["P"]
    if way.startswith("withdrawn"):
        await leave(harness.broker, entry)
    elif way == "cancelled":
        await harness.broker.cancel_task("t", "a")
    elif lease is not None:
        await harness.broker.release(lease, failed())
        assert stored(harness) == ["P"]  # It runs again.
    await harness.advance(6.0)
    await harness.broker.reap()
    assert stored(harness) == []


PARAMETERS = b'{"grammar":"' + b"g" * 5000 + b'"}'
SMALL: list[Value] = ["small", "", b"[1]", Octets(b"\x00\xff")]


def with_parameters(entry: Entry, parameters: bytes = PARAMETERS) -> Entry:
    return msgspec.structs.replace(entry, parameters=parameters)


@pytest.mark.parametrize("value", [*SMALL, LARGE])
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


async def test_a_dead_letter_and_a_known_culprit_have_their_large_parameters(harness: Stand) -> None:
    await die(harness, with_parameters(ask("text", id="a", caller="c")))
    [letter] = await harness.dead.find("a")
    assert (letter.entry.input, letter.entry.parameters) == ("text", PARAMETERS)
    verdict = await refused(harness, with_parameters(ask("text", caller="c")))
    assert verdict.code == errors.REJECTED_BY_MODEL
    for value, parameters in (("text", PARAMETERS.replace(b"gg", b"hg")), ("texts", PARAMETERS), ("text", b"")):
        await admit(harness, with_parameters(ask(value, caller="c"), parameters))


async def test_a_body_that_was_gathered_as_it_came_is_stored_as_it_is(harness: Stand) -> None:
    await admit(harness, ask(GATHERED, id="a"))
    lease = await harness.claim()
    assert [entry.input for entry in lease.entries] == [Octets(b"z" * 5000)]
    await harness.broker.complete(lease, [ItemResult(GATHERED)])
    assert (await drained(harness))["a"].output == Octets(b"z" * 5000)


async def test_an_output_that_nobody_waits_for_is_not_kept(harness: Stand) -> None:
    gone, there = ask(id="gone"), ask(id="there")
    await admit(harness, gone, there)
    lease = await harness.claim()
    await leave(harness.broker, gone)
    await harness.broker.complete(lease, [ItemResult(LARGE), ItemResult(LARGE)])
    assert stored(harness) == ["R"]
    assert (await harness.broker.complete(lease, [ItemResult(LARGE), ItemResult(LARGE)])).fenced
    assert stored(harness) == ["R"]
    assert list(await drained(harness)) == ["there"]


async def test_an_input_runs_on_for_others_when_its_own_client_has_left(harness: Stand) -> None:
    first, second = sharing("first", key(), input=LARGE), sharing("second", key(), input=LARGE)
    await admit(harness, first, second)
    assert stored(harness) == ["P", "P"]
    await leave(harness.broker, first)
    lease = await harness.claim()
    assert [entry.input for entry in lease.entries] == [LARGE]
    await harness.answer(lease)
    assert (await drained(harness))["second"].output == f"<{LARGE}>"
    await acknowledged(harness)
    assert stored(harness) == ["R"], "it is kept under the key"


async def die(harness: Stand, entry: Entry) -> None:
    await admit(harness, entry)
    while await harness.broker.state(entry.tenant, entry.id) is not None:
        claimed = await harness.broker.claim(slot(), AT_ONCE)
        if isinstance(claimed, Lease):
            await harness.broker.release(claimed, failed())
        await harness.advance(1.0)


async def test_a_dead_letter_has_its_input_until_it_is_purged(harness: Stand) -> None:
    for id, value in (("a", LARGE), ("b", Octets(b"y" * 5000))):
        await die(harness, ask(value, id=id))
        assert (await harness.dead.find(id))[0].entry.input == value
    assert stored(harness) == ["zp", "zp"]
    assert sorted(letter.entry.id for letter in await harness.dead.list()) == ["a", "b"]
    assert float(harness.server.command("ZSCORE", harness.key("ou"), b"\xff")) > 10_000
    assert await harness.dead.remove("a") == 1
    assert stored(harness) == ["zp"]
    assert 0 < harness.server.command("TTL", harness.key("zp:t\0b")) <= 7 * 86_400
    await die(harness, ask("small", id="b", nonce=1))  # In the place of the other.
    assert stored(harness) == []
    assert await harness.dead.remove("b") == 1
    assert harness.server.command("EXISTS", harness.key("ou")) == 0


async def test_a_known_culprit_is_known_by_its_whole_input(harness: Stand) -> None:
    await die(harness, ask(LARGE, id="a", caller="c"))
    assert (await refused(harness, ask(LARGE, caller="c"))).code == errors.REJECTED_BY_MODEL
    assert stored(harness) == ["zp"]
    for other in (LARGE + "x", "y" + LARGE[1:], Octets(LARGE.encode())):
        await admit(harness, ask(other, caller="c"))
    assert len((await harness.claim()).entries) > 0


async def test_what_is_refused_is_not_kept(harness: Stand) -> None:
    await admit(harness, ask(LARGE, id="a", nonce=1))
    assert (await refused(harness, ask(LARGE, id="a", nonce=2))).code == errors.IDEMPOTENCY_CONFLICT
    assert stored(harness) == ["P"]
    await admit(harness, ask(LARGE, id="a", nonce=1))  # It is there.
    assert stored(harness) == ["P"]
    await harness.answer(await harness.claim())
    await admit(harness, ask(LARGE, id="a", nonce=1))  # It has its outcome, which was not read yet.
    assert stored(harness) == ["R"]


async def test_an_input_whose_entry_never_came_has_an_end(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object) -> None:
        raise BrokerUnavailable("lost")

    with monkeypatch.context() as patched:
        patched.setattr(RedisConnection, "call", lost)
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
    assert told.failure is not None
    assert (told.failure.code, told.failure.reason) == (errors.SERVICE_OVERLOADED, "broker")
    assert "lost this input" in told.failure.message
    await harness.broker.complete(lease, [ItemResult(entry.id) for entry in lease.entries])
    replies = await drained(harness)
    assert {one: reply.output for one, reply in replies.items() if one != id} == {
        one: one for one in ids(lease.entries)
    }
    assert await harness.dead.count() == 0


async def test_a_batch_that_has_lost_all_its_inputs_is_none(harness: Stand) -> None:
    await admit(harness, ask(LARGE, id="a"), ask(LARGE, id="b"))
    lose(harness, "P", 2)
    assert isinstance(await harness.broker.claim(slot(), AT_ONCE), NoWork)
    assert {reply.failure is not None for reply in (await drained(harness)).values()} == {True}
    await admit(harness, ask(LARGE, id="c"))
    assert ids((await harness.claim()).entries) == ["c"]


async def test_a_lost_output_is_told(harness: Stand) -> None:
    await admit(harness, ask(id="a"))
    await harness.broker.complete(await harness.claim(), [ItemResult(LARGE)])
    lose(harness, "R")
    told = (await drained(harness))["a"].failure
    assert told is not None
    assert "lost its output" in told.message


async def test_a_claim_goes_on_while_its_inputs_take_long(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease is renewed meanwhile, and no other worker gets the batch."""
    await admit(harness, ask(LARGE, id="a"))
    fetch = RedisConnection.fetch

    async def slow(self: RedisConnection, name: str, length: int) -> bytes | None:
        await asyncio.sleep(3 * harness.lease_seconds)
        return await fetch(self, name, length)

    monkeypatch.setattr(RedisConnection, "fetch", slow)
    claiming = asyncio.ensure_future(harness.claim())
    await harness.settle()
    for _ in range(5):
        await harness.advance(harness.lease_seconds / 2)
        await harness.broker.reap()
    assert isinstance(await harness.broker.claim(slot("gpu-1"), AT_ONCE), NoWork)
    lease = await claiming
    assert isinstance(lease, Lease)
    await harness.answer(lease)


async def test_a_claim_is_repeated_after_unreadable_inputs(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    await admit(harness, ask(LARGE, id="a"))

    async def silent(*_: object) -> None:
        raise BrokerUnavailable("silent")

    with monkeypatch.context() as patched:
        patched.setattr(RedisConnection, "fetch", silent)
        with pytest.raises(BrokerUnavailable):
            await harness.claim()
    lease = await harness.claim()
    assert [entry.input for entry in lease.entries] == [LARGE]
    await harness.answer(lease)


async def test_without_room_an_output_goes_with_its_reply(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.brokers.redis.connection import OutOfMemory

    async def full(*_: object) -> None:
        raise OutOfMemory("full")

    await admit(harness, ask(id="a"))
    lease = await harness.claim()
    monkeypatch.setattr(RedisConnection, "store", full)
    await harness.broker.complete(lease, [ItemResult(LARGE)])
    assert (await drained(harness))["a"].output == LARGE


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
    """Event without which no large value of a kind is stored or read."""
    moves, move = asyncio.Event(), getattr(RedisConnection, way)

    async def wait(self: RedisConnection, name: str, *more: object) -> object:
        if f"}}:{kind}:" in name:
            await moves.wait()
        return await move(self, name, *more)

    monkeypatch.setattr(RedisConnection, way, wait)
    return moves


@pytest.mark.parametrize("way", ["store", "fetch_text"])
async def test_no_reply_waits_for_anothers_output(harness: Stand, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Neither those of the batch nor those of later batches wait, on both sides of the server."""
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
    found: dict[str, Value | None] = {}
    while len(found) < 2:
        replies, cursor = await harness.broker.replies("g", cursor)
        found |= {reply.id: reply.output for reply in replies}
    assert found == {id: LARGE + id for id in ("large 1", "large 2")}
    await drained(harness, after=cursor)
    await harness.advance(0.1)
    assert stored(harness) == []
    assert harness.server.command("HLEN", harness.key("e")) == 0
    assert harness.server.command("XLEN", harness.key("r:g")) == 0


async def test_replies_that_come_again_after_a_loss_are_known_by_those_whose_outputs_are_on_their_way(
    harness: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = held_up(monkeypatch, "fetch_text", "R")
    await admit(harness, ask(id="large"), ask(id="small"))
    lease = await harness.claim()
    outputs = [ItemResult(LARGE if entry.id == "large" else entry.id) for entry in lease.entries]
    await harness.broker.complete(lease, outputs)
    replies, cursor = await harness.broker.replies("g", 0)
    assert [reply.id for reply in replies] == ["small"]
    box = harness.broker._mailboxes["g"]  # type: ignore[attr-defined]
    [stream] = [stream for stream in box._streams if stream.last != b"0-0"]
    stream.last = b"0-0"  # As when the server's state began anew.
    await admit(harness, ask(id="next"))
    await harness.answer(await harness.claim())
    replies, cursor = await harness.broker.replies("g", cursor)
    moves.set()
    told = [reply.id for reply in replies]
    while "large" not in told:
        replies, cursor = await harness.broker.replies("g", cursor)
        told += [reply.id for reply in replies]
    assert told == ["next", "large"]


async def test_outputs_nobody_waits_for_are_not_read_and_go(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a list whose answer grew too large, with most of its outputs on their way."""
    moves, read = asyncio.Event(), list[str]()
    fetch = RedisConnection.fetch_text

    async def noted(self: RedisConnection, name: str, length: int) -> str | None:
        read.append(name)
        await moves.wait()
        return await fetch(self, name, length)

    monkeypatch.setattr(RedisConnection, "fetch_text", noted)
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


async def test_an_output_is_read_while_one_of_several_waits(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = held_up(monkeypatch, "fetch_text", "R")
    busy = [ask(id=f"busy {number}") for number in range(large_values.AT_ONCE)]
    followers = [sharing(f"{number}", same(keep=0.0)) for number in range(4)]
    await admit(harness, *busy)
    for entry in followers:
        await admit(harness, entry)
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult(LARGE)] * len(lease.entries))
    reading = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    await harness.broker.withdraw([entry.submission for entry in followers[:3]], "g")
    moves.set()
    await reading
    assert (await drained(harness))["3"].output == LARGE
    await acknowledged(harness)
    assert stored(harness) == []


async def test_outputs_apart_take_no_room_of_replies(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.brokers.redis.completion.fitting", partial(fitting, most=7000))
    await admit(harness, *(ask(id=f"apart {number}") for number in range(5)), ask(id="small"))
    lease = await harness.claim()
    outputs = [ItemResult(LARGE if entry.id != "small" else "x" * 10) for entry in lease.entries]
    assert (await harness.broker.complete(lease, outputs)).answered == 6
    assert [len(str(reply.output)) for reply in (await drained(harness)).values()].count(len(LARGE)) == 5


async def test_replies_carry_what_fits_where_storing_fails(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.brokers.redis.completion.fitting", partial(fitting, most=7000))
    monkeypatch.setattr(harness._links[0], "store", AsyncMock(side_effect=OutOfMemory("no room")))
    await admit(harness, *(ask(id=f"apart {number}") for number in range(3)))
    lease = await harness.claim()
    assert (await harness.broker.complete(lease, [ItemResult(LARGE)] * 3)).answered == 3
    replies = list((await drained(harness)).values())
    assert [reply.output for reply in replies].count(LARGE) == 1
    assert {reply.failure.reason for reply in replies if reply.failure is not None} == {"item"}


async def test_a_large_value_comes_in_pieces_or_is_missing(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the server would do nothing else for as long as it takes to make one answer of it."""
    link, name, value = harness._links[0], harness.key("R:1:g:a"), bytes(range(256)) * 5000
    await link.store(name, value, 60)
    real, answers = link._values.call, list[int]()

    async def call(key: str, *command: object, large: bool = False) -> bytes:
        answer: bytes = await real(key, *command, large=large)
        answers.append(len(answer))
        return answer

    monkeypatch.setattr(link._values, "call", call)
    assert await link.fetch(name, len(value)) == value
    assert max(answers) == PIECE < len(value)
    assert sum(answers) == len(value)

    async def dropping(key: str, *command: object, large: bool = False) -> bytes:
        answer: bytes = await real(key, *command, large=large)
        await link.drop([name])
        return answer

    monkeypatch.setattr(link._values, "call", dropping)
    assert await link.fetch(name, len(value)) is None


@pytest.mark.parametrize("text", ["x" * PIECE, "é€" * PIECE, "x\ud800\U0001f600" * PIECE])
async def test_a_large_text_is_decoded_in_pieces(harness: Stand, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Else a gateway would do nothing else for as long as it takes to decode all of it: 5 ms for 8 MB."""
    make, decoded = connection._text_decoder, list[int]()

    class Noted:
        def __init__(self, errors: str) -> None:
            self._decoder = make(errors)

        def decode(self, content: bytes, final: bool = False) -> str:
            decoded.append(len(content))
            return self._decoder.decode(content, final)

    monkeypatch.setattr(connection, "_text_decoder", Noted)
    await admit(harness, ask(id="a"))
    await harness.broker.complete(await harness.claim(), [ItemResult(text)])
    assert (await drained(harness))["a"].output == text
    assert max(decoded) == PIECE
    assert sum(decoded) == len(text.encode("utf-8", "surrogatepass"))


async def test_inputs_of_two_letters_of_one_id_are_never_mixed(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input lies under the id, so that of a later letter may take its place between two pieces."""
    link, first = harness._links[0], "x" * (3 * PIECE)
    await die(harness, ask(first, id="dead"))
    [name] = names_of(harness, "zp")
    real = link._values.call

    async def replaced(key: str, *command: object, large: bool = False) -> bytes:
        answer: bytes = await real(key, *command, large=large)
        if large and command[0] != "SET":
            await link.store(name, b"y" * len(first), 60)
        return answer

    monkeypatch.setattr(link._values, "call", replaced)
    assert (await harness.dead.find("dead"))[0].entry.input == first
    await harness.dead.remove("dead")


async def test_a_large_value_is_written_in_pieces_by_turns(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process would do nothing else for as long as it takes to encode and write all of it."""
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
        await link.store(harness.key("R:1:g:a"), value, 60)
        counting.cancel()
        assert max(written.values()) <= ARGUMENT + 200
        found = await link.fetch(harness.key("R:1:g:a"), len(value))
        assert found == (value.encode() if isinstance(value, str) else value)
        written.clear()
