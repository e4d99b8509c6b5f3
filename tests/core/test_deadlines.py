"""Deadlines that fit a model."""

from __future__ import annotations

import pytest

from headway.config import Settings
from headway.core.deadlines import fitting, flags


def test_who_just_missed_a_batch_can_wait_for_it_and_ride_in_the_next() -> None:
    assert fitting(10.0) == {"gpu_timeout_ms": 20_000, "queue_timeout_ms": 20_000, "request_timeout_ms": 40_000}
    assert fitting(10.01)["queue_timeout_ms"] == 21_000


@pytest.mark.parametrize("seconds", [0.0, 0.0001, 0.15, 10.01, 200.0, 500.0, 5000.0])
def test_what_fits_are_settings_that_are_taken(seconds: float) -> None:
    fits = fitting(seconds)
    if seconds:
        Settings(**{name: float(value) for name, value in fits.items()})  # type: ignore[arg-type]
    assert fits["queue_timeout_ms"] <= fits["request_timeout_ms"]


def test_only_deadlines_that_are_too_short_are_raised() -> None:
    limits = {"gpu_timeout_ms": 60_000.0, "queue_timeout_ms": 2000.0, "request_timeout_ms": 39_000.0}
    assert flags(10.0, limits) == "--queue-timeout-ms 20000 --request-timeout-ms 40000"
    assert flags(10.0, {"gpu_timeout_ms": 3000.0}) == "--gpu-timeout-ms 20000"
    assert flags(0.5, {"gpu_timeout_ms": 3000.0}) == ""
