"""Alerts fire and clear under a real Prometheus: the parts of `alerts_alone_drill` that take less than a minute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import alerts_alone_drill as drills


@pytest.mark.parametrize("part", [drills.rejections, drills.rollout, drills.gpus])
def test_the_alerts_of_a_drill_fire_and_clear(tmp_path: Path, part: Callable[[Path, list[str]], None]) -> None:
    missed: list[str] = []
    part(tmp_path, missed)
    assert missed == []
