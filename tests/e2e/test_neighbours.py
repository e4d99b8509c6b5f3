"""Poison of one tenant beside good requests of another: none of these fail, in one process and over Redis."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.client import PATIENCE
from tests.e2e.server import launched
from tests.identity.writing import entry, key_of
from tests.servers.redis import RedisServer

TARGET = "tests.targets.runs:Picky"
GOOD, BAD = 120, 12
LAX = ("--request-timeout-ms", "30000", "--queue-timeout-ms", "20000")


@pytest.fixture(params=["one process", "over Redis"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    rows = [entry("good", "ann", "good"), entry("evil", "bob", "evil")]
    (tmp_path / "keys.toml").write_text("".join(rows))
    keys = ("--keys", "keys.toml", "--user-rate", "0", *LAX)
    with ExitStack() as stack:
        if request.param == "one process":
            up = [stack.enter_context(launched(tmp_path, *keys, target=TARGET))]
        else:
            redis = stack.enter_context(RedisServer("valkey", tmp_path / "redis"))
            broker = ("--broker", redis.url, "--broker-timeout-ms", "20000")
            up = [stack.enter_context(launched(tmp_path, *broker, target=TARGET, role="worker"))]
            up.append(stack.enter_context(launched(tmp_path, *broker, *keys, role="gateway")))
        for server in up:
            server.expected = {"batch failed"}
            server.ready()
        yield up[-1].port
        for server in reversed(up):
            server.signal()
            server.check_end()


def test_poison_of_one_tenant_fails_none_of_another(port: int) -> None:
    def ask(job: tuple[str, str]) -> tuple[str, str]:
        key, text = job
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            header = {"authorization": f"Bearer {key_of(key)}", "content-type": "application/json"}
            connection.request("POST", "/v1/inference", json.dumps({"input": text}), header)
            told = json.loads(connection.getresponse().read())
            return key, told.get("error") or "answered"
        finally:
            connection.close()

    jobs = [("good", f"good {number}") for number in range(GOOD)]
    for number in range(BAD):
        jobs.insert(number * (GOOD // BAD + 1), ("evil", f"poison {number % (BAD // 2)}"))
    with ThreadPoolExecutor(24) as pool:
        found = Counter(pool.map(ask, jobs))
    assert found == {("good", "answered"): GOOD, ("evil", "REJECTED_BY_MODEL"): BAD}
