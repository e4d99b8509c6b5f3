"""Settings of the autoscaler."""

from __future__ import annotations

from dataclasses import dataclass

from headway.config.fields import setting as _setting
from headway.core.scaling import rules

NONE, LOCAL, KUBERNETES = "none", "local", "kubernetes"
AUTOSCALE = (NONE, LOCAL, KUBERNETES)
"""Ways in which the number of workers is set: not at all, in these processes, or by Kubernetes."""
SCALE_POLICIES = ("rules", "plan")
"""Policies by which the number of workers is chosen."""

_SCALING = "Autoscaler"


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """Settings of the autoscaler, a part of Settings."""

    autoscale: str = _setting(
        NONE,
        _SCALING,
        "Who changes the number of workers: local, the processes that run them, over the devices given; kubernetes, the API "
        "server of the cluster; none: the number is only published, for a scaler elsewhere.",
    )
    scale_policy: str = _setting(
        "rules",
        _SCALING,
        "How many there should be: rules, those of `scale_rules`; plan, the fewest that keep `promise_ms` at the measured "
        "load, as headway plan finds them.",
    )
    min_workers: int = _setting(1, _SCALING, "Fewest workers of a model.", "workers")
    max_workers: int = _setting(
        0,
        _SCALING,
        "Most workers of a model; 0: for local as many as there are devices (on the CPU: cores), for none without bound.",
        "workers",
    )
    scale_rules: str = _setting(
        "",
        _SCALING,
        "Rules, in the file a list of tables, else as JSON: "
        '[{"queue_above": 500, "for_s": 30, "add": 3}, {"utilisation_below": 0.4, "for_s": 900, "remove": 1}]; left out: '
        f"{'; '.join(f'{rule}: {rule.change:+d}' for rule in rules.USUAL)}.",
    )
    scale_cooldown_s: float = _setting(
        300.0, _SCALING, "Shortest time from one change to the next removal of workers.", "s"
    )
    scale_start_s: float = _setting(
        600.0,
        _SCALING,
        "Longest time for which a worker that was asked for counts as coming; then it is asked for again.",
        "s",
    )
    scale_target: str = _setting(
        "",
        _SCALING,
        "For kubernetes: what has the replicas, as [NAMESPACE/]deployment/NAME or [NAMESPACE/]statefulset/NAME.",
    )
    scale_slots: int = _setting(1, _SCALING, "For kubernetes: workers of one replica, its --workers.", "workers")
