"""Evidence as it is collected from a server and from logs, with a planted key and a planted warning."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.promises.collecting import keys_in, lines_in
from tests.promises.checker import check
from tests.promises.operation import History
from tests.servers.redis import RedisServer, client

LOG = """Headway gateway vm-12693 takes requests for model 'default'
{now} [warning  ] batch failed [headway.worker.failure_log] worker='cpu-0' error='RuntimeError: a poisonous input' size=1
{now} [info     ] a worker has come [headway.fleet] worker='cpu-0'
{now} [error    ] loop ended, starting it again [headway.runtime.supervisor] loop='reaper'
    | Traceback (most recent call last):
"""


@pytest.mark.processes
def test_a_planted_key_is_collected_from_a_server_and_found_out(tmp_path: Path) -> None:
    history = History()
    with RedisServer("valkey", tmp_path / "redis") as server, client(server.url) as plants:
        plants.set("headway:{default:0}:q", b"figures", ex=3000)
        plants.hset("headway:{default:0}:e", mapping={"acme\0gone": b"!of a gateway that is gone"})
        plants.expire("headway:{default:0}:e", 3600)
        history.evidence.keys = list(keys_in(plants))
        assert not check(history)
        plants.hset("headway:{default:0}:e", mapping={"acme\0waits": b"header"})
        plants.rpush("headway:{fleet}:k2", "planted")
        history.evidence.keys = list(keys_in(plants))
    assert {violation.promise for violation in check(history)} == {
        "a key in Redis that should be empty",
        "a key in Redis of a kind that nobody knows",
    }


def test_a_planted_warning_is_collected_from_a_log_and_found_out() -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%S.000+00:00", time.gmtime())
    history = History()
    history.evidence.lines = list(lines_in("worker-1", LOG.format(now=now)))
    assert [(line.level, line.event) for line in history.evidence.lines] == [
        ("warning", "batch failed"),
        ("error", "loop ended, starting it again"),
    ]
    assert abs(history.evidence.lines[0].at - time.monotonic()) < 60.0
    assert ["loop ended" in violation.story for violation in check(history)] == [True]
