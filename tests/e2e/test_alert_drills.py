"""The shortest part of `alerts_alone_drill` under a real Prometheus. The drill covers all alerts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.e2e import alerts_alone_drill
from tests.e2e.alerts_drill import watched


def test_the_alert_of_a_drill_fires_and_clears(tmp_path: Path) -> None:
    missed: list[str] = []
    alerts_alone_drill.rejections(tmp_path, partial(watched, missed))
    assert missed == []
