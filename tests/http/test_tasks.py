"""Tasks over HTTP: submitting, waiting, polling, deleting, and hiding them from other tenants."""

import asyncio
import json

import pytest

from headway.doors import answer_pieces
from headway.doors.entrance import CHARGED
from headway.errors import BrokerUnavailable
from headway.gateway.limiter import POLLS, POLLS_AT_ONCE
from headway.http import tasks
from headway.http.inference import codecs
from headway.http.server.connection_context import GRACE
from headway.model import Failure, Reply, TokenCount
from headway.runtime.fair_turns import FairTurns
from tests.http.stand import Answer, Stand, get, on_stand, post, settled

ASYNC = "Prefer: respond-async"
UUID = "0189f7a4-1111-7222-8333-444455556666"
PATHS = {
    "/v1/inference": '{"input": "a"}',
    "/api/inference": '{"input": "a"}',
    "/v1/predict": '{"model_id": "default", "input_data": "a"}',
}


def delete(path: str, *fields: str) -> bytes:
    return get(path, *fields, method="DELETE")


def task_of(answer: Answer) -> str:
    assert answer.status == 202, answer.body
    assert answer.json == {"task_id": answer.header["x-request-id"], "status": "PENDING"}
    assert answer.header["location"] == f"/v1/result/{answer.json['task_id']}"
    assert answer.header["retry-after"] == "1"
    assert answer.header["preference-applied"].startswith("respond-async")
    return str(answer.json["task_id"])


@pytest.mark.parametrize("path", PATHS)
@on_stand(whole=True)
async def test_a_task_is_handed_over_and_its_outcome_asked_for(stand: Stand, path: str) -> None:
    client, stand.gateway.tokens = await stand.connect(), TokenCount(7, 3)
    stand.go.clear()
    id = task_of(await client.ask(post(PATHS[path], path, ASYNC)))
    pending = await client.ask(get(f"/v1/result/{id}"))
    assert (pending.status, pending.json) == (200, {"task_id": id, "status": "PENDING"})
    assert pending.header["retry-after"] == "1"
    assert (await client.ask(get(f"/v1/result/{id}?wait=0.01"))).json == pending.json, "the wait is over"
    stand.go.set()
    for shown in (id, id.removeprefix("req_"), id.upper().replace("REQ_", "req_")):
        done = await client.ask(get(f"/v1/result/{shown}?wait=25"))
        metadata = {"tokens_used": 7, "model_version": "1"}
        told = {"task_id": id, "status": "SUCCESS", "output": "A", "metadata": metadata}
        assert (done.status, done.json) == (200, told)
        assert done.header["cache-control"] == "no-store"
        assert done.header["x-request-id"] != id
    assert stand.runs == ["a"]


@on_stand(whole=True)
async def test_one_that_is_done_in_time_is_answered_as_ever(stand: Stand) -> None:
    answer = await stand.ask(post('{"input": "a"}', "/v1/inference", f"{ASYNC}, wait=25"))
    assert (answer.status, answer.json["output"]) == (200, "A")
    assert "preference-applied" not in answer.header
    assert (await stand.ask(get(f"/v1/result/{answer.header['x-request-id']}"))).json["output"] == "A"


async def test_one_that_is_not_is_handed_over_under_the_same_id(stand: Stand) -> None:
    gateway = stand.gateway
    gateway.hold = True
    client = await stand.connect()
    fields = (f"{ASYNC}, wait=25", "X-Request-Timeout-Ms: 20", f"X-Request-Id: {UUID}")
    await client.send(post('{"input": "a"}', "/v1/inference", *fields) + get("/livez"))
    await gateway.until(lambda: bool(gateway.waiting))
    gateway.admit()
    answer = await client.answer()
    assert task_of(answer) == f"req_{UUID}"
    assert answer.header["preference-applied"] == "respond-async, wait=25"
    assert gateway.detached == [("default", UUID)]
    assert (await client.answer()).json == {"status": "ok"}, "the next request is read"
    client.leave()
    gateway.release()  # Nobody receives it.
    assert gateway.abandoned == []


@on_stand(whole=True)
async def test_the_id_of_a_task_is_the_last_answer_where_its_client_wants_no_other(stand: Stand) -> None:
    client = await stand.connect()
    answer = await client.ask(post('{"input": "a"}', "/v1/inference", ASYNC, "Connection: close"))
    assert task_of(answer)
    assert answer.header.get("connection") == "close"
    assert await client.ended()


async def test_a_request_is_handed_over_when_it_is_admitted_and_not_before(stand: Stand) -> None:
    gateway = stand.gateway
    gateway.hold = True
    client = await stand.connect()
    await client.send(post('{"input": "a"}', "/v1/inference", ASYNC))
    await gateway.until(lambda: bool(gateway.waiting))
    assert gateway.asked[0].options.timeout == 30.0
    gateway.failure = Failure("SHED", "busy", 2.0, "shed")
    gateway.release()
    assert (await client.answer()).error == "SHED"
    await client.send(post('{"input": "a"}', "/v1/inference", ASYNC))
    await gateway.until(lambda: bool(gateway.waiting))
    client.leave()
    await gateway.until(lambda: bool(gateway.abandoned))
    assert gateway.detached == []


