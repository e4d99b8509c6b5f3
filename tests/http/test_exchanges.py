"""Exchanges: routes whose codec keeps something of a request until its answer, has several inputs, or a form of its own."""

import json
from collections.abc import Iterator

import msgspec
import pytest

from headway.config import Settings
from headway.core.values import as_json
from headway.doors.exchange import JSON, CodecContext, Exchange, Outcome, Reader, Written
from headway.doors.rate_limit_headers import RateLimitHeaders
from headway.errors import BACKEND_ERROR, REJECTED_BY_MODEL, STATUS, AnyError, BadRequest, RequestError
from headway.gateway.served_models import KnownModels
from headway.http.inference import routes
from headway.http.inference.codecs import Codec, inference
from headway.http.inference.fast_path import FastPathConnection
from headway.http.inference.request_in_hand import RequestInHand
from headway.http.problem import Encoded
from headway.http.server.head import Head, RequestTarget
from headway.model import DedupKind, Failure, Limit, RequestOptions, Value, ValueKind, WorkerInfo, WorkerStatus
from tests.http.stand import Answer, Keys, Stand, get, on_stand, post, served, settled

KEY = "Authorization: Bearer key"
KEYS: Keys = {"key": {"rate": 60, "burst": 3}}
PATH = "/own/{model}/run"


def encode(error: AnyError, shown: str) -> Encoded:
    body = json.dumps({"wrong": error.message, "code": error.code}).encode()
    return {"content-type": "application/json", "x-own": "yes"}, body


def limit_lines(headers: RateLimitHeaders, limits: tuple[Limit, ...]) -> bytes:
    return headers.lines(limits) + b"x-limits: %d\r\n" % len(limits)


def open_head(
    head: Head, target: RequestTarget, options: RequestOptions, context: CodecContext
) -> tuple[RequestOptions, Reader]:
    """A body is one text, or several with `|` between them. The answer repeats the model, the query, a header field, and the
    first letter."""
    field = dict(head.fields).get(b"x-shout", b"")
    if field == b"wrong":
        raise BadRequest("X-Shout is wrong")
    kind = context.known[target.names["model"]].takes

    def read(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        text = body.decode()
        if not text:
            raise BadRequest("the body is empty")

        def write(outcome: Outcome) -> Written:
            shown, outputs, version = outcome.id, outcome.outputs, outcome.version
            if "ODD" in outputs:
                raise RequestError("the output is odd", code=BACKEND_ERROR)
            told = [target.names["model"], target.query.decode(), field.decode(), text[0], shown, version, str(kind)]
            array = b"[" + b",".join(map(as_json, outputs)) + b"]"
            answer = msgspec.json.encode({"told": told, "outputs": msgspec.Raw(array)})
            return b"content-type: application/own\r\nx-length: %d\r\n" % len(outputs), answer

        input: Value | list[Value] = [*text.split("|")] if "|" in text else text
        return Exchange("default", input, b'{"a":1}', msgspec.structs.replace(options, timeout=0.5), write)

    return options, Reader(read)


def own(settings: Settings) -> Codec:
    return Codec(open=open_head, encode_error=encode, limit_lines=limit_lines)


@pytest.fixture(autouse=True)
def route() -> Iterator[None]:
    """A route of an API with exchanges, and its error form for all that is below its path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "ROUTES", {**routes.ROUTES, PATH: own})
        patch.setattr(routes, "ERROR_FORMS", {"/own": encode})
        yield


def own_error(answer: Answer) -> tuple[int, str]:
    """Status and code of an error in the API's form."""
    assert (answer.header["content-type"], answer.header["x-own"]) == ("application/json", "yes")
    assert STATUS[answer.json["code"]] == answer.status
    return answer.status, answer.json["code"]


async def test_an_exchange_is_answered_by_what_its_codec_remembers(stand: Stand) -> None:
    client = await stand.connect()
    for shout in ("a", "a", "b", "b"):  # The second of each comes under a known head.
        for text in (f"{shout}x", f"{shout}x|{shout}y|z"):
            await client.send(post(text, "/own/m/run?q=1", f"X-Shout: {shout}"))
            answer = await client.answer()
            assert (answer.status, answer.header["content-type"]) == (200, "application/own")
            told = ["m", "q=1", shout, shout, answer.header["x-request-id"], "1", "None"]
            outputs = text.upper().split("|")
            assert answer.json == {"told": told, "outputs": outputs}
            assert answer.header["x-length"] == str(len(outputs))
        await client.send(post('{"input": "native"}'))
        assert (await client.answer()).json["output"] == "NATIVE"
    timeouts = {asked.options.timeout for asked in stand.gateway.asked if asked.input != "native"}
    assert 0.0 < min(timeouts) <= max(timeouts) == 0.5  # What is asked a moment later has as much less.
    assert {asked.parameters for asked in stand.gateway.asked} == {b'{"a":1}', b""}


class LabelledCodec(Codec, frozen=True):
    """The native form of one text, whose answer repeats the member `label` of its body."""

    def read_json(self, body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        exchange, label = Codec.read_json(self, body, options, known), json.loads(body)["label"]
        exchange.write = lambda outcome: (JSON, msgspec.json.encode({"label": label, "output": outcome.outputs[0]}))
        exchange.usual = None
        return exchange


@on_stand(whole=True)
async def test_an_input_that_the_gateway_has_is_kept_by_no_connection(stand: Stand) -> None:
    client = await stand.connect()
    await client.send(post(json.dumps({"input": "a" * 9_000}), "/v1/inference", "Idempotency-Key: k"))
    await settled(lambda: stand.real.pending == 1)
    assert stand.door._context is not None
    [connection] = stand.door._context.connections
    assert isinstance(connection, FastPathConnection)
    assert isinstance(connection.in_hand, RequestInHand)
    assert connection.in_hand.exchange is not None
    assert connection.in_hand.exchange.input == ""
    stand.go.set()
    assert (await client.answer()).json["output"] == "A" * 9_000


def test_what_a_native_body_has_beside_one_text_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def labelled(settings: Settings) -> Codec:
        native = inference(settings)
        return LabelledCodec(None, native.read, native.write, native.read_value)

    monkeypatch.setattr(routes, "ROUTES", {"/labelled": labelled})

    async def main(stand: Stand) -> None:
        client = await stand.connect()
        for label in ("first", "second", "third"):  # Behind the first each has a known head.
            await client.send(post(json.dumps({"input": "a", "label": label}), "/labelled"))
            assert (await client.answer()).json == {"label": label, "output": "A"}

    served(main)


async def test_a_path_that_names_a_model_is_read_as_it_was_written(stand: Stand) -> None:
    for path, model in (("a%20b", "a b"), ("%C3%A9", "é"), ("%FF", "\ufffd")):
        assert (await stand.ask(post("x", f"/own/{path}/run"))).json["told"][0] == model
    for path in ("/own//run", "/own/a/b/run", "/own/a/run/", "/own/a"):
        assert own_error(await stand.ask(post("x", path))) == (404, "NOT_FOUND")
    assert own_error(await stand.ask(get("/own/m/run"))) == (405, "METHOD_NOT_ALLOWED")
    assert (await stand.ask(get("/ownership"))).error == "NOT_FOUND"


def test_only_a_name_may_hold_a_slash_written_as_2f(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "ROUTES", {"/v2/models/{model}/run": own})

    async def main(stand: Stand) -> None:
        assert (await stand.ask(post("x", "/v2/models/org%2Fname/run"))).json["told"][0] == "org/name"
        assert (await stand.ask(post("x", "/v2%2Fmodels/org/run"))).status == 400

    served(main)


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (post("", "/own/m/run", KEY), 400, "BAD_REQUEST"),
        (post("x", "/own/m/run", KEY, "X-Shout: wrong"), 400, "BAD_REQUEST"),
        (post("x", "/own/m/run"), 401, "UNAUTHENTICATED"),
        (post("", "/own/m/run", KEY, length=9_000_000), 413, "PAYLOAD_TOO_LARGE"),
        (post("", "/own", KEY, length=9_000_000), 413, "PAYLOAD_TOO_LARGE"),
        (post("x|y", "/own/m/run", KEY, "Prefer: respond-async"), 400, "BAD_REQUEST"),
        (post("a|b|c|d", "/own/m/run", KEY), 413, "PAYLOAD_TOO_LARGE"),
        (post("odd", "/own/m/run", KEY), 502, "BACKEND_ERROR"),
        (post("a|odd", "/own/m/run", KEY), 502, "BACKEND_ERROR"),
        (get("/own/nothing"), 404, "NOT_FOUND"),
    ],
)
@on_stand(KEYS)
async def test_every_error_of_an_api_has_its_form(stand: Stand, request_: bytes, status: int, code: str) -> None:
    answer = await stand.ask(request_)
    assert own_error(answer) == (status, code)
    if KEY.encode() in request_ and b"/run" in request_:
        assert answer.header["x-limits"] == "1"


