"""Idempotency keys, requests that must be fresh, shared answers that are marked, and what callers hear of their limits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.doors.fields import shorten
from headway.doors.rate_limit_headers import RateLimitHeaders
from headway.gateway.broker_session import MOST_REPLIES
from headway.gateway.gateway import Gateway
from headway.gateway.limiter import Limiter
from headway.gateway.pending import Ending, PendingRequest
from headway.http.inference.inference_head import Wish, read_prefer
from headway.http.inference.request_in_hand import AsyncHandoff
from headway.model import DedupKind, Failure, Limit
from tests.http.stand import KEPT_LIMITS, Stand, get, on_stand, post, settled

BODY = '{"input": "a"}'


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("8e03978e-40d5-43dd-bc93-6894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        ('"8e03978e"', "8e03978e"),
        ('"a \\"b\\" \\\\ c"', 'a "b" \\ c'),
        ("a b", "a b"),
        ("x", "x"),
        ("  x ", "x"),
        ('" "', " "),
        ("k" * 255, "k" * 255),
        (f'"{"k" * 255}"', "k" * 255),
    ],
)
async def test_a_key_is_taken_with_or_without_quotes(stand: Stand, value: str, key: str) -> None:
    assert (await stand.ask(post(BODY, "/v1/inference", f"Idempotency-Key: {value}"))).status == 200
    assert stand.gateway.asked[0].options.key == key


@pytest.mark.parametrize(
    "value",
    ["", '""', '"', '"a', 'a"b"c"\x7f', '"a"; b=c', '"a\\b"', "k" * 256, f'"{"k" * 256}"', "é", "a\tb", '"a" "b"'],
)
async def test_a_malformed_key_is_refused(stand: Stand, value: str) -> None:
    client = await stand.connect()
    await client.send(post(BODY, "/v1/inference", f"Idempotency-Key: {value}"))
    answer = await client.answer()
    assert answer.error == "BAD_REQUEST"
    assert stand.gateway.asked == []
    if "\x7f" not in value:
        assert (
            f"{shorten(value.strip().encode('latin-1'))} is malformed; expected 1 to 255 printable"
            in answer.json["message"]
        )
        await client.send(post(BODY))
        assert (await client.answer()).status == 200


async def test_a_key_that_is_sent_twice_is_refused(stand: Stand) -> None:
    answer = await stand.ask(post(BODY, "/v1/inference", "Idempotency-Key: a", "Idempotency-Key: a"))
    assert answer.error == "BAD_REQUEST"


@pytest.mark.parametrize("path", ["/v1/inference", "/api/inference"])
@on_stand(whole=True)
async def test_one_key_is_one_run(stand: Stand, path: str) -> None:
    client = await stand.connect()
    key = 'Idempotency-Key: "k"'
    await client.send(post(BODY, path, key))
    first = await client.answer()
    assert "idempotency-replayed" not in first.header
    await client.send(post('{"input":  "a"}', path, key))
    second = await client.answer()
    assert (second.status, second.header["idempotency-replayed"]) == (200, "true")
    assert second.json["output"] == first.json["output"]
    assert second.json["request_id"] == second.header["x-request-id"] != first.json["request_id"]
    await client.send(post('{"input": "b"}', path, key))
    other = await client.answer()
    assert (other.status, other.error) == (422, "IDEMPOTENCY_CONFLICT")
    assert other.header["x-should-retry"] == "false"
    assert stand.runs == ["a"]


@on_stand(whole=True)
async def test_a_key_is_for_one_input_with_its_parameters_in_any_order(stand: Stand) -> None:
    for more, status in (
        ('"parameters": {"x": 1, "y": 2}', 200),
        ('"client_id": "me", "more": [1], "parameters": {"y": 2, "x": 1}', 200),
        ('"parameters": {"x": 1}', 422),
        ('"parameters": null', 422),
    ):
        answer = await stand.ask(post(f'{{"input": "a", {more}}}', "/v1/inference", "Idempotency-Key: k"))
        assert answer.status == status
    assert stand.runs == ["a"]


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


@on_stand(whole=True)
async def test_a_key_that_is_in_flight_is_waited_for_also_as_a_task(stand: Stand) -> None:
    stand.go.clear()
    clients = [await stand.connect() for _ in range(3)]
    for client in clients:
        await client.send(post(BODY, "/v1/inference", "Idempotency-Key: k"))
    task = await stand.ask(post(BODY, "/v1/inference", "Idempotency-Key: k", "Prefer: respond-async"))
    await settled(lambda: stand.real.pending == 4)
    stand.go.set()
    answers = [await client.answer() for client in clients]
    assert [answer.json["output"] for answer in answers] == ["A"] * 3
    assert ["idempotency-replayed" in answer.header for answer in answers].count(True) == 2
    assert task.status == 202
    assert (await stand.ask(get(f"{task.header['location']}?wait=25"))).json["output"] == "A"
    assert stand.runs == ["a"]


@on_stand(whole=True)
async def test_hundreds_under_one_key_are_answered_in_turns(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 clients that joined one key had their answers in one turn of the event loop, which took 15 ms."""
    turns, turn = Counter[int](), 0
    finish = Gateway._finish

    def count() -> None:
        nonlocal turn
        turn += 1
        asyncio.get_running_loop().call_soon(count)

    def counted(gateway: Gateway, ended: Sequence[PendingRequest], ending: Ending) -> None:
        turns[turn] += len(ended)
        finish(gateway, ended, ending)

    monkeypatch.setattr(Gateway, "_finish", counted)
    stand.go.clear()
    clients = [await stand.connect() for _ in range(2 * MOST_REPLIES + 2)]
    for client in clients:
        await client.send(post(BODY, "/v1/inference", "Idempotency-Key: k"))
    await settled(lambda: stand.real.pending == len(clients))
    count()
    stand.go.set()
    assert {(await client.answer()).json["output"] for client in clients} == {"A"}
    assert stand.runs == ["a"]
    assert sum(turns.values()) == len(clients)
    assert max(turns.values()) <= MOST_REPLIES


