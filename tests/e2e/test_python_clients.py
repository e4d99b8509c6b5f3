"""Both Python clients at running services: over Redis, with connections that are cut, and with keys."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.client import (
    DeadlineExceeded,
    NotFound,
    RateLimited,
    RejectedByModel,
    Result,
    TimedOut,
    Unauthenticated,
)
from tests.client.asking import CLIENTS, AnyClient, asking
from tests.e2e.client import PATIENCE, Gate, wait_until
from tests.e2e.server import Server, launched
from tests.identity.writing import entry, key_of
from tests.servers.proxy import ChaosProxy
from tests.servers.redis import RedisServer
from tests.targets.counted import runs_in

TARGET = "tests.targets.counted:Counted"
LEASE = ("--broker-timeout-ms", "20000")


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[tuple[Server, str]]:
    with launched(folder, *flags, target=TARGET) as server:
        server.ready()
        yield server, f"http://127.0.0.1:{server.port}"
        server.signal()
        server.check_end()


def test_what_users_do(tmp_path: Path) -> None:
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        served(tmp_path, "--broker", redis.url, *LEASE) as (server, url),
    ):
        for kind in CLIENTS:
            with asking(kind, url, timeout=PATIENCE) as client:
                check_answers(client)
                check_tasks(client, tmp_path)
                check_a_cut_connection(kind, server, tmp_path)
                check_a_lost_answer(kind, server, tmp_path)
                check_a_late_answer(kind, url, tmp_path)
        server.expected |= {"batch failed"}


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


def check_a_cut_connection(kind: str, server: Server, folder: Path) -> None:
    """The connection of a request is reset while its batch runs: it is sent again, and runs once."""
    gate = Gate(folder)
    with (
        ChaosProxy(server.port) as proxy,
        asking(kind, f"http://127.0.0.1:{proxy.port}", timeout=PATIENCE) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        asked = thread.submit(client.infer, gate.text())
        gate.reached()
        assert proxy.cut() == 1
        gate.open()
        assert asked.result(PATIENCE).output == gate.text().upper()
    assert runs_in(folder).count(gate.text()) == 1


def check_a_lost_answer(kind: str, server: Server, folder: Path) -> None:
    """The connection is reset when the answer is on its way: the next attempt gets the same, and nothing runs again."""
    gate = Gate(folder)
    with (
        ChaosProxy(server.port) as proxy,
        asking(kind, f"http://127.0.0.1:{proxy.port}", timeout=PATIENCE) as client,
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


def check_a_late_answer(kind: str, url: str, folder: Path) -> None:
    """A deadline of the service is told as such; the next call under the key finds the outcome of the run that went on."""
    gate = Gate(folder)
    with asking(kind, url, retries=0) as client, ThreadPoolExecutor(1) as thread:
        late = thread.submit(client.infer, gate.text(), timeout=5.0, idempotency_key=kind)
        gate.reached()
        with pytest.raises(DeadlineExceeded) as raised:
            late.result(PATIENCE)
        assert isinstance(raised.value, TimeoutError)
        gate.open()
        again = client.infer(gate.text(), timeout=PATIENCE, idempotency_key=kind)
        assert again.output == gate.text().upper()
    assert runs_in(folder).count(gate.text()) == 1


def test_keys_and_limits(tmp_path: Path) -> None:
    slow, spent = "rate = 600\nburst = 1\n", "rate = 0.1\nburst = 1\n"
    keys = entry("good") + entry("slow", user="bob", more=slow) + entry("spent", user="eve", more=spent)
    (tmp_path / "keys.toml").write_text(keys)
    with served(tmp_path, "--keys", "keys.toml") as (_, url):
        for kind in CLIENTS:
            with asking(kind, url) as client, pytest.raises(Unauthenticated):
                client.infer("x")
            with asking(kind, url, key_of("good")) as client:
                assert client.infer("x").output == "X"
                assert client.submit("x").result().output == "X"
            with asking(kind, url, key_of("slow"), retries=9) as client:
                # One request each tenth of a second: the others are told when to come back, and do.
                results = client.infer_many(["a", "b", "c"], concurrency=3)
                assert [result.output for result in results] == ["A", "B", "C"]
            # A pause of minutes is not waited for.
            with asking(kind, url, key_of("spent")) as client, pytest.raises(RateLimited) as raised:
                client.infer_many(["x", "x"])
            assert raised.value.retry_after is not None and raised.value.retry_after > 60