@on_stand(KEYS)
async def test_one_failure_of_several_and_marks_of_others_outcomes_are_told(stand: Stand) -> None:
    client = await stand.connect()
    stand.gateway.shared, stand.gateway.kept = DedupKind.SAME, True
    await client.send(post("a|b", "/own/m/run", KEY))
    answer = await client.answer()
    assert (answer.header["x-headway-cache"], answer.header["x-limits"]) == ("hit", "1")
    stand.gateway.failure = Failure(REJECTED_BY_MODEL, "bad")
    await client.send(post("a|b", "/own/m/run", KEY))
    answer = await client.answer()
    assert own_error(answer) == (422, "REJECTED_BY_MODEL")
    assert answer.json["wrong"] == "input 0 of 2, counted from 0: bad"


@on_stand(KEYS)
async def test_an_exchange_with_one_input_may_become_a_task(stand: Stand) -> None:
    stand.gateway.hold = True
    client = await stand.connect()
    await client.send(post("x", "/own/m/run", KEY, "Prefer: respond-async"))
    await stand.gateway.until(lambda: bool(stand.gateway.asked))
    stand.gateway.admit()
    answer = await client.answer()
    assert (answer.status, answer.header["preference-applied"]) == (202, "respond-async")
    assert answer.header["x-limits"] == "1"


async def test_a_client_that_leaves_abandons_all_inputs(stand: Stand) -> None:
    stand.gateway.hold = True
    client = await stand.connect()
    await client.send(post("a|b", "/own/m/run"))
    await stand.gateway.until(lambda: len(stand.gateway.asked) == 2)
    client.leave()
    await stand.gateway.until(lambda: not stand.gateway.waiting)
    assert {id for _, id in stand.gateway.abandoned} == {asked.id for asked in stand.gateway.asked}


async def test_kinds_of_the_models_are_known_to_a_codec(stand: Stand) -> None:
    worker = WorkerInfo(worker_id="g", model="default", status=WorkerStatus.HEALTHY, takes="json", gives="json")
    stand.gateway.served.learn([worker])
    assert (await stand.ask(post("x", "/own/default/run"))).json["told"][-1] == str(ValueKind.JSON)
