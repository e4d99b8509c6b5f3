"""A replica takes over under load, at the default time-out of the broker: nobody is refused, and nothing runs twice.

The drill says how it goes, and can be run by itself with all time-outs as they are by default.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.failover_drill import DRILLS, Seen, at_defaults, drill
from tests.servers.redis import KINDS, RedisServer

pytestmark = pytest.mark.parametrize("kind", KINDS)


def check(seen: Seen) -> None:
    assert not seen.refused
    assert (seen.wrong, seen.twice) == (0, [])


@pytest.mark.parametrize("servers", DRILLS)
def test_a_planned_failover_refuses_nobody_and_runs_nothing_twice(tmp_path: Path, kind: str, servers: str) -> None:
    seen = DRILLS[servers](tmp_path, kind, patient=True)
    check(seen)
    assert "is the primary" in seen.said


def test_nobody_is_refused_while_writes_are_paused_for_longer_than_a_call_may_take(tmp_path: Path, kind: str) -> None:
    seen = Seen()
    with RedisServer(kind, tmp_path / "redis") as redis, at_defaults(tmp_path, redis, redis.url, patient=True) as it:

        async def pause() -> str:
            redis.command("CLIENT", "PAUSE", 2500, "WRITE")
            return ""

        asyncio.run(drill([one.port for one in it.gateways], pause, seen))
        seen.note_runs(it)
    check(seen)
