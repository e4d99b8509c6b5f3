"""Alerts fire and clear under a real Prometheus: the parts of `alerts_alone_drill` that take less than a minute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.e2e import alerts_alone_drill as drills
from tests.e2e.alerts_drill import Watches, watched


@pytest.mark.parametrize("part", [drills.rejections, drills.rollout, drills.gpus])
def test_the_alerts_of_a_drill_fire_and_clear(tmp_path: Path, part: Callable[[Path, Watches], None]) -> None:
    missed: list[str] = []
    part(tmp_path, partial(watched, missed))
    assert missed == []
