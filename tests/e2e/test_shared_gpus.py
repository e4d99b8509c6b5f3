"""GPUs that hold several models: real processes, some of which are cold, die while they load, or are killed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tests.e2e.client import wait_until
from tests.e2e.server import Server
from tests.e2e.test_models import Client
from tests.servers.redis import RedisServer

TARGETS = """
import os
import pathlib
import time

class Model:
    def __init__(self, name: str) -> None:
        self.name = name
        if pathlib.Path(f"{name}-fault").exists():
            os._exit(3)

    def __call__(self, inputs: list[str]) -> list[str]:
        time.sleep(0.02)
        return [f"{self.name}:{text}" for text in inputs]
"""


def serving(folder: Path, models: str, *flags: str, role: str = "serve") -> Server:
    """Server of these models, whose targets are in place; not ready yet."""
    (folder / "several.py").write_text(TARGETS)
    first, *more = [f"{name}=several.py:Model('{name}')" for name in models]
    return Server(folder, target=first, flags=[*more, *flags], role=role)


def statuses(server: Server) -> dict[str, str]:
    return {worker["worker_id"]: worker["status"] for worker in server.workers()}


def test_a_cold_model_is_loaded_when_it_is_asked_for_and_another_makes_room(tmp_path: Path) -> None:
    server = serving(tmp_path, "abc", "--models-per-gpu", "2")
    try:
        server.ready()
        client = Client(server, "none")
        for number in range(
            2
        ):  # The very first request of a model makes no rate: only the second shows that it is asked for.
            assert client.native(str(number), "a")["output"] == f"a:{number}"
        assert client.native("2", "c")["output"] == "c:2"
        assert client.native("3", "a")["output"] == "a:3", "the one that was asked for has stayed"
        wait_until(lambda: statuses(server) == {"a/cpu-0": "healthy", "b/cpu-0": "cold", "c/cpu-0": "healthy"})
        assert [client.ask("GET", f"/v2/models/{model}/ready")[0] for model in "abc"] == [200] * 3, "who waits may ask"
        assert {one["state"] for one in client.post("/v2/repository/index")} == {"READY"}
        metrics = server.metrics()
        assert metrics.by("model_evictions_total", "reason") == {"cold": 1.0}
        assert metrics.value("model_loads_total", model="c", worker="c/cpu-0") == 1
        assert metrics.value("model_load_seconds_count", model="c") == 1
        assert metrics.value("gpu_batch_seconds_count", model="c") == 1, "a load is no batch"
        server.signal()
        server.check_end()
    finally:
        server.kill()


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