@on_stand(task_timeout_ms=20_000.0)
async def test_a_task_may_take_longer_than_a_request_but_its_client_decides(stand: Stand) -> None:
    for field, timeout in (("X-A: b", 20.0), ("X-Request-Timeout-Ms: 9000", 9.0), ("X-Request-Timeout-Ms: 1", 0.001)):
        await stand.ask(post('{"input": "a"}', "/v1/inference", ASYNC, field))
        assert stand.gateway.asked[-1].options.timeout == timeout


@on_stand(whole=True)
async def test_what_is_unknown_is_404_whatever_the_reason(stand: Stand) -> None:
    messages = set()
    for id in (f"req_{UUID}", "req_1", "x" * 300, "%0d%0aset-cookie:%20a=b", "%ff", "%2e%2e"):
        path = f"/v1/result/{id}"
        for request in (get(path), get(f"{path}?wait=5"), get(f"{path}?wait={'9' * 400}"), delete(path)):
            answer = await stand.ask(request)
            assert (answer.status, answer.error) == (404, "NOT_FOUND")
            assert "set-cookie" not in answer.header
            messages.add(answer.json["message"])
    assert len(messages) == 1


@on_stand(whole=True)
async def test_a_wait_that_is_no_number_is_refused(stand: Stand) -> None:
    for wait in ("x", "-1", "1e3", "", "1&wait=2", "NaN", "%00"):
        assert (await stand.ask(get(f"/v1/result/req_{UUID}?wait={wait}"))).error == "BAD_REQUEST", wait


@on_stand(whole=True)
async def test_a_task_that_is_forgotten_never_runs_and_whoever_waits_for_it_hears_so(stand: Stand) -> None:
    stand.go.clear()
    whoever, watcher = await stand.connect(), await stand.connect()
    await whoever.send(post('{"input": "first"}', "/v1/inference", f"{ASYNC}, wait=25", f"X-Request-Id: {UUID}"))
    await settled(lambda: stand.runs == ["first"])
    waiting = task_of(await stand.ask(post('{"input": "second"}', "/v1/inference", ASYNC)))
    await watcher.send(get(f"/v1/result/{waiting}?wait=25"))
    await settled(lambda: stand.real.pending == 3)
    for id in (waiting, UUID):
        gone = await stand.ask(delete(f"/v1/result/{id}"))
        assert (gone.status, gone.body) == (204, b"")
        assert (await stand.ask(delete(f"/v1/result/{id}"))).error == "NOT_FOUND"
    for client in (watcher, whoever):
        assert (await client.answer()).error == "NOT_FOUND"
    stand.go.set()
    assert (await stand.ask(post('{"input": "third"}'))).status == 200
    assert stand.runs == ["first", "third"]


@on_stand(whole=True)
async def test_a_client_that_leaves_ends_its_wait(stand: Stand) -> None:
    stand.go.clear()
    id = task_of(await stand.ask(post('{"input": "a"}', "/v1/inference", ASYNC)))
    client = await stand.connect()
    await client.send(get(f"/v1/result/{id}?wait=25"))
    await settled(lambda: stand.real.pending == 2)
    client.leave()
    await settled(lambda: stand.real.pending == 1)
    stand.go.set()
    assert (await stand.ask(get(f"/v1/result/{id}?wait=25"))).json["output"] == "A"


@on_stand(whole=True)
async def test_a_shutdown_ends_every_wait(stand: Stand) -> None:
    stand.go.clear()
    id = task_of(await stand.ask(post('{"input": "a"}', "/v1/inference", ASYNC)))
    client = await stand.connect()
    await client.send(get(f"/v1/result/{id}?wait=25"))
    await settled(lambda: stand.real.pending == 2)
    draining = asyncio.ensure_future(stand.door.drain())
    answer = await client.answer()
    assert (answer.json["status"], answer.header["connection"]) == ("PENDING", "close")
    client.leave()
    stand.later(GRACE)
    await draining
    stand.go.set()


@on_stand(whole=True)
async def test_while_the_broker_is_away_nothing_is_known(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*args: object) -> Reply:
        raise BrokerUnavailable("the broker at redis://secret:6379/0 does not answer")

    monkeypatch.setattr(stand.broker, "outcome", away)
    for request in (get(f"/v1/result/{UUID}"), delete(f"/v1/result/{UUID}")):
        answer = await stand.ask(request)
        assert (answer.status, answer.error) == (503, "SERVICE_OVERLOADED")
        assert answer.header["x-headway-dropped-reason"] == "broker"
        assert b"the queue is unreachable" in answer.body
        assert b"redis" not in answer.body, "where the broker is concerns no client"


