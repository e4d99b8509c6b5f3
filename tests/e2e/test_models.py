"""Several models on hosts that share Redis. Some of the models are cold."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.e2e.client import wait_until
from tests.e2e.server import Server
from tests.servers.redis import RedisServer

NAMED = """
import time

class Model:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, inputs: list[str]) -> list[str]:
        time.sleep(0.02)
        return [f"{self.name}:{text}" for text in inputs]
"""
SOON = {"headway.core.locality.LEAST_RESIDENCE": 1.0}
"""Shortens the minimum stay of a model on a GPU."""


def test_over_redis_hosts_of_different_models_serve_and_a_cold_one_is_loaded_on_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "several.py").write_text(NAMED)
    with RedisServer("valkey", tmp_path / "redis") as redis, contextlib.ExitStack() as stack:

        def up(server: Server) -> Server:
            stack.callback(server.kill)
            server.ready()
            return server

        def worker(models: str, name: str) -> Server:
            first, *more = [f"{name}=several.py:Model('{name}')" for name in models]
            flags = ["--broker", redis.url, "--name", name, "--models-per-gpu", "1"]
            return up(Server(tmp_path, first, [*more, *flags], role="worker", constants=SOON))

        hosts = [worker("ac", "one"), worker("bc", "two")]
        gateway = up(Server(tmp_path, "", ["--broker", redis.url], role="gateway"))

        def listed() -> list[str]:
            return [model["id"] for model in gateway.get("/v1/models").json["data"]]

        def answer(text: str, model: str) -> str:
            return str(gateway.post("/v1/inference", {"input": text, "model": model}).json["output"])

        wait_until(lambda: listed() == ["a", "b", "c"])
        for model in "ab":
            assert answer("1", model) == f"{model}:1"
        assert answer("2", "c") == "c:2", "nobody had it loaded"
        loads = [host.metrics().value("model_loads_total", model="c") for host in hosts]
        assert sorted(loads) == [0.0, 1.0], "one of the two that could has loaded it"
        host = hosts[loads.index(1.0)]
        assert host.metrics().value("model_load_seconds_count", model="c") == 1
        assert host.metrics().by("model_evictions_total", "reason") == {"cold": 1.0}
        hosts.append(worker("d", "three"))
        hosts[-1].expected = {"a setting has no effect"}  # It has only one model.
        wait_until(lambda: "d" in listed())
        assert answer("3", "d") == "d:3"
        for host in hosts:
            host.signal()
        for host in hosts:
            host.check_end()
        assert {worker["status"] for worker in gateway.workers()} == {"offline"}, "what was cold has left with its host"
        again = worker("ac", "one")
        assert again.log("waiting until the name is free") == []
        again.signal()
        again.check_end()
        gateway.signal()
        gateway.check_end()