@on_stand(whole=True)
async def test_that_the_model_rejects_an_input_is_kept_under_its_key_too(stand: Stand) -> None:
    for replayed in (None, "true"):
        answer = await stand.ask(post('{"input": "bad"}', "/v1/inference", "Idempotency-Key: k"))
        assert answer.error == "REJECTED_BY_MODEL"
        assert answer.header.get("idempotency-replayed") == replayed
    assert stand.runs == ["bad"]


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
    ("value", "fresh"),
    [
        ("no-cache", True),
        ("No-Store, max-age=0", True),
        ("max-age=3, no-cache=x", True),
        ("max-age=0", False),
        ("", False),
    ],
)
@on_stand(whole=True, cache=True, collapse=True)
async def test_who_wants_it_fresh_gets_it_fresh(stand: Stand, value: str, fresh: bool) -> None:
    await stand.ask(post(BODY))
    answer = await stand.ask(post(BODY, "/v1/inference", "Cache-Control: max-age=9", f"Cache-Control: {value}"))
    assert (answer.status, answer.header.get("x-headway-cache")) == (200, None if fresh else "hit")
    assert stand.runs == ["a"] * (2 if fresh else 1)


@pytest.mark.parametrize(("value", "kept"), [("no-cache", True), ("no-store", False), ("no-cache, no-store", False)])
@on_stand(whole=True, cache=True, collapse=True)
async def test_a_renewed_answer_is_kept_unless_told_otherwise(stand: Stand, value: str, kept: bool) -> None:
    await stand.ask(post(BODY, "/v1/inference", f"Cache-Control: {value}"))
    assert (await stand.ask(post(BODY))).header.get("x-headway-cache") == ("hit" if kept else None)
    assert stand.runs == ["a"] * (1 if kept else 2)


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
        await client.send(request)
        answer = await client.answer()
        assert answer.status == status
        assert answer.header["ratelimit-policy"] == '"key";q=2;w=60'
        assert answer.header["ratelimit"] in {f'"key";r={left};t={wait}' for wait in (29, 30, 59, 60)}
    await client.send(post(BODY, "/v1/inference", "Authorization: Bearer bob"))
    unlimited = await client.answer()
    assert unlimited.status == 200
    for request in (post(BODY), get("/livez"), get("/v1/result/x"), b"nonsense\r\n\r\n"):
        await client.send(request)
        assert "ratelimit" not in (await client.answer()).header, "of a caller that came before"
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
        (b"respond-async", AT_ONCE),
        (b"Respond-Async", AT_ONCE),
        (b"respond-async=", AT_ONCE),
        (b'respond-async=""; a=b', AT_ONCE),
        (b"respond-async, wait=10", Wish(10.0, b"respond-async, wait=10")),
        (b'wait = "10" ,, respond-async;x', Wish(10.0, b"respond-async, wait=10")),
        (b"respond-async, wait=007", Wish(7.0, b"respond-async, wait=7")),
        (b"respond-async, wait=0", Wish(0.0, b"respond-async, wait=0")),
        (b"respond-async, wait=1, wait=2", Wish(1.0, b"respond-async, wait=1")),
        (b'x="a, wait=3", respond-async', AT_ONCE),
        (b"respond-async, wait=soon", AT_ONCE),
        (b"respond-async, wait=-1", AT_ONCE),
        (b"respond-async, wait=1.5", AT_ONCE),
        (b"respond-async, wait=99999999999999999999", Wish(1e20, b"respond-async, wait=99999999999999999999")),
        (b'handling=lenient, return=minimal, respond-async, "', AT_ONCE),
        (b"wait=10", None),
        (b"respond-async=no", None),
        (b"respond-asynchronously", None),
        (b"", None),
        (b'"respond-async"', None),
        (b'x="respond-async', None),
    ],
)
def test_a_prefer_header_is_read_as_a_wish_or_ignored(value: bytes, wish: Wish | None) -> None:
    assert read_prefer(value) == wish


