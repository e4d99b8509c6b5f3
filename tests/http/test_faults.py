"""Unexpected exceptions get 500 with a request id, are logged once, and affect no other request."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import pytest
import structlog

from headway.doors.exchange import Usual
from headway.http.inference.codecs import Codec
from headway.http.inference.fast_path import FastPathConnection
from headway.http.server.connection import Connection
from headway.http.server.listener import Listener
from tests.http.stand import Answer, Client, Stand, get, post
from tests.http.test_listener import broken, on_door

BODY = '{"input": "a"}'
Logs = Sequence[MutableMapping[str, Any]]


def raises(*arguments: object, **named: object) -> Any:
    raise ZeroDivisionError("unforeseen")


def check(answer: Answer, logs: Logs) -> None:
    """Check that the only log line has the answer's request id."""
    assert (answer.status, answer.error) == (500, "INTERNAL")
    assert "unforeseen" not in answer.json["message"]
    (line,) = logs
    assert (line["log_level"], line["request_id"]) == ("error", answer.header["x-request-id"])
    assert line["exc_info"]


def break_decoding(patch: pytest.MonkeyPatch, stand: Stand) -> None:
    for reader in (Codec, Usual):
        patch.setattr(reader, "read", raises)


def break_encoding(patch: pytest.MonkeyPatch, stand: Stand) -> None:
    patch.setattr(Usual, "write", raises)


def break_identity(patch: pytest.MonkeyPatch, stand: Stand) -> None:
    context: Any = stand.door._context
    identity = context.entrance._identify.__self__
    for name in list(vars(identity)):
        patch.delattr(identity, name)


def break_submission(patch: pytest.MonkeyPatch, stand: Stand) -> None:
    patch.setattr(stand.gateway, "enter", raises)


def break_routing(patch: pytest.MonkeyPatch, stand: Stand) -> None:
    patch.setattr(FastPathConnection, "serve", raises)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("breaking", [break_decoding, break_encoding, break_identity, break_submission, break_routing])
async def test_a_fault_in_the_hot_lane(
    stand: Stand, breaking: Callable[[pytest.MonkeyPatch, Stand], None], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, before = await stand.connect(), ""
    if known and breaking is not break_routing:
        before = (await client.ask(post(BODY))).json["request_id"]
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        breaking(patch, stand)
        answer = await client.ask(post(BODY))
        check(answer, logs)
    assert answer.header["x-request-id"] != before
    assert await client.ended()
    assert (await stand.ask(post(BODY))).status == 200
    tier = "none" if breaking in (break_identity, break_routing) else "paid"
    assert stand.counters.gateway.refusals == {("internal", tier, ""): 1}


async def test_a_fault_while_an_id_is_handed_out(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await stand.hold(post(BODY, "/v1/inference", "Prefer: respond-async"))
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(stand.gateway, "detach", raises)
        stand.gateway.admit()
        check(await client.answer(), logs)
    assert [id for _, id in stand.gateway.abandoned] == [asked.id for asked in stand.gateway.asked]


async def test_a_fault_in_the_sweep_hits_one_connection_alone(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await stand.connect(), await stand.connect()
    for client in (first, second):
        await client.ask(get("/livez"))
    hit, other = stand.door._connections()
    inspect = Connection.inspect

    def some(connection: Connection, now: float) -> None:
        if connection is hit:
            raises()
        inspect(connection, now)

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(FastPathConnection, "inspect", some)
        stand.later(31.0)
    assert len(logs) == 1
    assert other.transport.is_closing()


@on_door(broken)
async def test_a_fault_outside_of_the_routes(door: Listener, client: Client) -> None:
    """It occurs before the router gets the request, so the router can't answer it."""
    with structlog.testing.capture_logs() as logs:
        check(await client.ask(get("/internal/health")), logs)
