"""Several models: of one process, as clients of every door see them, and of hosts over Redis on which some are cold."""

from __future__ import annotations

import contextlib
import json
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.e2e.client import wait_until
from tests.e2e.server import Server
from tests.identity.writing import entry, key_of
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
    )
    server = Server(tmp_path, target="upper", flags=["marked", "--keys", "keys.toml"])
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
        server.signal()
        server.check_end()
    finally:
        server.kill()


NAMED = """
import time

class Model:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, inputs: list[str]) -> list[str]:
        time.sleep(0.02)
        return [f"{self.name}:{text}" for text in inputs]
"""


def serving(folder: Path, models: str, *flags: str, role: str = "serve") -> Server:
    """Server of these models, whose targets are in place; not ready yet."""
    (folder / "several.py").write_text(NAMED)
    first, *more = [f"{name}=several.py:Model('{name}')" for name in models]
    return Server(folder, target=first, flags=[*more, *flags], role=role)


def statuses(server: Server) -> dict[str, str]:
    return {worker["worker_id"]: worker["status"] for worker in server.workers()}


def test_over_redis_hosts_of_different_models_serve_and_a_cold_one_is_loaded_on_one_of_them(tmp_path: Path) -> None:
    with RedisServer("valkey", tmp_path / "redis") as redis, contextlib.ExitStack() as stack:

        def up(server: Server) -> Server:
            stack.callback(server.kill)
            server.ready()
            return server

        def worker(models: str, name: str) -> Server:
            flags = ["--broker", redis.url, "--name", name, "--models-per-gpu", "1"]
            return up(serving(tmp_path, models, *flags, role="worker"))

        hosts = [worker("ac", "one"), worker("bc", "two")]
        gateway = up(Server(tmp_path, "", ["--broker", redis.url], role="gateway"))
        client = Client(gateway, "none")

        def listed() -> Any:
            return [model["id"] for model in client.ask("GET", "/v1/models")[1]["data"]]

        wait_until(lambda: listed() == ["a", "b", "c"])
        for model in "ab":
            assert client.native("1", model)["output"] == f"{model}:1"
        assert client.native("2", "c")["output"] == "c:2", "nobody had it loaded"
        loads = [host.metrics().value("model_loads_total", model="c") for host in hosts]
        assert sorted(loads) == [0.0, 1.0], "one of the two that could has loaded it"
        host = hosts[loads.index(1.0)]
        assert host.metrics().value("model_load_seconds_count", model="c") == 1
        assert host.metrics().by("model_evictions_total", "reason") == {"cold": 1.0}
        hosts.append(worker("d", "three"))
        hosts[-1].expected = {"a setting has no effect"}  # It has one model only.
        wait_until(lambda: "d" in listed())
        assert client.native("3", "d")["output"] == "d:3"
        for host in hosts:
            host.signal()
            host.check_end()
        assert set(statuses(gateway).values()) == {"offline"}, "what was cold has left with its host"
        again = worker("ac", "one")
        assert again.log("waiting for its name to become free") == []
        again.signal()
        again.check_end()
        gateway.signal()
        gateway.check_end()
