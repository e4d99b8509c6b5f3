"""The checker on what is left in Redis: allowed kinds, and planted keys that are not allowed."""

import time
from pathlib import Path

import pytest

from bench.promises.collecting import keys_in, lines_in
from tests.promises.checker import check
from tests.promises.evidence import Key
from tests.promises.histories import Scribe
from tests.promises.operation import History
from tests.servers.redis import RedisServer, client

LEFT = [
    Key("headway:{fleet}:w", "hash", 4, 3600.0),
    Key("headway:{fleet}:row:1764000000", "hash", 29, 1800.0),
    Key("headway:{limits}:ko:acme", "zset", 400, 89_998.0),
    Key("headway:{id:0000bc91d846dfb1079c5698a152f2b2}:o", "string", 14, 3542.0),
    Key("headway:{default:0}:q", "string", 880, 2988.0),
    Key("headway:{default:0}@3:k:i\0acme\0key: with colons", "string", 200, 3598.0),
    Key("headway:{default:0}:r:gateway-7", "stream", 0, 118.0),
    Key("headway:{default:0}:z", "hash", 19, 604_798.0),
    Key("headway:{default:0}:P:token", "string", 90_000, 40.0),
    Key("headway:{default:0}:R:shared", "string", 90_000, 230.0),
    Key("headway:{default:0}:Q:shared", "set", 1, 230.0),
    Key("headway:{default:0}:R:kept", "string", 90_000, 3800.0),
    Key("headway:{default:0}:K:kept", "set", 2, 3800.0),
]


UNKNOWN = "a key in Redis of a kind that nobody knows"
TOO_LATE = "a key in Redis that ends too late"
TASK_ID = "headway:{id:0000bc91d846dfb1079c5698a152f2b2}"
EMPTY = ["l2", "a1", "x", "y", "s", "p", "e", "v", "v:flight", "vs", "vd", "d", "tw", "b"]
"""Kinds of keys that must be empty once all requests are answered."""


@pytest.mark.parametrize(
    ("key", "promise"),
    [
        (LEFT[0], ""),
        *(
            (Key(name, "string", 1, 60.0), UNKNOWN)
            for name in (
                "headway:{default:0}:other",
                "headway:{fleet}:q",
                "headway:{limits}:z",
                "headway:stray",
                "headway:{default:0}:l12",
                f"{TASK_ID}:q",
            )
        ),
        (Key("headway:{default:0}:R:token", "string", 90_000, -1.0), "a key in Redis without an end"),
        (Key("headway:{default:0}:q", "string", 880, 7200.0), TOO_LATE),
        (Key("headway:{default:0}:R:of-none", "string", 90_000, 3800.0), TOO_LATE),
        (Key("headway:{default:0}@3:R:kept", "string", 90_000, 3800.0), TOO_LATE),
        (Key("headway:{default:0}:Q:kept", "set", 1, 3800.0), TOO_LATE),
        *(
            (Key(f"headway:{{default:0}}@3:{kind}", "hash", 1, 3000.0), "a key in Redis that should be empty")
            for kind in EMPTY
        ),
    ],
    ids=str,
)
def test_a_key_beside_those_that_a_fleet_leaves_may_be_left_or_is_found_out(key: Key, promise: str) -> None:
    it = Scribe()
    it.history.evidence.keys = [*LEFT, key]
    assert it.broken == ({promise} if promise else set())


LOG = """Headway gateway vm-12693 takes requests for model 'default'
{now} [warning  ] batch failed [headway.worker.failure_log] worker='cpu-0' error='RuntimeError: a poisonous input' size=1
{now} [info     ] a worker has come [headway.fleet] worker='cpu-0'
{now} [error    ] loop ended, restarting it [headway.runtime.supervisor] loop='reaper'
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
        ("error", "loop ended, restarting it"),
    ]
    assert abs(history.evidence.lines[0].at - time.monotonic()) < 60.0
    assert ["loop ended" in violation.story for violation in check(history)] == [True]
