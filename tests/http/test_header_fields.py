"""Idempotency keys, requests that must be fresh, shared answers that are marked, and what callers hear of their limits."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest

from headway.config import Settings
from headway.doors.entrance import RateLimitHeaders
from headway.doors.fields import read_options, shorten
from headway.errors import BadRequest
from headway.gateway.limiter import Limiter
from headway.http.inference.inference_head import Wish, read_prefer
from headway.http.inference.request_in_hand import AsyncHandoff
from headway.model import DedupKind, Failure, Limit, RequestOptions
from tests.http.stand import KEPT_LIMITS, Stand, get, on_stand, post, settled

BODY = '{"input": "a"}'


def options(name: bytes, value: str) -> RequestOptions:
    return read_options({name: value.encode("latin-1")}, Settings(), 4.0, chosen=False, origin=None)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("8e03978e-40d5-43dd-bc93-6894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        ('"a \\"b\\" \\\\ c"', 'a "b" \\ c'),
        ("a b", "a b"),
        ("x", "x"),
        ('" "', " "),
        ("k" * 255, "k" * 255),
        (f'"{"k" * 255}"', "k" * 255),
    ],
)
def test_a_key_is_taken_with_or_without_quotes(value: str, key: str) -> None:
    assert options(b"idempotency-key", value).key == key


@pytest.mark.parametrize(
    "value", ["", '""', '"', '"a', '"a"; b=c', '"a\\b"', "k" * 256, f'"{"k" * 256}"', "é", "a\tb", '"a" "b"', "a\x7f"]
)
def test_a_malformed_key_is_refused(value: str) -> None:
    with pytest.raises(BadRequest) as refused:
        options(b"idempotency-key", value)
    assert f"{shorten(value.encode('latin-1'))} is malformed; expected 1 to 255 printable" in refused.value.message


@on_stand(whole=True)
async def test_one_key_is_one_run_whose_outcome_is_replayed(stand: Stand) -> None:
    client, fields = await stand.connect(), ("/v1/inference", 'Idempotency-Key: "k"')
    first = await client.ask(post(BODY, *fields))
    assert "idempotency-replayed" not in first.header
    second = await client.ask(post('{"input":  "a"}', *fields))
    assert (second.status, second.header["idempotency-replayed"]) == (200, "true")
    assert second.json["output"] == first.json["output"]
    assert second.json["request_id"] == second.header["x-request-id"] != first.json["request_id"]
    other = await client.ask(post('{"input": "b"}', *fields))
    assert (other.status, other.error) == (422, "IDEMPOTENCY_CONFLICT")
    assert other.header["x-should-retry"] == "false"
    for replayed in (None, "true"):
        answer = await client.ask(post('{"input": "bad"}', "/v1/inference", "Idempotency-Key: of a rejection"))
        assert (answer.error, answer.header.get("idempotency-replayed")) == ("REJECTED_BY_MODEL", replayed)
    assert stand.runs == ["a", "bad"]


@on_stand(whole=True)
async def test_an_answer_that_is_too_large_to_be_kept_under_its_key_says_so_and_a_task_too(stand: Stand) -> None:
    huge = f'{{"input": "{"a" * KEPT_LIMITS.largest}"}}'
    for _ in range(2):
        answer = await stand.ask(post(huge, "/v1/inference", "Idempotency-Key: k"))
        assert (answer.status, answer.header["x-headway-kept"]) == (200, "no")
        assert "idempotency-replayed" not in answer.header
    assert len(stand.runs) == 2
    for fields in (["Idempotency-Key: small"], []):
        assert "x-headway-kept" not in (await stand.ask(post(BODY, "/v1/inference", *fields))).header
    task = await stand.ask(post(huge, "/v1/inference", "Prefer: respond-async"))
    await settled(lambda: stand.real.pending == 0)
    outcome = await stand.ask(get(task.header["location"]))
    assert (outcome.status, outcome.json["status"]) == (200, "FAILED")
    assert outcome.json["error"]["error"] == "PAYLOAD_TOO_LARGE"
    assert "too large to be kept" in outcome.json["error"]["message"]


@on_stand(whole=True)
async def test_who_waits_for_a_task_gets_an_output_that_is_too_large_to_be_kept_and_hears_so(stand: Stand) -> None:
    huge = f'{{"input": "{"a" * KEPT_LIMITS.largest}"}}'
    stand.go.clear()
    task = await stand.ask(post(huge, "/v1/inference", "Prefer: respond-async"))
    waiting = asyncio.ensure_future(stand.ask(get(task.header["location"] + "?wait=25")))
    await settled(lambda: stand.real.pending == 2)
    stand.go.set()
    outcome = await waiting
    assert (outcome.json["status"], outcome.header["x-headway-kept"]) == ("SUCCESS", "no")


@on_stand(whole=True, cache=True, collapse=True)
async def test_what_is_the_same_runs_once_and_is_marked(stand: Stand) -> None:
    stand.go.clear()
    clients = [await stand.connect() for _ in range(4)]
    for client in clients:
        await client.send(post(BODY))
    await settled(lambda: stand.real.pending == 4 and stand.runs == ["a"])
    stand.go.set()
    answers = [await client.answer() for client in clients]
    assert sorted(answer.header.get("x-headway-cache", "") for answer in answers) == ["", *["collapsed"] * 3]
    assert (await stand.ask(post(BODY))).header["x-headway-cache"] == "hit"
    assert "x-headway-cache" not in (await stand.ask(post('{"input": "b"}'))).header
    assert stand.runs == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "fresh", "unkept"),
    [
        ("no-cache", True, False),
        ("max-age=9, max-age=3, no-cache=x", True, False),
        ("No-Store, max-age=0", True, True),
        ("no-cache, no-store", True, True),
        ("max-age=0", False, False),
        ("", False, False),
    ],
)
def test_cache_control_says_whether_an_answer_has_to_be_fresh(value: str, fresh: bool, unkept: bool) -> None:
    found = options(b"cache-control", value)
    assert (found.fresh, found.unkept) == (fresh, unkept)


@on_stand(whole=True, cache=True, collapse=True)
async def test_who_wants_it_fresh_gets_it_fresh_and_it_is_kept_unless_told_otherwise(stand: Stand) -> None:
    for value, marks in (("no-store", (None, None)), ("no-cache", (None, "hit"))):
        for fields, mark in zip(((f"Cache-Control: {value}",), ()), marks, strict=True):
            answer = await stand.ask(post(f'{{"input": "{value}"}}', "/v1/inference", *fields))
            assert (answer.status, answer.header.get("x-headway-cache")) == (200, mark)
    await stand.ask(
        post('{"input": "no-cache"}', "/v1/inference", "Cache-Control: max-age=9", "Cache-Control: no-cache")
    )
    assert stand.runs == ["no-store", "no-store", "no-cache", "no-cache"]


async def test_a_failure_in_common_is_marked_as_well(stand: Stand) -> None:
    stand.gateway.failure = Failure("BACKEND_ERROR", "broken")
    stand.gateway.shared = DedupKind.SAME
    answer = await stand.ask(post(BODY))
    assert (answer.error, answer.header["x-headway-cache"]) == ("BACKEND_ERROR", "collapsed")


@on_stand(keys={"ada": {"rate": 2.0, "burst": 2.0}, "bob": {"rate": 0.0}}, whole=True)
async def test_limited_callers_hear_of_their_limits_on_every_answer(stand: Stand) -> None:
    client = await stand.connect()
    key = "Authorization: Bearer ada"
    requests = [
        (post(BODY, "/v1/inference", key), 200, 1),
        (post(BODY, "/v1/inference", key), 200, 0),
        (post(BODY, "/v1/inference", key), 429, 0),
        (post("{", "/v1/inference", key), 429, 0),
        (get("/v1/result/x", key), 404, 0),
        (post(BODY, "/v1/inference", key, "Prefer: respond-async"), 429, 0),
    ]
    for request, status, left in requests:
        answer = await client.ask(request)
        assert answer.status == status
        assert answer.header["ratelimit-policy"] == '"key";q=2;w=60'
        assert answer.header["ratelimit"] in {f'"key";r={left};t={wait}' for wait in (29, 30, 59, 60)}
    unlimited = await client.ask(post(BODY, "/v1/inference", "Authorization: Bearer bob"))
    assert unlimited.status == 200
    for request in (post(BODY), get("/livez"), get("/v1/result/x"), b"nonsense\r\n\r\n"):
        assert "ratelimit" not in (await client.ask(request)).header, "of a caller that came before"
    assert "ratelimit" not in unlimited.header


@on_stand(keys={"ada": {}}, whole=True, tier_rates="paid=50")
async def test_a_task_and_a_late_body_tell_of_the_limits_too(stand: Stand) -> None:
    key = "Authorization: Bearer ada"
    task = await stand.ask(post(BODY, "/v1/inference", key, "Prefer: respond-async"))
    assert (task.status, task.header["ratelimit-policy"]) == (202, '"user";q=1000;w=60, "tier";q=50;w=60')
    assert task.header["ratelimit"].startswith('"tier";r=7;t=')
    client = await stand.connect()
    await client.send(post("{", "/v1/inference", key, length=100))
    stand.later(60)
    late = await client.answer()
    assert late.error == "REQUEST_TIMEOUT"
    assert "ratelimit" in late.header


class Charged:
    def __init__(self, **owed: float) -> None:
        self._owed = owed
        self.limiter = Limiter(1, lambda: 0.0)

    @property
    def broker(self) -> Charged:
        return self

    def rate_limit_debt(self, limit: Limit) -> float:
        return self._owed[limit.name]

    def counted(self, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
        return limits


@pytest.mark.parametrize(
    ("owed", "field"),
    [
        ((0.0, 0.0), '"user";r=10;t=0'),
        ((1.0, 0.0), '"user";r=9;t=1'),
        ((1.0, 50.0), '"tier";r=5;t=50'),
        ((10.0, 100.0), '"user";r=0;t=10'),
        ((0.5, 105.0), '"tier";r=0;t=105'),
    ],
)
def test_the_limit_with_the_least_left_is_told(owed: tuple[float, float], field: str) -> None:
    limits = (Limit("u", "user", 60.0, 10.0), Limit("t", "tier", 6.0, 10.0))
    told = RateLimitHeaders(Charged(user=owed[0], tier=owed[1])).fields(limits)  # type: ignore[arg-type]
    assert told == {"ratelimit-policy": '"user";q=60;w=60, "tier";q=6;w=60', "ratelimit": field}


def test_a_rate_below_one_a_minute_has_a_longer_window() -> None:
    allowances = RateLimitHeaders(Charged(key=0.0))  # type: ignore[arg-type]
    assert allowances.fields((Limit("k", "key", 0.25, 1.0),))["ratelimit-policy"] == '"key";q=1;w=240'
    assert allowances.fields(()) == {}


AT_ONCE = Wish(0.0, b"respond-async")


@pytest.mark.parametrize(
    ("value", "wish"),
    [
        (b"Respond-Async", AT_ONCE),
        (b'respond-async=""; a=b', AT_ONCE),
        (b'wait = "10" ,, respond-async;x', Wish(10.0, b"respond-async, wait=10")),
        (b"respond-async, wait=007", Wish(7.0, b"respond-async, wait=7")),
        (b"respond-async, wait=1, wait=2", Wish(1.0, b"respond-async, wait=1")),
        (b'x="a, wait=3", respond-async', AT_ONCE),
        (b"respond-async, wait=soon", AT_ONCE),
        (b"respond-async, wait=1.5", AT_ONCE),
        (b"respond-async, wait=99999999999999999999", Wish(1e20, b"respond-async, wait=99999999999999999999")),
        (b'handling=lenient, return=minimal, respond-async, "', AT_ONCE),
        (b"wait=10", None),
        (b"respond-async=no", None),
        (b'"respond-async"', None),
        (b'x="respond-async', None),
    ],
)
def test_a_prefer_header_is_read_as_a_wish_or_ignored(value: bytes, wish: Wish | None) -> None:
    assert read_prefer(value) == wish


def handover(wait: float) -> tuple[AsyncHandoff, mock.Mock, mock.Mock]:
    """A handover with its event loop, and what it calls in the end."""
    loop, hand_over = mock.Mock(), mock.Mock()
    return AsyncHandoff(loop, wait, hand_over), loop, hand_over


@pytest.mark.parametrize(("wait", "order"), [(0.0, "admitted"), (2.0, "admitted, time"), (2.0, "time, admitted")])
def test_a_request_is_handed_over_once_it_is_admitted_and_its_wait_is_over(wait: float, order: str) -> None:
    subject, loop, hand_over = handover(wait)
    assert subject.due == (wait == 0.0)
    for step in order.split(", "):
        hand_over.assert_not_called()
        if step == "admitted":
            subject.admitted()
        else:
            ((seconds, expire), _) = loop.call_later.call_args
            assert seconds == wait
            expire()
    subject.admitted()
    hand_over.assert_called_once()
    assert subject.due


def test_a_handover_that_ended_is_neither_timed_nor_told() -> None:
    subject, loop, hand_over = handover(2.0)
    subject.end()
    loop.call_later.return_value.cancel.assert_called_once()
    loop.call_later.call_args.args[1]()
    subject.admitted()
    hand_over.assert_not_called()
