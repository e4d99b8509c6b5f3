"""How fresh a worker is."""

from __future__ import annotations

import pytest

from headway.core.health import judged
from headway.model import WorkerStatus

HEALTHY, DEGRADED, OFFLINE, STARTING = (
    WorkerStatus.HEALTHY,
    WorkerStatus.DEGRADED,
    WorkerStatus.OFFLINE,
    WorkerStatus.STARTING,
)


@pytest.mark.parametrize(
    ("said", "age", "believed"),
    [
        (HEALTHY, 0.0, HEALTHY),
        (HEALTHY, 1.49, HEALTHY),
        (HEALTHY, 1.5, DEGRADED),
        (HEALTHY, 10.0, OFFLINE),
        (STARTING, 9.0, STARTING),
        (STARTING, 10.0, OFFLINE),
        (DEGRADED, 1.0, DEGRADED),
        (OFFLINE, 0.0, OFFLINE),
    ],
)
def test_silence_is_not_health(said: WorkerStatus, age: float, believed: WorkerStatus) -> None:
    assert judged(said, age) is believed
