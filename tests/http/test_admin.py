import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from headway import __version__
from headway.core.tensors import Tensor, TensorHead, pack
from headway.model import DeadLetter, Entry, InferenceRequest, ItemResult, Principal, RequestOptions, Role, WorkerStatus
from headway.runtime.request_id import new_id
from tests import virtual_time
from tests.contracts.brokers import ask
from tests.http.ordinary import request
from tests.identity.writing import key_of
from tests.scenes import Scene, scene
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand

TENANT = Principal("alice", "acme", 0)


class Touchy(FakeBackend):
    """Fails on inputs that contain `poison`, until it is `cured`."""

    cured = False

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        items = await super().run(entries, timeout)
        return [
            ItemResult(None, "cannot digest \x1b[31mthis") if "poison" in str(entry.input) and not self.cured else item
            for entry, item in zip(entries, items, strict=True)
        ]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Port:
    def __init__(self, stand: Stand, role: Role = Role.SERVE, **how: Any) -> None:
        self.app = stand.admin_app(role, **how)

    async def ask(
        self,
        method: str,
        target: str,
        host: str = "127.0.0.1:9000",
        token: str | None = None,
        fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        client: str = "127.0.0.1",
    ) -> Answer:
        headers = {"host": host, **(fields or {})}
        if token is not None:
            headers["authorization"] = token
        answer = await self.app(request(method, target, headers, body, client))
        return Answer(answer.status, answer.headers, answer.body)

    async def get(self, target: str) -> Answer:
        return await self.ask("GET", target)


def played(
    scene: Callable[[Stand, Port], Awaitable[None]], *, backend: FakeBackend | None = None, **settings: Any
) -> None:
    """Run a scene against a service in virtual time."""

    async def main(clock: Callable[[], float]) -> None:
        stand = Stand(clock, backend or Touchy(), **settings)
        async with stand:
            await scene(stand, Port(stand))

    virtual_time.run(main)


def on_admin(**how: Any) -> Callable[[Scene], Callable[..., None]]:
    """Turn a coroutine function that takes a stand and its admin port into a test. The arguments are those of `played`."""
    return scene(lambda main: played(main, **how), tools=2)


async def test_health_and_readiness_of_an_idle_service(stand: Stand, port: Port) -> None:
    health = (await port.get("/internal/health")).json
    assert health["status"] == "ok"
    assert (health["gpu_utilization"], health["queue_depth"], health["requests_per_second"]) == (0.0, 0, 0.0)
    assert health["workers"] == {status.value: int(status is WorkerStatus.HEALTHY) for status in WorkerStatus}
    assert (health["policy"], health["broker"], health["version"]) == ("paced", "", __version__)
    assert health["id"]
    assert [queue["tier"] for queue in health["queues"]] == ["enterprise", "paid", "free"]
    verbose = await port.get("/readyz?verbose")
    assert verbose.json == {"status": "ok", "checks": {"workers": "1 of 1 healthy", "draining": False}}


async def test_health_shows_the_load(stand: Stand, port: Port) -> None:
    asked = [stand.asking(f"text {n}") for n in range(20)]
    await asyncio.sleep(0.05)
    health = (await port.get("/internal/health")).json
    assert health["queue_depth"] == sum(queue["depth"] for queue in health["queues"]) == 12
    assert health["pending"] == 20
    assert health["requests_per_second"] > 0
    assert health["queue_oldest_seconds"] == pytest.approx(0.05, abs=0.01)
    assert max(queue["oldest_seconds"] for queue in health["queues"]) == health["queue_oldest_seconds"]
    await asyncio.gather(*asked)
    await asyncio.sleep(2)
    health = (await port.get("/internal/health")).json
    assert (health["queue_depth"], health["pending"]) == (0, 0)
    assert 0 < health["gpu_utilization"] < 1