@on_stand(whole=True)
async def test_an_output_that_is_no_text_makes_a_task_fail(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(tenant: str, id: str) -> Reply:
        return Reply(id, tenant, "\ud800")

    monkeypatch.setattr(stand.broker, "outcome", found)
    answer = await stand.ask(get(f"/v1/result/{UUID}"))
    assert (answer.json["status"], answer.json["error"]["error"]) == ("FAILED", "BACKEND_ERROR")


@on_stand(keys={name: {"tenant": name} for name in ("mine", "yours")}, whole=True)
async def test_another_tenant_knows_nothing_of_it(stand: Stand) -> None:
    mine, yours = "Authorization: Bearer mine", "Authorization: Bearer yours"
    id = task_of(await stand.ask(post('{"input": "a"}', "/v1/inference", ASYNC, mine)))
    path = f"/v1/result/{id}"
    assert (await stand.ask(get(f"{path}?wait=25", mine))).json["output"] == "A"
    never = await stand.ask(get(f"/v1/result/{UUID}", yours))
    for request in (get(path, yours), get(f"{path}?wait=25", yours), delete(path, yours)):
        foreign = await stand.ask(request)
        assert (foreign.status, set(foreign.header)) == (404, set(never.header))
        assert {name for name in foreign.json if foreign.json[name] != never.json[name]} == {"request_id"}
    for request in (get(path), delete(path, "Authorization: Bearer x"), delete(path, "Content-Length: 1000")):
        assert (await stand.ask(request)).error == "UNAUTHENTICATED"
    assert stand.counters.gateway.refusals["unauthenticated", "none", ""] == 3
    assert (await stand.ask(get(path, mine))).json["output"] == "A"


@on_stand(
    keys={"ada": {"rate": 1.0, "burst": 1.0}, "bob": {"rate": 1.0, "burst": 1.0, "key": "bob"}, "eve": {"rate": 0.0}},
    whole=True,
    tier_rates="paid=1",
)
async def test_polls_are_limited_by_what_their_caller_may_send(stand: Stand) -> None:
    """Requests about models count as polls, too."""
    client, ada = await stand.connect(), "Authorization: Bearer ada"
    paths = f"/v1/result/{UUID}", f"/v1/result/{UUID}?wait=5", "/v1/models", "/v2/models/default", "/v2/models/stats"
    polls = [*(get(path, ada) for path in paths), post("{}", "/v2/repository/index", ada)]
    for number in range(POLLS + POLLS_AT_ONCE):
        assert (await client.ask(polls[number % len(polls)])).status in (200, 404)
    for poll in polls:
        answer = await client.ask(poll)
        assert (answer.status, answer.header["x-headway-dropped-reason"]) == (429, "polls")
        assert "30 polls a minute" in str(answer.json)
        assert answer.header["retry-after"]
    assert stand.counters.gateway.refusals["polls", "paid", ""] == len(polls)
    requests = await client.ask(post('{"input": "a"}', "/v1/inference", ada))
    assert requests.status == 200, "requests are counted apart"
    for key in ("bob", "eve"):
        answer = await client.ask(get(f"/v1/result/{UUID}", f"Authorization: Bearer {key}"))
        assert answer.status == 404, "somebody else's"


@on_stand(whole=True, keys={"ada": {"rate": 1.0, "burst": 1.0}})
async def test_a_large_outcome_counts_as_several_polls(stand: Stand) -> None:
    """Each poll builds and sends it again, so polls of 15 MB could occupy a whole gateway."""
    bearer, client = "Authorization: Bearer ada", await stand.connect()
    long = "\x01" * (CHARGED // 6 + 99)  # Each character becomes six bytes.
    task = await client.ask(post(json.dumps({"input": long}), "/v1/inference", ASYNC, bearer))
    poll = get(f"/v1/result/{task_of(task)}?wait=25", bearer)
    for _ in range((POLLS + POLLS_AT_ONCE) // 2):
        assert (await client.ask(poll)).json["output"] == long.upper()
    answer = await client.ask(poll)
    assert (answer.status, answer.header["x-headway-dropped-reason"]) == (429, "polls")


@on_stand(whole=True)
async def test_a_large_outcome_is_made_and_sent_in_turns(
    stand: Stand, turns: list[tuple[FairTurns, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building and writing 15 MB in one go blocked the loop for about 15 ms."""
    long, piece = '"é' * 1_000 + "x" * 2_500, 1 << 8
    id = task_of(await stand.ask(post(json.dumps({"input": long}), "/v1/inference", ASYNC)))
    await stand.ask(get(f"/v1/result/{id}?wait=25"))
    for module in (answer_pieces, codecs, tasks):
        monkeypatch.setattr(module, "PIECE", piece)
    monkeypatch.setattr("headway.doors.answer_pieces.TURN", -1.0)
    for accept in ("application/json", "application/octet-stream"):
        turns.clear()
        answer = await stand.ask(get(f"/v1/result/{id}", f"Accept: {accept}"))
        assert (answer.status, answer.header["content-type"]) == (200, accept)
        text = answer.json["output"] if accept == "application/json" else answer.body.decode()
        assert text == long.upper()
        assert len(turns) > 2 * len(long) / piece, "one to make each piece, and one to send it"
