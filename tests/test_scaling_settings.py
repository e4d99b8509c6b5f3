"""Settings of the autoscaler: each wrong one is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.app.scaling import check_to_zero
from headway.config import load
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


@pytest.mark.parametrize(
    ("flags", "setting", "part"),
    [
        ({"autoscale": "kubernetes"}, "--autoscale", "is not known"),
        ({"scale_policy": "plans"}, "--scale-policy", "Did you mean plan?"),
        ({"min_workers": 3, "max_workers": 2}, "--min-workers", "is more than --max-workers (2)"),
        ({"min_workers": -1}, "--min-workers", "between 0"),
        ({"scale_to_zero_after_s": 60}, "--scale-to-zero-after-s", "needs --min-workers 0, and that is 1"),
        (
            {"min_workers": 0, "scale_to_zero_after_s": 60, "models_per_gpu": 2},
            "--scale-to-zero-after-s",
            "make room anyway",
        ),
        ({"autoscale": "local", "models_per_gpu": 2}, "--autoscale", "--models-per-gpu"),
        ({"scale_rules": "[]"}, "--scale-rules", "0 rules"),
        ({"scale_rules": '[{"queue_above": 1}]'}, "--scale-rules", "For example"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_mend(flags: dict[str, Any], setting: str, part: str) -> None:
    with pytest.raises(SettingError) as found:
        load(flags, {})
    assert found.value.setting == setting
    assert part in str(found.value)


def test_rules_of_the_file_that_are_none_are_named_with_their_key(tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    file.write_text("[models.a]\nscale_rules = [{queue_above = 20, add = 1}]\n")
    with pytest.raises(SettingError, match=r"\[models.a\] scale_rules.*rule 1 lacks for_s"):
        load({}, {}, file)


def test_what_decides_that_a_model_has_no_worker_has_to_be_told_when_and_a_host_of_workers_does_not(
    tmp_path: Path,
) -> None:
    file = tmp_path / "headway.toml"
    file.write_text("[models.a]\n[models.b]\nmin_workers = 0\n")
    for flags, path in (({"min_workers": 0}, None), ({}, file)):
        settings = load(flags, {}, path)  # As a worker, which has no --scale-to-zero-after-s, loads it.
        with pytest.raises(
            SettingError, match=r"nothing says when a model should have none\. Set --scale-to-zero-after"
        ):
            check_to_zero(settings)
    check_to_zero(load({"min_workers": 0, "scale_to_zero_after_s": 5}, {}))
