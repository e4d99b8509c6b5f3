"""Rights that the chart gives: none, as nothing in it asks the API server."""

from __future__ import annotations

from tests.charts.rendering import NAME, SWITCHES, of_kind, pods, render


def test_nobody_has_rights_or_a_token() -> None:
    for switch in SWITCHES:
        objects = render(switch)
        assert all(pod["spec"]["automountServiceAccountToken"] is False for _, pod in pods(objects)), switch
        for kind in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"):
            assert of_kind(objects, kind) == {}, switch
        assert all(not one["automountServiceAccountToken"] for one in of_kind(objects, "ServiceAccount").values())


def test_each_account_is_made_unless_it_is_somebody_elses() -> None:
    made = {*of_kind(render("models"), "ServiceAccount")}
    assert made == {f"{NAME}-{part}" for part in ("gateway", "worker", "controller", "redis")}
    assert of_kind(render("accounts of others"), "ServiceAccount") == {}
    assert f"{NAME}-redis" not in of_kind(render("redis elsewhere"), "ServiceAccount")