async def test_workers_are_listed(stand: Stand, port: Port) -> None:
    await asyncio.sleep(1.5)
    [worker] = (await port.get("/internal/workers")).json["workers"]
    assert worker.pop("last_heartbeat").endswith("+00:00")
    said = {"worker_id": "gpu-0", "model": "m", "status": "healthy", "estimated": True, "share": 1.0, "pid": 4242}
    kinds = {"takes": "text", "gives": "text"}
    zero = (
        "utilisation", "items_per_second", "loading_seconds", "retry_seconds", "in_flight", "restarts", "memory", "failed",
    )  # fmt: skip
    empty, unknown = ("version", "target", "gpu", "reason"), ("weight", "gpu_figures", "cost")
    assert worker == said | kinds | dict.fromkeys(zero, 0) | dict.fromkeys(empty, "") | dict.fromkeys(unknown)


def inference(
    id: str, input: str, tenant: Principal = TENANT, parameters: bytes = b"", tier: int = 0
) -> InferenceRequest:
    return InferenceRequest(tenant, id, RequestOptions(4.0, tier), "m", input, parameters)


async def bury(stand: Stand, **how: Any) -> str:
    """Make a request that becomes a dead letter, and return its id."""
    id = new_id()
    await stand.gateway.ask(inference(id, "poison", **how))
    return id


async def test_a_request_is_followed_from_the_queue_to_its_end(stand: Stand, port: Port) -> None:
    ids = [new_id() for _ in range(9)]
    inputs = ["poison", *["text"] * 8]
    asked = [asyncio.ensure_future(stand.gateway.ask(inference(*given))) for given in zip(ids, inputs, strict=True)]
    await asyncio.sleep(0.05)
    states = [(await port.get(f"/internal/requests/req_{id}")).json["status"] for id in ids]
    assert sorted(states) == ["processing"] * 8 + ["queued"]
    await asyncio.gather(*asked)
    failed = (await port.get(f"/internal/requests/{ids[0]}")).json
    assert (failed["status"], failed["error"]["error"]) == ("failed", "REJECTED_BY_MODEL")
    completed = (await port.get(f"/internal/requests/req_{ids[1]}")).json
    assert (completed["status"], completed["error"], completed["request_id"]) == ("completed", None, f"req_{ids[1]}")
    assert completed["latency_ms"] == pytest.approx(100, abs=20)
    unknown = await port.get(f"/internal/requests/req_{new_id()}")
    assert (unknown.status, unknown.json["error"]) == (404, "NOT_FOUND")
    assert unknown.json["detail"].endswith(" is pending or was answered recently")


async def test_a_dead_letter_is_listed_without_its_input_and_shown_with_it(stand: Stand, port: Port) -> None:
    id = await bury(stand, parameters=b'{"a":1}', tier=2)
    listing = await port.get("/internal/dlq")
    assert listing.json["count"] == 1
    assert b"poison" not in listing.body
    [letter] = listing.json["letters"]
    assert letter.pop("died_at").endswith("+00:00")
    assert letter.pop("batch_id").startswith("gpu-0@")
    died = {"error": "cannot digest \x1b[31mthis", "cause": "item", "attempts": 1, "worker": "gpu-0"}
    assert letter == {"id": f"req_{id}", "model": "m", "tenant": "acme", "tier": "free", "model_version": None, **died}
    for shown in (f"req_{id}", id):
        whole = (await port.get(f"/internal/dlq/{shown}")).json
        assert (whole["input"], whole["parameters"]) == ("poison", {"a": 1})


def letter_of(entry: Entry) -> DeadLetter:
    return DeadLetter(entry=entry, error="bad", cause="raised", attempts=3, worker="gpu-0", died_at=0.0)


async def test_others_have_their_turns_while_large_arrays_are_shown(stand: Stand, port: Port) -> None:
    rows, turns, over = 200, 0, False
    numbers = pack([Tensor(TensorHead("x", "FP32", (rows, 1024)), bytes(4 * 1024 * rows))])
    await stand.dead.add(letter_of(msgspec.structs.replace(ask("", id="x", model="m"), input=numbers)))

    async def others() -> None:
        nonlocal turns
        while not over:
            turns += 1
            await asyncio.sleep(0)

    waiting = asyncio.create_task(others())
    letter = (await port.get("/internal/dlq/x")).json
    over = True
    await waiting
    assert letter["tensors"] == "`x`, FP32 of shape [200, 1024]"
    assert letter["input"] == [[0.0] * 1024] * rows
    assert turns > rows


