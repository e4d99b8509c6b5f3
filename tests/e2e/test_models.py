"""Several models of one process, as clients of every door see them."""

from __future__ import annotations

import contextlib
import json
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import pytest

from headway.grpc import messages
from tests.e2e.client import wait_until
from tests.e2e.server import Server
from tests.identity.writing import entry, key_of
from tests.servers.ports import Port
from tests.servers.redis import RedisServer

TARGETS = """
import time

def slow(inputs: list[str]) -> list[str]:
    time.sleep(0.1)
    return [text.upper() for text in inputs]

class Marked:
    def __init__(self, mark="-"):
        self.mark = mark
    def __call__(self, inputs: list[str]) -> list[str]:
        time.sleep(0.1)
        return [self.mark + text for text in inputs]
"""
SLOW = 0.001
"""Requests a minute of a limit of which nothing comes back within a test."""
CAPPED_FOR_UPPER = f"model_limits = {{upper = {{rate = {SLOW}, burst = 6}}}}"
SETTINGS = """
request_timeout_ms = 30000
queue_timeout_ms = 30000
max_batch_size = 8
[models.upper]
target = "both.py:slow"
[models.marked]
target = "both.py:Marked(mark='+')"
version = "3"
"""


class Client:
    """Client of one server, with a key."""

    def __init__(self, server: Server, key: str) -> None:
        self._port, self._key = server.port, key_of(key)

    def ask(self, method: str, path: str, body: object = None, **fields: str) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON and header fields of an answer."""
        line = HTTPConnection("127.0.0.1", self._port, timeout=60)
        sent = None if body is None else json.dumps(body)
        line.request(method, path, sent, {"Authorization": f"Bearer {self._key}", **fields})
        answer = line.getresponse()
        content = json.loads(answer.read())
        line.close()
        return answer.status, content, {name.lower(): value for name, value in answer.getheaders()}

    def post(self, path: str, body: object = None) -> Any:
        return self.ask("POST", path, body)[1]

    def native(self, input: str, model: str | None) -> Any:
        return self.post("/v1/inference", {"input": input} if model is None else {"input": input, "model": model})


def test_several_models_at_every_door_under_keys_for_some(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(TARGETS)
    (tmp_path / "headway.toml").write_text(SETTINGS)
    (tmp_path / "keys.toml").write_text(
        entry("all", "all", "acme", "paid", "rate = 0")
        + entry("one", "one", "acme", "paid", 'rate = 0\nmodels = ["marked"]')
        + entry("capped", "capped", "capped", "paid", f"rate = {SLOW}\nburst = 12\n{CAPPED_FOR_UPPER}")
    )
    with contextlib.closing(Port()) as port:
        flags = ["marked", "--keys", "keys.toml", "--grpc-port", str(port.number)]
        server = Server(tmp_path, target="upper", flags=flags)
    try:
        server.ready()
        everything, one = Client(server, "all"), Client(server, "one")
        assert everything.native("a", "upper")["output"] == "A"
        answered = everything.native("a", "marked")
        assert (answered["output"], answered["metadata"]["model_version"]) == ("+a", "3")
        unnamed = everything.native("a", None)
        assert (unnamed["status"], unnamed["message"].endswith("name one of: marked, upper")) == (400, True)
        foreign = one.native("a", "upper")
        assert (foreign["status"], foreign["error"]) == (403, "FORBIDDEN")
        assert "upper" not in one.native("a", "other")["message"]
        assert [model["id"] for model in one.ask("GET", "/v1/models")[1]["data"]] == ["marked"]
        assert one.ask("GET", "/v2/models/upper")[0] == 403
        assert one.post("/v2/repository/index") == [{"name": "marked", "version": "3", "state": "READY", "reason": ""}]
        tensor = {"name": "INPUT", "datatype": "BYTES", "shape": [1, 1], "data": ["b"]}
        told = one.post("/v2/models/marked/versions/3/infer", {"inputs": [tensor]})
        assert (told["outputs"][0]["data"], told["model_version"]) == (["+b"], "3")
        assert one.ask("POST", "/v2/models/marked/versions/4/infer", {"inputs": [tensor]})[0] == 404
        completed = everything.post("/v1/completions", {"model": "marked", "prompt": "c"})
        assert (completed["model"], completed["choices"][0]["text"]) == ("marked", "+c")
        asked = {"input": "d", "model": "marked"}
        _, _, fields = one.ask("POST", "/v1/inference", asked, Prefer="respond-async")
        assert one.ask("GET", f"{fields['location']}?wait=20")[1]["output"] == "+d"
        assert {worker["worker_id"]: worker["model"] for worker in server.workers()} == {
            "upper/cpu-0": "upper", "marked/cpu-0": "marked",
        }  # fmt: skip
        metrics = server.metrics()
        assert metrics.value("requests_total", model="upper", outcome="ok") == 1
        assert metrics.value("requests_total", model="marked", outcome="ok") == 4
        limited_for_a_model(Client(server, "capped"), server.grpc_port)
        server.signal()
        server.check_end()
    finally:
        server.kill()


def limited_for_a_model(client: Client, grpc_port: int) -> None:
    """A key of 12 requests, of which 6 may be for the model upper, by whichever door."""
    predict = {"model_id": "upper", "input_data": "a"}
    _, _, fields = client.ask("POST", "/v1/predict", predict)
    assert fields["ratelimit-policy"] == '"key";q=1;w=60000, "model";q=1;w=60000'
    assert fields["ratelimit"].startswith('"model";r=5;t=')
    status, _, fields = client.ask("POST", "/v1/completions", {"model": "upper", "prompt": ["a", "b"]})
    assert (status, fields["ratelimit"][:11], fields["x-ratelimit-remaining-requests"]) == (200, '"model";r=3', "3")
    assert client.ask("POST", "/v1/predict", predict, Prefer="respond-async")[0] == 202
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        call = channel.unary_unary(f"/{messages.HEADWAY}/Predict")
        bearer = (("authorization", f"Bearer {key_of('capped')}"),)
        for model, left in (("upper", 'model";r=1'), ("upper", 'model";r=0'), ("marked", 'key";r=5')):
            asked = messages.message("headway.v1.PredictRequest")(model_id=model, input_data=b"a").SerializeToString()
            _, done = call.with_call(asked, metadata=bearer)
            assert dict(done.trailing_metadata())["ratelimit"].startswith(f'"{left}')
        asked = messages.message("headway.v1.PredictRequest")(model_id="upper", input_data=b"a").SerializeToString()
        with pytest.raises(grpc.RpcError, match="to the model 'upper'"):
            call(asked, metadata=bearer)
    for _ in range(20):  # What is refused takes nothing of what the key may ask of others.
        status, told, fields = client.ask("POST", "/v1/predict", predict)
        assert (status, told["error"], fields["ratelimit"][:11]) == (429, "RATE_LIMITED", '"model";r=0')
        assert "to the model 'upper' for this credential, 6 at once" in told["message"]
    several = client.post("/v1/completions", {"model": "upper", "prompt": ["a"] * 7})
    assert (
        "only 6 fit into the rate limit at once for this credential and the model 'upper'"
        in several["error"]["message"]
    )
    never = {"model": "marked", "prompt": ["a"] * 13}
    status, told, _ = client.ask("POST", "/v1/completions", never)
    assert status == 413
    assert "only 12 fit into the rate limit at once" in told["error"]["message"]
    status, _, fields = client.ask("POST", "/v1/completions", {"model": "marked", "prompt": list("abcd")})
    assert (status, fields["ratelimit"][:9]) == (200, '"key";r=0'), "the list that was too large cost 1"
    assert client.ask("POST", "/v1/completions", never)[0] in (413, 429), "429 where it is refused before its body came"
    assert "for this key, 12 at once" in client.native("a", "marked")["message"]


def test_a_gateway_serves_the_models_that_workers_of_the_fleet_bring_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(TARGETS)
    with RedisServer("valkey", tmp_path / "redis") as redis, contextlib.ExitStack() as stack:

        def up(role: str, target: str = "", *flags: str) -> Server:
            server = Server(tmp_path, target, ["--broker", redis.url, *flags], role=role)
            stack.callback(server.kill)
            server.ready()
            return server

        up("worker", "upper=both.py:slow", "--max-batch-size", "4")
        gateway = up("gateway")
        client = Client(gateway, "none")

        def listed() -> list[str]:
            return [model["id"] for model in client.ask("GET", "/v1/models")[1]["data"]]

        assert listed() == ["upper"]
        assert client.native("a", None)["output"] == "A", "it is the only model"
        late = up("worker", "marked=both.py:Marked('+')", "--model-version", "3")
        wait_until(lambda: listed() == ["marked", "upper"])
        answered = client.native("b", "marked")
        assert (answered["output"], answered["metadata"]["model_version"]) == ("+b", "3")
        assert client.native("a", None)["status"] == 400
        workers = {worker["model"]: worker["version"] for worker in gateway.workers()}
        assert workers == {"upper": "1", "marked": "3"}
        other = up("worker", "marked=both.py:slow", "--model-version", "3", "--name", "other")
        found = gateway.logged("workers run different targets under one model and version")
        assert (found["model"], found["version"], len(found["workers"].split(", "))) == ("marked", "3", 2)
        for worker in (late, other):
            worker.signal()
            worker.check_end()
        assert client.native("a", "upper")["output"] == "A"
        gateway.expected = {"workers run different targets under one model and version"}
        gateway.signal()
        gateway.check_end()
