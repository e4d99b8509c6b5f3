"""Header fields for idempotency keys, fresh answers, shared answers and rate limits."""

from collections.abc import Mapping
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
async def test_an_answer_that_is_too_large_to_be_kept_under_its_key_says_so_and_a_task_too(stand: Stand) -> None:
    huge = f'{{"input": "{"a" * KEPT_LIMITS.largest}"}}'
    for _ in range(2):
        answer = await stand.ask(post(huge, "/v1/inference", "Idempotency-Key: k"))
        assert (answer.status, answer.header["x-headway-kept"]) == (200, "no")
        assert "idempotency-replayed" not in answer.header
    assert len(stand.runs) == 2
    for fields in (["Idempotency-Key: small"], []):
        assert "x-headway-kept" not in (await stand.ask(post(BODY, "/v1/inference", *fields))).header
    stand.go.clear()
    task, waiting = await stand.ask(post(huge, "/v1/inference", "Prefer: respond-async")), await stand.connect()
    await waiting.send(get(task.header["location"] + "?wait=25"))
    await settled(lambda: stand.real.pending == 2)
    stand.go.set()
    outcome = await waiting.answer()
    assert (outcome.json["status"], outcome.header["x-headway-kept"]) == ("SUCCESS", "no")
    outcome = await stand.ask(get(task.header["location"]))
    assert (outcome.status, outcome.json["status"]) == (200, "FAILED")
    assert outcome.json["error"]["error"] == "PAYLOAD_TOO_LARGE"
    assert "too large to be kept" in outcome.json["error"]["message"]


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
    for value, fields, mark in (
        ("no-store", ["Cache-Control: no-store"], None),
        ("no-store", [], None),
        ("no-cache", ["Cache-Control: no-cache"], None),
        ("no-cache", [], "hit"),
        ("no-cache", ["Cache-Control: max-age=9", "Cache-Control: no-cache"], None),
    ):
        answer = await stand.ask(post(f'{{"input": "{value}"}}', "/v1/inference", *fields))
        assert (answer.status, answer.header.get("x-headway-cache")) == (200, mark)
    assert stand.runs == ["no-store", "no-store", "no-cache", "no-cache"]


async def test_answers_and_failures_in_common_are_marked(stand: Stand) -> None:
    gateway, mark, asked = stand.gateway, "x-headway-cache", post(BODY, "/v1/inference", "Idempotency-Key: k")
    for gateway.failure in (None, Failure("BACKEND_ERROR", "broken")):
        gateway.shared, gateway.kept = DedupKind.SAME, False
        assert (await stand.ask(asked)).header[mark] == "collapsed"
        gateway.shared, gateway.kept = DedupKind.KEY, True
        answer = await stand.ask(asked)
        assert (answer.header["idempotency-replayed"], mark in answer.header) == ("true", False)
    assert answer.error == "BACKEND_ERROR"


@on_stand(keys={"ada": {"rate": 2.0, "burst": 2.0}, "bob": {"rate": 0.0}}, whole=True)
async def test_limited_callers_hear_of_their_limits_on_every_answer(stand: Stand) -> None:
    client = await stand.connect()
    key = "Authorization: Bearer ada"
    good = post(BODY, "/v1/inference", key)
    for request, status, left in (
        (good, 200, 1),
        (post(BODY, "/v1/inference", key, "Prefer: respond-async"), 202, 0),
        (good, 429, 0),
        (post("{", "/v1/inference", key), 429, 0),
        (get("/v1/result/x", key), 404, 0),
    ):
        answer = await client.ask(request)
        assert answer.status == status
        assert answer.header["ratelimit-policy"] == '"key";q=2;w=60'
        assert answer.header["ratelimit"] in {f'"key";r={left};t={wait}' for wait in (29, 30, 59, 60)}
    unlimited = post(BODY, "/v1/inference", "Authorization: Bearer bob")
    for request in (unlimited, post(BODY), get("/livez"), get("/v1/result/x"), b"nonsense\r\n\r\n"):
        assert "ratelimit" not in (await client.ask(request)).header, "of a caller that came before"


def told(limits: tuple[Limit, ...], **owed: float) -> Mapping[str, str]:
    """Return the header fields for a caller with these limits. `owed` is the debt for each limit, by name."""
    gateway = mock.Mock(limiter=Limiter(1, lambda: 0.0), counted=lambda limits: limits)
    gateway.broker.rate_limit_debt = lambda limit: owed[limit.name]
    return RateLimitHeaders(gateway).fields(limits)


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
    expected = {"ratelimit-policy": '"user";q=60;w=60, "tier";q=6;w=60', "ratelimit": field}
    assert told(limits, user=owed[0], tier=owed[1]) == expected


def test_a_rate_below_one_a_minute_has_a_longer_window() -> None:
    assert told((Limit("k", "key", 0.25, 1.0),), key=0.0)["ratelimit-policy"] == '"key";q=1;w=240'
    assert told(()) == {}


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
