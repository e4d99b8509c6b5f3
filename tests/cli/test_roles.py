"""`headway gateway`, `worker` and `controller`: what they take, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headway.app.roles import ROLES as PARTS
from headway.app.wiring import tell_of_other_roles
from headway.config import FIELDS, Settings, flag
from headway.model import Role
from tests.cli.command import code_of, run

ROLES = {role.value: parts.settings for role, parts in PARTS.items() if not parts.alone}
TARGET = {"gateway": [], "worker": ["x:y"], "controller": []}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_the_flags_of_what_it_does(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([role, "--help-all"]) == 0
    shown = capsys.readouterr().out
    flags = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", shown, re.MULTILINE))
    assert flags == {flag(name) for name in ROLES[role]} | {"--config", "--help"}
    assert f"headway {role} " in shown
    assert "SIGTERM" in shown or role == "controller"


def test_every_setting_has_its_role() -> None:
    assert set().union(*ROLES.values()) == set(FIELDS)
    for name in ("broker", "broker_prefix", "shards", "name", "tiers", "max_batch_size", "admin_port", "log_level"):
        for settings in ROLES.values():
            assert name in settings
    assert "port" not in ROLES["worker"] + ROLES["controller"]
    assert "workers" not in ROLES["gateway"] + ROLES["controller"]
    assert set(PARTS[Role.SERVE].settings) == set(FIELDS)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_without_a_broker_is_told_what_it_lacks(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([role, *TARGET[role]]) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"headway: --broker = '': a {role} without a broker has nobody to work with. Name the")


@pytest.mark.parametrize(
    ("role", "option", "takers"),
    [
        ("controller", "--devices", "serve and worker"),
        ("gateway", "--autoscale", "serve, worker and controller"),
        ("worker", "--scale-policy", "serve and controller"),
        ("gateway", "--reload", "serve and worker"),
        ("worker", "--input-policy", "serve and gateway"),
        ("worker", "--user-rate", "serve and gateway"),
        ("controller", "--tier-rates", "serve and gateway"),
        ("worker", "--bogus", ""),
    ],
)
def test_a_flag_of_other_roles_names_them(
    role: str, option: str, takers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of([role, option]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert (f"headway {role} has no {option}: it is a flag of headway {takers}." in told) is bool(takers)


@pytest.mark.parametrize("role", ["gateway", "controller"])
def test_a_target_for_a_role_without_one_is_told_who_takes_it(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([role, "--broker", "redis://127.0.0.1", "model.py:f"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"headway {role} takes no TARGET, and was given model.py:f: workers run it." in told
    assert "headway serve model.py:f" in told


@pytest.mark.parametrize("given", [["--rate", "x"], ["--rate=x"]])
def test_a_bad_number_of_a_tool_is_named(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["plan", *given, "--p95", "100", "--batch-ms", "10", "--max-batch-size", "10"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "Invalid value for '--rate': 'x' is not a valid float" in told


@pytest.mark.parametrize("command", [["bench", "http://127.0.0.1:1"], ["plan", "--batch-ms", "10", "--p95", "100"]])
def test_a_tool_without_its_rate_says_that_it_is_missing(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(command) == 2
    assert "Missing option '--rate'" in capsys.readouterr().err


def test_a_flag_without_its_value_is_told_to_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["serve", "model.py:f", "--workers"]) == 2
    told = capsys.readouterr().err
    assert "'--workers' requires an argument" in told
    assert "it is a flag of" not in told


def test_settings_of_other_roles_in_a_shared_file_are_told_in_the_log() -> None:
    settings = Settings(workers=4, port=0, scale_policy="plan")
    with capture_logs() as logs:
        tell_of_other_roles(settings, PARTS[Role.CONTROLLER])
        tell_of_other_roles(Settings(port=0), PARTS[Role.CONTROLLER])
    assert [(one["log_level"], one["settings"]) for one in logs] == [("info", "workers")]


@pytest.mark.parametrize("role", ROLES)
def test_a_url_that_is_no_brokers_is_refused_without_its_password(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of([role, *TARGET[role], "--broker", "http://user:canary@broker"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("headway: --broker = 'http://…@broker': is not the URL of a Redis or Valkey. Begin it with")
    assert "canary" not in error


def test_a_worker_may_have_any_admin_port(capsys: pytest.CaptureFixture[str]) -> None:
    """Also the one that is the public port of others."""
    for role in ("worker", "controller"):
        assert code_of([role, *TARGET[role], "--admin-port", "8000"]) == 3
        assert "--broker = ''" in capsys.readouterr().err


def test_a_fallback_that_is_no_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["gateway", "--broker", "redis://127.0.0.1:1", "--fallback", "no.py:x"]) == 3
    assert capsys.readouterr().err.startswith(
        "headway: --fallback = 'no.py:x': is not a target: TARGET 'no.py:x': there is"
    )


@pytest.mark.processes
def test_a_real_process_without_a_broker_ends_with_3(tmp_path: Path) -> None:
    done = run(["gateway"], tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert "Traceback" not in done.stderr
