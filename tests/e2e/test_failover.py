"""A replica takes over under load, with the default broker timeout: no request is refused, and nothing runs twice.

The drill can also be run by itself: with one server or Sentinels, and with all timeouts at their defaults.
"""

from __future__ import annotations

from pathlib import Path

from tests.e2e.failover_drill import of_cluster


def test_a_planned_failover_refuses_nobody_and_runs_nothing_twice(tmp_path: Path) -> None:
    seen = of_cluster(tmp_path, "valkey", patient=True)
    assert not seen.refused
    assert (seen.wrong, seen.twice) == (0, [])
    assert "has replaced the primary" in seen.said
