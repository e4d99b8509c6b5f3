"""A replica takes over under load, at the default time-out of the broker: nobody is refused, and nothing runs twice.

The drill says how it goes, and can be run by itself for one server and under Sentinels, too, with all time-outs as they are by default.
"""

from __future__ import annotations

from pathlib import Path

from tests.e2e.failover_drill import of_cluster


def test_a_planned_failover_refuses_nobody_and_runs_nothing_twice(tmp_path: Path) -> None:
    seen = of_cluster(tmp_path, "valkey", patient=True)
    assert not seen.refused
    assert (seen.wrong, seen.twice) == (0, [])
    assert "has replaced the primary" in seen.said
