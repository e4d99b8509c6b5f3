"""Both Python clients at a running service over Redis, with keys, and with a connection that is cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.client import NotFound, RejectedByModel, Result, TimedOut, Unauthenticated
from tests.client.asking import CLIENTS, AnyClient, asking
from tests.e2e.client import PATIENCE, Gate, wait_until
from tests.e2e.server import Server, launched
from tests.identity.writing import entry, key_of
from tests.servers.proxy import ChaosProxy
from tests.servers.redis import RedisServer
from tests.targets.counted import runs_in

TARGET = "tests.targets.counted:Counted"
LEASE = ("--broker-timeout-ms", "20000")


def test_what_users_do(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(entry("good", more="rate = 0"))
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        launched(tmp_path, "--broker", redis.url, *LEASE, "--keys", "keys.toml", target=TARGET) as server,
    ):
        server.ready()
        url = f"http://127.0.0.1:{server.port}"
        for kind in CLIENTS:
            with asking(kind, url) as client, pytest.raises(Unauthenticated):
                client.infer("x")
            with asking(kind, url, key_of("good"), timeout=PATIENCE) as client:
                check_answers(client)
                check_tasks(client, tmp_path)
                check_a_lost_answer(kind, server, tmp_path)
        server.expected |= {"batch failed"}
        server.signal()
        server.check_end()


def check_answers(client: AnyClient) -> None:
    result = client.infer("hello", parameters={"n": 1})
    assert (result.output, result.request_id[:4]) == ("HELLO", "req_")
    assert result.latency_ms is not None and result.latency_ms > 0
    assert [one.output for one in client.infer_many([f"n{i}" for i in range(20)])] == [f"N{i}" for i in range(20)]
    with pytest.raises(NotFound, match="'other'"):
        client.infer("hello", model="other")
    good, bad = client.infer_many(["a", "exception"], return_errors=True)
    assert isinstance(good, Result) and good.output == "A"
    assert isinstance(bad, RejectedByModel) and bad.request_id.startswith("req_") and bad.hopeless


def check_tasks(client: AnyClient, folder: Path) -> None:
    gate = Gate(folder)
    task = client.submit(gate.text())
    gate.reached()
    assert task.status() == "PENDING"
    with pytest.raises(TimedOut):
        task.result(timeout=0.05)
    gate.open()
    assert task.result(timeout=PATIENCE).output == gate.text().upper()
    assert client.task(task.id).status() == "SUCCESS"
    task.cancel()
    with pytest.raises(NotFound):
        task.result()
    with pytest.raises(RejectedByModel):
        client.submit("exception").result()


def check_a_lost_answer(kind: str, server: Server, folder: Path) -> None:
    """The connection is reset when the answer is on its way: the next attempt gets the same, and nothing runs again."""
    gate = Gate(folder)
    with (
        ChaosProxy(server.port) as proxy,
        asking(kind, f"http://127.0.0.1:{proxy.port}", key_of("good"), timeout=PATIENCE) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        asked = thread.submit(client.infer, gate.text())
        gate.reached()
        proxy.black_hole()
        gate.open()
        wait_until(lambda: server.health()["pending"] == 0)
        proxy.cut()
        proxy.normal()
        assert asked.result(PATIENCE).output == gate.text().upper()
    assert runs_in(folder).count(gate.text()) == 1