async def test_a_listing_is_bounded(stand: Stand, port: Port) -> None:
    for n in range(3):
        await stand.ask(f"poison {n}")
    assert len((await port.get("/internal/dlq?limit=2")).json["letters"]) == 2
    for limit in ("0", "-1", "x", "", "1e3", "9" * 5000, "0" * 5000 + "1", "0000000010001", "٣"):
        answer = await port.get(f"/internal/dlq?limit={limit}")
        assert (answer.status, answer.json["error"]) == (400, "BAD_REQUEST"), limit
        assert "10000" in answer.json["detail"]


async def test_a_replay_that_succeeds_removes_the_letter(stand: Stand, port: Port) -> None:
    id = await bury(stand)
    vars(stand.backends[0])["cured"] = True
    answer = await port.ask("POST", f"/internal/dlq/req_{id}/replay")
    assert answer.status == 200
    assert (answer.json["output"], answer.json["replayed"]) == ("POISON", f"req_{id}")
    assert answer.json["request_id"] != f"req_{id}"
    assert isinstance(answer.json["latency_ms"], float)
    assert answer.json["latency_ms"] == pytest.approx(100, abs=20)
    assert (await port.get("/internal/dlq")).json == {"count": 0, "letters": []}
    assert (await port.ask("POST", f"/internal/dlq/req_{id}/replay")).status == 404


async def test_a_replay_that_fails_keeps_the_one_letter_which_is_purged_once(stand: Stand, port: Port) -> None:
    id = await bury(stand)
    answer = await port.ask("POST", f"/internal/dlq/{id}/replay")
    assert (answer.status, answer.json["error"]) == (422, "REJECTED_BY_MODEL")
    assert answer.headers["content-type"] == "application/problem+json"
    letters = (await port.get("/internal/dlq")).json["letters"]
    assert [letter["id"] for letter in letters] == [f"req_{id}"]
    assert (await port.ask("DELETE", f"/internal/dlq/req_{id}")).status == 204
    gone = await port.ask("DELETE", f"/internal/dlq/req_{id}")
    assert (gone.status, gone.json["error"]) == (404, "NOT_FOUND")
    assert (await port.get(f"/internal/dlq/{id}")).status == 404


async def test_a_replay_is_for_the_model_of_the_letter(stand: Stand, port: Port) -> None:
    await stand.dead.add(letter_of(ask("fine", id="x", model="other")))
    answer = await port.ask("POST", "/internal/dlq/x/replay")
    assert (answer.status, answer.json["error"]) == (404, "NOT_FOUND")
    assert "'other'" in answer.json["detail"]


async def test_of_two_tenants_with_one_id_it_is_said_whose_letter_is_meant(stand: Stand, port: Port) -> None:
    for tenant in ("acme", "böse&co"):
        await stand.gateway.ask(inference("x", f"poison of {tenant}", Principal("somebody", tenant, 2)))
    which = "2 tenants have a dead letter req_x: 'acme', 'böse&co'; add ?tenant=NAME to choose one"
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/replay")):
        unclear = await port.ask(method, f"/internal/dlq/x{path}")
        assert (unclear.status, unclear.json["error"]) == (400, "BAD_REQUEST")
        assert which in unclear.json["detail"]
    assert (await port.get("/internal/dlq")).json["count"] == 2
    of_one, of_nobody = "/internal/dlq/x?tenant=b%C3%B6se%26co", "/internal/dlq/x?tenant=nobody"
    assert (await port.get(of_one)).json["input"] == "poison of böse&co"
    for method in ("GET", "DELETE"):
        unknown = await port.ask(method, of_nobody)
        assert (unknown.status, "req_x of this tenant" in unknown.json["detail"]) == (404, True)
    assert (await port.ask("DELETE", of_one)).status == 204
    assert (await port.get("/internal/dlq/x")).json["tenant"] == "acme"
    assert (await port.ask("DELETE", "/internal/dlq/x")).status == 204


