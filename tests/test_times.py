"""Times among the settings: those left out fit those that were given, and those that do not go together are refused."""

from __future__ import annotations

import pytest

from headway.app.scaling import scale_limits
from headway.config import Settings, load
from headway.config.models import ModelSettings
from headway.errors import SettingError


def test_a_shorter_deadline_in_all_shortens_the_default_of_the_queue() -> None:
    assert load({"request_timeout_ms": "1000"}, {}).queue_timeout_ms == 1000
    assert load({"request_timeout_ms": "5000"}, {}).queue_timeout_ms == 2000
    assert load({"request_timeout_ms": "1000", "queue_timeout_ms": "500"}, {}).queue_timeout_ms == 500
    with pytest.raises(SettingError, match=r"^--request-timeout-ms = 0\.5: must lie"):
        load({"request_timeout_ms": "0.5"}, {})


def test_a_longer_deadline_in_all_lengthens_what_must_not_end_before() -> None:
    slow = load({"request_timeout_ms": "300000", "gpu_timeout_ms": "400000"}, {})
    assert (slow.task_timeout_ms, slow.drain_s, slow.queue_timeout_ms) == (300_000, 400, 2000)
    told = load({"request_timeout_ms": "300000", "task_timeout_ms": "50000"}, {})
    assert (told.task_timeout_ms, told.drain_s) == (50_000, 300)
    several = Settings(models=(ModelSettings("a"), ModelSettings("b", values=(("gpu_timeout_ms", 90_000.0),))))
    assert several.drain_s == 90
    usual = load({}, {})
    assert (usual.task_timeout_ms, usual.drain_s) == (30_000, 30)
    with pytest.raises(SettingError, match=r"^--request-timeout-ms = 700000\.0: must lie"):
        load({"request_timeout_ms": "700000"}, {})


def test_a_lease_outlives_a_slow_call_to_the_broker_by_2_s() -> None:
    assert [Settings(broker_timeout_ms=wait).lease_s for wait in (500.0, 1000.0, 5000.0)] == [2.5, 3, 7]


def test_what_is_derived_goes_with_what_it_is_derived_from() -> None:
    assert scale_limits(Settings(start_timeout_ms=1000.0)).start_within == 2
    usual = Settings(memory_mb=64)
    assert (usual.kept_bytes, usual.bodies_bytes, usual.ledger_backlog) == (16 << 20, 16 << 20, 100_000)
    assert (usual.bulk_max_files, usual.bulk_max_lines, usual.bulk_max_jobs) == (10_240, 10_485_760, 102)
    with pytest.raises(SettingError, match=r"^--memory-mb = 8: has no room for a request of --max-body-bytes"):
        load({"memory_mb": 8}, {})