@given(st.binary(max_size=200))
def test_no_bytes_in_a_prefer_header_raise(value: bytes) -> None:
    wish = read_prefer(value)
    assert wish is None or (wish.wait >= 0.0 and wish.applied.startswith(b"respond-async"))


class Clockwork:
    """An event loop's timer that goes off when told."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Any]] = []
        self.cancelled = False

    def call_later(self, seconds: float, call: Any) -> Clockwork:
        self.set.append((seconds, call))
        return self

    def cancel(self) -> None:
        self.cancelled = True


def handover(wait: float) -> tuple[AsyncHandoff, Clockwork, list[str]]:
    clockwork, told = Clockwork(), list[str]()
    return AsyncHandoff(cast(asyncio.AbstractEventLoop, clockwork), wait, lambda: told.append("")), clockwork, told


def test_at_once_means_as_soon_as_it_is_admitted() -> None:
    subject, clockwork, told = handover(0.0)
    assert subject.due and not clockwork.set and not told
    subject.admitted()
    assert told == [""]
    subject.admitted()
    assert told == [""], "once"


@pytest.mark.parametrize("first", ["admitted", "time"])
def test_after_a_wait_it_takes_both(first: str) -> None:
    subject, clockwork, told = handover(2.0)
    ((seconds, expire),) = clockwork.set
    assert seconds == 2.0 and not subject.due
    steps = [subject.admitted, expire]
    for step in steps if first == "admitted" else reversed(steps):
        assert not told
        step()
    assert told == [""] and subject.due


def test_a_handover_that_ended_is_neither_timed_nor_told() -> None:
    subject, clockwork, told = handover(2.0)
    subject.end()
    assert clockwork.cancelled
    clockwork.set[0][1]()
    subject.admitted()
    assert not told