@pytest.mark.parametrize("path", ["/internal/dlq", "/metrics", "/nowhere"])
@on_admin(admin_token="s3cret,old", admin_names="headway.example")
async def test_a_service_token_is_asked_for(stand: Stand, port: Port, path: str) -> None:
    """Two tokens are valid while the token is being changed."""
    for wrong in (None, "", "Bearer", "Bearer s3cret2", "Basic s3cret", "Bearer s\xe9cret", "Bearer s3cret,old"):
        refused = await port.ask("GET", path, token=wrong)
        assert (refused.status, refused.json["error"]) == (401, "UNAUTHENTICATED"), wrong
        assert refused.headers["www-authenticate"] == "Bearer"
        assert b"s3cret" not in refused.body
    for right in ("Bearer s3cret", "bearer  s3cret ", "Bearer old"):
        assert (await port.ask("GET", path, host="headway.example", token=right)).status in (200, 404)
    for free in ("/livez", "/readyz", "/healthz"):
        assert (await port.ask("GET", free, host="10.0.0.7")).status == 200


@pytest.mark.parametrize("token", ["", "s3cret"])
async def test_a_clients_key_is_good_nowhere_here(stand: Stand, port: Port, token: str) -> None:
    stand.settings = replace(stand.settings, admin_token=token)
    port = Port(stand)
    for path in ("/internal/dlq/x", "/metrics", "/nowhere"):
        for text in (key_of("a"), key_of("a")[:-1], "hw_live_"):
            refused = await port.ask("GET", path, token=f"Bearer {text}")
            assert (refused.status, refused.json["error"]) == (403, "FORBIDDEN")
            assert "client's key" in refused.json["message"]
            assert b"canary" not in refused.body
    assert (await port.ask("GET", "/livez", token=f"Bearer {key_of('a')}")).status == 200


@on_admin(admin_names="ops.example")
async def test_without_a_token_only_loopback_names_are_answered(stand: Stand, port: Port) -> None:
    for host in ("127.0.0.1", "127.0.0.1:9000", "localhost:9000", "[::1]:9000"):
        assert (await port.ask("GET", "/internal/health", host=host)).status == 200, host
    evil = "evil.example:9000", "127.0.0.1.evil.example", "localhost:1@evil", "[::1]evil"
    for host in (*evil, "", "[::2]", "localhost:x", "ops.example", "10.0.0.7"):
        refused = await port.ask("GET", "/internal/health", host=host)
        assert (refused.status, refused.json["error"]) == (403, "FORBIDDEN"), host
        assert "HEADWAY_ADMIN_TOKEN" in refused.json["message"]


async def test_unknown_routes_and_methods_are_problem_documents(stand: Stand, port: Port) -> None:
    missing = await port.get("/internal/nothing")
    assert (missing.status, missing.json["error"]) == (404, "NOT_FOUND")
    assert missing.json["message"] == "nothing is served at /internal/nothing"
    for method, path in (("GET", "/internal/none/" + "x" * 4000), ("PUT", "/internal/dlq/" + "x" * 4000)):
        assert len((await port.ask(method, path)).json["message"]) < 400
    for path in ("/v1/inference", "/v2/models/m/infer", "/api/inference", "/openapi.json"):
        public = await port.ask("POST", path)
        assert public.status == 404 and "this is the admin port: use the public one" in public.json["message"]
    assert (await port.get("/health")).json["message"].endswith("; /healthz and /internal/health are")
    wrong = await port.ask("PUT", "/internal/dlq/x")
    assert (wrong.status, wrong.json["error"]) == (405, "METHOD_NOT_ALLOWED")
    assert set(wrong.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE", "OPTIONS"}
    assert missing.json["request_id"] == wrong.json["request_id"] == "req_door"
