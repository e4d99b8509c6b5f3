"""Inference calls: credentials, metadata, deadlines, cancellation, sizes, and the status for each error."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from headway import errors
from headway.config import Settings
from headway.errors import CODES, RequestError
from headway.gateway.client_quotas import HeldBytes
from headway.grpc import status
from headway.grpc.calls import CallQuotas, PlainCall
from headway.grpc.header_blocks import RequestFields
from headway.model import DedupKind, Failure, Octets, TokenCount
from tests.grpc.stand import ID, PREDICT, Port, failed, on_port, predict, predicted
from tests.http.stand import PATIENCE

KEYS = {"secret": {}, "other": {"tenant": "other", "user": "bob"}}
BEARER = (("authorization", "Bearer secret"),)
Status = grpc.StatusCode


async def test_an_input_is_answered_with_its_output_and_the_tokens_where_the_target_tells_them(port: Port) -> None:
    client = port.client()
    call = client.call(PREDICT, predict("hello"))
    answer = predicted(await call)
    assert (answer.request_id, answer.output) == ("req_" + ID.format(0), b"HELLO")
    assert answer.latency_ms >= 0
    assert not answer.HasField("tokens_used")
    assert dict(await call.trailing_metadata())["x-request-id"] == "req_" + ID.format(0)
    (asked,) = port.gateway.asked
    assert (asked.input, asked.model, asked.parameters, asked.tier) == ("hello", "default", b"", 1)
    for used in (7, 0):
        port.gateway.tokens = TokenCount(used)
        answer = predicted(await client.ask(PREDICT, predict("a")))
        assert (answer.HasField("tokens_used"), answer.tokens_used) == (True, used)


async def test_metadata_mean_the_same_as_header_fields_of_http(port: Port) -> None:
    chosen = "01890a5d-ac96-774b-bcce-b302099a8057"
    fields = (
        ("x-request-id", f"req_{chosen}"),
        ("x-request-tier", "free"),
        ("x-request-timeout-ms", "1500"),
        ("idempotency-key", "k-1"),
        ("cache-control", "no-cache"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    )
    answer = predicted(await port.client().ask(PREDICT, predict("a"), fields))
    assert answer.request_id == f"req_{chosen}"
    (asked,) = port.gateway.asked
    options = asked.options
    assert (asked.id, asked.tier, options.timeout, options.key) == (chosen, 2, 1.5, "k-1")
    assert options.fresh and options.chosen and not options.task


TIER = ("x-request-tier", "free")


async def test_wrong_metadata_and_messages_are_an_invalid_argument(port: Port) -> None:
    client = port.client()
    for body, metadata, part in (
        (predict("a"), (("x-request-tier", "gold"),), "expected one of"),
        (predict("a"), (("x-request-timeout-ms", "soon"),), "expected milliseconds above 0"),
        (predict("a"), (("idempotency-key", "k" * 300),), "malformed"),
        (predict("a"), (TIER, TIER), "the metadata x-request-tier was sent twice; send it once"),
        (predict(b"\xff"), (), "is not UTF-8"),
        (predict("a\0b"), (), "U+0000"),
        (b"\xff\xff\xff", (), "the message is malformed"),
        (b"\x0a\x05a", (), "the message is malformed"),
        (b"\x12", (), "the message is malformed"),
    ):
        refused = await client.fail(PREDICT, body, metadata)
        assert (refused.status, refused.trailers["x-headway-error"]) == (Status.INVALID_ARGUMENT, "BAD_REQUEST")
        assert part in refused.details
        assert refused.trailers["grpc-retry-pushback-ms"] == "-1"
    refused = await failed(client.channel.stream_unary(PREDICT)(iter(())))
    assert (refused.status, refused.details) == (Status.INVALID_ARGUMENT, "the call has no message; send exactly one")
    assert port.gateway.asked == []


@pytest.mark.parametrize(
    "metadata",
    [
        tuple((f"x-{number}", "v") for number in range(5_000)),
        (("x-same", "v"),) * 5_000,
        (("x-long", "v" * 1_000_000),),
        (("x-long-bin", b"v" * 1_000_000),),
    ],
    ids=["many names", "one name", "a long text", "long octets"],
)
async def test_a_flood_of_metadata_is_refused_and_spares_its_neighbours(port: Port, metadata: Any) -> None:
    client = port.client(**{"grpc.enable_retries": 1})  # The client retries calls that the port never processed.
    for _ in range(3):
        refused = await client.fail(PREDICT, predict("flood"), metadata)
        assert refused.status is Status.RESOURCE_EXHAUSTED
        assert predicted(await client.ask(PREDICT, predict("a"))).output == b"A"
    assert [asked.input for asked in port.gateway.asked] == ["a"] * 3


@on_port(KEYS)
async def test_without_a_good_key_a_call_is_unauthenticated_and_its_message_is_not_waited_for(port: Port) -> None:
    client = port.client()
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
        refused = await failed(client.channel.stream_unary(PREDICT)(metadata=metadata))  # The client sends no message.
        assert (refused.status, refused.trailers["x-headway-error"]) == (Status.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert port.counters.gateway.refusals["unauthenticated", "none", ""] == 3
    assert port.gateway.asked == []
    assert predicted(await client.ask(PREDICT, predict("a"), BEARER)).output == b"A"


async def test_a_call_whose_time_has_passed_abandons_its_request(port: Port) -> None:
    port.gateway.hold = True
    assert (await port.client().fail(PREDICT, predict("a"), timeout=0.2)).status is Status.DEADLINE_EXCEEDED
    await port.gateway.until(lambda: port.gateway.abandoned == [("default", ID.format(0))])
    assert port.gateway.waiting == []


async def test_a_model_that_takes_octets_gets_them_and_gives_them(port: Port) -> None:
    port.stand.learn("bytes")
    port.gateway.output = Octets(b"\xfe\x00")
    assert predicted(await port.client().ask(PREDICT, predict(b"\xff\x00"))).output == b"\xfe\x00"
    assert port.gateway.asked[0].input == Octets(b"\xff\x00")


@on_port(max_body_bytes=4000)
async def test_a_message_may_not_be_nor_unpack_to_more_than_max_body_bytes(port: Port) -> None:
    client = port.client()
    assert (await client.fail(PREDICT, predict("a" * 5000))).status is Status.RESOURCE_EXHAUSTED
    assert predicted(await client.ask(PREDICT, predict("a" * 900))).output == b"A" * 900
    method = client.channel.unary_unary(PREDICT)
    good = await method(predict("a" * 900), compression=grpc.Compression.Gzip)
    assert predicted(good).output == b"A" * 900
    refused = await failed(method(predict("a" * 3_000_000), compression=grpc.Compression.Gzip))
    assert refused.status is Status.RESOURCE_EXHAUSTED
    assert len(port.gateway.asked) == 2


async def test_each_error_has_a_status_and_says_whether_a_retry_helps(port: Port) -> None:
    client = port.client()
    for code, facts in CODES.items():
        port.gateway.failure = Failure(code, "why not — ü", 0.25, "queue")
        told = await client.fail(PREDICT, predict("a"))
        assert (code, told.status.value[0]) == (code, status.status_of(code))
        assert told.details == "why not — ü"
        assert told.trailers["x-headway-error"] == errors.SHOWN.get(code, code)
        pushback = int(told.trailers["grpc-retry-pushback-ms"])
        assert (code, pushback) == (code, 250 if facts.status in (409, 429, 503) and not facts.hopeless else -1)
        assert ("x-headway-dropped-reason" in told.trailers) is facts.refusal
    for text in ("x" * 100_000, "ü" * 50_000, "\ud800", "a\nb\0c"):
        port.gateway.failure = Failure(errors.BACKEND_ERROR, text)
        told = await client.fail(PREDICT, predict("a"))
        assert told.status is Status.INTERNAL
        assert 0 < len(told.details) <= status.LONGEST


async def test_an_output_with_a_lone_surrogate_is_the_models_fault_and_an_unforeseen_one_shows_nothing(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **named: object) -> bool:
        raise ValueError("the secret")

    port.gateway.output = "\ud800"
    told = await port.client().fail(PREDICT, predict("a"))
    assert (told.status, told.trailers["x-headway-error"]) == (Status.INTERNAL, "BACKEND_ERROR")
    monkeypatch.setattr(port.gateway, "submit", broken)
    told = await port.client().fail(PREDICT, predict("a"))
    assert (told.status, "secret" in told.details) == (Status.INTERNAL, False)


async def test_an_outcome_of_another_request_is_marked(port: Port) -> None:
    port.gateway.shared, port.gateway.kept = DedupKind.KEY, True
    call = port.client().call(PREDICT, predict("a"))
    await call
    assert dict(await call.trailing_metadata())["idempotency-replayed"] == "true"
    port.gateway.failure = Failure(errors.REJECTED_BY_MODEL, "no")
    told = await port.client().fail(PREDICT, predict("a"))
    assert (told.status, told.trailers["idempotency-replayed"]) == (Status.INVALID_ARGUMENT, "true")


OTHER = (("authorization", "Bearer other"),)


@on_port(KEYS, whole=True, user_rate=18.0)
async def test_limits_are_told_and_kept_across_calls_of_which_wrong_ones_count(port: Port) -> None:
    client = port.client()
    call = client.call(PREDICT, predict("a"), BEARER)
    await call
    assert not port.stand.real.limiter.debts, "a call is charged once"
    trailers = dict(await call.trailing_metadata())
    assert trailers["ratelimit-policy"].startswith('"user";q=18')
    assert trailers["ratelimit"].startswith('"user";r=')
    left = int(trailers["ratelimit"].partition("r=")[2].partition(";")[0])
    for number in range(left):
        call = client.call(PREDICT, b"\xff" if number % 2 else predict("a"), BEARER)
        assert await call.code() is (Status.INVALID_ARGUMENT if number % 2 else Status.OK)
    for body in (predict("a"), b"\xff"):
        refused = await client.fail(PREDICT, body, BEARER)
        assert (refused.status, refused.trailers["x-headway-error"]) == (Status.RESOURCE_EXHAUSTED, "RATE_LIMITED")
        assert int(refused.trailers["grpc-retry-pushback-ms"]) > 0
    assert predicted(await client.ask(PREDICT, predict("b"), OTHER)).output == b"B"


@on_port({**KEYS, "secret": {"rate": 1.0, "burst": 2.0}}, whole=True)
async def test_calls_whose_messages_are_on_their_way_count_towards_the_limit(port: Port) -> None:
    there = asyncio.Event()

    async def late() -> AsyncIterator[bytes]:
        await there.wait()
        yield b"\xff"

    client = port.client()
    calls = [client.channel.stream_unary(PREDICT)(late(), metadata=BEARER, timeout=PATIENCE) for _ in range(9)]
    refused = [asyncio.ensure_future(failed(call)) for call in calls]
    while sum(call.done() for call in refused) < 7:
        await asyncio.wait([call for call in refused if not call.done()], return_when=asyncio.FIRST_COMPLETED)
    there.set()
    told = [call.status.name for call in await asyncio.gather(*refused)]
    assert sorted(told) == ["INVALID_ARGUMENT"] * 2 + ["RESOURCE_EXHAUSTED"] * 7


@on_port(KEYS, read_timeout_ms=50)
async def test_a_message_that_does_not_come_is_not_waited_for_long_and_is_counted_under_its_tier(port: Port) -> None:
    late = await failed(port.client().channel.stream_unary(PREDICT)(metadata=BEARER))
    assert (late.status, late.trailers["x-headway-error"]) == (Status.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT")
    tier = port.settings.tier_names[port.settings.default_tier_index]
    assert port.counters.gateway.refusals == {("request_timeout", tier, ""): 1}


@on_port(KEYS, max_connections=10)
async def test_a_tenant_with_too_many_calls_is_refused_and_others_are_not(port: Port) -> None:
    port.gateway.hold = True
    client = port.client()
    calls = [client.call(PREDICT, predict("a"), BEARER) for _ in range(9)]
    await port.gateway.until(lambda: len(port.gateway.waiting) == 9)
    refused = await client.fail(PREDICT, predict("a"), BEARER)
    assert (refused.status, refused.trailers["x-headway-dropped-reason"]) == (Status.RESOURCE_EXHAUSTED, "calls")
    other = client.call(PREDICT, predict("b"), OTHER)
    await port.gateway.until(lambda: len(port.gateway.waiting) == 10)
    port.gateway.release()
    assert [predicted(answer).output for answer in await asyncio.gather(*calls, other)] == [b"A"] * 9 + [b"B"]
    port.gateway.hold = False
    await client.ask(PREDICT, predict("a"), BEARER)


@on_port(max_body_bytes=500_000, memory_mb=5)
async def test_calls_wait_for_room_to_read_their_message_and_lose_nothing(port: Port) -> None:
    client = port.client()
    answers = await asyncio.gather(*(client.ask(PREDICT, predict(f"a{n}" * 1000)) for n in range(60)))
    assert [predicted(answer).output for answer in answers] == [(f"A{n}" * 1000).encode() for n in range(60)]


async def test_room_to_read_is_shared_fairly_and_given_back() -> None:
    quotas = CallQuotas(Settings(max_body_bytes=1 << 18, keys="k"), HeldBytes(2 << 20))
    for _ in range(7):
        await quotas.room_to_read("a")
    greedy = asyncio.ensure_future(quotas.room_to_read("a"))
    await asyncio.sleep(0)
    assert not greedy.done()
    await quotas.room_to_read("b")
    left = asyncio.ensure_future(quotas.room_to_read("a"))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    quotas.has_read("b")
    quotas.has_read("a")
    await greedy
    for _ in range(7):
        quotas.has_read("a")
    with pytest.raises(KeyError):
        quotas.has_read("a")


async def test_bytes_that_another_port_gives_back_let_a_waiting_call_read() -> None:
    bytes = HeldBytes(2 << 20)
    quotas = CallQuotas(Settings(max_body_bytes=1 << 18), bytes)
    assert bytes.take("by HTTP", 2 << 20)
    waiting = asyncio.ensure_future(quotas.room_to_read("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    bytes.give("by HTTP", 1 << 20)
    await waiting
    quotas.has_read("a")
    assert bytes.free == 1 << 20
    assert bytes.freed is None


def test_unread_answers_are_bounded_for_each_owner() -> None:
    quotas = CallQuotas(Settings(max_body_bytes=1 << 18), HeldBytes(1 << 20))
    assert quotas.keep("a", 10) == 0
    assert quotas.keep("a", 1 << 30) == 0, "one answer may wait, however large"
    assert quotas.keep("a", 700_000) == 700_000
    with pytest.raises(RequestError, match="use fewer at a time"):
        quotas.keep("a", 700_000)
    quotas.drop("a", 700_000)
    assert quotas.keep("a", 700_000) == 700_000


def test_calls_without_a_credential_count_for_their_address() -> None:
    owners: list[str] = []
    for address in ("10.0.0.1", "10.0.0.2"):
        stream = SimpleNamespace(head=RequestFields(()), connection=SimpleNamespace(address=address))
        port = SimpleNamespace(quotas=SimpleNamespace(begin=owners.append))
        PlainCall(cast(Any, port), cast(Any, stream), cast(Any, None)).belong_to_address()
    assert len(set(owners)) == 2
