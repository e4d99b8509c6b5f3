"""The Kubernetes driver as the settings of a controller make it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.app.scaling import kubernetes_targets, make_driver
from headway.config import Settings
from headway.config.models import ModelSettings
from headway.errors import SettingError
from headway.scaling.kubernetes import KubernetesScaling, ScaleTarget

SETTINGS = Settings(
    autoscale="kubernetes",
    max_workers=8,
    broker="redis://127.0.0.1:6379/0",
    models=(
        ModelSettings("small", values=(("scale_target", "deployment/small"),)),
        ModelSettings("large", values=(("scale_target", "gpus/statefulset/large"), ("scale_slots", 4))),
    ),
)


def test_each_model_has_its_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kubernetes_targets(SETTINGS) == {
        "small": ScaleTarget("deployment", "small"),
        "large": ScaleTarget("statefulset", "large", "gpus", 4),
    }
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert isinstance(make_driver(SETTINGS, {}, lambda: 0.0), KubernetesScaling)


def test_a_controller_in_no_pod_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingError, match="needs a pod of a cluster"):
        make_driver(SETTINGS, {}, lambda: 0.0)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ((), "sets the replicas of model default"),
        ((ModelSettings("small"),), "sets the replicas of model small"),
        (
            tuple(ModelSettings(name, values=(("scale_target", "deployment/one"),)) for name in ("a", "b")),
            "has the replicas of two models",
        ),
    ],
)
def test_a_model_without_a_workload_of_its_own_is_named(models: tuple[ModelSettings, ...], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        kubernetes_targets(replace(SETTINGS, models=models))
