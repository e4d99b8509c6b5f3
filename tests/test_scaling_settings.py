"""Settings of the autoscaler and time limits: defaults fit together, and each wrong value is refused with a reason."""

from pathlib import Path

import pytest

from headway.app.scaling import check_to_zero, scale_limits
from headway.config import Settings, load
from headway.config.target import ModelSettings
from headway.core.scaling.rules import QUEUE_ABOVE, ScaleRule, read
from headway.errors import SettingError


def test_rules_are_tables_of_the_file_or_json_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    file.write_text(
        "scale_rules = [{queue_above = 20, for_s = 2, add = 1}]\n"
        "[models.own]\nscale_rules = [{queue_above = 30, for_s = 3, add = 2}]\n"
        "[models.other]\n"
    )
    served = load({}, {}, file).served
    assert read(served["own"].scale_rules) == (ScaleRule(QUEUE_ABOVE, 30, 3, 2),)
    assert read(served["other"].scale_rules) == (ScaleRule(QUEUE_ABOVE, 20, 2, 1),)
    text = '[{"queue_above": 20, "for_s": 2, "add": 1}]'
    assert read(load({"scale_rules": text}, {}).scale_rules) == read(served["other"].scale_rules)


def test_rules_of_the_file_that_are_none_are_named_with_their_key(tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    file.write_text("[models.a]\nscale_rules = [{queue_above = 20, add = 1}]\n")
    with pytest.raises(SettingError, match=r"\[models.a\] scale_rules.*rule 1 lacks for_s"):
        load({}, {}, file)


def test_what_brings_a_model_to_no_worker_must_be_told_and_a_host_need_not(tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    file.write_text("[models.a]\n[models.b]\nmin_workers = 0\n")
    for flags, path in (({"min_workers": 0}, None), ({}, file)):
        settings = load(flags, {}, path)  # Loaded as a worker does, which has no --scale-to-zero-after-s.
        with pytest.raises(SettingError, match=r"no setting says when to remove the last worker\. Set --scale-to-zero"):
            check_to_zero(settings)
    check_to_zero(load({"min_workers": 0, "scale_to_zero_after_s": 5}, {}))


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
    with pytest.raises(SettingError, match=r"^--memory-mb = 8: is too little for a request of --max-body-bytes"):
        load({"memory_mb": 8}, {})
